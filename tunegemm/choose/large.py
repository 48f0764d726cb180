"""Launches for products of many rows, which run at the power cap (docs/decisions/0012).

There the kernel that draws least is the fastest. Beside the kernels of the class `ORDERED` stand those that
ship for many rows (`shortlist.large_kernels`), whose clusters of a GPC take neighbouring tiles. They are put
in order by what the trees of db/order.json expect at one clock for all, and by the clock that the table of
joules leaves each (`model.energy`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tunegemm.choose.invariance import Ranked, columns_in_16_bit, in_16_bit, order_here
from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.model import rank as model
from tunegemm.model import shortlist
from tunegemm.model.energy import steady
from tunegemm.model.features import order_features
from tunegemm.model.terms import Floats, terms

#: Rows up to which lasting work mostly leaves the chip its clocks.
FEW_ROWS = 256
#: Whether tiles go along n, and whether L2 lets go first of what a group of them does not share.
_ORDERS = tuple(itertools.product((False, True), repeat=2))


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
