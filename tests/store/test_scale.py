"""What reads a large database in narrow rows says the same as what reads all of it; and how fast it was."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from pandas.testing import assert_frame_equal

from benchmarks import database as benchmark
from tests.store.test_database import DEVICE, FINGERPRINT, KERNEL, PROBLEM, measurement
from tests.support.stores import Store
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate.cublaslt import TORCH_MM
from tunegemm.report.leaderboard import VENDOR_FAMILY, Leaderboard
from tunegemm.store import Database
from tunegemm.store.queries import latest_records

SMALL = Problem.parse("64x64x64")


def vendor(algorithm: str) -> Candidate:
    return Candidate.make(VENDOR_FAMILY, {"algorithm": algorithm})


class TestLeaders(Store):
    @pytest.fixture
    def filled(self, database: Database) -> Database:
        """Two devices and two toolchains, confirmed and not, with and without the vendor's, won and lost."""
        upgraded = dataclasses.replace(DEVICE, fingerprint=dataclasses.replace(FINGERPRINT, driver="590.1"))
        other = dataclasses.replace(
            DEVICE, fingerprint=dataclasses.replace(FINGERPRINT, device_name="NVIDIA Unheard")
        )
        database.publish(PROBLEM, DEVICE, measurement(1.30), label="of an old driver")
        database.confirm(PROBLEM, upgraded, measurement(1.10), label="winner")
        database.publish(PROBLEM, upgraded, measurement(1.20, vendor("a1")), label="a lucky screen")
        database.publish(PROBLEM, upgraded, measurement(1.02, vendor("a1")), label="a1", method="race")
        database.publish(PROBLEM, upgraded, measurement(1.04, vendor("a2")), label="a2", method="race")
        database.publish(PROBLEM, other, measurement(1.05, KERNEL.kernel))
        database.publish(SMALL, DEVICE, measurement(1.0, TORCH_MM), label="torch.mm")
        database.publish(SMALL, DEVICE, measurement(0.95), label="slow")
        database.publish(SMALL, DEVICE, measurement(0.97, vendor("a3")), label="a3")
        return database

    def test_they_say_what_the_summary_of_everything_says(self, filled: Database) -> None:
        narrow = Leaderboard.best_of_all(latest_records(filled))
        whole = Leaderboard.summary(filled.frame())
        assert_frame_equal(narrow.frame, whole.frame, check_dtype=False, check_exact=False)
        assert (narrow.title, narrow.note) == (whole.title, whole.note)

    def test_an_empty_database(self, database: Database) -> None:
        board = Leaderboard.best_of_all(latest_records(database))
        assert board.frame.empty and "There are no measurements" in board.plain()

    def test_the_lookup_has_what_the_records_have(self, filled: Database) -> None:
        lookup = filled.lookup()
        records = filled.records()
        assert len(lookup) == len(records) == 4
        found = {(each.problem, each.fingerprint): each for p in (PROBLEM, SMALL) for each in lookup.find(p)}
        for record in records:
            each = found[record.problem, record.fingerprint]
            assert (each.candidate, each.ratio, each.kernel_source, each.layer) == (
                record.candidate, record.ratio, record.kernel_source, record.layer,
            )  # fmt: skip
        assert lookup.find(Problem.parse("8x8x8")) == []


def test_the_synthetic_database_is_one(tmp_path: Path) -> None:
    """What the benchmark measures is readable by everything else, too."""
    path = tmp_path / "tuning.sqlite"
    assert benchmark.build(path, shapes=20, toolchains=2, measured=5) == 400
    with Database.open(path, read_only=True) as database:
        assert len(database.problems()) == 20 and len(database.records()) == 80
        assert all(record.confirmed for record in database.records())
        first = database.problems()[0]
        assert len(database.measurements(first, benchmark.device().fingerprint)) == 5


def test_the_committed_figures_hold_what_is_promised() -> None:
    """Of benchmarks/results/cpu/database.json, measured by `python -m benchmarks.database`."""
    rows = {row["name"]: row for row in json.loads(benchmark.OUT.read_text())["rows"]}
    assert (
        rows["concurrent"]["kept"]
        == rows["concurrent"]["writers"] * rows["concurrent"]["publications_each"]
        == 8000
    )
    assert (rows["killed"]["kills"], rows["killed"]["missing"]) == (200, 0)
    assert rows["size"]["measurements"] == 1_000_000 and rows["size"]["bytes_per_measurement"] < 1000
    assert rows["leaderboard"]["seconds"] <= 1.0
    assert rows["snapshot"]["records"] == 100_000 and rows["snapshot"]["seconds"] <= 0.5
