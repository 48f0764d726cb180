"""Compute a `Form` by torch's own functions, for calls that no kernel computes as a whole.

If torch has one call for the whole form, that call gets the caller's arguments. Otherwise fp16 and fp8
products keep their fp32 sums until the last step and are rounded once, as in a kernel: values that leave the
range in between may come back. For bf16, and under autograd, transforms and tracing, which build their own
graphs, torch's functions run one after the other. Torch raises the errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import linear

from tunegemm.choose.operators import absorbed
from tunegemm.dispatch import guards
from tunegemm.dispatch.autograd import Add, Multiply, is_simple
from tunegemm.dispatch.forms import ADDMM, LINEAR, SCALED_MM, Form
from tunegemm.dispatch.library import takes_fp8
from tunegemm.errors import ProblemError
from tunegemm.generate.cublaslt.eager import step_of
from tunegemm.generate.cublaslt.products import INT8_LEAST_ROWS


def by_torch(form: Form, a: Any, b: Any, tensors: Sequence[Any], numbers: Sequence[float], out: Any) -> Any:
    """The form by torch's functions; None for BELOW_AUTOGRAD and ADDMM, whose callers have those."""
    if form.torchs is not None:
        return form.torchs(a, b, *tensors) if out is None else form.torchs(a, b, *tensors, out=out)
    if form.call == SCALED_MM and a.dtype != torch.int8:  # torch has only the plain product of int8
        named = dict(zip(("scale_a", "scale_b", "bias"), tensors, strict=False))
        return _one_call(form, a, b, form.epilogue.steps, named, None)
    return unfused(form, a, b, tensors, numbers, out)


#: Torch's single functions of two matrices, a bias of one dimension if any, and ``out=``, by epilogue.
INTO: dict[str, Callable[..., Any]] = {
    "": torch.mm,
    "bias_n": lambda a, b, bias, *, out: torch.addmm(bias, a, b, out=out),
}


def unfused(
    form: Form,
    a: Any,
    b: Any,
    tensors: Sequence[Any],
    numbers: Sequence[float],
    out: Any = None,
    *,
    multiply: Multiply | None = None,
    biased: Add | None = None,
) -> Any:
    """The form's result for ``a @ b``, or for ``a @ b.mT`` if its call is LINEAR.

    multiply, biased: replace torch's products, of a and b as they are given, if no single torch call takes
    the steps. Raises the errors of torch's functions.
    """
    operands = form.join(tensors, numbers)
    named = dict(zip((operand.name for operand in form.epilogue.operands), operands, strict=True))
    if form.call == LINEAR and a.ndim == 1 and getattr(named.get("bias"), "ndim", 1) == 2:
        named["bias"] = named["bias"].flatten()  # torch's linear takes a row for a line
    steps = [step for step in form.epilogue.steps if step != "amax"]
    taken = steps_taken(form, a, b, steps, named)
    rest = steps[len(taken) :]
    replaced = multiply is not None or biased is not None
    is_whole = not rest and form.epilogue.function is None and (bool(taken) or _is_own(form, a))
    if is_whole and not replaced and not form.writes:
        value = _one_call(form, a, b, taken, named, out)
        if value is out:
            return out
    elif not replaced and _is_wide(form, a, b, rest, named):
        wide = _wide(form, a, b, steps, named)
        value = _rounded(wide, form.out_dtype_of(a))
        if form.writes:
            _raise_amax(named["amax"], wide)
    else:
        value = _one_by_one(form, a, b, steps, taken, named, multiply, biased)
        if form.writes:
            _raise_amax(named["amax"], value.float() if value.dtype.itemsize == 1 else value)
    return value if out is None else _into(out, value)


def taken_operands(form: Form, a: Any, b: Any) -> tuple[str, ...]:
    """The operands of torch's single call, which autocast casts."""
    taken = absorbed(form.epilogue.steps)
    if "bias_n" in taken:
        return ("bias",) if form.call in (LINEAR, ADDMM) or is_simple(a, b) else ()
    return ("c",) if "beta_c" in taken and a.ndim == b.ndim else ()


def added(a: Any, b: Any, bias: Any, out: Any = None) -> Any:
    """``a @ b`` and a value for each column, by a single torch call if there is one."""
    if a.ndim == b.ndim == 2 and out is not None:
        return torch.addmm(bias, a, b, out=out)
    if b.ndim == 2:
        return linear(a, b.t(), bias)
    if a.ndim == b.ndim == 3:
        return torch.baddbmm(bias, a, b) if out is None else torch.baddbmm(bias, a, b, out=out)
    return torch.matmul(a, b) + bias


def _is_own(form: Form, a: Any) -> bool:
    """Whether the result has the operands' dtype."""
    return form.out_dtype is None or form.out_dtype == a.dtype


def _is_fp8(tensor: Any) -> bool:
    return bool(tensor.dtype.is_floating_point) and tensor.dtype.itemsize == 1


