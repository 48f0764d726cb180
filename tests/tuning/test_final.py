"""The final race: its winner is the record, unless the GPU did other work, or torch.mm is as fast.

And what a tuning leaves that ends amid it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.tuning.planted import (
    DEVICE,
    PROBLEM,
    Timed,
    capped,
    interrupt_when,
    kernels,
    launches,
    measurement,
    planted_tuner,
    run_of,
)
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate.cublaslt import TORCH_MM
from tunegemm.measure.outcome import Failure, Measurement, Outcome
from tunegemm.measure.settings import FINAL, QUICK_FINAL, SCREEN, Job, RaceSettings
from tunegemm.model import rank as model
from tunegemm.search.efforts import EFFORTS, Effort
from tunegemm.store import Database, Record
from tunegemm.tuning import tuner as tuning
from tunegemm.tuning.progress import Progress
from tunegemm.tuning.run import Run, finalists, race
from tunegemm.tuning.tuner import Tuner

ALGORITHMS = [Candidate.make("cublaslt", {"algorithm": number}) for number in range(8)]


@pytest.mark.parametrize(("effort", "own", "quickest"), [("quick", 6, 2), ("full", 12, 4)])
def test_the_quickest_reach_the_final_race_whatever_torch_did(
    effort: Effort, own: int, quickest: int
) -> None:
    """256x4096x4096 on an H200: torch.mm took 17.4 us beside some candidates and 15.8 beside others."""
    screened = {TORCH_MM: Measurement(TORCH_MM, (17.4,) * 3, (17.4,) * 3, 1e-3, 0.0)}
    for number in range(30):
        ours, torchs = (16.5, 17.4) if number < 25 else (16.1, 15.8)
        for launch in launches(Candidate.make("cute_sm90", {"kernel": number})):
            screened[launch] = Measurement(launch, (ours,) * 3, (torchs,) * 3, 1e-3, 0.0)
    chosen = finalists(screened, effort)
    assert chosen[-1] == TORCH_MM and len(chosen) == own + quickest + 1
    beside_fast, beside_slow = ([c for c in chosen[:-1] if (c["kernel"] >= 25) == x] for x in (True, False))
    assert len(beside_slow) == own and len(beside_fast) == quickest
    assert len({c.kernel for c in chosen}) == (own + quickest) / 2 + 1, "two launches of a kernel"


def screen_of_tiles() -> dict[Candidate, Measurement]:
    """Small tiles lead a little by their ratio; large ones fetch less."""
    screened = {TORCH_MM: measurement(TORCH_MM, 10.0)}
    for number, algorithm in enumerate(ALGORITHMS):
        screened[algorithm] = measurement(algorithm, 10.1 + number)
    for place, tile in enumerate((64, 96, 128, 160, 192, 224, 256) * 3):
        kernel = Candidate.make(
            "cute_sm90", {"schedule": "cooperative", "tile_m": tile, "tile_n": tile, "stages": place}
        )
        for width, launch in enumerate(launches(kernel)):
            screened[launch] = measurement(launch, 9.0 + 0.001 * tile + 0.01 * width + 0.0001 * place)
    return screened


def at_cap(screened: Mapping[Candidate, Measurement]) -> dict[Candidate, float]:
    """Of a GPU at its power cap: what small tiles lead by they lose by what they draw."""
    return {
        c: m.ratio * (c["tile_n"] / 256) ** 0.2 for c, m in screened.items() if c.family != TORCH_MM.family
    }


@pytest.mark.parametrize(("effort", "own", "algorithms"), [("quick", 4, 1), ("full", 12, 3)])
def test_at_the_power_cap_few_are_raced_by_what_they_draw(effort: Effort, own: int, algorithms: int) -> None:
    screened = screen_of_tiles()
    expected = at_cap(screened)
    chosen = finalists(screened, effort, expected)
    assert effort != "quick" or len(chosen) <= 7, "each costs a turn of 240 ms in a round"
    ours = [c for c in chosen if c.family == "cute_sm90"]
    assert max(Counter(c.kernel for c in ours).values()) == 2, "of each kernel its two best launches"
    best_first = sorted(expected, key=lambda c: -expected[c])
    two = [c for c in best_first if [o for o in best_first if o.kernel == c.kernel].index(c) < 2]
    assert ours[:own] == two[:own]
    assert ours[0]["tile_m"] == 256
    # Whatever is expected, the leader of the screen is raced.
    leader = max((c for c in screened if c.family == "cute_sm90"), key=lambda c: screened[c].ratio)
    assert leader in ours and leader["tile_m"] == 64
    assert [c for c in chosen if c.family == "cublaslt"] == [*ALGORITHMS[:algorithms], TORCH_MM]


@pytest.mark.parametrize("effort", EFFORTS)
@pytest.mark.parametrize("is_throttled", [True, False])
def test_what_there_is_is_raced_if_it_is_less(effort: Effort, is_throttled: bool) -> None:
    assert finalists({}, effort, {} if is_throttled else None) == []
    only = launches(kernels(32)[0])[0]
    two = {TORCH_MM: measurement(TORCH_MM, 10.0), only: measurement(only, 9.0)}
    assert finalists(two, effort, at_cap(two) if is_throttled else None) == [only, TORCH_MM]


@pytest.mark.parametrize("is_throttled", [True, False])
def test_torch_is_raced_where_only_other_families_were_asked_for(is_throttled: bool) -> None:
    """`tune --families cute_sm90` of 96x80x64, where torch.mm is the fastest, ended without a record."""
    own = Candidate.make("cute_sm90", {"tile_m": 64, "tile_n": 64, "schedule": "cooperative"})
    screened = {own: measurement(own, 11.0)}
    expected = at_cap(screened) if is_throttled else None
    assert finalists(screened, "quick", expected) == [own, TORCH_MM]


FASTEST = launches(kernels(16)[0])[0]


@pytest.fixture
def tuner(tmp_path: Path) -> Iterator[Tuner]:
    with (
        Database.open(tmp_path / "tuning.sqlite", create=True) as database,
        planted_tuner(DEVICE, database, cache=tmp_path) as tuner,
    ):
        yield tuner


def database_of(tuner: Tuner) -> Database:
    assert tuner.database is not None
    return tuner.database


def record(tuner: Tuner) -> Record | None:
    return database_of(tuner).best(PROBLEM, DEVICE.fingerprint)


class Planted:
    """Answers with measurements in their order."""

    def __init__(self, outcomes: Sequence[Measurement]) -> None:
        self._outcomes = list(outcomes)
        self.seconds: dict[str, float] = {}

    def discover(self, problem: Problem) -> list[Candidate]:
        return [TORCH_MM]

    def swept(self, problem: Problem) -> None:
        """Every candidate can be measured."""

    def measure(self, problem: Problem, jobs: Sequence[Job], settings: RaceSettings) -> Iterator[Measurement]:
        for _ in jobs:
            yield self._outcomes.pop(0)


@pytest.mark.parametrize("noise", [0.06, 0.04])
def test_a_race_on_a_busy_gpu_confirms_nothing(tuner: Tuner, noise: float) -> None:
    """Of made-up times: torch.mm disagrees with itself, timed twice in one race."""
    raced = [replace(one, noise=noise) for one in (measurement(FASTEST, 9.0), measurement(TORCH_MM, 10.0))]
    result = race(run_of(tuner, Planted(raced)), [FASTEST, TORCH_MM], FINAL)
    known = record(tuner)
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
    tuner: Tuner,
    screen: list[tuple[float, int | None]], race_of: tuple[float, int | None], noise: float, confirmed: bool,
) -> None:  # fmt: skip
    def measured(candidate: Candidate, baseline: tuple[float, int | None], ratio: float) -> Measurement:
        us, clock = baseline
        telemetry = {"sm_clock_mhz": clock}
        return Measurement(candidate, (us / ratio,) * 3, (us,) * 3, 1e-3, noise, telemetry)

    screens = [measured(FASTEST, baseline, 1.0) for baseline in screen]
    raced = [measured(FASTEST, race_of, 1.1), measured(TORCH_MM, race_of, 1.0)]
    trials = run_of(tuner, Planted([*screens, *raced]))
    for _ in screens:
        [*trials.evaluate([FASTEST], SCREEN, stage="screen")]
    result = race(trials, [FASTEST, TORCH_MM], FINAL)
    known = record(tuner)
    assert known is not None and known.confirmed == confirmed
    assert ("torch.mm takes" in result.note) == (not confirmed)


def test_nothing_slower_than_torch_wins(tmp_path: Path) -> None:
    """Not even within the noise, nor where torch.mm itself failed: the record says what is launched."""
    slower, torch_mm = measurement(FASTEST, 10.001), measurement(TORCH_MM, 10.02)
    for raced, best in (([slower, torch_mm], TORCH_MM), ([slower], None)):
        with (
            Database.open(tmp_path / f"{len(raced)}.sqlite", create=True) as database,
            planted_tuner(DEVICE, database, cache=tmp_path) as tuner,
        ):
            result = race(run_of(tuner, Planted(raced)), [one.candidate for one in raced], FINAL)
            record = database.best(PROBLEM, DEVICE.fingerprint)
        assert (result.best.candidate if result.best else None) == best
        assert (record.candidate if record else None) == best


@pytest.mark.parametrize("us", [1e-9, 1e308, 5e-324])
def test_samples_of_impossible_sizes_end_in_a_result(tmp_path: Path, us: float) -> None:
    with planted_tuner(DEVICE, cache=tmp_path) as tuner:
        odd = replace(measurement(FASTEST, 9.0), samples_us=(us,) * 3)
        result = race(run_of(tuner, Planted([odd, measurement(TORCH_MM, 10.0)])), [FASTEST, TORCH_MM], FINAL)
    assert result.best is not None


OWN = [launches(kernel)[0] for kernel in kernels(16, 32, 64)]


def screen(trials: Run, *candidates: Candidate) -> None:
    for _ in trials.evaluate([*candidates, TORCH_MM], SCREEN, stage="screen"):
        pass


def words(tuner: Tuner) -> set[str]:
    return {entry.method for entry in database_of(tuner).measurements(PROBLEM)}


def test_at_the_power_cap_the_fastest_in_steady_state_wins(tuner: Tuner) -> None:
    measurer = capped()
    trials = run_of(tuner, measurer)
    screen(trials, *OWN)
    assert trials.is_throttled
    assert trials.leader is not None and trials.leader.candidate["tile_n"] == 16
    asked = len(measurer.asked)
    result = race(trials, finalists(trials.screened, "quick", trials.at_cap), QUICK_FINAL)
    known = record(tuner)
    assert all(steady_ms == 0 for steady_ms, _ in measurer.asked[:asked])
    ((steady_ms, raced),) = measurer.asked[asked:]
    assert steady_ms == QUICK_FINAL.steady_ms and set(raced) == {*OWN, TORCH_MM}
    assert result.best is not None and known is not None and known.candidate == result.best.candidate
    assert known.confirmed and known.candidate["tile_n"] == 64
    assert words(tuner) == {"screen", "steady_final"}


@pytest.mark.parametrize("screened_at_the_cap", [True, False])
def test_a_race_of_a_gpu_that_holds_its_clocks_is_no_steady_state(
    tuner: Tuner, screened_at_the_cap: bool
) -> None:
    """It may have been at its cap while it screened: what it times now is interleaved all the same."""
    measurer = Timed(
        lambda c, _: c["tile_n"], is_throttled=lambda settings: screened_at_the_cap and settings == screening
    )
    trials, screening = run_of(tuner, measurer), replace(SCREEN, seed=0)
    screen(trials, *OWN)
    assert trials.is_throttled == screened_at_the_cap
    race(trials, finalists(trials.screened, "quick", trials.at_cap), QUICK_FINAL)
    # The winner is stored twice: with all rounds, and with those that report.
    assert words(tuner) == {"screen", "race", "final"}


@pytest.mark.parametrize("at_the_cap", [True, False])
def test_a_search_goes_by_what_is_expected_to_last(tuner: Tuner, at_the_cap: bool) -> None:
    trials = run_of(tuner, Timed(lambda c, _: 8.5 + c["tile_n"] / 64, is_throttled=lambda _: at_the_cap))
    screen(trials, *OWN)
    ratios = {c: m.ratio for c, m in trials.screened.items()}
    failure = Failure(OWN[0], "wrong", "relative error 0.7 > 0.01")
    values = dict(trials.search_values(trials.screened.values()))
    assert values[TORCH_MM] == 1.0 and list(trials.search_values([failure])) == [(OWN[0], None)]
    own = {c: ratio for c, ratio in ratios.items() if c != TORCH_MM}
    expected = model.steady_ratios(PROBLEM, own, DEVICE)
    assert values == ratios | (expected if at_the_cap else {})
    assert trials.at_cap == (expected if at_the_cap else None) and expected != own


def test_a_short_screen_that_saw_no_cap_does_not_hide_it(tuner: Tuner) -> None:
    throttled = [True]
    trials = run_of(tuner, Timed(lambda *_: 9.0, is_throttled=lambda _: throttled[-1]))
    screen(trials, *OWN)
    throttled.append(False)
    screen(trials, OWN[0])
    screen(trials, OWN[1])
    assert trials.is_throttled


def test_the_clocks_that_another_problem_left_are_no_cap_of_this_one(tuner: Tuner) -> None:
    throttled = [True]
    trials = run_of(tuner, Timed(lambda *_: 9.0, is_throttled=lambda _: throttled[-1]))
    screen(trials)
    assert trials.is_throttled, "for all that is known"
    throttled.append(False)
    screen(trials, *OWN)
    assert not trials.is_throttled and trials.at_cap is None


A, B = launches(kernels(32)[0])[0], launches(kernels(64)[0])[0]
RATIOS = {(A, False): 1.05, (B, False): 1.01, (A, True): 0.98, (B, True): 1.03}
"""Of issue and old records alike: A leads the screen, and in steady state it is slower than torch.mm."""


def by_ratio(candidate: Candidate, settings: RaceSettings) -> float:
    return 10 / RATIOS.get((candidate, settings.steady_ms > 0), 0.9)


class TestEndedAmidIt:
    @pytest.mark.parametrize("measured", range(5))
    def test_ctrl_c_reports_the_record_that_it_leaves(
        self, tuner: Tuner, monkeypatch: pytest.MonkeyPatch, measured: int
    ) -> None:
        """After so many of the four outcomes, whatever comes first."""
        monkeypatch.setattr(Tuner, "measurer_for", lambda *_: Timed(by_ratio))
        screen(run_of(tuner, Timed(by_ratio)), A, B)
        database = database_of(tuner)

        def raced() -> int:
            return sum(entry.method == "steady_final" for entry in database.measurements(PROBLEM))

        def is_due(progress: Progress) -> bool:
            return progress.stage == "final" and raced() == measured

        result = tuner.tune(PROBLEM, trials=1, on_progress=interrupt_when(is_due))
        assert raced() == measured
        left = record(tuner)
        assert result.interrupted and result.best is not None and left is not None
        assert (result.best.candidate, result.best.ratio) == (left.candidate, left.ratio)
        assert not left.confirmed
        latest = {m.candidate: m for m in database.measurements(PROBLEM, DEVICE.fingerprint)}
        assert latest[left.candidate].ratio >= 1 or left.candidate == TORCH_MM

    @pytest.mark.parametrize("stored", [True, False])
    def test_the_three_measurements(self, tmp_path: Path, stored: bool) -> None:
        """A at 1.05 by a screen, 0.98 in steady state; B at 1.03 there: it is B."""
        with (
            Database.open(tmp_path / "tuning.sqlite", create=True) as database,
            planted_tuner(DEVICE, database if stored else None, cache=tmp_path) as tuner,
        ):
            trials = run_of(tuner, Timed(by_ratio))
            screen(trials, A)
            assert trials.leader is not None and trials.leader.candidate == A
            for candidate in (A, B):
                [*trials.evaluate([candidate], FINAL, stage="final")]
            result = trials.interrupted()
            record = database.best(PROBLEM, DEVICE.fingerprint)
        assert result.best is not None and result.best.candidate == B
        assert result.best.ratio == pytest.approx(1.03)
        assert not stored or (record is not None and record.candidate == B)

    def test_a_budget_that_ends_the_search_leaves_what_it_reports(
        self, tuner: Tuner, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Tuner, "measurer_for", lambda *_: Timed(by_ratio))
        screen(run_of(tuner, Timed(by_ratio)), A, B)
        result = tuner.tune(PROBLEM, trials=1, budget_seconds=0.0)
        left = record(tuner)
        assert result.best is not None and left is not None
        assert left.candidate == result.best.candidate == B

    @pytest.mark.parametrize(("start_s", "torchs_s"), [(5000.0, 0.0), (0.0, 997.0)], ids=["start", "reserve"])
    def test_neither_the_start_nor_torchs_own_race_takes_the_budget_of_kernels(
        self, tuner: Tuner, monkeypatch: pytest.MonkeyPatch, start_s: float, torchs_s: float
    ) -> None:
        """4096x2048x7168 of 32 groups once measured none in 15 s (H100): for 10 s there was no process that
        measures, and 5 were kept for steady state, as torch's product had met the power cap.
        """
        now = time.monotonic

        class Slow(Timed):
            """Which takes so long for torch's product, by the clock of the tuner."""

            def measure(self, problem: Problem, jobs: Any, settings: RaceSettings) -> Iterator[Outcome]:
                if not self.asked:
                    self.seconds["start"] = start_s
                    monkeypatch.setattr(
                        tuning, "time", SimpleNamespace(monotonic=lambda: now() + start_s + torchs_s)
                    )
                return super().measure(problem, jobs, settings)

        timed = Slow(by_ratio, is_throttled=lambda _: True)
        monkeypatch.setattr(Tuner, "measurer_for", lambda *_: timed)
        result = tuner.tune(PROBLEM, trials=4, budget_seconds=1000.0)
        assert any(one.candidate != TORCH_MM for one in result.outcomes), result.note

    def test_kill_9_leaves_no_record_that_is_slower_than_torch(self, tmp_path: Path) -> None:
        """A process of its own that is killed by itself, right after A's outcome was published."""
        program = (
            "import os, signal, sys; from tests.tuning.test_final import *\n"
            "def die(progress):\n"
            "    if sum(one.measurement.is_steady for one in trials.results) == 2:\n"
            "        os.kill(os.getpid(), signal.SIGKILL)\n"
            "folder = Path(sys.argv[1])\n"
            "database = Database.open(folder / 'tuning.sqlite', create=True)\n"
            "with planted_tuner(DEVICE, database, cache=folder) as tuner:\n"
            "    trials = run_of(tuner, Timed(by_ratio), on_progress=die)\n"
            "    screen(trials, A, B)\n"
            "    [*trials.evaluate([TORCH_MM, A, B], FINAL, stage='final')]\n"
        )
        path = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        killed = subprocess.run([sys.executable, "-c", program, str(tmp_path)], env=path, timeout=120)
        assert killed.returncode == -signal.SIGKILL
        with Database.open(tmp_path / "tuning.sqlite", create=True) as database:
            record = database.best(PROBLEM, DEVICE.fingerprint)
            assert len(database.measurements(PROBLEM, DEVICE.fingerprint)) == 5
            raced = [
                m.candidate
                for m in database.measurements(PROBLEM, DEVICE.fingerprint)
                if m.measurement.is_steady
            ]
        assert raced == [TORCH_MM, A]
        assert record is not None and record.candidate in (B, TORCH_MM)


def test_a_record_that_is_older_than_the_tuning_is_what_ctrl_c_reports(tuner: Tuner) -> None:
    """A confirmed record stays, whatever a screen says of another candidate."""
    database_of(tuner).confirm(PROBLEM, DEVICE, measurement(B, 9.0))
    trials = run_of(tuner, Timed(by_ratio))
    screen(trials, A)
    result = trials.interrupted()
    assert result.best is not None and result.best.candidate == B
    assert isinstance(result.best, Measurement) and result.interrupted
