"""The operators `tunegemm::mm`, `bmm`, `matmul_out` and `fused`, which traced code holds in place of calls.

torch.compile and torch.export put them into their graphs and do not look inside. The kernel is chosen when
the graph runs. Eager code does not use them, because the path to an operator written in Python costs more
than the dispatcher does. `fused` stays in a graph only if a kernel is recorded for it when the graph is made.
Otherwise the graph holds torch's operators, which a compiler fuses with their surroundings.

torch.compile caches its results on disk under the graph that Dynamo traced. Records decide later which
products are served, so the graph must contain them: the operators' argument `records` is a short text that
changes with the records. Once that decision is made, the operators become `CALLS`. Two graphs with the same
decision share Inductor's code.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch._guards import TracingContext
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from tunegemm.dispatch import api
from tunegemm.dispatch.autograd import DTYPES, differentiably, gradients, is_simple, turned
from tunegemm.dispatch.extension import define, library
from tunegemm.dispatch.forms import BELOW_AUTOGRAD, LINEAR, MATMUL, Form, form_of, shaped
from tunegemm.dispatch.guards import PLAIN, are_torchs, is_transformed
from tunegemm.dispatch.unfused import unfused
from tunegemm.torch.lowering import lower

#: Products on other devices stay torch's operators in a graph, where its compiler may fuse them.
DEVICE_TYPE = "cuda"

#: The names by which Inductor's code calls us, see `lowering`. Change them together with names and arguments
#: there, because Inductor keeps code of any age on disk.
CALLS = "calls-3"

Operands: TypeAlias = Sequence[torch.Tensor]
Numbers: TypeAlias = Sequence[float]

# A compiler that calls us fixes strides late (`lowering`). A tag would fix them earlier and copy operands
# that are not computed yet: the norm of a model was written again for each product that reads it.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)


def teach_inductor() -> None:
    """Call `lower` if a graph is being traced. Torch 2.11 reports `is_compiling` only to traced code and to
    exports."""
    if torch.compiler.is_compiling() or TracingContext.try_get() is not None:
        lower()


def records() -> str:
    """The planner's fingerprint, which changes with the served products. Empty in exported programs, which
    other hosts run with other records."""
    return "" if torch.compiler.is_exporting() else api.dispatcher.planner.fingerprint()


# For Dynamo a constant at trace time, as torch.compiler.assume_constant_result would make it; that would
# import Dynamo now.
records._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _write(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    if api.dispatcher.below_autograd(a, b, out) is None:
        torch.matmul(a, b, out=out)
    elif not out.is_inference():  # inference tensors count no versions
        torch.autograd.graph.increment_version(out)


def _define_product(name: str) -> None:
    rank = 2 if name == "mm" else 3
    plain, aten = form_of(MATMUL, ""), getattr(torch.ops.aten, name)

    def compute(a: torch.Tensor, b: torch.Tensor, *, records: str = "") -> torch.Tensor:
        result = api.dispatcher.below_autograd(a, b)
        return torch.matmul(a, b) if result is None else result

    def check(a: torch.Tensor, b: torch.Tensor) -> None:
        torch._check(a.ndim == rank and b.ndim == rank, lambda: f"tunegemm::{name} takes {rank}-D tensors")
        torch._check(a.dtype == b.dtype, lambda: f"operands of {a.dtype} and {b.dtype}; convert one of them")
        for x, y in zip((*a.shape[:-2], a.shape[-1]), b.shape[:-1], strict=True):
            torch._check(x == y, lambda: f"shapes {tuple(a.shape)} and {tuple(b.shape)} do not multiply")

    def fake(a: torch.Tensor, b: torch.Tensor, *, records: str = "") -> torch.Tensor:
        teach_inductor()
        check(a, b)
        return a.new_empty((*a.shape[:-1], b.shape[-1]))

    def autograd(keyset: Any, a: torch.Tensor, b: torch.Tensor, *, records: str = "") -> torch.Tensor:
        if is_transformed():
            return torch.matmul(a, b)  # an autograd.Function cannot be applied inside a transform's kernel
        is_trained = torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)
        if torch._C._len_torch_dispatch_stack() and not is_served(plain, a, b, is_trained):
            check(a, b)
            return aten(a, b)  # traced: a compiler does more with its own operator
        if is_trained:
            return differentiably(operator, a, b)
        if type(a) in PLAIN and type(b) in PLAIN and not torch._C._len_torch_dispatch_stack():
            return compute(a, b)  # no mode below is active; saves the way through torch's dispatcher
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keyset & torch._C._after_autograd_keyset, a, b, records=CALLS)

    def vmap(
        info: Any, in_dims: Any, a: torch.Tensor, b: torch.Tensor, *, records: str = ""
    ) -> tuple[torch.Tensor, int]:
        a, b = (x if dim is None else x.movedim(dim, 0) for x, dim in zip((a, b), in_dims, strict=True))
        return torch.matmul(a, b), 0

    define(f"{name}(Tensor a, Tensor b, *, str records='') -> Tensor", compute, fake, _TAGS, autograd)
    operator = getattr(torch.ops.tunegemm, name).default
    torch.library.register_vmap(f"tunegemm::{name}", vmap, lib=library)


def _define_fused() -> None:
    # `form`: the epilogue, then the output's dtype and accumulation if given.
    def compute(
        a: torch.Tensor, b: torch.Tensor, operands: Operands, numbers: Numbers, *form: Any, records: str = ""
    ) -> torch.Tensor:
        result = None
        if a.device.type == DEVICE_TYPE and not _is_cast(a, b, *operands):
            result = api.dispatcher.fused(form_of(BELOW_AUTOGRAD, *form), a, b, tuple(operands), numbers)
        if result is None:
            result = unfused(form_of(MATMUL, *form), a, b, operands, numbers)
        return result

    def fake(
        a: torch.Tensor, b: torch.Tensor, operands: Operands, numbers: Numbers, *form: Any, records: str = ""
    ) -> torch.Tensor:
        teach_inductor()
        return unfused(form_of(MATMUL, *form), a, b, operands, numbers)

    def autograd(
        keyset: Any, a: torch.Tensor, b: torch.Tensor, operands: Operands, numbers: Numbers, *form: Any,
        records: str = "",
    ) -> torch.Tensor:  # fmt: skip
        asked = form_of(MATMUL, *form)
        if (
            is_transformed()
            or any(map(is_traceable_wrapper_subclass, (a, b, *operands)))
            or _is_cast(a, b, *operands)
        ):
            return unfused(asked, a, b, operands, numbers)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (a, b, *operands)):
            multiply = partial(traced_matmul, of_any_class=True)
            return unfused(asked, a, b, operands, numbers, multiply=multiply)
        if torch._C._len_torch_dispatch_stack() and not is_served(asked, a, b):
            return unfused(asked, a, b, operands, numbers)
        with torch._C._AutoDispatchBelowAutograd():
            below = keyset & torch._C._after_autograd_keyset
            return operator.redispatch(below, a, b, operands, numbers, *form, records=CALLS)

    # A rule of `torch.library.register_vmap` could not compute this by a vmap of its own (torch 2.13).
    def batched(
        a: torch.Tensor, b: torch.Tensor, operands: Operands, numbers: Numbers, *form: Any, records: str = ""
    ) -> torch.Tensor:
        return unfused(form_of(MATMUL, *form), a, b, operands, numbers)

    schema = (
        "fused(Tensor a, Tensor b, Tensor[] operands, float[] numbers, str epilogue, "
        "ScalarType? out_dtype=None, str accumulation='fast', *, str records='') -> Tensor"
    )
    define(schema, compute, fake, _TAGS, autograd)
    operator = torch.ops.tunegemm.fused.default
    library.impl("fused", batched, "FuncTorchBatched")


def is_served(form: Form, a: torch.Tensor, b: torch.Tensor, is_trained: bool = False) -> bool:
    """Whether a kernel is recorded for traced operands, or for one of their gradients if they train.

    A symbolic extent counts as the value it was traced with; for m any recorded value counts.
    """
    if not may_be_served(a, b):
        return False
    places = [
        ([hint(extent) for extent in tensor.shape], [hint(step) for step in tensor.stride()], tensor.dtype)
        for tensor in (a, b)
    ]
    symbolic = any(isinstance(extent, torch.SymInt) for extent in (*a.shape, *b.shape))
    results = []

    def ask(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        index = a.device.index or 0
        results.append(api.dispatcher.planner.serves(form, left, right, index, any_m=symbolic))
        return left.new_empty((*left.shape[:-1], right.shape[-1]))

    with _disable_current_modes(), torch.no_grad():
        left, right = (
            torch.empty_strided(shape, strides, dtype=dtype, device="meta")
            for shape, strides, dtype in places
        )
        result = ask(left, right)
        if is_trained and not any(results):
            needed = left if b.requires_grad else None, right if a.requires_grad else None
            gradients(ask, result, needed, (turned(left), turned(right)))
    return any(results)


def may_be_served(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the code made from a product of traced operands may call tunegemm."""
    if a.ndim < 2 or b.ndim < 2 or a.device.type != DEVICE_TYPE or b.device != a.device or _is_cast(a):
        return False
    # C++ would call us through torch's dispatcher, and outlive the Python interpreter that we need.
    return not getattr(sys.modules.get("torch._inductor.config"), "cpp_wrapper", False)


