"""Made-up times, and compile workers that take none: tuning with all its parts but a GPU and a compiler."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.planted.tuning_families import ABORTS, RAISES
from tunegemm.compile.artifacts import ArtifactStore
from tunegemm.compile.pool import CompilePool
from tunegemm.describe.device import Device, find_device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate, SearchSpace
from tunegemm.generate import families
from tunegemm.generate.cublaslt import TORCH_MM
from tunegemm.measure.outcome import STEADY_MS, Measurement, Outcome
from tunegemm.measure.settings import Job, RaceSettings
from tunegemm.store import Database
from tunegemm.tuning.progress import Progress
from tunegemm.tuning.run import Measurer, Run
from tunegemm.tuning.tuner import Tuner

PROBLEM = Problem.parse("512x512x512")
DEVICE = replace(find_device("model:h200"), spec="cuda:0")


def kernels(*widths: int) -> list[Candidate]:
    """One small, feasible kernel of the shipped space per tile width."""
    family, space = families.get("cute_sm90"), families.load_space("cute_sm90")
    found = []
    for width in widths:
        narrow = dict(space.compile_values) | {"tile_m": (64,), "tile_n": (width,)}
        found.append(
            next(
                kernel
                for kernel in replace(space, compile_values=narrow).kernels()
                if family.check(PROBLEM, kernel, DEVICE)
            )
        )
    return found


def launches(kernel: Candidate, count: int = 3) -> list[Candidate]:
    """A few launches of a kernel."""
    values = families.load_space("cute_sm90").launch_values
    first = {name: listed[0] for name, listed in values.items()}
    name, listed = max(values.items(), key=lambda item: len(item[1]))
    return [kernel.with_launch(**first | {name: value}) for value in listed[:count]]


def measurement(candidate: Candidate, us: float, **telemetry: Any) -> Measurement:
    """torch.mm takes 10 us."""
    return Measurement(candidate, (us, us + 0.1, us), (10.0, 10.0, 10.0), 1e-3, 0.002, telemetry)


class Timed:
    """A GPU at its power cap by a function: microseconds of a candidate by a race's settings.

    torch.mm takes 10.
    """

    def __init__(
        self,
        time_us: Callable[[Candidate, RaceSettings], float],
        *,
        is_throttled: Callable[[RaceSettings], bool] = bool,
        noise: float = 0.001,
    ) -> None:
        self.asked: list[tuple[float, list[Candidate]]] = []
        """Of each interleave, for how long a round of steady-state timing is, and its candidates."""
        self.seconds: dict[str, float] = {}
        self._time_us, self._is_throttled, self._noise = time_us, is_throttled, noise

    def discover(self, problem: Problem) -> list[Candidate]:
        return [TORCH_MM]

    def swept(self, problem: Problem) -> None:
        """Every candidate can be measured."""

    def measure(self, problem: Problem, jobs: Sequence[Job], settings: RaceSettings) -> Iterator[Outcome]:
        self.asked.append((settings.steady_ms, [job.candidate for job in jobs]))
        throttled = self._is_throttled(settings)
        for job in jobs:
            us = 10.0 if job.candidate == TORCH_MM else self._time_us(job.candidate, settings)
            facts = {
                "sm_clock_mhz": 1500,
                "throttle_reasons": ("sw_power_cap",) if throttled else (),
                STEADY_MS: settings.steady_ms if throttled else 0.0,
            }
            yield Measurement(job.candidate, (us,) * 3, (10.0,) * 3, 1e-3, self._noise, facts)


def capped() -> Timed:
    """The narrowest kernel leads in interleaved timing, in steady state the widest with a large swizzle."""

    def time_us(candidate: Candidate, settings: RaceSettings) -> float:
        wide, swizzle = candidate["tile_n"] / 64, candidate["swizzle_size"] / 100
        return 9.5 - wide - swizzle if settings.steady_ms else 8.5 + wide

    return Timed(time_us)


@functools.cache
def small_space(family: str) -> SearchSpace:
    """A family's space with few tiles: of the 100,000 kernels of all most would be ruled out anyway."""
    space = families.load_space(family)
    widths = tuple(n for n in space.compile_values["tile_n"] if n in (16, 32, 64, RAISES, ABORTS))
    return replace(
        space, compile_values=dict(space.compile_values) | {"tile_m": (64,), "tile_n": widths or (64,)}
    )


def planted_tuner(
    device: Device, database: Database | None = None, *, cache: Path, workers: int = 1, **options: Any
) -> Tuner:
    """A tuner of small search spaces, whose compile workers write objects at once."""
    tuner = Tuner(device, database, cache=cache, workers=workers, **options)
    tuner.kernels.space = small_space
    tuner.pool.close()
    tuner.pool = tuner.ahead.pool = CompilePool(
        ArtifactStore(cache), workers=workers, families_module="tests.support.planted.tuning_families"
    )
    return tuner


def run_of(
    tuner: Tuner,
    measurer: Measurer,
    problem: Problem = PROBLEM,
    on_progress: Callable[[Progress], None] | None = None,
) -> Run:
    """The state with which `Tuner.tune` begins."""
    return Run(problem, tuner.device, tuner.pool, measurer, database=tuner.database, on_progress=on_progress)


def interrupt_when(condition: Callable[[Progress], bool]) -> Callable[[Progress], None]:
    """Ctrl-C as soon as the progress meets a condition."""

    def on_progress(progress: Progress) -> None:
        if condition(progress):
            raise KeyboardInterrupt

    return on_progress
