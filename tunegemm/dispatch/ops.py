"""The operators `tunegemm::mm`, `bmm` and `matmul_out`: what traced code holds in place of a call.

torch.compile and torch.export put them into their graphs and do not look inside; a kernel is chosen when the
graph runs. Eager code does without them: torch's way to an operator written in Python costs more than the
dispatcher does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from tunegemm.dispatch.autograd import DTYPES, PLAIN, batched, gradients, is_simple

if TYPE_CHECKING:
    from tunegemm.dispatch.dispatcher import Dispatcher

#: Products of other devices stay torch's in a graph, where its compiler may fuse them.
_DEVICE_TYPE = "cuda"

_library = torch.library.Library("tunegemm", "DEF")


def define(serving: Callable[[], Dispatcher]) -> None:
    """Registers the operators, whose products are computed by what `serving` returns at each call."""
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
    for name in ("mm", "bmm"):
        _library.define(f"{name}(Tensor a, Tensor b) -> Tensor", tags=tags)
        _define_product(name, serving)
    _library.define("matmul_out(Tensor a, Tensor b, Tensor(a!) out) -> ()", tags=tags)

    def write(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        if serving().recorded(a, b, out) is None:
            torch.matmul(a, b, out=out)
        elif not out.is_inference():  # inference tensors count no versions
            torch.autograd.graph.increment_version(out)

    _library.impl("matmul_out", write, "CompositeExplicitAutograd")
    torch.library.register_fake("tunegemm::matmul_out", lambda a, b, out: None, lib=_library)


def _define_product(name: str, serving: Callable[[], Dispatcher]) -> None:
    operator = getattr(torch.ops.tunegemm, name).default
    rank = 2 if name == "mm" else 3

    def compute(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        result = serving().recorded(a, b)
        return torch.matmul(a, b) if result is None else result

    def fake(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        torch._check(a.ndim == rank and b.ndim == rank, lambda: f"tunegemm::{name} takes {rank}-D tensors")
        torch._check(a.dtype == b.dtype, lambda: f"operands of {a.dtype} and {b.dtype}; convert one")
        for x, y in zip((*a.shape[:-2], a.shape[-1]), b.shape[:-1], strict=True):
            torch._check(x == y, lambda: f"shapes {tuple(a.shape)} and {tuple(b.shape)} do not multiply")
        return a.new_empty((*a.shape[:-1], b.shape[-1]))

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, keyset: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(a, b)
            return below_autograd(keyset, a, b)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            a, b = ctx.saved_tensors
            return None, *gradients(operator, grad, a, b, ctx.needs_input_grad[1:])

    def below_autograd(keyset: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keyset & torch._C._after_autograd_keyset, a, b)

    def autograd(keyset: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return torch.matmul(a, b)  # an autograd.Function cannot be applied inside a transform's kernel
        if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
            return Differentiable.apply(keyset, a, b)
        if type(a) in PLAIN and type(b) in PLAIN and not torch._C._len_torch_dispatch_stack():
            return compute(a, b)  # nobody below wants to know; saves the way through torch's dispatcher
        return below_autograd(keyset, a, b)

    def vmap(info: Any, in_dims: Any, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, int]:
        return batched(traced_matmul, in_dims, a, b), 0

    _library.impl(name, compute, "CompositeExplicitAutograd")
    _library.impl(name, autograd, "Autograd", with_keyset=True)
    torch.library.register_fake(f"tunegemm::{name}", fake, lib=_library)
    torch.library.register_vmap(f"tunegemm::{name}", vmap, lib=_library)


def traced_matmul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """`tunegemm.matmul` while a graph is traced."""
    if not (_is_servable(a, b) and is_simple(a, b)):
        return torch.matmul(a, b) if out is None else torch.matmul(a, b, out=out)
    if out is not None:
        if out.dtype != a.dtype or out.shape != (*a.shape[:-1], b.shape[-1]):
            return torch.matmul(a, b, out=out)
        torch.ops.tunegemm.matmul_out(a, b, out)
        return out
    if b.ndim == 3:
        return torch.ops.tunegemm.bmm(a, b)
    if a.ndim == 2:
        return torch.ops.tunegemm.mm(a, b)
    return torch.ops.tunegemm.mm(a.flatten(0, -2), b).unflatten(0, a.shape[:-1])


def traced_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`tunegemm.linear` while a graph is traced."""
    # A bias is added by torch's kernel, until there are records of kernels that add one.
    if bias is not None or weight.ndim != 2 or not _is_servable(x, weight):
        return torch.nn.functional.linear(x, weight, bias)
    return traced_matmul(x, weight.t())


def _is_servable(a: torch.Tensor, b: torch.Tensor) -> bool:
    kind = a.device.type
    return (
        kind == _DEVICE_TYPE
        and b.device.type == kind
        and a.dtype == b.dtype
        and a.dtype in DTYPES
        and not (torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != a.dtype)
    )
