"""Differentiable products.

Products of a backward pass are dispatched like any other, and so are those of their own backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from tunegemm.dispatch.forms import shaped
from tunegemm.dispatch.guards import is_transformed

#: Element types that have kernels and gradients, with their names in problems.
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}

Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
#: A product and a bias.
Add = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
#: A product; returns None if there is no kernel for it.
Maybe = Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None]


def is_simple(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether ``a @ b`` is one product, or one per entry of a common batch, without broadcasting.

    That is (..., m, k) x (k, n) and (l, m, k) x (l, k, n).
    """
    return a.ndim > 1 and (b.ndim == 2 or (a.ndim == b.ndim == 3 and a.shape[0] == b.shape[0]))


def turned(tensor: torch.Tensor) -> bool:
    """Whether columns are contiguous: all that an operand's own gradient needs of it."""
    shape, strides = tensor.shape, tensor.stride()
    return strides[-2] == 1 and strides[-1] != 1 and shape[-2] != 1 and shape[-1] != 1


def gradients(
    multiply: Multiply, grad: torch.Tensor, operands: Sequence[torch.Tensor | None], columns: Sequence[bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The requested gradients of a and b: grad x B^T and A^T x grad, each laid out as its operand is.

    So a weight that was multiplied transposed gets a gradient that an optimizer can add without a copy;
    `Problem.backward` names these products. operands: a and b; None in place of one if the other has no
    gradient. columns: `turned` of both.
    """
    a, b = operands
    grad = grad.resolve_neg()  # memory of a view with the negative bit has the opposite sign
    if 0 in grad.stride():  # the gradient of a sum, for example: no kernel reads strides of 0
        grad = grad.contiguous()
    return (
        None if b is None else _laid_out(multiply, grad, b.mT, columns[0]),
        None if a is None else _laid_out(multiply, a.mT, grad, columns[1]),
    )


def _laid_out(multiply: Multiply, a: torch.Tensor, b: torch.Tensor, columns: bool) -> torch.Tensor:
    return multiply(b.mT, a.mT).mT if columns and a.ndim == b.ndim else multiply(a, b)


class Product(torch.autograd.Function):
    """``a @ b``, or ``a @ b.t()`` of a `linear`, by `product`, or by torch if that has no kernel; plus a
    bias of one value for each column, by `add`.

    `is_simple` must hold for the operands.
    """

    @staticmethod
    def forward(
        ctx: Any,
        product: Maybe,
        a: torch.Tensor,
        b: torch.Tensor,
        linear: bool,
        bias: torch.Tensor | None,
        add: Add | None,
    ) -> torch.Tensor:
        right = b.t() if linear else b
        _, of_a, of_b, *_ = ctx.needs_input_grad
        ctx.product, ctx.linear = product, linear
        # As torch: what no gradient needs may be freed, or changed in place.
        ctx.save_for_backward(a if of_b else None, b if of_a else None)
        ctx.columns = None if of_a and of_b else (turned(a), turned(right))
        ctx.set_materialize_grads(False)
        return _multiply(product, a, right) if bias is None or add is None else add(a, right, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if grad is None:
            return (None,) * 6
        a, b = ctx.saved_tensors
        of_bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[4] else None
        if is_transformed():  # as with is_grads_batched
            multiply: Multiply = torch.matmul
        else:  # derivatives of a backward pass are rarely needed
            multiply = partial(differentiably if torch.is_grad_enabled() else _multiply, ctx.product)
        right = b.t() if ctx.linear and b is not None else b
        of_a, of_b = gradients(multiply, grad, (a, right), ctx.columns or (turned(a), turned(right)))
        return None, of_a, of_b.t() if ctx.linear and of_b is not None else of_b, None, of_bias, None


def _multiply(product: Maybe, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    result = product(a, b)
    return torch.matmul(a, b) if result is None else result


def differentiably(
    product: Maybe,
    a: torch.Tensor,
    b: torch.Tensor,
    linear: bool = False,
    bias: torch.Tensor | None = None,
    add: Add | None = None,
) -> torch.Tensor:
    """`Product`, recorded by autograd; `is_simple` must hold."""
    if b.requires_grad and a.ndim > 2 and b.ndim == 2:  # as torch: by rows, copied where no view has them
        result = differentiably(product, a.flatten(0, -2), b, linear, bias, add)
        return shaped(result, (*a.shape[:-1], result.shape[-1]))
    return Product.apply(product, a, b, linear, bias, add)
