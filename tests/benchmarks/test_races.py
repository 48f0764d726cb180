"""What a tuning database says of its races. Times are made up; the database is a real one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import races
from tests.store.test_database import DEVICE
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate.cublaslt import TORCH_MM
from tunegemm.measure.outcome import Measurement
from tunegemm.store import Database

PROBLEM = Problem(256, 128, 64)


def race(database: Database, late: list[float], *, settled: bool, torch_us: float = 100.0) -> None:
    """Of candidates that take so long at late clocks; at first the order is the other way round."""
    rounds, slow = 21, [120.0] * 21
    torchs = slow if settled else [torch_us] * 3 + slow[3:]
    for place, us in enumerate([*late, 120.0]):
        samples = [us] * rounds
        if not settled:
            samples[:3] = [100.0 + 120.0 - us] * 3
        candidate = Candidate.make("cute_sm90", {"place": place}) if place < len(late) else TORCH_MM
        evidence = {"products_per_replay": 10, "sm_clock_mhz": 1500, "settle_ms": 300 if settled else 0}
        found = Measurement(candidate, tuple(samples), tuple(torchs), 1e-3, 1e-3, evidence)
        database.publish(PROBLEM, DEVICE, found, label=str(candidate), policy="race")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tuning.sqlite"
    with Database.open(path) as database:
        race(database, [110.0, 112.0, 114.0, 116.0, 118.0, 119.0], settled=False)
        race(database, [110.5, 112.5, 114.5, 116.5, 118.5, 119.5], settled=True)
        race(database, [110.1, 112.1], settled=False, torch_us=101.0)  # too few to say anything
    return path


def test_early_and_late_are_told_apart(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "races.json"
    assert races.main(["--db", str(path), "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == (
        "2 races, torch.mm slower by 8 to 40 % at the end of 1; there early and late ratios correlate by "
        "-1.00 in the median, negatively in 1, and 0 had one winner"
    )
    unsettled, settled = json.loads(out.read_text())["rows"]
    assert unsettled["settle_ms"] == 0 and settled["settle_ms"] == 300
    assert unsettled["torch_early_us"] == 100 and unsettled["torch_late_us"] == 120
    assert unsettled["correlation"] < -0.9 and unsettled["best_late"]["rank_early"] == 7
    assert unsettled["best_late"]["late"] == pytest.approx(120 / 110, abs=1e-4)
    assert settled["correlation"] == 1 and settled["best_late"]["rank_early"] == 1
    assert settled["torch_as_candidate"] == {"ratio": 1.0, "products": 10}
    # Three rounds of torch.mm twice, of six candidates and of torch.mm as a seventh, ten products each.
    early = [100.0 + 120.0 - us for us in (110.0, 112.0, 114.0, 116.0, 118.0, 119.0, 120.0)]
    assert unsettled["late_after_ms"] == round(3 * 10 * (2 * 100 + sum(early)) * 1e-3)
    assert settled["late_after_ms"] == 0


def test_races_of_a_time_and_none(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert races.main(["--db", str(path), "--since", "2999"]) == 0
    assert capsys.readouterr().out.strip() == "no final race with 6 candidates that stayed"
    assert races.main(["--db", str(path.with_name("missing.sqlite"))]) == 2
    assert "missing.sqlite" in capsys.readouterr().err
