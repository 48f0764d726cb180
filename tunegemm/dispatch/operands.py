"""What a pair of operands asks for: the problem, how to view it as matrices, and what kernels may refuse.

Everything here depends on shapes, strides, dtypes and the alignment of addresses only, so one answer holds
for every later call with the same key. It runs once per key, off the hot path, and never looks at a device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tunegemm.describe.epilogue import Epilogue
from tunegemm.describe.problem import DTYPE_BYTES, Problem, overlaps_itself
from tunegemm.errors import ProblemError

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
    views: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    """Shapes in which a kernel sees a, b and the output: matrices, or batches of as many matrices."""
    tma_refusal: str
    """Why TMA cannot read or write these views; empty when it can (base addresses aside)."""
    packed: bool
    """Whether every operand is dense: no gap between rows or batch entries."""
    spans: tuple[int, int, int]
    """Bytes from the first to past the last element of a, b and the output."""


@dataclass(frozen=True)
class Refusal:
    """A product that torch computes, whatever the database says."""

    reason: str
    """One line; empty where torch is simply the right place (broadcasting, empty extents, errors)."""


def describe(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    epilogue: str = "",
    accumulation: str = "fast",
) -> Operands | Refusal:
    """What ``torch.matmul(a, b, out=out)`` asks for, with what becomes of it before it is stored.

    Handled: whatever views make a product of two matrices, of two equal batches of them, or of one matrix and
    a batch, where the matrix is a batch of stride 0. Never raises: what torch would reject is a Refusal too.
    torch.matmul takes no operands of 8 bits on a GPU: they need an `out_dtype`.
    """
    for operand in (a, b):
        if not hasattr(operand, "data_ptr"):
            return Refusal(f"operand {operand!r:.40} is not a tensor")
    if out is not None and out.dtype != (a.dtype if out_dtype is None else out_dtype):
        return Refusal("")
    if a.dtype != b.dtype and (a.dtype.itemsize > 1 or out_dtype is None):
        return Refusal("")
    choices, out_shape = _matrices(tuple(a.shape), tuple(b.shape))
    if choices and b.ndim > 1 and Epilogue.parse(epilogue).gated:
        out_shape = (*out_shape[:-1], out_shape[-1] // 2)
    if not choices or (out is not None and tuple(out.shape) != out_shape):
        return Refusal("")
    for a_shape, b_shape in choices:
        try:
            matrix, other = seen_as(a, a_shape), seen_as(b, b_shape)
            if out is not None:
                out.view(*a_shape[:-1], out_shape[-1] if b.ndim > 1 else 1)
            break
        except RuntimeError:  # the leading dimensions have no common stride
            continue
    else:
        rows = f"operand of strides {a.stride()} has no single row stride"
        return Refusal(rows if b.ndim == 2 and out is None else "")
    try:
        problem = Problem.from_tensors(
            matrix, other, out_dtype=out_dtype, epilogue=epilogue, accumulation=accumulation
        )
    except ProblemError as error:
        return Refusal(str(error))
    if DTYPE_BYTES[problem.in_dtype] == 1 and out_dtype is None:
        return Refusal(f"{problem.in_dtype} operands: torch.matmul has no product of them on a GPU")
    return _described(problem, matrix, other, out, out_shape)


def seen_as(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A view of a tensor in a shape; of one matrix in the shape of a batch, as many times the same.

    Raises RuntimeError where no view is so.
    """
    if tensor.numel() == math.prod(shape):
        return tensor.view(shape)
    return tensor.view(shape[1:]).expand(shape)


def _matrices(
    a: tuple[int, ...], b: tuple[int, ...]
) -> tuple[list[tuple[tuple[int, ...], tuple[int, ...]]], tuple[int, ...]]:
    """Shapes to see operands of these shapes in, both of 2 or both of 3 dimensions, and the result's shape.

    The best comes first: one product rather than a batch. None at all for what no view makes such a product,
    for empty extents, and for a dot product, which no matrix kernel computes.
    """
    if 0 in a or 0 in b or not a or not b or len(a) == len(b) == 1:
        return [], ()
    left, right = (1, *a) if len(a) == 1 else a, (*b, 1) if len(b) == 1 else b
    (*a_lead, m, k), (*b_lead, b_k, n) = left, right
    if k != b_k:
        return [], ()
    rank = max(len(a_lead), len(b_lead))
    a_lead, b_lead = [1] * (rank - len(a_lead)) + a_lead, [1] * (rank - len(b_lead)) + b_lead
    out = (*map(max, a_lead, b_lead), *(m,) * (len(a) > 1), *(n,) * (len(b) > 1))
    batch, of_b = math.prod(a_lead), math.prod(b_lead)
    entries = max(batch, of_b)
    choices: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    if of_b == 1:
        choices.append(((batch * m, k), (k, n)))
    if entries > 1 and (batch == 1 or of_b == 1 or a_lead == b_lead):
        choices.append(((entries, m, k), (entries, k, n)))
    return choices, out


def _described(
    problem: Problem, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, out_shape: tuple[int, ...]
) -> Operands | Refusal:
    d_shape = (*a.shape[:-1], problem.out_n)
    if out is None:
        d_strides = _dense_strides(d_shape)
    else:
        if out.is_conj() or out.is_neg():
            return Refusal("")
        d_strides = tuple(out.view(d_shape).stride())
        if d_strides[-1] != 1 and d_strides[-2] == 1:
            problem = replace(problem, out_major="m")
    item, out_item = a.element_size(), DTYPE_BYTES[problem.out_dtype]
    views = (
        ("a", tuple(a.shape), tuple(a.stride()), -1 if problem.a_major == "k" else -2, item),
        ("b", tuple(b.shape), tuple(b.stride()), -2 if problem.b_major == "k" else -1, item),
        ("out", d_shape, d_strides, -1 if problem.out_major == "n" else -2, out_item),
    )
    refusals = [_tma_refusal(*view) for view in views]
    if out is not None and overlaps_itself(d_shape, d_strides):
        return Refusal("")
    _, shape, strides, major, _ = views[2]
    if strides[major] != 1 and shape[major] > 1:
        return Refusal(f"output of strides {strides} has no unit stride")
    a_span, b_span, d_span = (_span(shape, strides) * size for _, shape, strides, _, size in views)
    return Operands(
        problem,
        out_shape,
        (tuple(a.shape), tuple(b.shape), d_shape),
        next((refusal for refusal in refusals if refusal), ""),
        all(_is_packed(shape, strides, major) for _, shape, strides, major, _ in views),
        (a_span, b_span, d_span),
    )


def _tma_refusal(name: str, shape: Sequence[int], strides: Sequence[int], major: int, item: int) -> str:
    """Why a tensor map cannot describe the view; `major` is the index of its contiguous mode.

    A mode of extent 1 is never stepped over: launchers give it a stride that TMA takes. Batch entries may
    share memory: a stride of 0 is a multiple of 16 bytes, too.
    """
    where = f"operand {name} of shape {tuple(shape)} and strides {tuple(strides)}"
    if strides[major] != 1:
        return f"{where} has no unit stride"
    for dim, stride in enumerate(strides):
        if dim != len(strides) + major and shape[dim] > 1 and stride * item % ALIGNMENT:
            return (
                f"{where}: stride {stride} x {item} B is not a multiple of the {ALIGNMENT} B that TMA needs"
            )
    if overlaps_itself(shape[-2:], strides[-2:]):
        return f"{where} overlaps itself"
    return ""


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
