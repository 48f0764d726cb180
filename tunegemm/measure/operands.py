"""Operand sets, the fp32 reference, and the check of a result against it.

Exact sets are a check that covers each k, row and column. With random operands, one k of 65536 contributes
0.4 % of a result, less than the tolerance for rounding to bf16: a kernel that omits the last ones would pass.
In an exact set the elements of a and b are 0 or plus or minus one power of two, and few are not 0. In any
order, sums are then small integer multiples of that unit. They are exact in fp32, in the 14 bits in which
Hopper's tensor cores add fp8 products, in fp16, and, for each k split alone, in bf16. So a result has to
equal the rounded one to the bit; with an epilogue, it has to be within a fourth of the usual tolerance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tunegemm.describe.epilogue import Operand, operand_dtype
from tunegemm.describe.problem import DTYPE_BYTES, Problem, operand_dtypes
from tunegemm.generate.takes import TORCHS

if TYPE_CHECKING:
    import torch

#: A replay's operand sets together exceed this many times the L2, so that each product starts with a cold L2.
L2_MULTIPLE = 3

#: Most operand sets: a tiny problem stays partly in the L2, and its evidence records that.
MAX_SETS = 128

#: Largest ||D - ref|| / ||ref||, by output dtype. Rounding an exact result to nearest gives about
#: u / sqrt(3), where u is half a unit in the last place: 2^-9 for bf16, 2^-12 for fp16; split-K that
#: adds in the output dtype doubles that. 4 u leaves room, and is still below the 1.6e-2 of a single
#: wrong 128x128 tile in 8192x8192. fp32 shows the tensor cores' truncating accumulation, which grows
#: with K; 5e-4 is below the 1.1e-3 of a result that was rounded to bf16 on its way.
#: fp8 outputs round so much that 2 u must suffice. tf32 operands lose as much as an output of 11 bits. int8
#: products are exact.
_TOLERANCES = {
    "bf16": 4 * 2.0**-9, "fp16": 4 * 2.0**-12, "fp32": 5e-4, "tf32": 4 * 2.0**-11, "fp8_e4m3": 2 * 2.0**-5,
    "fp8_e5m2": 2 * 2.0**-4, "int32": 0.0,
}  # fmt: skip

#: The most that Hopper's tensor cores lose of a sum of fp8 products per instruction, which covers 32 of k:
#: half a unit of 14 bits on average, always towards zero.
_FP8_LOSS_PER_INSTRUCTION = 2.0**-14
_PROMOTED_K = 128

#: Largest |D - ref| of one element, in units of tolerance x root mean square of the reference. An
#: element of a product of random operands stays under 6 rms, so its rounding error under 6/4 of the
#: tolerance; a single element that was not written, or written from elsewhere, is off by about 1 rms.
ELEMENT_FACTOR = 16.0

#: If the largest element exceeds this many rms, as with gates, whose values are products of two random ones,
#: its rounding error is proportionally larger: the unit is then the largest element over this.
_PEAK = 6.0

#: The variance of integers from -128 to 127.
INT8_VARIANCE = (256**2 - 1) / 12

#: Of exact sets: nonzero products in the sum of an element, if this few still cover every k.
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

_GUARD_BYTE = 0xA5
_MIB = 1 << 20


@dataclass(frozen=True)
class Operands:
    """One set: a, b as torch.matmul takes them, and an output between two guards."""

    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor
    guards: tuple[torch.Tensor, ...]
    """Bytes directly before and after the output; no kernel may write them."""
    fused: tuple[Any, ...] = ()
    """The epilogue's tensors and numbers, in its order; before them the ends of groups."""
    amax: torch.Tensor | None = None
    """The operand that the epilogue writes; 0 before a launch."""

    @property
    def arguments(self) -> tuple[Any, ...]:
        """All arguments of a launcher."""
        return (self.a, self.b, self.out, *self.fused)


