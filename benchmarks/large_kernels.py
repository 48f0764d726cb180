"""Our own kernels that ship compiled, launched on large products; one product's operands and replays.

Of `benchmarks.power_cap`. Nothing is compiled: the objects are those of `make kernels`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.results import results_path
from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate, Value
from tunegemm.errors import ArtifactError, MeasureError
from tunegemm.generate import families
from tunegemm.generate.cublaslt import TORCH_MM
from tunegemm.model import energy, shortlist
from tunegemm.model.terms import Columns, Floats, Terms, terms
from tunegemm.store import packs
from tunegemm.store.shipped import read_shipped

if TYPE_CHECKING:
    from tunegemm.measure.backend import Backend
    from tunegemm.measure.race import Replay

#: Rows from which a record's kernel is one for large products.
_LARGE_ROWS = 1024
_ROOF = "smem, n256, 2 wg"
_MIN_REPLAY_MS = 1.0


@dataclass(frozen=True)
class Launches:
    """Launches of compiled kernels on one problem, and what the model says of each."""

    candidates: tuple[Candidate, ...]
    columns: Columns
    terms: Terms
    steady: energy.Steady
    mj: Floats
    """Millijoules of a product, at the model's clock and time."""

    def best(self, values: Floats) -> list[int]:
        """The place of each kernel's launch that has the least of the values, the least first."""
        places: dict[Candidate, int] = {}
        for place in np.argsort(values, kind="stable").tolist():
            places.setdefault(self.candidates[place].kernel, place)
        return list(places.values())


def table_of(device: Device) -> energy.Table:
    """The joules of work on a device. Raises MeasureError where nobody measured them."""
    if (table := energy.table_of(device.fingerprint.device_name)) is None:
        raise MeasureError(f"{device.name} has no table of joules (docs/decisions/0014)")
    return table


def roof_tflops(device: Device) -> float | None:
    """What m64n256 without loads makes at the cap, by the device's power_roof.json; None without one."""
    try:
        rows = json.loads(results_path(None, device, "power_roof.json").read_text())["rows"]
        return next(float(row["tflops"]) for row in rows if row["workload"] == _ROOF)
    except (OSError, StopIteration):
        return None


def object_of(problem: Problem, candidate: Candidate, device: Device) -> Path:
    """Its compiled kernel. Raises ArtifactError without one."""
    family = families.generator(candidate.family)
    if (found := packs.find(family.kernel_key(problem, candidate, device))) is None:
        raise ArtifactError(f"{family.label(candidate)}: no compiled kernel ships; run `make kernels`")
    return found.path


def launches(problem: Problem, device: Device) -> Launches:
    """All kernels of shipped records of large products, and the listed ones, that are compiled and can run.

    Each in all orders of tiles: swizzles of 8 and 1, rows or columns first, clusters by GPC where that is
    compiled, and of 8 with and without the hint that lets L2 go of what a group does not share.

    Raises ArtifactError where no compiled kernel is there.
    """
    records, _ = read_shipped()
    large = (r.candidate for r in records if r.problem.m >= _LARGE_ROWS and shortlist.covers(r.problem))
    recorded = {c.kernel for c in large if families.get(c.family).compiled}
    found: list[Candidate] = []
    for kernel in sorted(recorded | set(shortlist.listed()), key=Candidate.to_json):
        family = families.generator(kernel.family)
        for order in ("gpc", "index"):
            launch = _with(shortlist.launched(problem, kernel), cluster_order=order)
            if packs.find(family.kernel_key(problem, launch, device)) is None:
                continue
            in_each_order = (
                _with(launch, swizzle_size=swizzle, raster_order=raster, l2_hint=hint)
                for swizzle, hint in ((8, "none"), (8, "streamed"), (1, "none"))
                for raster in ("along_m", "along_n")
            )
            found += (one for one in in_each_order if family.check(problem, one, device).runs)
            break
    if not found:
        raise ArtifactError(f"{problem}: no compiled kernel that suits it; run `make kernels`")
    return _told(problem, tuple(dict.fromkeys(found)), device)


def _told(problem: Problem, candidates: tuple[Candidate, ...], device: Device) -> Launches:
    table = table_of(device)
    columns = Columns.of(candidates)
    found = terms(problem, columns, device)
    steady = energy.steady(problem, columns, found, device)
    work = energy.terms_mj(problem, columns, found, table, steady.clock_mhz, steady.us)
    return Launches(candidates, columns, found, steady, np.sum(list(work.values()), axis=0))


def _with(launch: Candidate, **values: Value) -> Candidate:
    """The launch with those of the values that its family has a parameter for."""
    names = families.get(launch.family).parameters["launch"]
    return launch.with_launch(**dict(launch.launch_params) | {n: v for n, v in values.items() if n in names})


class Product:
    """Operands of one problem on a device, and what a right result is.

    Elements are normal(0, 1), as those of the table of joules: what draws is the bits that change.
    """

    def __init__(self, problem: Problem, device: Device, backend: Backend) -> None:
        import torch

        from tunegemm.measure.backend import warm_us
        from tunegemm.measure.operands import count_sets, expected, make_operands

        self.problem, self._device, self._backend = problem, device, backend
        count = count_sets(problem, device.l2_bytes, backend.free_bytes())
        self._sets = [make_operands(problem, backend.torch_device, index) for index in range(count)]
        generator = torch.Generator(device=backend.torch_device).manual_seed(0)
        # Where activations bend, products have a variance of 1; fp8 would lose bits so, and only has scales.
        deviation = 1 / math.sqrt(problem.k) if problem.epilogue and problem.in_dtype == "bf16" else 1.0
        for one in self._sets:
            for values, scale in ((one.a, deviation), (one.b, 1.0)):
                drawn = torch.empty(values.shape, device=values.device)
                values.copy_(drawn.normal_(0.0, scale, generator=generator))
        self._wanted: Any = expected(problem, self._sets[0])
        torch_us = warm_us(backend, self._launcher(TORCH_MM), self._sets)
        self._passes = max(1, math.ceil(_MIN_REPLAY_MS * 1e3 / (torch_us * count)))
        self.products = self._passes * count
        """Products of a replay."""

    def replay(self, candidate: Candidate) -> tuple[Replay, float]:
        """The candidate's replay, which ran, and its seconds. Raises TunegemmError for a wrong result,
        ValueError for a library's algorithm that the library refuses, RuntimeError for a failed launch.
        """
        from tunegemm.measure.operands import check, restore, tolerance

        launcher = self._launcher(candidate)
        restore(self._sets[0])
        self._backend.launch(launcher, self._sets[0])
        if objection := check(self._sets[0], self._wanted).objection(tolerance(self.problem)):
            raise MeasureError(f"{families.get(candidate.family).label(candidate)}: {objection}")
        replay = self._backend.capture(launcher, self._sets, self._passes)
        for _ in range(2):  # a first replay is uploaded within its timing
            replay.start()
            us = replay.finish()
        return replay, us * self.products * 1e-6

    def _launcher(self, candidate: Candidate) -> Callable[..., Any]:
        family = families.get(candidate.family)
        path = object_of(self.problem, candidate, self._device) if family.compiled else None
        return family.load(self.problem, candidate, self._device, path)