def _right(form: Form, b: Any) -> Any:
    return b.mT if form.call == LINEAR and b.ndim > 1 else b  # a weight of one line is that column


def steps_taken(form: Form, a: Any, b: Any, steps: Sequence[str], named: dict[str, Any]) -> tuple[str, ...]:
    """The leading steps that a single torch call computes together with the product."""
    taken = absorbed(steps)
    if not taken:
        return ()
    if taken[0].startswith("scale"):
        if not _is_fp8(a):
            return ()
        is_scaled = form.out_dtype is torch.bfloat16 or taken[0] == "scale_tensor"
        return taken if is_scaled and takes_fp8(a, _right(form, b)) else ()
    if not _is_own(form, a) or _is_fp8(a):
        return ()
    if taken == ("bias_n",):
        is_one = form.call == LINEAR or (is_simple(a, b) and named["bias"].ndim == 1)
        return taken if is_one else ()
    return taken if a.ndim == b.ndim and a.ndim in (2, 3) else ()


def _one_call(
    form: Form, a: Any, b: Any, taken: tuple[str, ...], named: dict[str, Any], out: Any, dtype: Any = None
) -> Any:
    """The product and these steps by a single torch call. dtype: an fp8 product's, if not the form's."""
    arguments = {} if out is None else {"out": out}
    if form.call == LINEAR and out is None and taken in ((), ("bias_n",)):
        return linear(a, b, named["bias"] if taken else None)
    if not taken:
        return torch.matmul(a, _right(form, b), **arguments)
    if taken == ("bias_n",):
        return added(a, _right(form, b), named["bias"], out)
    if taken[0].startswith("scale"):
        return torch._scaled_mm(
            a, _right(form, b), named["scale_a"], named["scale_b"],
            bias=named["bias"] if "bias_n" in taken else None, out_dtype=dtype or form.out_dtype,
            use_fast_accum=form.accumulation == "fast", **arguments,
        )  # fmt: skip
    add = torch.addmm if a.ndim == 2 else torch.baddbmm
    scalars = {"beta": named.get("beta", 1), "alpha": named.get("alpha", 1)}
    c = named["c"] if "beta_c" in taken else named.get("bias") if "bias_n" in taken else None
    if c is None:  # torch has no call without C, but does not read it where beta is 0
        c, scalars["beta"] = a.new_zeros(()), 0
    return add(c, a, _right(form, b), **scalars, **arguments)


def _is_wide(form: Form, a: Any, b: Any, rest: Sequence[str], named: dict[str, Any]) -> bool:
    """Whether the sums are kept in fp32 up to the last step.

    Not if a gradient, a transform or a graph consists of torch's functions, nor if those determine the
    result's dtype; nor for a relu alone, which gives the same before and after rounding. bf16 has the
    range of fp32: torch's functions one after the other lose no more than in any other program, and move a
    third of the bytes.
    """
    if a.dtype.itemsize > 2 or b.dtype.itemsize > 2 or form.out_dtype is torch.int32:
        return False
    if not (a.dtype.is_floating_point or (a.dtype is torch.int8 and form.out_dtype is not None)):
        return False
    tensors = [value for value in named.values() if isinstance(value, torch.Tensor)]
    if guards.grad_enabled() and any(tensor.requires_grad for tensor in (a, b, *tensors)):
        return False
    if guards.dispatch_modes() or guards.tracing() or guards.is_transformed():
        return False
    if not _is_own(form, a) or form.writes or _is_fp8(a):
        return True
    if a.dtype is not torch.float16 or (list(rest) == ["relu"] and form.epilogue.function is None):
        return False
    same = all(tensor.dtype == a.dtype for tensor in (b, *tensors))
    return same and guards.cast_by_autocast(a, b) is None


def _wide(form: Form, a: Any, b: Any, steps: Sequence[str], named: dict[str, Any]) -> Any:
    """Compute all steps in fp32."""
    right, steps = _right(form, b), list(steps)
    if a.dtype == torch.int8:
        value = of_int8(a, right).float()
    elif takes_fp8(a, right):
        scale_a = scale_b = a.new_ones((), dtype=torch.float32)
        if steps[:1] == ["scale_tensor"]:
            scale_a, scale_b = named["scale_a"], named["scale_b"]
            steps.pop(0)
        value = torch._scaled_mm(
            a, right, scale_a, scale_b, out_dtype=torch.float32, use_fast_accum=form.accumulation == "fast"
        )
    else:
        value = _in_fp32(a, right)
    _check_pairs(form, a, b, value)
    return _after(form, value, steps, named, torch.float32)