def hint(extent: Any) -> int:
    """An extent, or the value that a symbolic one was traced with. Adds no guard."""
    return int(extent.node.hint or 2) if isinstance(extent, torch.SymInt) else int(extent)


def traced_fused(
    call: int,
    text: str,
    a: torch.Tensor,
    b: torch.Tensor,
    tensors: tuple[torch.Tensor, ...],
    numbers: tuple[float, ...],
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    accumulation: str,
) -> torch.Tensor:
    """`Dispatcher.fused` while a graph is traced. If an output is given, torch writes it."""
    amax = tensors[-1] if text.endswith("amax") and not text.startswith("custom") else None
    if amax is not None:
        text, tensors = text.removesuffix("amax").removesuffix("+"), tensors[:-1]
    right = _turned(b) if call == LINEAR else b
    if call == LINEAR and a.ndim == 1 and text.startswith("bias_n"):  # torch takes a row for a line
        tensors = (tensors[0].flatten(), *tensors[1:])
    result = torch.ops.tunegemm.fused(
        a, right, list(tensors), list(numbers), text, out_dtype, accumulation, records=records()
    )
    if amax is not None:
        amax.copy_(torch.maximum(amax, result.float().abs().amax()))
    return result if out is None else out.copy_(result)


def traced_matmul(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None, of_any_class: bool = False
) -> torch.Tensor:
    """`tunegemm.matmul` while a graph is traced. of_any_class: subclasses mean what torch.Tensor means."""
    if not ((of_any_class or are_torchs(a, b)) and _is_servable(a, b) and is_simple(a, b)):
        return torch.matmul(a, b) if out is None else torch.matmul(a, b, out=out)
    if out is not None:
        is_trained = torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)
        if is_trained or out.dtype != a.dtype or out.shape != (*a.shape[:-1], b.shape[-1]):
            return torch.matmul(a, b, out=out)
        torch.ops.tunegemm.matmul_out(a, b, out)
        return out
    if b.ndim == 3:
        return torch.ops.tunegemm.bmm(a, b, records=records())
    if a.ndim == 2:
        return torch.ops.tunegemm.mm(a, b, records=records())
    result = torch.ops.tunegemm.mm(a.flatten(0, -2), b, records=records())
    return shaped(result, (*a.shape[:-1], b.shape[-1]))


