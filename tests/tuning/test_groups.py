"""A grouped product is tuned with all parts but a GPU: searched, stored, found again by its key, shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import here
from tests.tuning.planted import DEVICE, Timed, planted_tuner
from tunegemm.choose.selection import recorded
from tunegemm.choose.snapshot import Snapshot
from tunegemm.cli.results import verdict_line
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate.cublaslt import TORCH_MM
from tunegemm.measure.settings import RaceSettings
from tunegemm.model.grouped import shipped_kernel
from tunegemm.store import Database
from tunegemm.tuning.begin import screened_before
from tunegemm.tuning.tuner import Tuner

PROBLEM = Problem.parse("4096x2048x7168", groups=32)
PLAIN = Problem.parse("4096x2048x7168")


def time_us(candidate: Candidate, settings: RaceSettings) -> float:
    """torch takes 10; the narrowest tile of rows is the best, most with small swizzles."""
    return 5.0 + candidate["tile_n"] / 64 + candidate["swizzle_size"] / 100


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "tuning.sqlite"
    monkeypatch.setattr(Tuner, "measurer_for", lambda *_: Timed(time_us, is_throttled=lambda _: False))
    with (
        Database.open(path, create=True) as database,
        planted_tuner(DEVICE, database, cache=tmp_path) as tuner,
    ):
        result = tuner.tune(PROBLEM)
        assert result.best is not None and result.best.candidate.family == "grouped"
        tried = {outcome.candidate for outcome in result.outcomes}
        assert {candidate.family for candidate in tried} == {"grouped", TORCH_MM.family}
        assert shipped_kernel(PROBLEM, DEVICE.name) in tried, "what serves without a record is in the race"
        assert result.study is not None and len(result.study.trials) >= 10
        record = database.best(PROBLEM, DEVICE.fingerprint)
        assert record is not None and record.candidate == result.best.candidate and record.confirmed
        assert database.best(PLAIN, DEVICE.fingerprint) is None
        assert database.problems() == [PROBLEM]
        served = recorded(Snapshot(database.records()), Problem.parse("3000x2048x7168", groups=32),
                          DEVICE.fingerprint)  # fmt: skip
        assert served is not None and served.candidate == record.candidate
    return path


def test_torch_alone_takes_no_products_from_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a budget ends before a kernel is measured."""
    monkeypatch.setattr(Tuner, "measurer_for", lambda *_: Timed(time_us, is_throttled=lambda _: False))
    path = tmp_path / "tuning.sqlite"
    with (
        Database.open(path, create=True) as database,
        planted_tuner(DEVICE, database, cache=tmp_path) as tuner,
    ):
        result = tuner.race(PROBLEM, [])
        assert result.best is not None and result.best.candidate == TORCH_MM
        assert "no kernel was measured" in result.note
        assert "nothing changes" in verdict_line(result, "here")
        assert recorded(Snapshot(database.records()), PROBLEM, DEVICE.fingerprint) is None
        lost = tuner.race(PROBLEM, [shipped_kernel(PROBLEM, DEVICE.name)])
        assert lost.best is not None and "no kernel was measured" not in lost.note


def test_what_was_tuned_is_listed_and_explained(tuned: Path) -> None:
    shown = here("leaderboard", "--db", tuned).stdout
    assert "groups32" in shown and "64" in shown
    explained = here(
        "explain", "--shape", PROBLEM.shape, "--groups", "32", "--device", "model:h200", "--db", tuned
    )
    assert "dispatch" in explained.stdout and "x torch" in explained.stdout
    others = here(
        "explain", "--shape", "3000x2048x7168", "--groups", "32", "--device", "model:h200", "--db", tuned
    )
    assert "by the record of 4096 rows" in others.stdout


def test_what_was_timed_over_other_skews_is_not_compared(tuned: Path, tmp_path: Path) -> None:
    with Database.open(tuned, create=True) as database:
        assert len(screened_before(database, PROBLEM, DEVICE)) >= 10
        assert not screened_before(database, PROBLEM, DEVICE, ("uniform",))


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--shape", "64x64x64x2", "--groups", "4"), "4 groups with a batch of 2"),
        (("--shape", "64x64x64", "--groups", "4", "--epilogue", "relu"), "epilogue 'relu' of bf16 with 4"),
        (("--shape", "64x64x64", "--groups", "4", "--dtype", "tf32"), "in_dtype 'tf32' with 4 groups"),
        (("--shape", "64x64x60", "--groups", "4"), "alignment 8 with 4 groups"),
        (("--shape", "64x64x64", "--groups", "-1"), "-1"),
        (("--shape", "64x64x64", "--skews", "uniform"), "--skews is for rows in groups; add --groups"),
        (("--shape", "64x64x64", "--groups", "4", "--skews", "hot"), "skew 'hot' is not known"),
    ],
)
def test_groups_that_cannot_be_tuned_are_refused(words: tuple[str, ...], part: str) -> None:
    result = here("tune", *words, "--device", "model:h200", code=2)
    assert part in result.stderr
