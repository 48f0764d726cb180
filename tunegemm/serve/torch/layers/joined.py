"""The gradients of layers that were computed as one product."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tunegemm.serve import api
from tunegemm.serve.forms import BELOW_AUTOGRAD
from tunegemm.serve.torch.autograd import gradients, multiply_differentiably
from tunegemm.serve.torch.together import beside, parts_of


def _product(a: torch.Tensor, b: torch.Tensor) -> Any:
    return api.product(BELOW_AUTOGRAD, a, b)


_multiply = partial(multiply_differentiably, _product)


class Joined(torch.autograd.Function):
    """The results of linear layers of one input, from the product of it and all their weights.

    Backward are two products, of x and of all weights, dispatched as any other; the weights' gradients share
    a storage, as the weights do.
    """

    @staticmethod
    def forward(
        ctx: Any, whole: torch.Tensor, x: torch.Tensor, right: torch.Tensor, apart: bool, *parameters: Any
    ) -> Any:
        """whole: x and all weights multiplied, with their biases; right: all weights, (k, n); apart: whether
        the results are to be tensors of their own; parameters: the weights, then the biases, if any."""
        count = sum(parameter.ndim == 2 for parameter in parameters)
        ctx.right, ctx.rows = right, [parameter.shape[0] for parameter in parameters[:count]]
        ctx.set_materialize_grads(False)
        # As torch's linear layers keep no more than what a gradient takes.
        of_x, of_weights = ctx.needs_input_grad[1], any(ctx.needs_input_grad[4 : 4 + count])
        ctx.save_for_backward(x if of_weights else None, *(parameters[:count] if of_x else ()))
        # Not views as autograd means it: what is written into one is not in the others.
        return tuple(torch.unsafe_split_with_sizes(whole, ctx.rows, -1)) if apart else whole

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if all(grad is None for grad in grads):
            return (None,) * len(ctx.needs_input_grad)
        x, *weights = ctx.saved_tensors
        rows, right = ctx.rows, ctx.right
        is_used = [grad is not None for grad in grads] if len(grads) > 1 else [True] * len(rows)
        of_x, of_weights, of_biases = (
            ctx.needs_input_grad[1],
            *(
                [wanted and used for wanted, used in zip(ctx.needs_input_grad[start:], is_used, strict=False)]
                for start in (4, 4 + len(rows))
            ),
        )
        grad = beside(grads, rows if len(grads) > 1 else [sum(rows)])
        x = grad if x is None else x  # which says then how a gradient is laid out, and no more
        biases = parts_of(lambda: grad.flatten(0, -2).sum(0), rows, of_biases)
        if torch.is_grad_enabled():  # somebody differentiates this, with respect to the weights, too
            right = torch.cat(weights).t() if weights else right
        grad_of_x, joined = gradients(_multiply, grad, (x, right), (of_x, any(of_weights)))
        return None, grad_of_x, None, None, *parts_of(lambda: joined.t(), rows, of_weights), *biases  # type: ignore[union-attr]
