"""Products of which more than a launch is asked: gradients, tangents, and the transforms of torch.func.

The products of a backward pass are dispatched like any other, and so are those of their own backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.autograd import forward_ad

#: Element types that have kernels and gradients.
DTYPES = frozenset((torch.bfloat16, torch.float16))

#: Subclasses (fake tensors, DTensor, quantized and user-made ones) give torch.matmul their own meaning.
PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))

Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
#: A product, or None where there is no kernel for it.
Maybe = Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None]


def is_simple(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether ``a @ b`` is one product, or one per entry of a common batch: nothing to broadcast.

    Of (..., m, k) x (k, n) and (l, m, k) x (l, k, n).
    """
    return a.ndim > 1 and (b.ndim == 2 or (a.ndim == b.ndim == 3 and a.shape[0] == b.shape[0]))


def gradients(
    multiply: Multiply, grad: torch.Tensor, a: torch.Tensor, b: torch.Tensor, wanted: tuple[bool, bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Of a and b, as far as they are wanted: grad x B^T and A^T x grad, each laid out as its operand is.

    A weight that was multiplied transposed so gets the gradient that an optimizer can add without a copy;
    `Problem.backward` names these products.
    """
    if 0 in grad.stride():  # of a sum, say: no kernel reads one element many times
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


def batched(
    multiply: Multiply, in_dims: tuple[int | None, int | None], a: torch.Tensor, b: torch.Tensor
) -> torch.Tensor:
    """The products of every entry along the mapped dimensions, which the result has in front.

    A batch of first operands before one matrix is one larger product; anything else is a batched one.
    """
    a_dim, b_dim = in_dims
    a_rank, b_rank = a.ndim - (a_dim is not None), b.ndim - (b_dim is not None)
    if a_dim is not None:
        a = a.movedim(a_dim, 0)
    if b_dim is None:
        if b_rank == 2:
            return multiply(a.flatten(0, -2), b).unflatten(0, a.shape[:-1])
        b = b.expand(a.shape[0], *b.shape)
    else:
        b = b.movedim(b_dim, 0)
        if a_dim is None:
            a = a.expand(b.shape[0], *a.shape)
    if b_rank == 2 and a_rank > 2:  # rows of each entry
        rows = a.flatten(1, -2)
        return multiply(rows, b).unflatten(1, a.shape[1:-1])
    if a_rank == 3:  # a batch of batches
        return multiply(a.flatten(0, 1), b.flatten(0, 1)).unflatten(0, a.shape[:2])
    return multiply(a, b)


class Product(torch.autograd.Function):
    """``a @ b`` by `product`, or by torch where that has no kernel; see `is_simple` for what it takes."""

    @staticmethod
    def forward(ctx: Any, product: Maybe, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.product = product
        ctx.save_for_backward(a, b)
        if forward_ad._current_level >= 0:
            ctx.save_for_forward(a, b)
        ctx.set_materialize_grads(False)  # no product with zeros
        return _Transformable.forward(product, a, b)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if grad is None:
            return None, None, None
        a, b = ctx.saved_tensors
        multiply = partial(multiply_differentiably, ctx.product)
        return None, *gradients(multiply, grad, a, b, ctx.needs_input_grad[1:])

    @staticmethod
    def jvp(ctx: Any, _: Any, a_tangent: Any, b_tangent: Any) -> Any:
        a, b = ctx.saved_tensors
        of_a = None if a_tangent is None else multiply_differentiably(ctx.product, a_tangent, b)
        of_b = None if b_tangent is None else multiply_differentiably(ctx.product, a, b_tangent)
        if of_a is None or of_b is None:
            return of_b if of_a is None else of_a
        return of_a + of_b


class Sum(torch.autograd.Function):
    """``a @ b + bias`` by `compute`, with a bias of one value for each column; its products by `product`."""

    @staticmethod
    def forward(
        ctx: Any, compute: Callable[..., Any], product: Maybe, a: Any, b: Any, bias: Any
    ) -> torch.Tensor:
        ctx.product = product
        ctx.save_for_backward(a, b)
        result: torch.Tensor = compute(a, b, bias)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        a, b = ctx.saved_tensors
        multiply = partial(multiply_differentiably, ctx.product)
        of_bias = grad.reshape(-1, grad.shape[-1]).sum(0) if ctx.needs_input_grad[4] else None
        return None, None, *gradients(multiply, grad, a, b, ctx.needs_input_grad[2:4]), of_bias


class _Transformable(Product):
    """The same for the transforms of torch.func, in the form that they want.

    Apart, because calls of that form take twice as long: torch binds their arguments by name.
    """

    @staticmethod
    def forward(product: Maybe, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        result = product(a, b)
        return torch.matmul(a, b) if result is None else result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.product, a, b = inputs
        ctx.save_for_backward(a, b)
        ctx.save_for_forward(a, b)
        ctx.set_materialize_grads(False)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], product: Maybe, a: Any, b: Any) -> tuple[torch.Tensor, int]:
        return batched(partial(multiply_differentiably, product), in_dims[1:], a, b), 0


def multiply_differentiably(product: Maybe, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b`` with what autograd and torch.func want to know of it; `is_simple` must hold."""
    transformed = torch._C._functorch.peek_interpreter_stack() is not None
    if not transformed and not torch.is_grad_enabled() and forward_ad._current_level < 0:
        return _Transformable.forward(product, a, b)  # a backward pass, mostly: nobody wants to know
    return (_Transformable if transformed else Product).apply(product, a, b)


def add_differentiably(
    compute: Callable[..., Any], product: Maybe, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """``a @ b + bias`` with what autograd wants to know of it; `is_simple` must hold."""
    result: torch.Tensor = Sum.apply(compute, product, a, b, bias)
    return result