@dataclass(frozen=True)
class Check:
    """The comparison of a result with its reference."""

    relative_error: float
    """||D - ref|| / ||ref||; NaN if an element was never written."""
    element_error: float
    """max |D - ref| / rms(ref); if the reference has higher peaks than a product, in units of those peaks."""
    guards_intact: bool
    amax_error: float = 0.0
    """|amax - max |ref|| / max |ref|; NaN when it was not written."""

    def objection(self, tolerance: float) -> str | None:
        """Return None if the result is correct; else one line with the numbers."""
        if not self.relative_error <= tolerance:  # NaN never passes
            if math.isnan(self.relative_error):
                return "output has NaN: elements were not written, or computed from uninitialised data"
            return f"relative error {self.relative_error:.3g} > {tolerance:.3g}"
        if not self.element_error <= ELEMENT_FACTOR * tolerance:
            return f"one element is off by {self.element_error:.3g} rms > {ELEMENT_FACTOR * tolerance:.3g}"
        if not self.amax_error <= 2 * tolerance:  # of fp32 values, but their order of addition is free
            return f"amax is off by {self.amax_error:.3g} > {2 * tolerance:.3g}"
        if not self.guards_intact:
            return "wrote outside its output"
        return None


def tolerance(problem: Problem) -> float:
    """Return the largest relative error of a correct result. With bf16 in and fp16 out torch rounds to both,
    so bf16's applies."""
    limit = _TOLERANCES[problem.out_dtype]
    if problem.in_dtype == "tf32":
        return limit + _TOLERANCES["tf32"]
    if problem.in_dtype.startswith("fp8"):
        summed = min(problem.k, _PROMOTED_K) if problem.accumulation == "two_level" else problem.k
        return limit + math.ceil(summed / 32) * _FP8_LOSS_PER_INSTRUCTION
    if problem.out_dtype in ("fp32", "int32") or problem.in_dtype == "int8":
        return limit
    return max(_TOLERANCES[problem.in_dtype], limit)


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of an element type, such as `bf16`."""
    import torch

    dtype: torch.dtype = getattr(torch, TORCHS[name])
    return dtype


def count_sets(problem: Problem, l2_bytes: int, free_bytes: int) -> int:
    """How many operand sets to make: over `L2_MULTIPLE` x L2, within 25 % of free memory, at least 1."""
    wanted = math.ceil(L2_MULTIPLE * l2_bytes / problem.memory_bytes)
    affordable = (free_bytes // 4) // problem.memory_bytes
    return max(1, min(wanted, affordable, MAX_SETS))


def make_operands(problem: Problem, device: torch.device, seed: int) -> Operands:
    """Return a set with a, b uniform in [-1, 1), int8 over all its values, and out poisoned.

    It is deterministic for a seed and device.

    a and b have exactly the problem's alignment: packed if possible, else by gaps between lines, or by their
    addresses if there are no lines to separate. With an epilogue, a is scaled so that products have a
    variance of 1, where activations bend and a bias shows. int8 values are fixed, so the first scale does
    that. For rows in groups the division is missing: `tunegemm.measure.groups` adds it.
    """
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    unit = problem.alignment // DTYPE_BYTES[problem.in_dtype]

    fused = problem.fused
    spread_of_a = 3 / math.sqrt(problem.k) if fused else 1.0

    def random(
        rows: int, columns: int, row_major: bool, dtype: torch.dtype, batch: int, spread: float = 1.0
    ) -> torch.Tensor:
        lines, extent = (rows, columns) if row_major else (columns, rows)
        pitch = _pitch(problem, extent)
        start = unit if lines == batch == 1 and problem.alignment < problem.packed_alignment else 0
        room = _uniform(start + batch * lines * pitch, dtype, device, generator, spread)
        values = room[start:].view(batch, lines, pitch)
        values = (values[0] if batch == 1 else values)[..., :extent]
        return values if row_major else values.mT

    def fused_operand(operand: Operand) -> Any:
        if operand.kind == "number":
            return 0.75 if operand.name == "alpha" else -0.5
        shape = problem.operand_shape(operand)
        if operand.name == "amax":
            return torch.zeros(shape, dtype=torch.float32, device=device)
        low, high = (0.5, 1.5) if operand.fp32 else (-2.0, 2.0)
        if operand.name == "scale_a" and problem.in_dtype == "int8":
            low, high = (bound / (INT8_VARIANCE * math.sqrt(problem.k)) for bound in (low, high))
        dtype_here = torch_dtype(operand_dtype(operand, problem.out_dtype))
        turned = problem.out_major == "m" and operand.kind == "matrix"
        lines = (*shape[:-2], shape[-1], shape[-2]) if turned else shape
        value = torch.empty(lines, dtype=dtype_here, device=device).uniform_(low, high, generator=generator)
        return value.mT if turned else value

    out, guards = _guarded_output(problem, device)
    a_dtype, b_dtype = map(torch_dtype, operand_dtypes(problem.in_dtype))
    a = random(problem.m, problem.k, problem.a_major == "k", a_dtype, problem.batch, spread_of_a)
    b = random(problem.k, problem.n, problem.b_major == "n", b_dtype, problem.groups or problem.batch)
    operands = tuple(map(fused_operand, fused.operands))
    amax = operands[-1] if "amax" in fused.steps else None
    return Operands(a, b, out, guards, operands, amax)


def _uniform(
    elements: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator, spread: float
) -> torch.Tensor:
    import torch

    room = torch.empty(elements, dtype=dtype, device=device)
    if dtype == torch.int8:
        return room.random_(-128, 128, generator=generator)
    if dtype.itemsize > 1:
        return room.uniform_(-spread, spread, generator=generator)
    for part in room.split(_MIB << 8):  # torch has no random fp8; values rounded to fp8 stay small
        values = torch.empty(part.shape, dtype=torch.float32, device=device)
        part.copy_(values.uniform_(-spread, spread, generator=generator))
    return room


def _pitch(problem: Problem, extent: int) -> int:
    """The line pitch in elements: the extent, or the next number with exactly the problem's alignment."""
    if problem.alignment == problem.packed_alignment:
        return extent
    unit = problem.alignment // DTYPE_BYTES[problem.in_dtype]
    pitch = -(-extent // unit) * unit
    return pitch + unit if problem.alignment < problem.packed_alignment and pitch % (2 * unit) == 0 else pitch


def _guarded_output(
    problem: Problem, device: torch.device
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Return an output in the middle of a larger allocation whose other bytes hold a pattern.

    A guard is as large as 256 rows of the output, the tallest tile, but at most 4 MiB.
    """
    import torch

    element_bytes = DTYPE_BYTES[problem.out_dtype]
    columns = problem.out_n
    contiguous, other = (columns, problem.m) if problem.out_major == "n" else (problem.m, columns)
    guard = min(-(-256 * contiguous * element_bytes // 1024) * 1024, 4 * _MIB)
    size = contiguous * other * problem.batch * element_bytes
    memory = torch.empty(2 * guard + size, dtype=torch.uint8, device=device)
    guards = memory[:guard], memory[guard + size :]
    for region in guards:
        region.fill_(_GUARD_BYTE)
    shape = (other, contiguous) if problem.batch == 1 else (problem.batch, other, contiguous)
    out = memory[guard : guard + size].view(torch_dtype(problem.out_dtype)).view(shape)
    _poison(out)
    return (out if problem.out_major == "n" else out.mT), guards


def _poison(out: torch.Tensor) -> None:
    """Fill with NaN, or with an integer that no sum over fewer than 131072 of k reaches."""
    out.fill_(math.nan if out.dtype.is_floating_point else -(2**31))


def reference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the fp32 product of upcast operands, in blocks whose upcast copies stay under 1 GiB each; for
    int8 the int32 product, computed exactly in fp64.

    The caller ensures that fp32 products are not computed in tf32.
    """
    import torch

    if a.ndim == 3:
        return torch.stack([reference(a[i], b[i]) for i in range(a.shape[0])])
    (m, k), n = a.shape, b.shape[1]
    exact = a.dtype == torch.int8
    wide = torch.float64 if exact else torch.float32
    result = torch.empty((m, n), dtype=torch.int32 if exact else wide, device=a.device)
    step = max(1, (1 << 28) // k)
    for column in range(0, n, step):
        right = b[:, column : column + step].to(wide)
        for row in range(0, m, step):
            block = result[row : row + step, column : column + step]
            if exact:
                block.copy_(torch.mm(a[row : row + step].to(wide), right))
            else:
                torch.mm(a[row : row + step].to(wide), right, out=block)
    return result


def expected(problem: Problem, operands: Operands) -> torch.Tensor:
    """Return a correct kernel's result, in fp32: the product after the problem's epilogue."""
    if problem.groups:
        return _of_groups(problem, operands)
    product = reference(operands.a, operands.b)
    fused = problem.fused
    if not fused:
        return product
    named = {operand.name: value for operand, value in zip(fused.operands, operands.fused, strict=True)}
    return fused.reference(product.float(), named)


def _of_groups(problem: Problem, operands: Operands) -> torch.Tensor:
    """Return each group's rows times its own b, group after group; with a gate, whose columns are b's halves,
    or with the scales of its rows and columns.
    """
    import torch

    ends, *arguments = operands.fused
    results = []
    for group, (first, end) in enumerate(pairwise([0, *ends.tolist()])):
        if end > first:
            product = reference(operands.a[first:end], operands.b[group])
            if problem.fused.gated:  # alternating, as the epilogue reads them
                product = product.unflatten(1, (2, -1)).mT.flatten(1)
            named = {
                operand.name: value[first:end] if operand.kind == "m" else value[group]
                for operand, value in zip(problem.fused.operands, arguments, strict=True)
            }
            results.append(problem.fused.reference(product, named))
    return torch.cat(results)


def check(operands: Operands, wanted: torch.Tensor) -> Check:
    """Compare an output with its reference, in blocks of rows; one synchronization."""
    import torch

    out = operands.out.reshape(-1, operands.out.shape[-1]) if operands.out.ndim == 3 else operands.out
    wanted = wanted.reshape(-1, wanted.shape[-1])
    step = max(1, (1 << 26) // wanted.shape[1])
    facts = torch.zeros(4, dtype=torch.float64, device=wanted.device)
    for row in range(0, wanted.shape[0], step):
        block = wanted[row : row + step]
        if block.dtype == torch.int32:  # fp32 would not show a difference of 1
            block = block.double()
        difference = out[row : row + step].to(block.dtype) - block
        facts[0] += difference.square().sum(dtype=torch.float64)
        facts[1] += block.square().sum(dtype=torch.float64)
        facts[2] = torch.maximum(facts[2], difference.abs().max().double())  # keeps NaN
        facts[3] = torch.maximum(facts[3], block.abs().max().double())
    intact = torch.stack([(region == _GUARD_BYTE).all() for region in operands.guards]).all()
    square_error, square, largest, peak, guards = [*facts.tolist(), bool(intact)]
    rms = math.sqrt(square / wanted.numel())
    amax_error = 0.0
    if operands.amax is not None:
        amax_error = abs(float(operands.amax) - peak) / peak
    return Check(math.sqrt(square_error / square), largest / max(rms, peak / _PEAK), bool(guards), amax_error)


def restore(operands: Operands) -> None:
    """Poison the output, and restore the guards if a kernel damaged them."""
    _poison(operands.out)
    if operands.amax is not None:
        operands.amax.zero_()
    for region in operands.guards:
        region.fill_(_GUARD_BYTE)


def make_exact(problem: Problem, device: torch.device, seed: int) -> Operands:
    """Return a set as `make_operands` makes it, with other a and b. Deterministic for a seed and device."""
    import torch

    operands = make_operands(problem, device, seed)
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
            _fill_exact(entry, part, used, unit if of_a else 1.0, generator)
    if problem.in_dtype == "int8" and problem.fused:  # its first scale is for other values
        names = [operand.name for operand in problem.fused.operands]
        if "scale_a" in names:
            operands.fused[names.index("scale_a")].mul_(INT8_VARIANCE * math.sqrt(k / summed))
    return operands


def _fill_exact(
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


def exact_objection(problem: Problem, operands: Operands, wanted: torch.Tensor) -> str | None:
    """Return None if the result of an exact set is correct; else one line with the numbers."""
    checked = check(operands, wanted)
    limit = tolerance(problem)
    if problem.fused:
        if (said := checked.objection(limit)) is not None:
            return f"with exact sums: {said}"
        if not checked.element_error <= (most := ELEMENT_FACTOR / 4 * limit):
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