def traced_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, of_any_class: bool = False
) -> torch.Tensor:
    """`tunegemm.linear` while a graph is traced. of_any_class: as for `traced_matmul`."""
    is_usual = bias is None or (x.ndim > 1 and bias.ndim == 1 and bias.dtype == x.dtype)
    are_plain = of_any_class or are_torchs(x, weight, bias)
    if not (are_plain and weight.ndim == 2 and is_usual and _is_servable(x, weight)):
        return torch.nn.functional.linear(x, weight, bias)
    if bias is not None:
        return traced_fused(LINEAR, "bias_n", x, weight, (bias,), (), None, None, "fast")
    return traced_matmul(x, _turned(weight), of_any_class=True)


def _turned(weight: torch.Tensor) -> torch.Tensor:
    """The transpose. Torch (2.13) traces neither `t()` within `inference_mode` nor `mT` within `cond`."""
    return weight.swapaxes(-2, -1) if weight.ndim > 1 else weight


def _is_servable(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.device.type == b.device.type == DEVICE_TYPE
        and a.dtype == b.dtype
        and a.dtype in DTYPES
        and not _is_cast(a)
    )


def _is_cast(a: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether autocast casts an operand of a product."""
    if a.dtype.itemsize == 1 or not torch.is_autocast_enabled(DEVICE_TYPE):
        return False
    return any(each.dtype != torch.get_autocast_dtype(DEVICE_TYPE) for each in (a, *others))


_define_product("mm")
_define_product("bmm")
define("matmul_out(Tensor a, Tensor b, Tensor(a!) out) -> ()", _write, lambda a, b, out: None, _TAGS)
_define_fused()
