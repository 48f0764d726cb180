"""Predictions for fp8 and fused products, by the kernels that ship for such products.

The kernels are those of policy `batch_invariant`, in the order that `invariance` expects of them; the trees
are asked about the first few. torch runs its operations one after the other. Trees and margins are in
db/kinds-GPU.json, made by `fit.kinds` from what `fit.kind_choices` measured.
docs/decisions/0021 has the evidence.

Products of many rows run at the power cap (docs/decisions/0012), where the kernel that draws least is the
fastest. Beside those kernels stand the ones that ship for many rows (`shortlist.large_kernels`), whose
clusters of a GPC take neighbouring tiles. All are put in order by what the trees of db/order.json expect at
one clock for all, and by the clock that the table of joules leaves each (`model.energy`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from tunegemm.choose.compiled_code import kernels_after
from tunegemm.choose.fitted import Fitted
from tunegemm.choose.invariance import Ranked, columns_in_16_bit, in_16_bit, order_here, ranked
from tunegemm.describe.device import Device
from tunegemm.describe.epilogue import GATED
from tunegemm.describe.problem import DTYPE_BYTES, MAX_ALIGNMENT, Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate import families
from tunegemm.generate.cublaslt.choice import LibraryChoice
from tunegemm.model import rank as model
from tunegemm.model import shortlist
from tunegemm.model.energy import steady
from tunegemm.model.features import OF_GAIN, gain_features, order_features
from tunegemm.model.terms import Floats, elementwise_us, terms

#: Rows up to which lasting work mostly leaves the chip its clocks.
FEW_ROWS = 256
#: Whether tiles go along n, and whether L2 lets go first of what a group of them does not share.
_ORDERS = tuple(itertools.product((False, True), repeat=2))
#: Launches that the trees are asked about: those that are expected to be nearest to the best.
ASKED = 4


@dataclass(frozen=True)
class Gains(Fitted):
    """The model of fp8 and fused products. Its cases are their dtypes and epilogues (`name_of`)."""

    file: ClassVar = "kinds"
    features: ClassVar = OF_GAIN

    @staticmethod
    def covers(problem: Problem) -> bool:
        is_one = problem.batch == 1 and not problem.groups and problem.alignment == MAX_ALIGNMENT
        return bool(problem.epilogue) and is_one and bool(shortlist.ordered_kernels(problem))

    def case(self, problem: Problem, library: LibraryChoice | None) -> str:
        return name_of(problem)

    def expected(
        self, problem: Problem, device: Device, library: LibraryChoice | None
    ) -> tuple[Callable[[int], Candidate], Floats]:
        found = best_ranked(problem, device)
        logs = self.forest(features_of(problem, found, device, library))
        return lambda number: found[number].candidate, logs

    def basis(self, case: str) -> str:
        validated = self.served[case]
        return (
            f"predicted from {validated['products']:g} such products measured on this kind of GPU; of them, "
            f"left out in turn, {validated['under_099']:g} lost over 1 %"
        )


def name_of(problem: Problem) -> str:
    """Such as ``bf16 swiglu``: what the files call such products. fp16 goes by bf16, which is as fast."""
    return f"{'bf16' if problem.in_dtype == 'fp16' else problem.in_dtype} {problem.epilogue}"


def is_gated(problem: Problem) -> bool:
    """Whether two columns of the product become one."""
    return any(step in GATED for step in problem.fused.steps)


def best_ranked(problem: Problem, device: Device) -> list[Ranked]:
    """The shipped kernels that are expected to be nearest to the best, and run."""
    order: Sequence[Ranked] = ranked(problem, shortlist.ordered_kernels(problem), device)
    if problem.m > FEW_ROWS and shortlist.large_kernels(problem):
        order = large_ranked(problem, order, device)
    found: list[Ranked] = []
    for one in sorted(order, key=lambda one: -one.score):
        if len(found) == ASKED:
            break
        if families.get(one.candidate.family).check(problem, one.candidate, device).runs:
            found.append(one)
    return found


def features_of(
    problem: Problem, found: Sequence[Ranked], device: Device, library: LibraryChoice | None
) -> Floats:
    """A row of `OF_GAIN` for each launch. library: what torch's library chooses for the product alone."""
    seen, modelled = in_16_bit(problem), replace(device, spec="model")
    columns = columns_in_16_bit(problem, [one.candidate for one in found])
    costs = terms(seen, columns, modelled)
    matrix_bytes = problem.m * problem.n * DTYPE_BYTES[problem.out_dtype]
    after_us = kernels_after(problem) * elementwise_us(2 * matrix_bytes, modelled)
    return gain_features(
        seen, columns, costs, [one.candidate.family for one in found], modelled, library,
        behind=np.array([one.expected for one in found]),
        one_byte=DTYPE_BYTES[problem.in_dtype] == 1,
        gated=is_gated(problem),
        adds="residual" in problem.fused.steps,
        after=after_us / costs.total_us,
    )  # fmt: skip


@dataclass(frozen=True)
class Large(Ranked):
    """A kernel at its launch for a problem of many rows."""

    slowed: float = 0.0
    """What the power cap takes from its speed, in log; 0 where there is no table of joules."""

    @property
    def score(self) -> float:
        return model.STEADY_LEAD * self.expected - model.STEADY_CLOCK * self.slowed


def large_ranked(problem: Problem, listed: Sequence[Ranked], device: Device) -> list[Large]:
    """The listed kernels beside those that ship for many rows, each with what the power cap takes from it."""
    found = [*listed, *_by_gpc(problem, device)]
    slowed = slowed_by_cap(problem, [one.candidate for one in found], device).tolist()
    return [
        Large(one.kernel, one.candidate, one.expected, log) for one, log in zip(found, slowed, strict=True)
    ]


def slowed_by_cap(problem: Problem, candidates: Sequence[Candidate], device: Device) -> Floats:
    """How much longer each takes at the clock that the power cap leaves it, in log."""
    seen, modelled = in_16_bit(problem), replace(device, spec="model")
    columns = columns_in_16_bit(problem, candidates)
    found = terms(seen, columns, modelled)
    return np.log(steady(seen, columns, found, modelled).us / found.total_us)


def _by_gpc(problem: Problem, device: Device) -> list[Ranked]:
    """The kernels that ship for many rows, each in the order of tiles in which it draws least. Where one row
    of clusters covers the product neighbours share next to nothing, and it is left out."""
    kernels = [
        kernel for kernel in shortlist.large_kernels(problem) if model.l2_hint(problem, kernel) == "none"
    ]
    if not kernels:
        return []
    seen, modelled = in_16_bit(problem), replace(device, spec="model")
    columns = columns_in_16_bit(problem, kernels)
    parts = [
        columns.launched(along_n=np.bool_(along_n), streamed=np.bool_(streamed))
        for along_n, streamed in _ORDERS
    ]
    found = [terms(seen, part, modelled) for part in parts]
    times = [steady(seen, part, one, modelled).us for part, one in zip(parts, found, strict=True)]
    best = np.argmin(times, axis=0)
    result = []
    for number, (along_n, streamed) in enumerate(_ORDERS):
        rows = np.flatnonzero(best == number)
        if not len(rows):
            continue
        names = [kernels[row].family for row in rows]
        table = order_features(seen, parts[number].take(rows), found[number].take(rows), names, modelled)
        for row, log in zip(rows.tolist(), order_here()(table).tolist(), strict=True):
            kernel = kernels[row].kernel
            launch = shortlist.launched_by_gpc(problem, kernel, along_n=along_n, streamed=streamed)
            result.append(Ranked(kernel, launch, log))
    return result
