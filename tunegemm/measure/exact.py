"""Operands whose product every correct kernel computes exactly: a check that covers each k, row and column.

With random operands, one k of 65536 contributes 0.4 % of a result, less than the tolerance for rounding to
bf16: a kernel that omits the last ones would pass. Here the elements of a and b are 0 or plus or minus one
power of two, and few are not 0. In any order, sums are then small integer multiples of that unit. They are
exact in fp32, in the 14 bits in which Hopper's tensor cores add fp8 products, in fp16, and, for each k split
alone, in bf16. So a result has to equal the rounded one to the bit; with an epilogue, it has to be within a
fourth of the usual tolerance.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tunegemm.describe.problem import Problem
from tunegemm.measure import operands as data
from tunegemm.measure.operands import Operands

if TYPE_CHECKING:
    import torch

#: Nonzero products in the sum of an element, if this few still cover every k.
_SUMMED = 16
#: The fewest rows of a, and columns of b, in which each k is not 0.
_SEEN = 2
#: With more products, sums could exceed the range in which bf16 is exact. Then only the k near an end or a
#: multiple of 32 are not 0, because tiles and splits of k begin and end there.
_MOST_SUMMED = 1024
#: Likewise if an epilogue rounds: with more products, one would be too small a fraction of the sum to show.
_MOST_FUSED = 32
_NEAR, _BOUNDARY = 128, 32
_CHUNK = 1 << 26


def make_exact(problem: Problem, device: torch.device, seed: int) -> Operands:
    """Return a set as `make_operands` makes it, with other a and b. Deterministic for a seed and device."""
    import torch

    operands = data.make_operands(problem, device, seed)
    generator = torch.Generator(device=device).manual_seed(seed)
    k = problem.k
    parts = [min(1.0, max(math.sqrt(_SUMMED / k), _SEEN / extent)) for extent in (problem.m, problem.n)]
    used = torch.ones(k, dtype=torch.bool, device=device)
    summed = k * parts[0] * parts[1]
    if summed > (_MOST_FUSED if problem.fused else _MOST_SUMMED):
        place = torch.arange(k, device=device) % _BOUNDARY
        used = (place == 0) | (place == _BOUNDARY - 1)
        used[:_NEAR] = used[-_NEAR:] = True
        summed = float(used.sum()) * parts[0] * parts[1]
    # An epilogue bends at 1.
    unit = 2.0 ** -round(math.log2(summed) / 2) if problem.fused and problem.in_dtype != "int8" else 1.0
    for matrix, part, of_a in ((operands.a, parts[0], True), (operands.b.mT, parts[1], False)):
        for entry in matrix if matrix.ndim == 3 else (matrix,):
            _fill(entry, part, used, unit if of_a else 1.0, generator)
    if problem.in_dtype == "int8" and problem.fused:  # its first scale is for other values
        names = [operand.name for operand in problem.fused.operands]
        if "scale_a" in names:
            operands.fused[names.index("scale_a")].mul_(data.INT8_VARIANCE * math.sqrt(k / summed))
    return operands


def _fill(
    matrix: torch.Tensor, part: float, used: torch.Tensor, unit: float, generator: torch.Generator
) -> None:
    """Fill a fraction of a matrix whose columns are k, with at least `_SEEN` elements of each column."""
    import torch

    rows, k = matrix.shape
    seen = torch.randint(rows, (_SEEN, k), device=matrix.device, generator=generator)
    step = max(1, _CHUNK // k)
    for row in range(0, rows, step):
        block = matrix[row : row + step]
        luck = torch.rand(block.shape, device=matrix.device, generator=generator)
        sign = torch.where(
            torch.rand(block.shape, device=matrix.device, generator=generator) < 0.5, -unit, unit
        )
        here = torch.arange(row, row + block.shape[0], device=matrix.device)[:, None]
        chosen = luck < part
        for item in seen:
            chosen |= here == item
        block.copy_(torch.where(chosen & used, sign, 0.0))


def objection(problem: Problem, operands: Operands, wanted: torch.Tensor) -> str | None:
    """Return None if the result of an exact set is correct; else one line with the numbers."""
    checked = data.check(operands, wanted)
    limit = data.tolerance(problem)
    if problem.fused:
        if (said := checked.objection(limit)) is not None:
            return f"with exact sums: {said}"
        if not checked.element_error <= (most := data.ELEMENT_FACTOR / 4 * limit):
            return f"with exact sums: one element is off by {checked.element_error:.3g} rms > {most:.3g}"
        return None
    if not checked.guards_intact:
        return "wrote outside its output"
    wrong = (operands.out != wanted.to(operands.out.dtype)).sum()  # NaN also differs
    if count := int(wrong):
        return (
            f"{count} of {wanted.numel()} elements differ where each sum is exact: the kernel omits part of k"
        )
    return None
