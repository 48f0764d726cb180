"""Describe calls of torch's library as forms with epilogues.

`addmm_steps` and `scale_steps` return a call's epilogue; `call_of` describes a whole call of one of
`choose.operators`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from tunegemm.choose.operators import OPERATORS, SCALES
from tunegemm.dispatch.forms import BELOW_AUTOGRAD, Call, form_of
from tunegemm.dispatch.guards import PLAIN, num_elements, rank

#: Values of ATen's ScalingType (ATen/BlasBackend.h); those of blocks are 1x32, 1x128 and 128x128.
_TENSOR_WISE, _ROW_WISE, _NARROW, _LINES, _BLOCKS = 0, 1, 3, 4, 5
#: How the epilogue of a pair of recipes begins.
_KINDS: dict[tuple[int, ...], str] = {
    (_TENSOR_WISE, _TENSOR_WISE): "scale_tensor",
    (_ROW_WISE, _ROW_WISE): "scale_rowwise",
}
#: Torch's fp8 product requires B's rows and columns to be multiples of this.
_FP8_UNIT = 16


def addmm_steps(
    c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, beta: float, alpha: float
) -> tuple[str, tuple[torch.Tensor, ...], tuple[float, ...]]:
    """The epilogue of ``beta * c + alpha * a @ b`` and its operands, for which `is_sum` holds.

    Dispatch decides whether a kernel takes C's shape: torch accepts more shapes, which it broadcasts. Raises
    TypeError if C is not a tensor or a factor is not a number, RuntimeError if C has no strides.
    """
    first, scalars = ("", ()) if alpha == 1 else ("alpha+", (_float(alpha),))
    dimensions = rank(c)
    if beta == 0:
        return first[:-1], (), scalars
    if beta == 1:
        if dimensions == 1:
            return first + "bias_n", (c,), scalars
        # A row, as Inductor expands it or a user passes it. The gradient of an expanded one has all rows.
        if dimensions == a.ndim == 2 and (
            c.shape[0] == 1 != a.shape[0]
            or (0 == c.stride(0) < c.shape[0] and not (c.requires_grad and torch.is_grad_enabled()))
        ):
            return first + "bias_n", (c[0],), scalars
    return first + "beta_c", (c,), (*scalars, _float(beta))


def is_sum(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, beta: float, dimensions: int) -> bool:
    """Whether torch accepts these operands of ``beta * c + a @ b``, as matrices (2) or batches (3), and the
    call requests only the sum.

    Torch checks the dtype, gradient and class of C even if beta is 0 and C is not read. Raises TypeError if
    an operand is not a tensor.
    """
    if not rank(a) == rank(b) == dimensions >= rank(c):
        return False
    left, right, extents = a.shape, b.shape, c.shape
    if left[-1] != right[-2] or (dimensions == 3 and left[0] != right[0]):
        return False
    place = dimensions
    for extent in reversed(extents):
        place -= 1
        if extent != 1 and extent != (right[-1] if place == dimensions - 1 else left[place]):
            return False
    return beta != 0 or (
        c.dtype == a.dtype
        and c.device == a.device
        and type(c) in PLAIN
        and not (c.requires_grad and torch.is_grad_enabled())
    )


def _float(number: float) -> float:
    if isinstance(number, str):  # float() would parse some strings
        raise TypeError(f"{number!r} is not a number")
    return float(number)


def scale_steps(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, bias: bool
) -> str:
    """The epilogue of ``torch._scaled_mm`` with these scales; empty for scales that only torch takes.

    Raises TypeError if an operand is not a tensor.
    """
    if rank(a) != 2 or rank(b) != 2:
        return ""
    counts = num_elements(scale_a), num_elements(scale_b)
    if torch.float8_e8m0fnu in (scale_a.dtype, scale_b.dtype):
        return ""  # of a single block of k
    if counts == (1, 1):
        return "scale_tensor+bias_n" if bias else "scale_tensor"
    if scale_a.shape == (a.shape[0], 1) and scale_b.shape == (1, b.shape[1]):
        return "scale_rowwise+bias_n" if bias else "scale_rowwise"
    return ""


def takes_fp8(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether torch multiplies these fp8 operands as they lie, on a GPU."""
    return (
        a.ndim == b.ndim == 2
        and a.dtype.itemsize == b.dtype.itemsize == 1
        and a.is_floating_point()
        and a.stride(1) == 1
        and b.stride(0) == 1
        and not (b.shape[0] % _FP8_UNIT or b.shape[1] % _FP8_UNIT)
        and not a.dtype == b.dtype == torch.float8_e5m2
    )


