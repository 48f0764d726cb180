"""Predictions for plain products of many rows, by the kernels that ship for such products.

Such products run at the power cap (docs/decisions/0012), where the kernel that draws least is the fastest.
The clusters of a GPC take neighbouring tiles (`shortlist.large_kernels`), each kernel in the order of tiles
in which the table of joules expects least of it. The trees compare each with a kernel of the tiles that
cuBLASLt chooses, by the model's terms. Trees and margins are in db/rows-GPU.json, made by
`benchmarks.row_fit` from what `benchmarks.row_choices` measured. docs/decisions/0020 has the evidence.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from tunegemm.choose.fitted import MANY_ROWS, Allows, Fitted, Outlook, anything
from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.errors import TunegemmError
from tunegemm.generate.cublaslt import TORCH_MM
from tunegemm.generate.cublaslt.choice import LibraryChoice, first_choice
from tunegemm.model import shortlist
from tunegemm.model.energy import steady
from tunegemm.model.features import OF_ROWS, row_features
from tunegemm.model.terms import Bools, Columns, Floats, Ints, Terms, terms

#: Such a product, of the dtypes that were measured.
PLAIN = Problem.parse("64x4096x4096")
#: K whose rows begin amid the 32 B that device memory is read by: as of few rows, what was expected of them
#: failed most.
UNIT_OF_K = 16
#: Whether tiles go along n, and whether L2 lets go first of what a group of them does not share.
_ORDERS = tuple(itertools.product((False, True), repeat=2))


@dataclass(frozen=True)
class Rows(Fitted):
    """The model of plain products of many rows. It needs to know what torch launches."""

    file: ClassVar = "rows"
    features: ClassVar = OF_ROWS
    least_rows: ClassVar = MANY_ROWS

    kernels: tuple[int, ...]
    """Places in the list, of those that may serve."""
    fitted_to: Mapping[str, Any]

    @classmethod
    def _further(cls, data: Mapping[str, Any], path: Path) -> dict[str, Any]:
        if data["list"] != digest_of_list():
            raise TunegemmError(f"{path} was fitted to other kernels; run `python -m benchmarks.row_fit`")
        return {"kernels": tuple(data["kernels"]), "fitted_to": data["fitted_to"]}

    @staticmethod
    def covers(problem: Problem) -> bool:
        return shortlist.covers(problem) and problem.in_dtype == PLAIN.in_dtype

    def outlook(
        self,
        problem: Problem,
        device: Device,
        allows: Allows = anything,
        ask: Callable[[Problem, int], LibraryChoice | None] = first_choice,
    ) -> Outlook:
        if not device.is_real:
            refusal = f"over {MANY_ROWS - 1} rows go by what torch's library chooses, which only a GPU says"
            return Outlook(refusal=refusal, decides=False, rows=(MANY_ROWS, sys.maxsize))
        return super().outlook(problem, device, allows, ask)

    def unmeasured(self, problem: Problem) -> str:
        if problem.k % UNIT_OF_K:
            return f"predictions of over {MANY_ROWS - 1} rows are for K that is a multiple of {UNIT_OF_K}"
        return super().unmeasured(problem)

    def case(self, problem: Problem, library: LibraryChoice | None) -> str:
        return "plain"

    def expected(
        self, problem: Problem, device: Device, library: LibraryChoice | None
    ) -> tuple[Callable[[int], Candidate], Floats]:
        if library is None:
            return lambda number: TORCH_MM, np.zeros(0)
        found = launches(problem, device, library, self.kernels)
        logs = self.forest(row_table(problem, found, device, library))
        return lambda number: found.candidate(problem, number), logs

    def basis(self, case: str) -> str:
        validated = self.served[case]
        return (
            f"predicted from {self.fitted_to['products']:g} products of many rows measured on this kind of "
            f"GPU; of {validated['products']:g} left out in turn {validated['under_099']:g} lost over 1 %"
        )


@dataclass(frozen=True)
class Launches:
    """The shipped kernels at their launches for one product, behind them one with the tiles of torch's."""

    place: Ints
    """In the list of kernels."""
    columns: Columns
    terms: Terms
    slowed: Floats
    """What the power cap takes from the speed of each, in log."""

    def take(self, rows: Any) -> Launches:
        """Some of them, by their numbers or a mask."""
        return Launches(self.place[rows], self.columns.take(rows), self.terms.take(rows), self.slowed[rows])

    def candidate(self, problem: Problem, number: int) -> Candidate:
        """One of them as it is launched."""
        kernel = shortlist.large_kernels(PLAIN)[int(self.place[number])].kernel
        along_n, streamed = bool(self.columns.along_n[number]), bool(self.columns.streamed[number])
        return shortlist.launched_by_gpc(problem, kernel, along_n=along_n, streamed=streamed)


