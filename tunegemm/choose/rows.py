"""Launches that may serve a plain product of many rows, and what fitted trees read of them.

Such products run at the power cap (docs/decisions/0012), where the kernel that draws least is the fastest.
Three sources have launches for one: the kernels that ship for many rows (`shortlist.large_kernels`), whose
clusters of a GPC take neighbouring tiles; up to `LISTED_ROWS` some of db/selector.toml, which may split k;
and what else cuBLASLt's heuristic names, beside the algorithm that torch.mm launches.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import numpy as np

from tunegemm.choose.invariance import order_here
from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate.cublaslt import library
from tunegemm.generate.cublaslt.choice import parse_label
from tunegemm.model import rank as model
from tunegemm.model import shortlist
from tunegemm.model.energy import steady
from tunegemm.model.features import order_features
from tunegemm.model.terms import Bools, Columns, Floats, Ints, Terms, terms

#: Numbers of the sources.
LARGE, LISTED, LIBRARY = range(3)
#: Rows up to which kernels of db/selector.toml are asked, too: those that added most to the best of
#: `benchmarks.choices` between 129 and 1,024 rows, by their places.
LISTED_ROWS = 512
LISTED_PLACES = (35, 41, 48, 54, 59, 60, 79, 83, 84, 85, 86, 89, 103, 104, 109, 111)
#: Algorithms that the heuristic is asked for, and the workspace that torch gives it.
REQUESTED, WORKSPACE_BYTES = 8, 32 << 20
#: Whether tiles go along n, and whether L2 lets go first of what a group of them does not share.
_ORDERS = tuple(itertools.product((False, True), repeat=2))


@dataclass(frozen=True)
class Launches:
    """Launches for one product, and the model's terms of each."""

    source: Ints
    place: Ints
    """In the list of the source; of algorithms, in the order in which the heuristic names them."""
    columns: Columns
    terms: Terms
    slowed: Floats
    """What the power cap takes from its speed, in log."""
    algorithms: tuple[Candidate, ...]
    """What the library named."""

    def __len__(self) -> int:
        return len(self.source)

    def take(self, rows: Any) -> Launches:
        """Some of them, by their numbers or a mask."""
        return Launches(
            self.source[rows], self.place[rows], self.columns.take(rows), self.terms.take(rows),
            self.slowed[rows], self.algorithms,
        )  # fmt: skip

    def candidate(self, problem: Problem, number: int) -> Candidate:
        """One of them as it is launched."""
        source, place, c = int(self.source[number]), int(self.place[number]), self.columns
        along_n = bool(c.along_n[number])
        if source == LIBRARY:
            return self.algorithms[place]
        if source == LARGE:
            kernel = shortlist.large_kernels(_PLAIN)[place].kernel
            streamed = bool(c.streamed[number])
            return shortlist.launched_by_gpc(problem, kernel, along_n=along_n, streamed=streamed)
        return shortlist.launched(
            problem, shortlist.listed()[place], int(c.split_k[number]), bool(c.second[number]), along_n,
            int(c.swizzle[number]),
        )  # fmt: skip


_PLAIN = Problem.parse("64x4096x4096")


def launches(problem: Problem, device: Device, algorithms: Sequence[Candidate] = ()) -> Launches:
    """The launches that may serve a product: of each kernel one, of those that may split k two at most.

    algorithms: what the heuristic names; torch.mm launches the first one.
    """
    device = replace(device, spec="model")  # as at the fit: each chip counts its resident clusters anew
    parts = [_large(problem)]
    many = len(parts[0][1])
    if problem.m <= LISTED_ROWS:
        listed = shortlist.choices(problem, device, LISTED_PLACES)
        parts.append((LISTED, listed.kernels, listed.columns))
    named = [
        (place, one) for place, label in enumerate(map(library.label, algorithms)) if (one := stand_in(label))
    ]
    if named:
        places, kernels = zip(*named, strict=True)
        parts.append((LIBRARY, np.array(places), Columns.of(kernels)))
    found = of_columns(problem, device, parts, algorithms)
    # Of the orders of tiles of a kernel that in which it draws least.
    us = (np.log(found.terms.total_us[:many]) + found.slowed[:many]).reshape(len(_ORDERS), -1)
    us[1:, _is_lone(problem, found.columns.take(slice(us.shape[1])))] = np.inf
    best = us.argmin(axis=0) * us.shape[1] + np.arange(us.shape[1])
    return found.take(np.concatenate([best, np.arange(many, len(found))]))