def has_scales(text: str, a: torch.Tensor, out_dtype: torch.dtype | None) -> bool:
    """Whether torch scales fp8 products so on a GPU: by rows into bf16 only, and without a bias into fp32."""
    if not a.is_cuda or out_dtype is torch.bfloat16:
        return True
    return text == "scale_tensor" or (text == "scale_tensor+bias_n" and out_dtype is not torch.float32)


def call_of(name: str, arguments: Sequence[Any], keywords: dict[str, Any]) -> tuple[Call, str]:
    """Describe a call of an ATen operator with valid arguments. Also returns why torch always computes it;
    empty if `tunegemm.enable` serves it."""
    operator = OPERATORS[name]
    a, b, *more = arguments[operator.first :]
    out, refusal = keywords.get("out"), operator.refusal
    tensors: tuple[torch.Tensor, ...] = ()
    numbers: tuple[float, ...] = ()
    text = ""
    if operator.absorbs == SCALES:
        value = dict(zip(argument_names(name)[2:], more, strict=False))
        bias, out_dtype = value.get("bias"), value.get("out_dtype")
        if (scales := _scales(name, value)) is not None:
            scale_a, scale_b, recipes = scales
            text = scale_steps(a, b, scale_a, scale_b, bias is not None)
            if recipes and not text.startswith(_KINDS.get(recipes, "others")):
                text = ""
            tensors = () if not text else (scale_a, scale_b) if bias is None else (scale_a, scale_b, bias)
        accumulation = "fast" if value.get("use_fast_accum") else "two_level"
        form = form_of(BELOW_AUTOGRAD, text, out_dtype, accumulation)
        if not text:
            refusal = "unsupported scales: kernels take one per operand, or one per row and column"
        elif not (takes_fp8(a, b) and has_scales(text, a, out_dtype)):
            refusal = "torch does not support this product of fp8 operands on a GPU"
        return Call(form, a, b, tensors, (), out), refusal
    if name == "_int_mm":
        return Call(form_of(BELOW_AUTOGRAD, "", torch.int32), a, b, (), (), out), refusal
    if operator.absorbs:
        beta, alpha = keywords.get("beta", 1), keywords.get("alpha", 1)
        try:
            text, tensors, numbers = addmm_steps(arguments[0], a, b, beta, alpha)
        except TypeError as error:  # of a complex number
            refusal = refusal or str(error)
    if more:
        refusal = refusal or "with an out_dtype, which tunegemm.enable does not serve"
    out_dtype = more[0] if more else None
    return Call(form_of(BELOW_AUTOGRAD, text, out_dtype), a, b, tensors, numbers, out), refusal


@cache
def argument_names(name: str) -> list[str]:
    """The names of an operator's arguments. A call may lack the last ones."""
    return [each.name for each in getattr(torch.ops.aten, name).default._schema.arguments]


def _scales(name: str, value: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]] | None:
    """The scales of a scaled product's operands, and their recipes if its operator has those; None for a
    scale of the result, several for one operand, and swizzled ones. value: the arguments by name."""
    scale_a, scale_b = value["scale_a"], value["scale_b"]
    if name == "_scaled_mm":
        return None if value.get("scale_result") is not None else (scale_a, scale_b, ())
    swizzled = any(value["swizzle_a"]) or any(value["swizzle_b"])
    given = scale_a, scale_b, value["recipe_a"], value["recipe_b"]
    if any(len(each) != 1 for each in given) or swizzled or value.get("contraction_dim"):
        return None
    return scale_a[0], scale_b[0], (*given[2], *given[3])


def block_scales(name: str, arguments: Sequence[Any]) -> tuple[Any, Any, Any, Any, Any, bool] | None:
    """Operands, scales and output dtype of an operator's call whose scales may be of 1x128 and 128x128; and
    whether the call says that they are of 1x32.
    """
    a, b, *more = arguments
    value = dict(zip(argument_names(name)[2:], more, strict=False))
    scales = _scales(name, value)
    recipes: tuple[tuple[int, ...], ...] = (), (_LINES, _BLOCKS), (_NARROW, _NARROW)
    if scales is None or value.get("bias") is not None or scales[2] not in recipes:
        return None
    return a, b, scales[0], scales[1], value.get("out_dtype"), scales[2] == (_NARROW, _NARROW)


def in_fp32(scale: torch.Tensor) -> torch.Tensor:
    """Block scales as kernels read them: E8M0 is converted, exactly. Dense scales keep their strides."""
    return scale.float() if scale.dtype is torch.float8_e8m0fnu else scale
