"""Launches that may serve a plain product of many rows, and what fitted trees read of them.

Such products run at the power cap (docs/decisions/0012), where the kernel that draws least is the fastest.
Three sources have launches for one: the kernels that ship for many rows (`shortlist.large_kernels`), whose
clusters of a GPC take neighbouring tiles; up to `LISTED_ROWS` some of db/selector.toml, which may split k;
and what else cuBLASLt's heuristic names, beside the algorithm that torch.mm launches.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from tunegemm.choose.fitted import Fitted
from tunegemm.choose.invariance import order_here
from tunegemm.choose.predictions import MANY_ROWS
from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.errors import TunegemmError
from tunegemm.generate.cublaslt import TORCH_MM, library
from tunegemm.generate.cublaslt.choice import LibraryChoice, parse_label
from tunegemm.model import rank as model
from tunegemm.model import shortlist
from tunegemm.model.energy import steady
from tunegemm.model.features import OF_ROWS, order_features, row_features
from tunegemm.model.terms import Bools, Columns, Floats, Ints, Terms, terms

#: Numbers of the sources.
LARGE, LISTED, LIBRARY = range(3)
OURS, LIBRARYS = "cute_sm90", "cublaslt"
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

    def families(self) -> list[str]:
        """The family of each."""
        return [
            LIBRARYS if source == LIBRARY else shortlist.listed()[place].family if source == LISTED else OURS
            for source, place in zip(self.source.tolist(), self.place.tolist(), strict=True)
        ]

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
_ALL: Mapping[int, Sequence[int]] = {
    LARGE: range(len(shortlist.large_kernels(_PLAIN))),
    LISTED: LISTED_PLACES,
    LIBRARY: range(1, REQUESTED),
}


@dataclass(frozen=True)
class Rows(Fitted):
    """The model of plain products of many rows. It needs to know what torch launches."""

    file: ClassVar = "rows"
    features: ClassVar = OF_ROWS
    least_rows: ClassVar = MANY_ROWS

    kernels: Mapping[int, tuple[int, ...]]
    """Places that may serve, by source."""
    fitted_to: Mapping[str, Any]

    @classmethod
    def _further(cls, data: Mapping[str, Any], path: Path) -> dict[str, Any]:
        if data["list"] != digest_of_lists():
            raise TunegemmError(f"{path} was fitted to other kernels; run `python -m benchmarks.row_fit`")
        kernels = {int(source): tuple(places) for source, places in data["kernels"].items()}
        return {"kernels": kernels, "fitted_to": data["fitted_to"]}

    @staticmethod
    def covers(problem: Problem) -> bool:
        return shortlist.covers(problem) and problem.in_dtype == _PLAIN.in_dtype

    def case(self, problem: Problem, library: LibraryChoice | None) -> str:
        return "plain"

    def expected(
        self, problem: Problem, device: Device, library: LibraryChoice | None
    ) -> tuple[Callable[[int], Candidate], Floats]:
        if library is None or not (algorithms := named(problem, device)):
            return lambda number: TORCH_MM, np.zeros(0)
        found = launches(problem, device, algorithms, self.kernels)
        logs = self.forest(row_table(problem, found, device, library))
        return lambda number: found.candidate(problem, number), logs

    def basis(self, case: str) -> str:
        validated = self.served[case]
        return (
            f"predicted from {self.fitted_to['products']:g} products of many rows measured on this kind of "
            f"GPU; of {validated['products']:g} left out in turn {validated['under_099']:g} lost over 1 %"
        )


def named(problem: Problem, device: Device) -> list[Candidate]:
    """What the heuristic names, as torch asks it: torch.mm launches the first one. Empty where it cannot be
    asked, or its first one has no tile that is known."""
    try:
        found = library.algorithms(problem, device.index, REQUESTED, WORKSPACE_BYTES)
    except RuntimeError:
        return []
    return found if found and stand_in(library.label(found[0])) else []


def digest_of_lists() -> str:
    """A digest of the kernels by their places."""
    kernels = [*shortlist.large_kernels(_PLAIN), *(shortlist.listed()[place] for place in LISTED_PLACES)]
    text = "\n".join(f"{one.family} {sorted(dict(one.compile_params).items())}" for one in kernels)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def launches(
    problem: Problem,
    device: Device,
    algorithms: Sequence[Candidate] = (),
    kernels: Mapping[int, Sequence[int]] | None = None,
) -> Launches:
    """The launches that may serve a product: of each kernel one, of those that may split k two at most.

    algorithms: what the heuristic names; torch.mm launches the first one, which comes last here. kernels:
    places that are asked, by source; all by default.
    """
    kernels = kernels or _ALL
    device = replace(device, spec="model")  # as at the fit: each chip counts its resident clusters anew
    parts = [_large(problem, kernels[LARGE])]
    many = len(parts[0][1])
    if problem.m <= LISTED_ROWS and kernels[LISTED]:
        listed = shortlist.choices(problem, device, tuple(kernels[LISTED]))
        parts.append((LISTED, listed.kernels, listed.columns))
    stands = [
        (place, one)
        for place, label in enumerate(map(library.label, algorithms))
        if (one := stand_in(label)) and (place in kernels[LIBRARY] or not place)
    ]
    if stands:
        stands.append(stands.pop(0))  # torch's own comes last
        parts.append(
            (LIBRARY, np.array([place for place, _ in stands]), Columns.of([one for _, one in stands]))
        )
    source = np.concatenate([np.full(len(places), number) for number, places, _ in parts])
    place = np.concatenate([places for _, places, _ in parts])
    columns = Columns(
        *(np.concatenate([getattr(part, one.name) for _, _, part in parts]) for one in fields(Columns))
    )
    found = of_columns(problem, device, source, place, columns, tuple(algorithms))
    # Of the orders of tiles of a kernel that in which it draws least.
    us = (np.log(found.terms.total_us[:many]) + found.slowed[:many]).reshape(len(_ORDERS), -1)
    us[1:, _is_lone(problem, found.columns.take(slice(us.shape[1])))] = np.inf
    best = us.argmin(axis=0) * us.shape[1] + np.arange(us.shape[1])
    return found.take(np.concatenate([best, np.arange(many, len(found))]))


def of_columns(
    problem: Problem,
    device: Device,
    source: Ints,
    place: Ints,
    columns: Columns,
    algorithms: tuple[Candidate, ...] = (),
) -> Launches:
    """Launches with the model's terms."""
    found = terms(problem, columns, device)
    slowed = np.log(steady(problem, columns, found, device).us / found.total_us)
    return Launches(source, place, columns, found, slowed, algorithms)


