"""The power cap: qualifying rounds in steady-state timing, and what a tuning leaves that ends amid them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

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
    trials_of,
)
from tunegemm.describe.space import Candidate
from tunegemm.generate.cublaslt import TORCH_MM
from tunegemm.measure.outcome import Measurement
from tunegemm.measure.policy import FINAL, SCREEN, Policy
from tunegemm.store import Database
from tunegemm.tuning import final
from tunegemm.tuning.finalists import of_interleaved
from tunegemm.tuning.progress import Progress
from tunegemm.tuning.qualifying import qualify
from tunegemm.tuning.trials import Trials
from tunegemm.tuning.tuner import Tuner

WIDTHS = (16, 32, 64)
OWN = [launches(kernel)[0] for kernel in kernels(*WIDTHS)]


@pytest.fixture
def tuner(tmp_path: Path) -> Iterator[Tuner]:
    with (
        Database.open(tmp_path / "tuning.sqlite") as database,
        planted_tuner(DEVICE, database, cache=tmp_path) as tuner,
    ):
        yield tuner


def screen(trials: Trials, *candidates: Candidate) -> None:
    for _ in trials.evaluate([*candidates, TORCH_MM], SCREEN, stage="screen"):
        pass


def test_at_the_power_cap_the_fastest_in_steady_state_wins(
    tuner: Tuner, monkeypatch: pytest.MonkeyPatch
) -> None:
    measurer, ahead = capped(), list[Candidate]()
    trials = trials_of(tuner, measurer)
    screen(trials, *OWN)
    assert trials.is_throttled
    assert of_interleaved(trials.screened)[0]["tile_n"] == 16
    monkeypatch.setattr(trials, "compile_ahead", ahead.extend)
    finalists = qualify(trials, tuner.kernels, left_s=60.0)
    result = final.race(trials, finalists, FINAL)
    assert tuner.database is not None
    record = tuner.database.best(PROBLEM, DEVICE.fingerprint)
    policies = {entry.policy for entry in tuner.database.entries(PROBLEM)}
    _, first, second, last = measurer.asked
    assert [steady_ms > 0 for steady_ms, _ in measurer.asked] == [False, True, True, True]
    assert set(first[1]) == {*OWN, TORCH_MM}
    leaders = {OWN[-1].kernel, OWN[-2].kernel}
    assert not set(second[1]) & set(first[1])
    by_order = {order: [c for c in second[1] if c["cluster_order"] == order] for order in ("index", "gpc")}
    assert {c.kernel for c in by_order["index"]} == leaders
    assert {c.kernel for c in by_order["gpc"]} == {c.kernel for c in OWN}
    assert {c.kernel for c in ahead if c["cluster_order"] == "gpc"} == {c.kernel for c in OWN}
    assert TORCH_MM in last[1] and finalists[0]["tile_n"] == 64
    assert result.best is not None and record is not None and record.candidate == result.best.candidate
    assert record.candidate["tile_n"] == 64 and record.candidate["swizzle_size"] == 16
    assert policies == {"screen", "qualifying", "steady_final"}


def test_without_time_for_qualifying_rounds_few_are_raced(tuner: Tuner) -> None:
    measurer = capped()
    trials = trials_of(tuner, measurer)
    screen(trials, *(launch for kernel in kernels(*WIDTHS) for launch in launches(kernel)))
    finalists = qualify(trials, tuner.kernels, left_s=5.0)
    assert len(measurer.asked) == 1, "no qualifying rounds"
    assert len(finalists) <= 5 and finalists[-1] == TORCH_MM
    assert len({c.kernel for c in finalists}) == len(finalists), "of each kernel its best launch"
    assert qualify(trials, tuner.kernels, left_s=60.0) and len(measurer.asked) == 3


def test_no_qualifying_rounds_on_a_gpu_that_holds_its_clocks(tuner: Tuner) -> None:
    measurer = Timed(lambda *_: 9.0, is_throttled=lambda _: False)
    trials = trials_of(tuner, measurer)
    screen(trials, *OWN)
    assert not trials.is_throttled
    assert set(qualify(trials, tuner.kernels, left_s=60.0)) == {*OWN, TORCH_MM}
    assert len(measurer.asked) == 1


def test_a_short_screen_that_saw_no_cap_does_not_hide_it(tuner: Tuner) -> None:
    throttled = [True, False]
    trials = trials_of(tuner, Timed(lambda *_: 9.0, is_throttled=lambda _: throttled.pop(0)))
    screen(trials)
    screen(trials, *OWN)
    assert trials.is_throttled


def test_rounds_that_were_interleaved_after_all_are_no_steady_state(tuner: Tuner) -> None:
    """A GPU that was at its cap while it screened and holds its clocks now: what it times is a screen's."""
    measurer = Timed(lambda c, _: c["tile_n"], is_throttled=lambda policy: not policy.steady_ms)
    trials = trials_of(tuner, measurer)
    screen(trials, *OWN)
    finalists = qualify(trials, tuner.kernels, left_s=60.0)
    assert finalists and not trials.qualified
    assert tuner.database is not None
    assert {entry.policy for entry in tuner.database.entries(PROBLEM)} == {"screen"}


