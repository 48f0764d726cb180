"""A `Form` by torch's own operations: what a call means where no kernel does all of it at once.

Shapes, dtypes and errors are those of torch's functions; so are gradients and transforms. The library's call
takes what it can: a column bias or C of the operands' dtype, and the scales of fp8 operands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import linear

from tunegemm.errors import ProblemError
from tunegemm.generate.cublaslt.eager import step_of
from tunegemm.generate.cublaslt.products import INT8_LEAST_ROWS
from tunegemm.serve.forms import LINEAR, Form
from tunegemm.serve.library import absorbed

#: Functions in the place of torch's: a product of (a, b) as the form's kind means it; one with a column bias.
Multiply = Callable[[Any, Any], Any]
MultiplyAndAdd = Callable[[Any, Any, Any], Any]


def unfused(
    form: Form,
    a: Any,
    b: Any,
    tensors: Sequence[Any],
    numbers: Sequence[float],
    out: Any = None,
    *,
    multiply: Multiply | None = None,
    biased: MultiplyAndAdd | None = None,
) -> Any:
    """What the form makes of ``a @ b``, or of ``a @ b.mT`` where it is linear's.

    Raises what torch's functions raise.
    """
    operands = form.join(tensors, numbers)
    named = dict(zip((operand.name for operand in form.epilogue.operands), operands, strict=True))
    steps = [step for step in form.epilogue.steps if step != "amax"]
    if out is not None and steps == ["bias_n"] and biased is None and _is_plain_addmm(form, a, b, out):
        return torch.addmm(named["bias"], a, b.t() if form.kind == LINEAR else b, out=out)
    value, taken = _product(form, a, b, steps, named, multiply, biased)
    if form.epilogue.gated and value.shape[-1] % 2:
        raise ProblemError(
            f"operands {tuple(a.shape)} and {tuple(b.shape)}: gates take pairs of columns, "
            f"not {value.shape[-1]}; give gate and up in turns, as tunegemm.interleave makes them"
        )
    dtype = form.out_dtype_of(a)
    own = value.dtype if value.dtype.is_floating_point else dtype  # sums of int8 products are scaled first
    if "scale_rowwise" in steps and "scale_rowwise" not in taken:  # given as (m, 1) and (1, n)
        named |= {name: named[name].flatten() for name in ("scale_a", "scale_b")}
    if form.epilogue.function is not None:
        value = form.epilogue.reference(value, named).to(own)
    else:
        for step in steps:
            if step not in taken:
                value = step_of(step, own)(value, named, None)
    if value.dtype.is_floating_point and dtype.itemsize == 1:
        value = value.to(dtype)
    if form.writes:
        shown = value.float() if dtype.itemsize == 1 else value
        named["amax"].copy_(torch.maximum(named["amax"], shown.abs().amax().to(torch.float32)))
    return value if out is None else _into(out, value)


def taken_operands(form: Form, a: Any, b: Any) -> tuple[str, ...]:
    """The operands that go into the library's call, with which autocast casts them."""
    taken = absorbed(form.epilogue.steps)
    if taken == ("bias_n",):
        return ("bias",) if form.kind == LINEAR or (a.ndim > 1 and b.ndim == 2) else ()
    return ("c",) if "beta_c" in taken and a.ndim == b.ndim else ()


def _product(
    form: Form,
    a: Any,
    b: Any,
    steps: list[str],
    named: dict[str, Any],
    multiply: Multiply | None,
    biased: MultiplyAndAdd | None,
) -> tuple[Any, tuple[str, ...]]:
    """The product, and the steps that were taken along."""
    taken, own_dtype = absorbed(steps), form.out_dtype is None or form.out_dtype == a.dtype
    if taken == ("bias_n",) and own_dtype:
        if biased is not None:
            return biased(a, b, named["bias"]), taken
        if form.kind == LINEAR:
            return linear(a, b, named["bias"]), taken
        if a.ndim > 1 and b.ndim == 2 and named["bias"].ndim == 1:
            return linear(a, b.t(), named["bias"]), taken
    elif "beta_c" in taken and own_dtype and a.ndim == b.ndim and a.ndim in (2, 3):
        add = torch.addmm if a.ndim == 2 else torch.baddbmm
        right = b.mT if form.kind == LINEAR else b
        return add(named["c"], a, right, beta=named["beta"], alpha=named.get("alpha", 1)), taken
    elif taken and taken[0].startswith("scale") and a.ndim == 2 and _is_fp8(a):
        bias = named["bias"] if "bias_n" in taken else None
        right = b.mT if form.kind == LINEAR else b
        value = torch._scaled_mm(
            a, right, named["scale_a"], named["scale_b"], bias=bias, out_dtype=form.out_dtype,
            use_fast_accum=form.accumulation == "fast",
        )  # fmt: skip
        return value, taken
    if multiply is not None:
        return multiply(a, b), ()
    if own_dtype:
        return linear(a, b) if form.kind == LINEAR else torch.matmul(a, b), ()
    right = b.mT if form.kind == LINEAR else b
    if a.dtype == torch.int8 and (form.out_dtype == torch.int32 or form.epilogue.scales):
        return _of_int8(a, right), ()
    if form.out_dtype == torch.float32 and a.dtype.itemsize == 2:
        return _in_fp32(a, right), ()
    return torch.matmul(a, right).to(form.out_dtype), ()


def _is_fp8(tensor: Any) -> bool:
    return bool(tensor.dtype.is_floating_point) and tensor.dtype.itemsize == 1


def _of_int8(a: Any, b: Any) -> Any:
    """``torch._int_mm``, which wants more rows on a GPU than a decode step has."""
    if not a.is_cuda or a.ndim != 2 or a.shape[0] >= INT8_LEAST_ROWS:
        return torch._int_mm(a, b)
    padded = torch.nn.functional.pad(a, (0, 0, 0, INT8_LEAST_ROWS - a.shape[0]))
    return torch._int_mm(padded, b)[: a.shape[0]]


def _in_fp32(a: Any, b: Any) -> Any:
    """The product of 16-bit operands as it was summed; torch has that on a GPU, of matrices and batches."""
    if not a.is_cuda:
        return torch.matmul(a.float(), b.float())
    if a.ndim == b.ndim == 3:
        return torch.bmm(a, b, out_dtype=torch.float32)
    if b.ndim == 2 and a.ndim > 1:
        return torch.mm(a.flatten(0, -2), b, out_dtype=torch.float32).unflatten(0, a.shape[:-1])
    return torch.matmul(a.float(), b.float())


def _is_plain_addmm(form: Form, a: Any, b: Any, out: Any) -> bool:
    return a.ndim == b.ndim == 2 and form.out_dtype in (None, a.dtype) and out.dtype == a.dtype


def _into(out: Any, value: Any) -> Any:
    if torch.is_grad_enabled() and (out.requires_grad or value.requires_grad):
        raise RuntimeError("out= of a fused product does not support automatic differentiation")
    if out.shape != value.shape or out.dtype != value.dtype:
        raise RuntimeError(
            f"out of {tuple(out.shape)} {out.dtype} for a result of {tuple(value.shape)} {value.dtype}"
        )
    return out.copy_(value)
