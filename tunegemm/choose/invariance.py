"""Policy `batch_invariant`: a row has the same bits however many rows there are.

All kernels of one reduction class give the same bits (`generate.families.reduction_class`), so each M may run
the fastest of them. Kernels are not compiled for particular extents: a kernel that may serve one M may serve
every M. The kernels of db/selector.toml ship compiled for plain 16-bit products, those of db/invariant.toml
for some other kinds. Recorded kernels join them, including those of another GPU of the architecture. Boosted
trees rank the kernels: they predict how far each trails the best of the class, and were fitted to measured
products of 16-bit operands (db/order.json, made by `fit.order`). For the trees, other operands count as
16-bit operands with as many bytes, and epilogues are left out.

The product alone and the product with its epilogue have different bits, because they round in different
places. So either every M has a fused kernel, or no M has one.

The same kernels in the same order serve fp8 and fused products by prediction (`best_ranked`). Products of
many rows run at the power cap (docs/decisions/0012), where the kernel that draws the least power is the
fastest. For them, kernels that ship for many rows (`shortlist.large_kernels`) join the list; in these, the
clusters of a GPC take neighbouring tiles. The ranking combines the trees' prediction at one clock for all
kernels with the clock that the table of joules leaves each kernel (`model.energy`).
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from tunegemm.choose.forest import read
from tunegemm.choose.neighbours import Offer
from tunegemm.choose.operators import kernels_after
from tunegemm.choose.policies import Policy
from tunegemm.choose.snapshot import Snapshot
from tunegemm.describe.device import Device
from tunegemm.describe.problem import DTYPE_BYTES, MAX_ALIGNMENT, Problem
from tunegemm.describe.space import Candidate
from tunegemm.errors import SpaceError, TunegemmError, TunegemmWarning, one_line
from tunegemm.generate import families
from tunegemm.generate.cublaslt.choice import LibraryChoice
from tunegemm.model import rank as model
from tunegemm.model import shortlist
from tunegemm.model.energy import steady
from tunegemm.model.features import FAMILIES, OF_GAIN, OF_ORDER, family_numbers, features
from tunegemm.model.terms import Columns, Floats, elementwise_us, fits_l2, terms
from tunegemm.resources import data_path
from tunegemm.store.record import Record

#: Kernels offered for a product, in case the best one cannot be loaded.
MOST_OPTIONS = 12
#: Recorded kernels compared for a kind without shipped ones: the lookup of each takes some time.
MOST_RECORDED = 48
#: Bonus, in log, of a kernel that won at the same N and K and within a factor of 2 in rows.
_OF_NEIGHBOURS = 0.02
#: Up to this many rows, sustained work mostly does not lower the chip's clocks.
FEW_ROWS = 256
#: Launches that the trees evaluate: those expected to be nearest to the best.
ASKED = 4
#: Launch options by GPC: whether tiles go along n, and whether L2 first evicts the unshared operand.
_BY_GPC = tuple({"along_n": n, "streamed": s} for n, s in itertools.product((False, True), repeat=2))
_SIXTEEN_BITS = 2

Expects = Callable[[Floats], Floats]
"""Predicts from rows of `OF_ORDER` how each launch compares with the best, in log."""


@dataclass(frozen=True)
class Ranked:
    """A kernel with its launch parameters for a problem."""

    kernel: Candidate
    candidate: Candidate
    expected: float
    """Its expected speed relative to the best of the class, in log."""
    slowed: float = 0.0
    """How much the power cap slows it, in log; 0 if that is unknown."""

    @property
    def score(self) -> float:
        """Its expected lead in sustained work, in log."""
        return model.STEADY_LEAD * self.expected - model.STEADY_CLOCK * self.slowed


def invariant_options(
    snapshot: Snapshot, problem: Problem, device: Device, policy: Policy
) -> tuple[Offer, ...]:
    """The kernels that the policy admits for this problem, the one expected to be fastest first.

    They are listed, or recorded for other problems. The caller must skip those that are not compiled here.
    """
    origins: dict[Candidate, Record] = {}
    close: set[Candidate] = set()
    ours = shortlist.ordered_kernels(problem)
    for record, is_close in near_records(snapshot, problem, device, everywhere=not ours):
        kernel = record.candidate.kernel
        if kernel not in origins and not policy.refusal(problem, record.candidate):
            origins[kernel] = record
            if is_close:
                close.add(kernel)
    ordered = [
        replace(prediction, expected=prediction.expected + _OF_NEIGHBOURS)
        if prediction.kernel in close
        else prediction
        for prediction in ranked(problem, [*dict.fromkeys([*origins, *ours])], device)
    ]
    options: list[Offer] = []
    for prediction in sorted(ordered, key=lambda prediction: -prediction.expected):
        if len(options) == MOST_OPTIONS:
            break
        try:
            family = families.get(prediction.candidate.family)
            if (
                policy.refusal(problem, prediction.candidate)
                or not family.check(problem, prediction.candidate, device).runs
            ):
                continue
        except (SpaceError, KeyError, TypeError):  # a stored candidate that is damaged or of another version
            continue
        origin = origins.get(prediction.kernel)
        basis = "a shipped kernel for this policy"
        if origin is not None:
            basis = f"from {origin.problem.shape} ({origin.ratio:.3f} x torch there)"
        label = family.label(prediction.candidate)
        options.append(Offer(Record(problem, prediction.candidate, device.fingerprint, label), basis, origin))
    return tuple(options)


def near_records(
    snapshot: Snapshot, problem: Problem, device: Device, *, everywhere: bool
) -> Iterator[tuple[Record, bool]]:
    """Records with the same N and K, the nearest first, and whether each is close.

    Then, if `everywhere`, records of all problems that differ in extents alone, and of aligned products
    without a batch, which the same compiled kernels serve.
    """
    extents = sorted(snapshot.extents(problem), key=lambda m: abs(math.log2(m / problem.m)))
    plain = replace(problem, batch=1, alignment=MAX_ALIGNMENT)
    same: Iterator[tuple[Problem, bool]] = (
        (replace(problem, m=m), abs(math.log2(m / problem.m)) <= 1) for m in extents
    )
    others = (
        (other, False)
        for alike in ((problem, plain) if plain != problem else (problem,))
        for other in snapshot.around(alike)
    )
    asked = itertools.chain(same, others if everywhere else ())
    result = (
        (record, is_close)
        for other, is_close in asked
        if (record := snapshot.find_kernel(other, device.fingerprint)) is not None
    )
    return itertools.islice(result, MOST_RECORDED)


def ranked(
    problem: Problem, kernels: Sequence[Candidate], device: Device, expects: Expects | None = None
) -> list[Ranked]:
    """Each kernel with the launch that the model prefers, in the given order; kernels without tiles drop out.

    expects: replaces the trees that ship.
    """
    kernels = [kernel for kernel in kernels if kernel.family in FAMILIES and "tile_m" in kernel.params]
    whole = fits_l2(in_16_bit(problem), device)  # then the order of tiles does not matter
    orders = [
        {"along_n": along_n, "swizzle": swizzle}
        for along_n, swizzle in (shortlist.RASTERS[:1] if whole else shortlist.RASTERS)
    ]
    return _at_best(problem, kernels, device, orders, shortlist.launched, False, expects or order_here())


def _at_best(
    problem: Problem,
    kernels: Sequence[Candidate],
    device: Device,
    orders: Sequence[Mapping[str, Any]],
    launched: Callable[..., Candidate],
    lasts: bool,
    expects: Expects,
) -> list[Ranked]:
    """Each kernel with the order of tiles in which the model expects it to be fastest.

    orders: columns of the model, and keyword arguments of `launched`. lasts: whether to compare at the clock
    that the power cap leaves each; else at one clock for all.
    """
    if not kernels:
        return []
    seen, modelled = in_16_bit(problem), _as_fitted(device)
    columns = columns_in_16_bit(problem, kernels)
    parts = [columns.launched(**{name: np.array(value) for name, value in order.items()}) for order in orders]
    results = [terms(seen, part, modelled) for part in parts]
    times = [
        steady(seen, part, prediction, modelled).us if lasts else prediction.total_us
        for part, prediction in zip(parts, results, strict=True)
    ]
    best, numbers = np.argmin(times, axis=0), family_numbers(kernels)
    expected = np.empty(len(kernels))
    for number, (part, item) in enumerate(zip(parts, results, strict=True)):
        rows = np.flatnonzero(best == number)
        if len(rows):
            expected[rows] = expects(
                features(OF_ORDER, seen, part.take(rows), item.take(rows), numbers[rows], modelled)
            )
    return [
        Ranked(kernel, launched(problem, kernel, **orders[number]), log)
        for kernel, number, log in zip(
            [each.kernel for each in kernels], best.tolist(), expected.tolist(), strict=True
        )
    ]


def best_ranked(problem: Problem, device: Device) -> list[Ranked]:
    """The shipped kernels that can run and are expected to be nearest to the best."""
    order = ranked(problem, shortlist.ordered_kernels(problem), device)
    if problem.m > FEW_ROWS and shortlist.large_kernels(problem):
        order = large_ranked(problem, order, device)
    runs = (
        kernel
        for kernel in sorted(order, key=lambda prediction: -prediction.score)
        if families.get(kernel.candidate.family).check(problem, kernel.candidate, device).runs
    )
    return list(itertools.islice(runs, ASKED))


def large_ranked(problem: Problem, listed: Sequence[Ranked], device: Device) -> list[Ranked]:
    """The listed kernels and those that ship for many rows, each with the slowdown by the power cap: 0 if
    there is no table of joules.

    If one row of clusters covers the product, neighbours share next to nothing, and the kernels for many rows
    are left out.
    """
    kernels = [
        kernel for kernel in shortlist.large_kernels(problem) if model.l2_hint(problem, kernel) == "none"
    ]
    launched, expects = shortlist.launched_by_gpc, order_here()
    results = [*listed, *_at_best(problem, kernels, device, _BY_GPC, launched, True, expects)]
    seen, modelled = in_16_bit(problem), _as_fitted(device)
    columns = columns_in_16_bit(problem, [result.candidate for result in results])
    costs = terms(seen, columns, modelled)
    slowed = np.log(steady(seen, columns, costs, modelled).us / costs.total_us).tolist()
    return [replace(item, slowed=log) for item, log in zip(results, slowed, strict=True)]


def features_of(
    problem: Problem, ranked: Sequence[Ranked], device: Device, library: LibraryChoice | None
) -> Floats:
    """A row of `OF_GAIN` for each launch. library: the choice of torch's library for the product alone."""
    seen, modelled = in_16_bit(problem), _as_fitted(device)
    launches = [kernel.candidate for kernel in ranked]
    columns = columns_in_16_bit(problem, launches)
    costs = terms(seen, columns, modelled)
    matrix_bytes = problem.m * problem.n * DTYPE_BYTES[problem.out_dtype]
    after_us = kernels_after(problem) * elementwise_us(2 * matrix_bytes, modelled)
    return features(
        OF_GAIN, seen, columns, costs, family_numbers(launches), modelled, library,
        behind=np.array([kernel.expected for kernel in ranked]),
        one_byte=DTYPE_BYTES[problem.in_dtype] == 1,
        gated=problem.fused.gated,
        adds="residual" in problem.fused.steps,
        after=after_us / costs.total_us,
    )  # fmt: skip


def _as_fitted(device: Device) -> Device:
    """The device as the trees were fitted: each chip counts its own clusters."""
    return replace(device, spec="model")


def in_16_bit(problem: Problem) -> Problem:
    """The plain product of 16-bit operands with as many bytes."""
    return Problem(problem.m, problem.n, max(1, problem.k * DTYPE_BYTES[problem.in_dtype] // _SIXTEEN_BITS))


def columns_in_16_bit(problem: Problem, kernels: Sequence[Candidate]) -> Columns:
    """The kernels' columns, as for the problem's product in 16 bit."""
    columns = Columns.of(kernels)
    tile_k = columns.tile_k * DTYPE_BYTES[problem.in_dtype] // _SIXTEEN_BITS
    return replace(columns, tile_k=np.maximum(tile_k, 1))


@cache
def order_here() -> Expects:
    """The trees that ship; if they cannot be read, the model alone after one warning."""
    try:
        return read(data_path("db", "order.json"), OF_ORDER)[0]
    except (TunegemmError, OSError) as error:
        warnings.warn(f"{one_line(error)}; kernels keep the model's order", TunegemmWarning, stacklevel=2)
        return lambda table: -table[:, OF_ORDER.index("log_us")]