def _one_by_one(
    form: Form,
    a: Any,
    b: Any,
    steps: Sequence[str],
    taken: tuple[str, ...],
    named: dict[str, Any],
    multiply: Multiply | None,
    biased: Add | None,
) -> Any:
    """Compute by torch's functions one after the other; each rounds to its own dtype."""
    right, dtype = _right(form, b), form.out_dtype_of(a)
    if taken == ("bias_n",) and biased is not None:
        value = biased(a, b, named["bias"])
    elif taken:
        between = torch.bfloat16 if dtype.itemsize == 1 and len(taken) < len(steps) else None
        value = _one_call(form, a, b, taken, named, None, between)
    elif multiply is not None and _is_own(form, a):
        value = multiply(a, b)
    elif _is_own(form, a) and not (_is_fp8(a) and form.epilogue.scales):  # fp8 sums are scaled first
        value = _one_call(form, a, b, (), named, None)
    elif a.dtype == torch.int8 and (form.out_dtype == torch.int32 or form.epilogue.scales):
        value = of_int8(a, right)
    elif a.dtype.is_floating_point and a.dtype.itemsize <= 2:
        value = _in_fp32(a, right)
    else:
        value = torch.matmul(a, right)
    _check_pairs(form, a, b, value)
    own = value.dtype if value.dtype.is_floating_point else dtype  # sums of int8 products are scaled first
    value = _after(form, value, steps[len(taken) :], named, own)
    if form.out_dtype is not None or (value.dtype.is_floating_point and dtype.itemsize == 1):
        return _rounded(value, dtype)
    return value


def _after(form: Form, value: Any, steps: Sequence[str], named: dict[str, Any], dtype: Any) -> Any:
    """Apply these steps, or the user's function, to a product in a dtype."""
    if form.epilogue.function is not None:
        return form.epilogue.reference(value, named).to(dtype)
    if "scale_rowwise" in steps:  # given as (m, 1) and (1, n)
        named = named | {name: named[name].flatten() for name in ("scale_a", "scale_b")}
    for step in steps:
        value = step_of(step, dtype)(value, named, None)
    return value


def _rounded(value: Any, dtype: torch.dtype) -> Any:
    """Round to the result's dtype; fp8 saturates at the largest number, as in every kernel."""
    if dtype.is_floating_point and dtype.itemsize == 1 and value.dtype != dtype:
        most = torch.finfo(dtype).max
        value = value.clamp(-most, most)
    return value.to(dtype)


def _raise_amax(amax: Any, value: Any) -> None:
    amax.copy_(torch.maximum(amax, value.abs().amax().to(torch.float32)))


def _check_pairs(form: Form, a: Any, b: Any, value: Any) -> None:
    columns = value.shape[-1] if b.ndim > 1 else 1
    if form.epilogue.gated and columns % 2:
        raise ProblemError(
            f"operands {tuple(a.shape)} and {tuple(b.shape)}: gates need an even number of columns, "
            f"not {columns}; interleave gate and up, as tunegemm.interleave does"
        )


def of_int8(a: Any, b: Any) -> Any:
    """``torch._int_mm``, which needs more rows on a GPU than a decode step has."""
    # On a CPU (torch 2.13) it reads beyond a line that all rows share.
    a, b = (each.contiguous() if 0 in each.stride() else each for each in (a, b))
    if not a.is_cuda or a.ndim != 2 or a.shape[0] >= INT8_LEAST_ROWS:
        return torch._int_mm(a, b)
    padded = torch.nn.functional.pad(a, (0, 0, 0, INT8_LEAST_ROWS - a.shape[0]))
    return torch._int_mm(padded, b)[: a.shape[0]]


def _in_fp32(a: Any, b: Any) -> Any:
    """The unrounded fp32 product of operands of up to 16 bits.

    On a GPU, torch has one for matrices and batches, without derivatives; otherwise the operands are cast.
    """
    if _is_fp8(a) and _is_fp8(b):
        a, b = a.to(torch.bfloat16), b.to(torch.bfloat16)  # bf16 represents every fp8 number
    if a.dtype != b.dtype:
        return torch.matmul(a, b)  # raises torch's error
    differentiates = guards.grad_enabled() and (a.requires_grad or b.requires_grad)
    if a.is_cuda and not differentiates and not guards.is_transformed():
        if a.ndim == b.ndim == 3:
            return torch.bmm(a, b, out_dtype=torch.float32)
        if b.ndim == 2 and a.ndim > 1:
            return torch.mm(a.flatten(0, -2), b, out_dtype=torch.float32).unflatten(0, a.shape[:-1])
    if not guards.any_autocast():
        return torch.matmul(a.float(), b.float())
    with torch.autocast(a.device.type, enabled=False):
        return torch.matmul(a.float(), b.float())


def _into(out: Any, value: Any) -> Any:
    if torch.is_grad_enabled() and (out.requires_grad or value.requires_grad):
        raise RuntimeError("out= of a fused product does not support automatic differentiation")
    given, wanted = ((tuple(each.shape), each.dtype, each.device) for each in (out, value))
    if given != wanted:
        shown = (f"{shape} {dtype} on {device}" for shape, dtype, device in (given, wanted))
        raise RuntimeError("out is {}, but the result is {}".format(*shown))
    return out.copy_(value)
