"""What a pair of operands asks for: the problem, how to view it as matrices, and what kernels may refuse.

Everything here depends on shapes, strides, dtypes and the alignment of addresses only, so one answer holds
for every later call with the same key. It runs once per key, off the hot path, and never looks at a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tunegemm.errors import ProblemError
from tunegemm.problem import Problem

if TYPE_CHECKING:
    import torch

#: TMA wants base addresses and all strides but the contiguous one in multiples of this many bytes
#: (CUDA driver API, cuTensorMapEncodeTiled: globalAddress and globalStrides).
ALIGNMENT = 16


@dataclass(frozen=True)
class Operands:
    """A product that a kernel may compute."""

    problem: Problem
    out_shape: tuple[int, ...]
    """Shape of what torch.matmul returns."""
    rows: tuple[int, int] | None
    """(m, k) when the first operand has leading dimensions to be folded into rows; else None."""
    tma_refusal: str
    """Why TMA cannot read or write these views; empty when it can (base addresses aside)."""
    packed: bool
    """Whether every operand is dense: no gap between rows or batch entries."""
    spans: tuple[int, int, int]
    """Bytes from the first to past the last element of a, b and the output."""


@dataclass(frozen=True)
class Refusal:
    """A product that is torch's, whatever the database says."""

    reason: str
    """One line; empty where torch is simply the right place (broadcasting, empty extents, errors)."""


def describe(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> Operands | Refusal:
    """What ``torch.matmul(a, b, out=out)`` asks for.

    Handled: (m, k) x (k, n); (..., m, k) x (k, n) whose leading dimensions fold into rows; and
    (l, m, k) x (l, k, n) with l > 1. Never raises: what torch would reject is a Refusal too.
    """
    if 0 in a.shape or 0 in b.shape:
        return Refusal("")
    if a.ndim < 2 or b.ndim < 2 or a.shape[-1] != b.shape[-2] or a.dtype != b.dtype:
        return Refusal("")
    if out is not None and out.dtype != a.dtype:
        return Refusal("")
    rows = None
    matrix = a
    if a.ndim > 2 and b.ndim == 2:
        rows = (a.numel() // a.shape[-1], a.shape[-1])
        try:
            matrix = a.view(rows)
        except RuntimeError:  # the leading dimensions have no common stride
            return Refusal(f"operand of strides {a.stride()} has no single row stride")
    elif a.ndim > 3 or a.ndim != b.ndim or a.shape[:-2] != b.shape[:-2] or a.shape[:-2] == (1,):
        return Refusal("")
    try:
        problem = Problem.from_tensors(matrix, b)
    except ProblemError as error:
        return Refusal(str(error))
    if problem.in_dtype not in ("bf16", "fp16"):
        # torch.matmul multiplies fp32 as its precision is set at each call, fp8 and int8 not at all on a GPU.
        return Refusal(f"{problem.in_dtype} operands: only bf16 and fp16 have tuned products here")
    out_shape = (*a.shape[:-1], b.shape[-1])
    return _described(problem, matrix, b, out, out_shape, rows)


def _described(
    problem: Problem,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None,
    out_shape: tuple[int, ...],
    rows: tuple[int, int] | None,
) -> Operands | Refusal:
    d_shape = (*a.shape[:-1], b.shape[-1])
    if out is None:
        d_strides = _dense_strides(d_shape)
    else:
        if tuple(out.shape) != out_shape or out.is_conj() or out.is_neg():
            return Refusal("")
        if rows is not None:
            if not out.is_contiguous():
                return Refusal("")
            d_strides = _dense_strides(d_shape)
        else:
            d_strides = tuple(out.stride())
        if d_strides[-1] != 1 and d_strides[-2] == 1:
            problem = replace(problem, out_major="m")
    item = a.element_size()
    views = (
        ("a", tuple(a.shape), tuple(a.stride()), -1 if problem.a_major == "k" else -2),
        ("b", tuple(b.shape), tuple(b.stride()), -2 if problem.b_major == "k" else -1),
        ("out", d_shape, d_strides, -1 if problem.out_major == "n" else -2),
    )
    refusals = [_tma_refusal(name, shape, strides, major, item) for name, shape, strides, major in views]
    if out is not None and _overlaps_itself(d_shape, d_strides):
        return Refusal("")
    _, shape, strides, major = views[2]
    if strides[major] != 1 and shape[major] > 1:
        return Refusal(f"output of strides {strides} has no unit stride")
    a_span, b_span, d_span = (_span(shape, strides) * item for _, shape, strides, _ in views)
    return Operands(
        problem,
        out_shape,
        rows,
        next((refusal for refusal in refusals if refusal), ""),
        all(_is_packed(shape, strides, major) for _, shape, strides, major in views),
        (a_span, b_span, d_span),
    )


def _tma_refusal(name: str, shape: Sequence[int], strides: Sequence[int], major: int, item: int) -> str:
    """Why a tensor map cannot describe the view; `major` is the index of its contiguous mode.

    An extent of 1 does not excuse its stride: the tensor map is built from the strides as they are.
    """
    where = f"operand {name} of shape {tuple(shape)} and strides {tuple(strides)}"
    if strides[major] != 1:
        return f"{where} has no unit stride"
    for dim, stride in enumerate(strides):
        if dim != len(strides) + major and stride * item % ALIGNMENT:
            return f"{where}: stride {stride} x {item} B is no multiple of the {ALIGNMENT} B that TMA needs"
    if _overlaps_itself(shape, strides):
        return f"{where} overlaps itself"
    return ""


def _overlaps_itself(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements may share an address (expanded or sliding-window views)."""
    reach = 1
    for stride, extent in sorted(zip(strides, shape, strict=True)):
        if stride < reach:
            return True
        reach = stride * extent
    return False


def _is_packed(shape: Sequence[int], strides: Sequence[int], major: int) -> bool:
    order = [major, -3 - major] + ([-3] if len(shape) == 3 else [])
    expected = 1
    for dim in order:
        if strides[dim] != expected:
            return False
        expected *= shape[dim]
    return True


def _dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for extent in reversed(shape[1:]):
        strides.insert(0, strides[0] * extent)
    return tuple(strides)


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    return 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