def digest_of_list() -> str:
    """A digest of the kernels in their order: places mean them."""
    text = "\n".join(f"{one.family} {sorted(one.compile_params)}" for one in shortlist.large_kernels(PLAIN))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def launches(
    problem: Problem, device: Device, torchs: LibraryChoice, kernels: tuple[int, ...] | None = None
) -> Launches:
    """Each kernel that has a whole cluster here, in the order of tiles in which it draws least.

    kernels: places in the list, of those that may serve; all by default.
    """
    c, every = _in_orders(kernels)
    m, n = np.where(c.swap_ab, problem.n, problem.m), np.where(c.swap_ab, problem.m, problem.n)
    fits = np.flatnonzero((-(-m // c.tile_m) >= c.cluster_m) & (-(-n // c.tile_n) >= c.cluster_n))
    stand_in = Columns.of([stand_in_of(torchs)])
    columns = Columns(
        *(
            np.concatenate([getattr(c, one.name)[fits], getattr(stand_in, one.name)])
            for one in fields(Columns)
        )
    )
    found = modelled(problem, device, np.append(every[fits], -1), columns)
    count = len(fits) // len(_ORDERS)
    us = (np.log(found.terms.total_us) + found.slowed)[:-1].reshape(len(_ORDERS), count)
    us[1:, _is_lone(problem, found.columns.take(slice(count)))] = np.inf
    return found.take(np.append(us.argmin(axis=0) * count + np.arange(count), len(fits)))


def modelled(problem: Problem, device: Device, places: Ints, columns: Columns) -> Launches:
    """Launches with the model's terms."""
    device = replace(device, spec="model")  # as at the fit: each chip counts its resident clusters anew
    found = terms(problem, columns, device)
    return Launches(
        places, columns, found, np.log(steady(problem, columns, found, device).us / found.total_us)
    )


def row_table(problem: Problem, found: Launches, device: Device, torchs: LibraryChoice) -> Floats:
    """A row of `OF_ROWS` for each launch but torch's own, which comes last."""
    t, mine = found.terms, slice(len(found.place) - 1)
    ahead = np.log(t.total_us[-1] / t.total_us)
    return row_features(
        problem, found.columns.take(mine), t.take(mine), replace(device, spec="model"), torchs,
        place=found.place[mine], slowed=found.slowed[mine], ahead=ahead[mine],
        ahead_steady=(ahead + found.slowed[-1] - found.slowed)[mine],
        ahead_fill=np.log(t.wave_efficiency / t.wave_efficiency[-1])[mine],
        ahead_compute=np.log(t.compute_us[-1] / t.compute_us)[mine],
        ahead_l2=np.log(t.l2_us[-1] / t.l2_us)[mine],
        ahead_epilogue=(t.epilogue_us[-1] / t.total_us[-1] - t.epilogue_us / t.total_us)[mine],
        torch_whole_fill=t.wave_efficiency[-1], torch_whole_waves=t.waves[-1],
        torch_to_flops=math.log(t.total_us[-1] / problem.flops),
    )  # fmt: skip


def _is_lone(problem: Problem, c: Columns) -> Bools:
    """Whether one row of clusters covers the product: it shares nothing, and L2 lets go of the other operand,
    whatever the order."""
    lone: Bools = np.where(c.swap_ab, c.tile_n * c.cluster_n, c.tile_m * c.cluster_m) >= problem.m
    return lone


@cache
def _in_orders(kernels: tuple[int, ...] | None) -> tuple[Columns, Ints]:
    """Kernels in each order of tiles, and their places."""
    columns = Columns.of(shortlist.large_kernels(PLAIN))
    asked = range(len(columns.tile_m)) if kernels is None else kernels
    places = np.tile(np.array(asked, dtype=np.int64), len(_ORDERS))
    orders = np.repeat(np.array(_ORDERS), len(asked), axis=0)
    return columns.take(places).launched(along_n=orders[:, 0], streamed=orders[:, 1]), places


@cache
def stand_in_of(choice: LibraryChoice) -> Candidate:
    """A kernel of ours with the tiles and clusters that the library chooses."""
    params: dict[str, Any] = {
        "schedule": "cooperative", "tile_m": choice.tile_m, "tile_n": choice.tile_n, "tile_k": 64,
        "stages": 4, "cluster_m": choice.cluster_m, "cluster_n": choice.cluster_n, "epi_n": 32,
        "swap_ab": False,
    }  # fmt: skip
    return Candidate.make("cute_sm90", params, {"split_k": choice.split_k, "swizzle_size": 1})