def of_columns(
    problem: Problem,
    device: Device,
    parts: Sequence[tuple[int, Ints, Columns]],
    algorithms: Sequence[Candidate] = (),
) -> Launches:
    """Launches of several sources, each with its places and columns."""
    source = np.concatenate([np.full(len(places), number) for number, places, _ in parts])
    place = np.concatenate([places for _, places, _ in parts])
    columns = Columns(
        *(np.concatenate([getattr(part, one.name) for _, _, part in parts]) for one in fields(Columns))
    )
    found = terms(problem, columns, device)
    slowed = np.log(steady(problem, columns, found, device).us / found.total_us)
    return Launches(source, place, columns, found, slowed, tuple(algorithms))


def score(problem: Problem, found: Launches, device: Device) -> Floats:
    """What is expected of each in steady state, in log, relative to one another: by the trees of
    db/order.json at one clock for all, and by the clock that the table of joules leaves each. Splits of k are
    the model's alone."""
    families = [
        shortlist.listed()[place].family if source == LISTED else "cute_sm90"
        for source, place in zip(found.source.tolist(), found.place.tolist(), strict=True)
    ]
    expected = order_here()(order_features(problem, found.columns, found.terms, families, device))
    return model.STEADY_LEAD * expected - model.STEADY_CLOCK * found.slowed


def _large(problem: Problem) -> tuple[int, Ints, Columns]:
    """The kernels that ship for many rows and have a whole cluster here, in each order of tiles."""
    c = _large_columns()
    m, n = np.where(c.swap_ab, problem.n, problem.m), np.where(c.swap_ab, problem.m, problem.n)
    fits = (-(-m // c.tile_m) >= c.cluster_m) & (-(-n // c.tile_n) >= c.cluster_n)
    return LARGE, np.tile(np.flatnonzero(fits), len(_ORDERS)), _in_orders().take(np.tile(fits, len(_ORDERS)))


def _is_lone(problem: Problem, c: Columns) -> Bools:
    """Whether one row of clusters covers the product: it shares nothing, and L2 lets go of the other operand,
    whatever the order."""
    lone: Bools = np.where(c.swap_ab, c.tile_n * c.cluster_n, c.tile_m * c.cluster_m) >= problem.m
    return lone


@cache
def _in_orders() -> Columns:
    count = len(_large_columns().tile_m)
    orders = np.repeat(np.array(_ORDERS), count, axis=0)
    return (
        _large_columns()
        .take(np.tile(np.arange(count), len(_ORDERS)))
        .launched(along_n=orders[:, 0], streamed=orders[:, 1])
    )


@cache
def _large_columns() -> Columns:
    return Columns.of(shortlist.large_kernels(_PLAIN))


@cache
def stand_in(label: str) -> Candidate | None:
    """A kernel of ours with the tiles and clusters of the algorithm of a label; None where it names none."""
    choice = parse_label(label)
    if choice is None:
        return None
    params: dict[str, Any] = {
        "schedule": "cooperative", "tile_m": choice.tile_m, "tile_n": choice.tile_n, "tile_k": 64,
        "stages": 4, "cluster_m": choice.cluster_m, "cluster_n": choice.cluster_n, "epi_n": 32,
        "swap_ab": False,
    }  # fmt: skip
    return Candidate.make("cute_sm90", params, {"split_k": choice.split_k, "swizzle_size": 1})
