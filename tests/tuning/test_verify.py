"""Re-verification with everything but a GPU: the race's times come from a recording that is written here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from fit.sweep_files import write_sweep
from tests.store.test_history import raced
from tunegemm.cli.verify import outcome_line
from tunegemm.describe.device import find_device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.errors import DeviceError
from tunegemm.generate.cublaslt import TORCH_MM
from tunegemm.measure.outcome import Failure, Measurement
from tunegemm.measure.replay import open_replay
from tunegemm.store import Database, Record
from tunegemm.store.validity import Grade
from tunegemm.tuning.tuner import Tuner
from tunegemm.tuning.verify import due, verify

PROBLEM = Problem.parse("512x512x512")
NOW = replace(find_device("model:h200"), spec="cuda:0")
NOW = replace(NOW, fingerprint=replace(NOW.fingerprint, driver="580.200.1"))
THEN = replace(NOW, fingerprint=replace(NOW.fingerprint, driver="580.100.1"))


def library(name: str) -> Candidate:
    """Stands for an algorithm of the library: nothing to compile, feasible wherever torch is."""
    return Candidate.make("cublaslt", {"algorithm": "torch.mm"}, {"workspace_mib": len(name)})


FIRST, SECOND, BROKEN = library("a"), library("bb"), library("ccc")


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with Database.open(tmp_path / "tuning.sqlite", create=True) as database:
        for candidate, ratio in ((FIRST, 1.10), (SECOND, 1.05), (BROKEN, 1.04), (TORCH_MM, 1.0)):
            database.publish(PROBLEM, THEN, raced(ratio, candidate), method="race", label=str(ratio))
        database.confirm(PROBLEM, THEN, raced(1.10, FIRST), label="1.1")
        yield database


@pytest.fixture
def tuner(database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tuner]:
    """A driver patch made the record slow; one rival does not run any more."""
    outcomes = [
        raced(0.97, FIRST), raced(1.051, SECOND), Failure(BROKEN, "launch", "refused"), raced(1.0, TORCH_MM),
    ]  # fmt: skip
    when = datetime(2026, 11, 21, tzinfo=UTC)
    write_sweep(tmp_path, "patched", NOW, PROBLEM, outcomes, recorded_at=when, command="made up")
    measurer = open_replay("patched", root=tmp_path)
    with Tuner(NOW, database, workers=1) as tuner:
        monkeypatch.setattr(tuner, "measurer_for", lambda problem: measurer)
        yield tuner


def test_rivals_race_again_and_the_new_winner_is_the_record(database: Database, tuner: Tuner) -> None:
    ((judgement, record),) = due(database.records(), NOW.fingerprint)
    assert judgement.grade is Grade.VERIFY and "driver 580.100.1" in judgement.reason
    result = verify(tuner, record)
    ratios = {o.candidate: o.ratio for o in result.outcomes if isinstance(o, Measurement)}
    assert ratios[FIRST] == pytest.approx(0.97, abs=2e-3) and {SECOND, TORCH_MM} < ratios.keys()
    assert Failure(BROKEN, "launch", "refused") in result.outcomes
    now = database.best(PROBLEM, NOW.fingerprint)
    assert now is not None and now.candidate == SECOND and now.confirmed
    then = database.best(PROBLEM, THEN.fingerprint)
    assert then is not None and then.candidate == FIRST, (
        "the old record stays what it was under the old driver"
    )
    assert due(database.records(), NOW.fingerprint) == [], "nothing is in doubt any more"
    assert len(due(database.records(), NOW.fingerprint, everything=True)) == 1
    assert "the record moved from 1.1 to" in outcome_line(record, judgement, result)


def test_only_the_top_candidates_are_raced(database: Database, tuner: Tuner) -> None:
    ((_, record),) = due(database.records(), NOW.fingerprint)
    result = verify(tuner, record, top=2)
    raced_again = {outcome.candidate for outcome in result.outcomes}
    assert raced_again == {FIRST, SECOND, TORCH_MM}, "torch.mm always runs"


@pytest.mark.parametrize(
    "facts", [{"torch": "2.0.0"}, {"device_name": "NVIDIA H100 NVL"}, {"capability": "8.0"}]
)
def test_records_that_are_no_more_than_seeds_are_not_verified(
    database: Database, facts: dict[str, str]
) -> None:
    assert due(database.records(), replace(NOW.fingerprint, **facts), everything=True) == []  # type: ignore[arg-type]


def test_of_a_problems_records_the_best_and_narrowest_is_due(database: Database) -> None:
    (old,) = database.records()
    narrower, current = replace(old, label="narrower"), replace(old, fingerprint=NOW.fingerprint)
    small = replace(old, problem=Problem.parse("64x64x64"))

    def labels(*records: Record, everything: bool = False) -> list[Record]:
        return [record for _, record in due(records, NOW.fingerprint, everything=everything)]

    assert labels(old, narrower) == [narrower] and labels(narrower, old) == [old]
    assert labels(old, small) == [small, old]
    for records in ((old, current), (current, old)):
        assert labels(*records) == [] and labels(*records, everything=True) == [current]


def test_nothing_is_verified_without_a_gpu(database: Database) -> None:
    with Tuner(find_device("model:h200"), database, workers=1) as tuner:
        ((_, record),) = due(database.records(), NOW.fingerprint)
        with pytest.raises(DeviceError, match="cannot be timed on model:h200; use cuda:N"):
            verify(tuner, record)


@pytest.mark.gpu
def test_on_a_real_gpu(tmp_path: Path) -> None:
    """Tuned, then the driver's patch is pretended to have changed: the same candidates are raced again."""
    from tunegemm.measure.worker import MeasureWorker
    from tunegemm.tuning.tuner import open_device

    device = open_device("cuda:0")
    problem = Problem.parse("1024x1024x1024")
    with Database.open(tmp_path / "gpu.sqlite", create=True) as database:
        before = replace(
            device, fingerprint=replace(device.fingerprint, driver=f"{device.fingerprint.driver}.0")
        )
        with Tuner(before, database) as tuner:
            assert isinstance(tuner.measurer_for(problem), MeasureWorker)
            tuner.tune(problem, trials=16)
        ((_, record),) = due(database.records(), device.fingerprint)
        with Tuner(device, database, cache=tmp_path / "empty") as tuner:  # no object: they are compiled
            result = verify(tuner, record)
        assert result.best is not None
        assert all(isinstance(outcome, Measurement) for outcome in result.outcomes)
        assert database.best(problem, device.fingerprint) is not None
