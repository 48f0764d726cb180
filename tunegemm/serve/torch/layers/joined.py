"""The gradients of layers that were computed as one product."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tunegemm.serve import api
from tunegemm.serve.forms import BELOW_AUTOGRAD
from tunegemm.serve.torch.autograd import Watched, gradients, multiply_differentiably
from tunegemm.serve.torch.together import beside, parts_of


def product(a: torch.Tensor, b: torch.Tensor) -> Any:
    """By a kernel, below autograd; None where there is none."""
    return api.product(BELOW_AUTOGRAD, a, b)


class Joined(torch.autograd.Function):
    """The results of linear layers of one input, from the product of it and all their weights.

    Backward are two products, of x and of all weights, dispatched as any other; the weights' gradients share
    a storage, as the weights do.
    """

    @staticmethod
    def forward(
        ctx: Any,
        whole: torch.Tensor,
        x: torch.Tensor,
        right: torch.Tensor,
        watched: Watched | None,
        apart: bool,
        *parameters: Any,
    ) -> Any:
        """whole: x and all weights multiplied, with their biases; right: all weights, (k, n).

        watched: computes the products of the gradients, None where torch is to; apart: whether the results
        are to be tensors of their own; parameters: the weights, then the biases, if any.
        """
        count = sum(parameter.ndim == 2 for parameter in parameters)
        ctx.right, ctx.rows = right, [parameter.shape[0] for parameter in parameters[:count]]
        ctx.watched = watched
        ctx.set_materialize_grads(False)
        # As torch's linear layers keep no more than what a gradient takes.
        of_x, of_weights = ctx.needs_input_grad[1], any(ctx.needs_input_grad[5 : 5 + count])
        ctx.save_for_backward(x if of_weights else None, *(parameters[:count] if of_x else ()))
        # Not views as autograd means it: what is written into one is not in the others.
        return tuple(torch.unsafe_split_with_sizes(whole, ctx.rows, -1)) if apart else whole

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if all(grad is None for grad in grads):
            return (None,) * len(ctx.needs_input_grad)
        x, *weights = ctx.saved_tensors
        rows, right, watched = ctx.rows, ctx.right, ctx.watched
        _, of_x, _, _, _, *wanted = ctx.needs_input_grad
        if len(grads) > 1:  # what a layer did not give has no gradient
            wanted = [want and grads[index % len(rows)] is not None for index, want in enumerate(wanted)]
        of_weights, of_biases = wanted[: len(rows)], wanted[len(rows) :]
        grad = beside(grads, rows if len(grads) > 1 else [sum(rows)])
        x = grad if x is None else x  # which says then how a gradient is laid out, and no more
        biases = parts_of(lambda: grad.flatten(0, -2).sum(0), rows, of_biases)
        if torch.is_grad_enabled() and weights:  # somebody differentiates this, with respect to them, too
            right = torch.cat(weights).t()
        multiply: Any = torch.matmul if watched is None else partial(multiply_differentiably, watched)
        grad_of_x, joined = gradients(multiply, grad, (x, right), (of_x, any(of_weights)))
        if watched is not None:
            watched.end()
        of_each = parts_of(lambda: joined.t(), rows, of_weights)  # type: ignore[union-attr]
        return None, grad_of_x, None, None, None, *of_each, *biases
