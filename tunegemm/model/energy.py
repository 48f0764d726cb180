"""Predicts the energy of a candidate's product, and its speed at the power cap.

Above some 2,000 rows Hopper runs at its cap of 700 W: the clock falls until the work fits the cap, and the
kernel that draws least power is the fastest. A measured table (energy.toml, docs/decisions/0014) has the
joules of a kernel's work; the predicted clock is the highest that keeps them under the cap. Like all of
`model`, the predictions only rank.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tunegemm.describe.device import Device
from tunegemm.describe.problem import DTYPE_BYTES, Problem
from tunegemm.model.terms import Bools, Columns, Floats, Ints, Terms, steady_clock_mhz, time_at

#: The table's energies hold at this clock, in MHz.
REFERENCE_MHZ = 1500.0
_STEP_MHZ = 20.0
#: The only term that does not depend on the chip's voltage.
_MEMORY = "dram"


@dataclass(frozen=True)
class Table:
    """The energy that work takes on one model of GPU."""

    cap_w: float
    static_w: float
    clocks_mhz: tuple[int, int]
    """The lowest clock that the power cap is known to lead to, and the highest clock."""
    slope: float
    bend: float
    pj_per_flop: Mapping[str, float]
    pj_per_byte: Mapping[str, float]

    def flop_pj(self, columns: Floats) -> Floats:
        """Picojoules per flop of WGMMAs with this many columns.

        Interpolates between measured widths, and beyond them uses the nearest.
        """
        widths = sorted(self.pj_per_flop, key=int)
        return np.interp(columns, [int(w) for w in widths], [self.pj_per_flop[w] for w in widths])

    def clocks(self) -> Floats:
        low, high = self.clocks_mhz
        return np.arange(low, high + 1, _STEP_MHZ)

    def voltage(self, clocks_mhz: Floats) -> Floats:
        """The factor by which a clock scales the chip's own terms (all but device memory)."""
        x = clocks_mhz / REFERENCE_MHZ - 1
        return 1 + self.slope * x + self.bend * x * x


@dataclass(frozen=True)
class Steady:
    """Predictions for sustained work, one entry for each candidate."""

    us: Floats
    clock_mhz: Floats
    at_cap: bool
    """Whether the fastest candidate runs below the highest clock."""

    def take(self, rows: Any) -> Steady:
        """A selection of the candidates, by indices or a mask."""
        return Steady(self.us[rows], self.clock_mhz[rows], self.at_cap)


@cache
def table_of(device_name: str) -> Table | None:
    """The table of a model of GPU; None if none was measured."""
    tables = tomllib.loads(Path(__file__).with_name("energy.toml").read_text(encoding="utf-8"))
    data = next((item for part, item in tables.items() if device_name.startswith(part)), None)
    return None if data is None else Table(**{**data, "clocks_mhz": tuple(data["clocks_mhz"])})


def steady(problem: Problem, columns: Columns, terms: Terms, device: Device) -> Steady:
    """Times at the clocks of sustained work. Without a table for the GPU, the times of `terms`."""
    table = table_of(device.fingerprint.device_name)
    if table is None:
        clocks = np.full(len(terms.total_us), steady_clock_mhz(device))
        return Steady(terms.total_us, clocks, False)
    work = work_pj(problem, columns, terms, table)
    memory_pj = work.pop(_MEMORY)
    chip_pj = sum(work.values(), start=np.zeros(len(memory_pj)))
    clocks = table.clocks()

    def fits(which: Ints, places: Ints) -> Bools:
        """Whether candidates stay under the cap at clocks; both are indices."""
        at = clocks[places]
        watts = (
            (chip_pj[which] * table.voltage(at) + memory_pj[which])
            * 1e-6
            / time_at(terms.take(which), at, device)
        )
        return watts + table.static_w <= table.cap_w

    # Find the highest clock that fits, or the lowest if none does. A higher clock draws more power, so a
    # binary search finds it. It tries the highest clock first, which fits if the work is below the cap.
    low, high = np.zeros(len(chip_pj), dtype=np.int64), np.full(len(chip_pj), len(clocks) - 1)
    tried, place = np.arange(len(chip_pj)), high.copy()
    while len(tried):
        fit = fits(tried, place[tried])
        low[tried] = np.where(fit, place[tried], low[tried])
        high[tried] = np.where(fit, high[tried], np.maximum(place[tried] - 1, low[tried]))
        tried = tried[low[tried] < high[tried]]
        place[tried] = (low[tried] + high[tried] + 1) // 2
    clock = clocks[low]
    us = time_at(terms, clock, device)
    return Steady(us, clock, bool(len(us) and clock[us.argmin()] < clocks[-1]))


def work_pj(problem: Problem, columns: Columns, terms: Terms, table: Table) -> dict[str, Floats]:
    """Picojoules of a product by cause, at the table's clock, without the static power."""
    pj = table.pj_per_byte
    out_bytes = problem.m * problem.n * problem.batch * DTYPE_BYTES[problem.out_dtype]
    flops = 2.0 * problem.m * problem.n * problem.k * problem.batch
    # Multiplying operands half as wide takes half as long; we assume that it also takes half the energy.
    flop_pj = table.flop_pj(columns.tile_n.astype(float)) * DTYPE_BYTES[problem.in_dtype] / 2
    return {
        "flops": flops * flop_pj,
        "filled": pj["filled"] * terms.filled_bytes,
        "l2_read": pj["l2_read"] * terms.l2_bytes,
        "stored": np.full(len(flop_pj), pj["stored"] * out_bytes),
        "crossing": pj["crossing"] * terms.crossing_bytes,
        _MEMORY: pj["dram"] * terms.dram_bytes,
    }
