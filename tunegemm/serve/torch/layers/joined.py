"""The gradients of layers that were computed as one product."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """The results of linear layers of one input beside each other, from the product of it and all weights.

    Backward are two products, of x and of all weights, dispatched as any other; the weights' gradients share
    a storage, as the weights do.
    """

    @staticmethod
    def forward(
        ctx: Any, whole: torch.Tensor, x: torch.Tensor, right: torch.Tensor, *parameters: torch.Tensor
    ) -> torch.Tensor:
        """whole: x and all weights multiplied, with their biases; right: all weights, (k, n); parameters: the
        weights, then the biases, if any. Returns whole."""
        count = sum(parameter.ndim == 2 for parameter in parameters)
        ctx.right, ctx.rows = right, [parameter.shape[0] for parameter in parameters[:count]]
        # As torch's linear layers keep no more than what a gradient takes.
        of_x, of_weights = ctx.needs_input_grad[1], any(ctx.needs_input_grad[3 : 3 + count])
        ctx.save_for_backward(x if of_weights else None, *(parameters[:count] if of_x else ()))
        return whole

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        x = grad if x is None else x  # which says then how a gradient is laid out, and no more
        count, of_x = len(ctx.rows), ctx.needs_input_grad[1]
        of_weights, of_biases = ctx.needs_input_grad[3 : 3 + count], ctx.needs_input_grad[3 + count :]
        biases = _wanted(lambda: grad.flatten(0, -2).sum(0), ctx.rows, of_biases)
        if torch.is_grad_enabled():  # somebody differentiates this, with respect to the weights, too
            pairs = [
                gradients(_multiply, part, (x, weight.t()), (of_x, wanted))
                for part, weight, wanted in zip(
                    grad.split(ctx.rows, -1),
                    weights or ctx.right.t().split(ctx.rows),
                    of_weights,
                    strict=True,
                )
            ]
            parts = [one for one, _ in pairs if one is not None]
            grad_of_x = torch.stack(parts).sum(0) if of_x else None
            return None, grad_of_x, None, *(None if one is None else one.t() for _, one in pairs), *biases
        joined: Any
        grad_of_x, joined = gradients(_multiply, grad, (x, ctx.right), (of_x, any(of_weights)))
        return None, grad_of_x, None, *_wanted(lambda: joined.t(), ctx.rows, of_weights), *biases


def _wanted(
    whole: Callable[[], Any], rows: Sequence[int], wanted: Sequence[bool]
) -> list[torch.Tensor | None]:
    """The parts of it that are wanted; it is not computed where none is."""
    if not any(wanted):
        return [None] * len(wanted)
    # Of unsafe_split torch has no form for is_grads_batched.
    joined = whole()
    is_mapped = torch._C._functorch.is_legacy_batchedtensor(joined)
    parts = joined.split(rows) if is_mapped else torch.unsafe_split_with_sizes(joined, rows)
    return [part if one else None for part, one in zip(parts, wanted, strict=True)]
