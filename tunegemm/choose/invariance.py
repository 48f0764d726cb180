"""Policy `batch_invariant`: a row has the same bits however many rows there are.

All kernels of one reduction class give the same bits (`generate.families.reduction_class`), so that each M
may take whichever of them is fastest there. A kernel is compiled for no extents: what one M may take every M
may. Those of db/selector.toml ship compiled for plain 16-bit products, those of db/invariant.toml for some
other kinds; kernels that were recorded stand beside them, also those of another GPU of the architecture.
Boosted trees put them in order: they expect how far each is behind the best of the class, by products of
16-bit operands that were measured (db/order.json, made by `fit.order`). Other operands are taken
for 16-bit ones of as many bytes, and epilogues for none.

The product alone and the product with its epilogue have different bits: they round in different places. Where
one M has a fused kernel every M has, and where none has all do without.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from tunegemm.choose.forest import read
from tunegemm.choose.policies import Policy
from tunegemm.choose.snapshot import Snapshot
from tunegemm.describe.device import Device
from tunegemm.describe.problem import DTYPE_BYTES, MAX_ALIGNMENT, Problem
from tunegemm.describe.space import Candidate
from tunegemm.errors import SpaceError, TunegemmError, TunegemmWarning, one_line
from tunegemm.generate import families
from tunegemm.model import shortlist
from tunegemm.model.features import FAMILIES, OF_ORDER, order_features
from tunegemm.model.terms import Columns, Floats, fits_l2, terms
from tunegemm.resources import data_path
from tunegemm.store.record import Record

#: Kernels that are offered of a product, for where the best cannot be loaded.
MOST_OPTIONS = 12
#: Recorded kernels that are compared for a kind of which none ships, as each takes some time to look up.
MOST_RECORDED = 48
#: What a kernel that won at the same N and K and at most twice or half as many rows is preferred by, in log.
_OF_NEIGHBOURS = 0.02
#: Orders of tiles where L2 does not hold the operands.
_RASTERS = (("along_m", 1), ("along_n", 1), ("along_m", 8), ("along_n", 8))
_SIXTEEN_BITS = 2

Expects = Callable[[Floats], Floats]
"""Says of rows of `OF_ORDER` how far each launch is behind the best, in log."""


@dataclass(frozen=True)
class Ranked:
    """A kernel at its launch for a problem."""

    kernel: Candidate
    candidate: Candidate
    expected: float
    """How far behind the best of the class it is expected to be, in log."""

    @property
    def score(self) -> float:
        """What kernels are put in order by, in log."""
        return self.expected


@dataclass(frozen=True)
class InvariantOption:
    """A kernel of the class for a problem that it was not measured for."""

    record: Record
    """The kernel as it would be launched here, without times."""
    origin: Record | None
    """A record that has it; None where it ships for its class."""

    def __str__(self) -> str:
        if self.origin is None:
            return "of the kernels that ship for this policy"
        return f"from {self.origin.problem.shape} ({self.origin.ratio:.3f} x torch there)"


def invariant_options(
    snapshot: Snapshot, problem: Problem, device: Device, policy: Policy
) -> tuple[InvariantOption, ...]:
    """The kernels that the policy admits for this problem, listed or recorded for other problems, the one
    first that is expected to be fastest. Those that are not compiled here are for the caller to pass over."""
    origins: dict[Candidate, Record] = {}
    close: set[Candidate] = set()
    ours = shortlist.ordered_kernels(problem)
    for record, is_close in _records(snapshot, problem, device, everywhere=not ours):
        kernel = record.candidate.kernel
        if kernel not in origins and not policy.refusal(problem, record.candidate):
            origins[kernel] = record
            if is_close:
                close.add(kernel)
    ordered = [
        replace(one, expected=one.expected + _OF_NEIGHBOURS) if one.kernel in close else one
        for one in ranked(problem, [*dict.fromkeys([*origins, *ours])], device)
    ]
    found: list[InvariantOption] = []
    for one in sorted(ordered, key=lambda one: -one.expected):
        if len(found) == MOST_OPTIONS:
            break
        try:
            family = families.get(one.candidate.family)
            if (
                policy.refusal(problem, one.candidate)
                or not family.check(problem, one.candidate, device).runs
            ):
                continue
        except (SpaceError, KeyError, TypeError):  # a stored candidate that is damaged or of another age
            continue
        origin = origins.get(one.kernel)
        label = family.label(one.candidate)
        found.append(InvariantOption(Record(problem, one.candidate, device.fingerprint, label), origin))
    return tuple(found)


def _records(
    snapshot: Snapshot, problem: Problem, device: Device, *, everywhere: bool
) -> Iterator[tuple[Record, bool]]:
    """Records of the same N and K, the nearest first, and whether they are close; then of all problems that
    differ in extents alone, and of aligned products without a batch, which run by the same objects."""
    extents = sorted(snapshot.extents(problem), key=lambda m: abs(math.log2(m / problem.m)))
    plain = replace(problem, batch=1, alignment=MAX_ALIGNMENT)
    same: Iterator[tuple[Problem, bool]] = (
        (replace(problem, m=m), abs(math.log2(m / problem.m)) <= 1) for m in extents
    )
    others = (
        (other, False)
        for alike in ((problem, plain) if plain != problem else (problem,))
        for other in snapshot.around(alike, math.inf)
    )
    asked = itertools.chain(same, others if everywhere else ())
    found = (
        (record, is_close)
        for other, is_close in asked
        if (record := snapshot.find_kernel(other, device.fingerprint)) is not None
    )
    return itertools.islice(found, MOST_RECORDED)


def ranked(
    problem: Problem, kernels: Sequence[Candidate], device: Device, expects: Expects | None = None
) -> list[Ranked]:
    """Each kernel at the launch that suits it, unless it has no tiles, in no order.

    expects: in place of the trees that ship.
    """
    kernels = [kernel for kernel in kernels if kernel.family in FAMILIES and "tile_m" in kernel.params]
    expects = expects or order_here()
    if not kernels:
        return []
    seen = in_16_bit(problem)
    modelled = replace(device, spec="model")  # as at the fit: each chip counts its own clusters
    rasters = _RASTERS[:1] if fits_l2(seen, device) else _RASTERS
    columns = columns_in_16_bit(problem, kernels)
    parts = [
        columns.launched(along_n=np.bool_(raster == "along_n"), swizzle=np.int64(swizzle))
        for raster, swizzle in rasters
    ]
    found = [terms(seen, part, modelled) for part in parts]
    best = np.argmin([one.total_us for one in found], axis=0)  # the order of tiles, by the model
    expected = np.empty(len(kernels))
    for number, (part, one) in enumerate(zip(parts, found, strict=True)):
        rows = np.flatnonzero(best == number)
        if len(rows):
            names = [kernels[row].family for row in rows]
            table = order_features(seen, part.take(rows), one.take(rows), names, modelled)
            expected[rows] = expects(table)
    return [
        Ranked(kernel, _launched(problem, kernel, *rasters[number]), float(log))
        for kernel, number, log in zip(kernels, best.tolist(), expected.tolist(), strict=True)
    ]


def in_16_bit(problem: Problem) -> Problem:
    """The plain product of 16-bit operands that have as many bytes."""
    return Problem(problem.m, problem.n, max(1, problem.k * DTYPE_BYTES[problem.in_dtype] // _SIXTEEN_BITS))


def columns_in_16_bit(problem: Problem, kernels: Sequence[Candidate]) -> Columns:
    """Kernels of the problem, as its product in 16 bit would have them."""
    columns = Columns.of(kernels)
    tile_k = columns.tile_k * DTYPE_BYTES[problem.in_dtype] // _SIXTEEN_BITS
    return replace(columns, tile_k=np.maximum(tile_k, 1))


def _launched(problem: Problem, kernel: Candidate, raster: str, swizzle: int) -> Candidate:
    return shortlist.launched(problem, kernel, along_n=raster == "along_n", swizzle=swizzle)


@cache
def order_here() -> Expects:
    """The trees that ship, or the model alone after one warning."""
    try:
        return order_of(data_path("db", "order.json"))
    except (TunegemmError, OSError) as error:
        warnings.warn(
            f"{one_line(error)}; kernels are taken in the model's order", TunegemmWarning, stacklevel=2
        )
        return lambda table: -table[:, OF_ORDER.index("log_us")]


def order_of(path: Path) -> Expects:
    """The trees of a file. Raises TunegemmError for one that is damaged or of another version."""
    return read(path, OF_ORDER)[0]