def row_table(problem: Problem, found: Launches, device: Device, torchs: LibraryChoice) -> Floats:
    """A row of `OF_ROWS` for each launch but torch's own, which comes last."""
    device = replace(device, spec="model")
    last = len(found) - 1
    ahead = np.log(found.terms.total_us[last] / found.terms.total_us)
    mine = slice(last)
    return row_features(
        problem, found.columns.take(mine), found.terms.take(mine), found.families()[mine], device, torchs,
        source=found.source[mine], place=found.place[mine], slowed=found.slowed[mine], ahead=ahead[mine],
        ahead_steady=(ahead + found.slowed[last] - found.slowed)[mine],
    )  # fmt: skip


def score(problem: Problem, found: Launches, device: Device) -> Floats:
    """What is expected of each in steady state, in log, relative to one another: by the trees of
    db/order.json at one clock for all, and by the clock that the table of joules leaves each. Splits of k are
    the model's alone."""
    families = [OURS if name == LIBRARYS else name for name in found.families()]
    expected = order_here()(order_features(problem, found.columns, found.terms, families, device))
    return model.STEADY_LEAD * expected - model.STEADY_CLOCK * found.slowed


def _large(problem: Problem, places: Sequence[int]) -> tuple[int, Ints, Columns]:
    """The kernels of these that have a whole cluster here, in each order of tiles."""
    c = _large_columns()
    m, n = np.where(c.swap_ab, problem.n, problem.m), np.where(c.swap_ab, problem.m, problem.n)
    fits = (-(-m // c.tile_m) >= c.cluster_m) & (-(-n // c.tile_n) >= c.cluster_n)
    fits &= np.isin(np.arange(len(fits)), places)
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
