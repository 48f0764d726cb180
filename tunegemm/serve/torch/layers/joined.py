"""The gradients of layers that were computed as one product."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tunegemm.serve import api
from tunegemm.serve.forms import BELOW_AUTOGRAD
from tunegemm.serve.torch.autograd import gradients, multiply_differentiably


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
        ctx: Any, whole: torch.Tensor, x: torch.Tensor, right: torch.Tensor, *parameters: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """whole: x and all weights multiplied, with their biases; right: all weights, (k, n); parameters: the
        weights, then the biases, if any."""
        count = sum(parameter.ndim == 2 for parameter in parameters)
        ctx.right, ctx.rows = right, [parameter.shape[0] for parameter in parameters[:count]]
        # As torch's linear layers keep no more than what a gradient takes.
        of_x, of_weights = ctx.needs_input_grad[1], any(ctx.needs_input_grad[3 : 3 + count])
        ctx.save_for_backward(x if of_weights else None, *(parameters[:count] if of_x else ()))
        # Not views as autograd means it: what is written into one is not in the others.
        return tuple(torch.unsafe_split_with_sizes(whole, ctx.rows, -1))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        x = grads[0] if x is None else x  # which says then how a gradient is laid out, and no more
        count, of_x = len(ctx.rows), ctx.needs_input_grad[1]
        of_weights, of_biases = ctx.needs_input_grad[3 : 3 + count], ctx.needs_input_grad[3 + count :]
        biases: list[torch.Tensor | None]
        biases = [
            grad.flatten(0, -2).sum(0) if wanted else None
            for grad, wanted in zip(grads, of_biases, strict=False)
        ]
        if torch.is_grad_enabled():  # somebody differentiates this, with respect to the weights, too
            pairs = [
                gradients(_multiply, grad, (x, weight.t()), (of_x, wanted))
                for grad, weight, wanted in zip(
                    grads, weights or ctx.right.t().split(ctx.rows), of_weights, strict=True
                )
            ]
            parts = [one for one, _ in pairs if one is not None]
            grad_of_x = torch.stack(parts).sum(0) if of_x else None
            return None, grad_of_x, None, *(None if one is None else one.t() for _, one in pairs), *biases
        grad = torch.cat(grads, -1)
        grad_of_x, joined = gradients(_multiply, grad, (x, ctx.right), (of_x, any(of_weights)))
        split: list[torch.Tensor | None] = [None] * count
        if joined is not None:
            rows = torch.unsafe_split_with_sizes(joined.t(), ctx.rows)
            split = [part if wanted else None for part, wanted in zip(rows, of_weights, strict=True)]
        return None, grad_of_x, None, *split, *biases
