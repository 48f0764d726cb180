"""Differentiable products.

Products of a backward pass are dispatched like any other, and so are those of their own backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from tunegemm.dispatch.guards import is_transformed

#: Element types that have kernels and gradients, with their names in problems.
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}

#: Subclasses (fake tensors, DTensor, quantized and user-made ones) give torch.matmul their own meaning.
PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))

Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
#: A product and a bias.
Add = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
#: A product; returns None if there is no kernel for it.
Maybe = Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None]


def are_torchs(*operands: torch.Tensor | None) -> bool:
    """Whether no subclass gives operands of a traced call a meaning of its own."""
    return torch.compiler.is_exporting() or all(
        each is None or type(each) in PLAIN or isinstance(each, FakeTensor) for each in operands
    )


def is_simple(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether ``a @ b`` is one product, or one per entry of a common batch, without broadcasting.

    That is (..., m, k) x (k, n) and (l, m, k) x (l, k, n).
    """
    return a.ndim > 1 and (b.ndim == 2 or (a.ndim == b.ndim == 3 and a.shape[0] == b.shape[0]))


def gradients(
    multiply: Multiply, grad: torch.Tensor, operands: Sequence[torch.Tensor], wanted: Sequence[bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The requested gradients of a and b: grad x B^T and A^T x grad, each laid out as its operand is.

    So a weight that was multiplied transposed gets a gradient that an optimizer can add without a copy;
    `Problem.backward` names these products.
    """
    a, b = operands
    grad = grad.resolve_neg()  # memory of a view with the negative bit has the opposite sign
    if 0 in grad.stride():  # the gradient of a sum, for example: no kernel reads strides of 0
        grad = grad.contiguous()
    of_a = _laid_out(multiply, grad, b.mT, like=a) if wanted[0] else None
    if wanted[1] and b.ndim == 2 and a.ndim > 2:
        rows = math.prod(a.shape[:-1])  # not `flatten`, which is_grads_batched cannot map
        a, grad = a.reshape(rows, a.shape[-1]), grad.reshape(rows, grad.shape[-1])
    return of_a, _laid_out(multiply, a.mT, grad, like=b) if wanted[1] else None


def _laid_out(multiply: Multiply, a: torch.Tensor, b: torch.Tensor, *, like: torch.Tensor) -> torch.Tensor:
    columns = like.stride(-2) == 1 and like.stride(-1) != 1 and like.shape[-2] != 1 and like.shape[-1] != 1
    if columns and a.ndim == b.ndim:
        return multiply(b.mT, a.mT).mT
    return multiply(a, b)


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
        ctx.product, ctx.linear = product, linear
        ctx.save_for_backward(a, b)
        right = b.t() if linear else b
        return _multiply(product, a, right) if bias is None or add is None else add(a, right, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        a, b = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        of_bias = grad.reshape(-1, grad.shape[-1]).sum(0) if wanted[4] else None
        if is_transformed():  # as with is_grads_batched
            multiply: Multiply = torch.matmul
        else:  # derivatives of a backward pass are rarely needed
            multiply = partial(differentiably if torch.is_grad_enabled() else _multiply, ctx.product)
        of_a, of_b = gradients(multiply, grad, (a, b.t() if ctx.linear else b), wanted[1:3])
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
    return Product.apply(product, a, b, linear, bias, add)