A, B = launches(kernels(32)[0])[0], launches(kernels(64)[0])[0]
RATIOS = {(A, False): 1.05, (B, False): 1.01, (A, True): 0.98, (B, True): 1.03}
"""Of issue and old records alike: A leads the screen, and in steady state it is slower than torch.mm."""


def by_ratio(candidate: Candidate, policy: Policy) -> float:
    return 10 / RATIOS.get((candidate, policy.steady_ms > 0), 0.9)


class TestEndedAmidQualifyingRounds:
    @pytest.mark.parametrize("measured", range(5))
    def test_ctrl_c_reports_the_record_that_it_leaves(
        self, tuner: Tuner, monkeypatch: pytest.MonkeyPatch, measured: int
    ) -> None:
        """After so many outcomes of the first round, whatever comes first in it."""
        monkeypatch.setattr(Tuner, "measurer_for", lambda *_: Timed(by_ratio))
        screen(trials_of(tuner, Timed(by_ratio)), A, B)
        rounds: list[Progress] = []

        def is_due(progress: Progress) -> bool:
            if progress.stage == "qualifying" and not progress.to_compile:
                rounds.append(progress)
            return len(rounds) > measured

        result = tuner.tune(PROBLEM, trials=1, on_progress=interrupt_when(is_due))
        assert tuner.database is not None
        record = tuner.database.best(PROBLEM, DEVICE.fingerprint)
        assert result.interrupted and result.best is not None and record is not None
        assert (result.best.candidate, result.best.ratio) == (record.candidate, record.ratio)
        latest = {m.candidate: m for m in tuner.database.measurements(PROBLEM, DEVICE.fingerprint)}
        assert latest[record.candidate].ratio >= 1 or record.candidate == TORCH_MM

    @pytest.mark.parametrize("stored", [True, False])
    def test_the_three_measurements(self, tmp_path: Path, stored: bool) -> None:
        """A at 1.05 by a screen, 0.98 by a qualifying round; B at 1.03 by such a round: it is B."""
        with (
            Database.open(tmp_path / "tuning.sqlite") as database,
            planted_tuner(DEVICE, database if stored else None, cache=tmp_path) as tuner,
        ):
            trials = trials_of(tuner, Timed(by_ratio))
            screen(trials, A)
            assert trials.leader is not None and trials.leader.candidate == A
            for candidate in (A, B):
                [*trials.evaluate([candidate], FINAL, stage="qualifying")]
            result = trials.interrupted()
            record = database.best(PROBLEM, DEVICE.fingerprint)
        assert result.best is not None and result.best.candidate == B
        assert result.best.ratio == pytest.approx(1.03)
        assert not stored or (record is not None and record.candidate == B)

    def test_a_budget_that_ends_it_leaves_what_it_reports(
        self, tuner: Tuner, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Tuner, "measurer_for", lambda *_: Timed(by_ratio))
        screen(trials_of(tuner, Timed(by_ratio)), A, B)
        result = tuner.tune(PROBLEM, trials=1, budget_seconds=0.0)
        assert tuner.database is not None
        record = tuner.database.best(PROBLEM, DEVICE.fingerprint)
        assert result.best is not None and record is not None
        assert record.candidate == result.best.candidate == B

    def test_kill_9_leaves_no_record_that_is_slower_than_torch(self, tmp_path: Path) -> None:
        """A process of its own that is killed by itself, right after A's qualifying round was published."""
        program = (
            "import os, signal, sys; from tests.tuning.test_qualifying import *\n"
            "def die(progress):\n"
            "    if progress.stage == 'qualifying' and len(trials.qualified) == 2:\n"
            "        os.kill(os.getpid(), signal.SIGKILL)\n"
            "folder = Path(sys.argv[1])\n"
            "database = Database.open(folder / 'tuning.sqlite')\n"
            "with planted_tuner(DEVICE, database, cache=folder) as tuner:\n"
            "    trials = trials_of(tuner, Timed(by_ratio), on_progress=die)\n"
            "    screen(trials, A, B)\n"
            "    [*trials.evaluate([TORCH_MM, A, B], FINAL, stage='qualifying')]\n"
        )
        path = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        killed = subprocess.run([sys.executable, "-c", program, str(tmp_path)], env=path, timeout=120)
        assert killed.returncode == -signal.SIGKILL
        with Database.open(tmp_path / "tuning.sqlite") as database:
            record = database.best(PROBLEM, DEVICE.fingerprint)
            assert len(database.measurements(PROBLEM, DEVICE.fingerprint)) == 5
        assert record is not None and record.candidate in (B, TORCH_MM)


def test_a_record_that_is_older_than_the_tuning_is_what_ctrl_c_reports(tuner: Tuner) -> None:
    """A confirmed record stays, whatever a screen says of another candidate."""
    assert tuner.database is not None
    tuner.database.confirm(PROBLEM, DEVICE, measurement(B, 9.0))
    trials = trials_of(tuner, Timed(by_ratio))
    screen(trials, A)
    result = trials.interrupted()
    assert result.best is not None and result.best.candidate == B
    assert isinstance(result.best, Measurement) and result.interrupted
