"""The final race: its winner is the record, unless the GPU did other work, or torch.mm is as fast."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.tuning.planted import (
    DEVICE,
    PROBLEM,
    kernels,
    launches,
    measurement,
    planted_tuner,
    trials_of,
)  # fmt: skip
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate.cublaslt import TORCH_MM
from tunegemm.measure.outcome import Measurement
from tunegemm.measure.policy import FINAL, SCREEN, Job, Policy
from tunegemm.store import Database
from tunegemm.tuning.final import race

FASTEST = launches(kernels(16)[0])[0]


class Planted:
    """Answers with measurements in their order."""

    def __init__(self, outcomes: Sequence[Measurement]) -> None:
        self._outcomes = list(outcomes)

    def discover(self, problem: Problem) -> list[Candidate]:
        return [TORCH_MM]

    def recorded(self, problem: Problem) -> None:
        """Every candidate can be measured."""

    def measure(self, problem: Problem, jobs: Sequence[Job], policy: Policy) -> Iterator[Measurement]:
        for _ in jobs:
            yield self._outcomes.pop(0)


@pytest.mark.parametrize("noise", [0.06, 0.04])
def test_a_race_on_a_busy_gpu_confirms_nothing(tmp_path: Path, noise: float) -> None:
    """Of made-up times: torch.mm disagrees with itself, timed twice in one race."""
    raced = [replace(one, noise=noise) for one in (measurement(FASTEST, 9.0), measurement(TORCH_MM, 10.0))]
    with (
        Database.open(tmp_path / "tuning.sqlite") as database,
        planted_tuner(DEVICE, database, cache=tmp_path) as tuner,
    ):
        trials = trials_of(tuner, Planted(raced))
        result = race(trials, [FASTEST, TORCH_MM], FINAL)
        known = database.best(PROBLEM, DEVICE.fingerprint)
    assert result.best is not None and result.best.candidate == FASTEST
    assert known is not None and known.confirmed == (noise < 0.05)
    assert ("no record is confirmed" in result.note) == (noise > 0.05)


@pytest.mark.parametrize(
    ("screen", "race_of", "noise", "confirmed"),
    [
        # Medians of torch.mm in us and SM clocks in MHz, as measured on H200s on 2026-11-21. Beside another
        # process: 8448x9216x2048 with a winner at 3.2, 8448x9216x256 at 1.7.
        ([(395.8, 1980), (1655.2, 1980)], (1235.4, 1980), 0.0027, False),
        ([(75.4, 1980)], (103.7, 1980), 0.031, False),
        # Alone, with a clock that the race lowered: 2304x5120x5120, 8448x9216x256; and 256x4096x4096.
        ([(157.7, 1980), (193.2, 1500)], (200.7, 1455), 0.0008, True),
        ([(75.5, 1980)], (96.9, 1470), 0.0024, True),
        ([(15.72, 1980), (17.43, 1965)], (17.25, 1965), 0.0006, True),
        # Alone, too, on 2026-11-22: the clock of the first interleave was read as it fell. 8448x9216x2048.
        ([(405.9, 1410)], (495.9, 1440), 0.0007, True),
        # Where NVML tells no clock, nothing is said.
        ([(395.8, None)], (1235.4, 1980), 0.0027, True),
    ],
)
def test_a_baseline_that_is_slow_throughout_confirms_nothing(
    tmp_path: Path,
    screen: list[tuple[float, int | None]],
    race_of: tuple[float, int | None],
    noise: float,
    confirmed: bool,
) -> None:
    def measured(candidate: Candidate, baseline: tuple[float, int | None], ratio: float) -> Measurement:
        us, clock = baseline
        evidence = {"sm_clock_mhz": clock}
        return Measurement(candidate, (us / ratio,) * 3, (us,) * 3, 1e-3, noise, evidence)

    with (
        Database.open(tmp_path / "tuning.sqlite") as database,
        planted_tuner(DEVICE, database, cache=tmp_path) as tuner,
    ):
        screens = [measured(FASTEST, baseline, 1.0) for baseline in screen]
        raced = [measured(FASTEST, race_of, 1.1), measured(TORCH_MM, race_of, 1.0)]
        trials = trials_of(tuner, Planted([*screens, *raced]))
        for _ in screens:
            [*trials.evaluate([FASTEST], SCREEN, stage="screen")]
        result = race(trials, [FASTEST, TORCH_MM], FINAL)
        known = database.best(PROBLEM, DEVICE.fingerprint)
    assert known is not None and known.confirmed == confirmed
    assert ("torch.mm takes" in result.note) == (not confirmed)


def test_nothing_slower_than_torch_wins(tmp_path: Path) -> None:
    """Not even within the noise, nor where torch.mm itself failed: the record says what is launched."""
    slower, torch_mm = measurement(FASTEST, 10.001), measurement(TORCH_MM, 10.02)
    for raced, best in (([slower, torch_mm], TORCH_MM), ([slower], None)):
        with (
            Database.open(tmp_path / f"{len(raced)}.sqlite") as database,
            planted_tuner(DEVICE, database, cache=tmp_path) as tuner,
        ):
            result = race(trials_of(tuner, Planted(raced)), [one.candidate for one in raced], FINAL)
            record = database.best(PROBLEM, DEVICE.fingerprint)
        assert (result.best.candidate if result.best else None) == best
        assert (record.candidate if record else None) == best


@pytest.mark.parametrize("us", [1e-9, 1e308, 5e-324])
def test_samples_of_impossible_sizes_end_in_a_result(tmp_path: Path, us: float) -> None:
    with planted_tuner(DEVICE, cache=tmp_path) as tuner:
        odd = replace(measurement(FASTEST, 9.0), samples_us=(us,) * 3)
        result = race(
            trials_of(tuner, Planted([odd, measurement(TORCH_MM, 10.0)])), [FASTEST, TORCH_MM], FINAL
        )
    assert result.best is not None
