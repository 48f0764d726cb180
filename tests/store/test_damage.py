"""A damaged cell costs its own row alone: each cell by values of each kind, through each reading function."""

from __future__ import annotations

import logging
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.store.test_database import DEVICE, FINGERPRINT, KERNEL, PROBLEM, RESOURCES, measurement
from tunegemm.describe.problem import Problem
from tunegemm.measure.evidence import QUALIFYING, RACE
from tunegemm.measure.outcome import Failure
from tunegemm.store import Database, queries
from tunegemm.store.history import leaders as leaders_of
from tunegemm.store.history import regressions, related, seeds
from tunegemm.store.leaders import leaders
from tunegemm.store.lookup import read_file
from tunegemm.store.models import Base

SMALL = Problem.parse("64x64x64")
OTHER = replace(DEVICE, fingerprint=replace(FINGERPRINT, driver="590.1"))
TABLES = ("problems", "fingerprints", "candidates", "measurements", "failures", "records", "choices")
#: What no row may refer to by mistake, and what has no other meaning when it is changed.
KEYS = {"id", "problem_id", "fingerprint_id", "candidate_id", "measurement_id"}
VALUES: tuple[Any, ...] = (
    "", "[1]", "[]", "{}", "quick", "[1e400]", '[10, "x"]', "[" * 5000, "9" * 5000, "2026-11-22T10:00:00",
    "0001-01-01T00:00:00+23:59", "\x1b[31m", -1, 0, 1, 1e308, float("inf"), -(2**63), b"\xff\x00", 0.5,
)  # fmt: skip

Read = Callable[[Database], Any]


def _regressions(database: Database) -> Any:
    return regressions(database, PROBLEM, FINGERPRINT.digest), regressions(database, PROBLEM, "5")


def _lookup(database: Database) -> Any:
    lookup = database.lookup()
    return [lookup.find(problem) for problem in (PROBLEM, SMALL)], len(lookup), lookup.problems()


def _file(database: Database) -> Any:
    lookup = read_file(Path(database.location), "user")
    return lookup and [lookup.find(problem) for problem in (PROBLEM, SMALL)]


def _report(database: Database) -> Any:
    found = queries.records(database, FINGERPRINT.device_name)
    counts = queries.measurement_count(database, FINGERPRINT.device_name, ["64x64x64"])
    trials = [queries.trials(database, record, 100) for record in found]
    return counts, trials, queries.failure_counts(database, FINGERPRINT.device_name)


READERS: dict[str, Read] = {
    "records": lambda d: d.records(),
    "best": lambda d: d.best(PROBLEM, FINGERPRINT),
    "lookup": _lookup,
    "read_file": _file,
    "entries": lambda d: d.entries(),
    "leaders_of": lambda d: leaders_of(d.entries(PROBLEM)),
    "history": lambda d: d.history(PROBLEM),
    "regressions": _regressions,
    "seeds": lambda d: seeds(d, PROBLEM, OTHER.fingerprint),
    "related": lambda d: related(d.records(), PROBLEM, FINGERPRINT),
    "measurements": lambda d: d.measurements(PROBLEM, FINGERPRINT),
    "failures": lambda d: d.failures(PROBLEM, FINGERPRINT, current=True),
    "problems": lambda d: d.problems(),
    "frame": lambda d: d.frame(),
    "leaders": lambda d: leaders(d, "cublaslt"),
    "report": _report,
    "latest_device": queries.latest_device,
    "device_names": queries.device_names,
    "fingerprint_digests": queries.fingerprint_digests,
}


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two problems under two fingerprints, with every kind of row."""
    path = tmp_path_factory.mktemp("damage") / "sample.sqlite"
    with Database.open(path) as database:
        for problem in (PROBLEM, SMALL):
            for device in (DEVICE, OTHER):
                other = KERNEL.with_launch(swizzle=8)
                library = replace(KERNEL, family="cublaslt")
                database.publish(problem, device, measurement(1.04), resources=RESOURCES, label="pp")
                database.publish(problem, device, measurement(1.02, other), policy=QUALIFYING)
                database.publish(problem, device, measurement(1.01, library), policy=RACE, label="a1")
                database.publish(problem, device, Failure(KERNEL.with_launch(clusters=7), "timeout", "hung"))
                database.confirm(problem, device, measurement(1.05), label="pp")
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
    return path


def cells() -> Iterator[tuple[str, str]]:
    for table in TABLES:
        for column in Base.metadata.tables[table].columns:
            if column.name not in KEYS:
                yield table, column.name


@pytest.fixture(scope="module")
def opened(sample: Path) -> Iterator[tuple[sqlite3.Connection, Database]]:
    """A copy of it to damage, and the database, open all the while: queries are compiled once for all."""
    path = sample.with_name("damaged.sqlite")
    shutil.copy(sample, path)
    with closing(sqlite3.connect(path, isolation_level=None)) as connection, Database.open(path) as database:
        connection.execute("PRAGMA ignore_check_constraints = ON")
        connection.execute("PRAGMA synchronous = OFF")
        yield connection, database


@pytest.mark.slow
@pytest.mark.parametrize(
    ("table", "column", "half"), [(*cell, number % 2) for number, cell in enumerate(cells())]
)
def test_a_damaged_cell_costs_its_own_row_alone(
    opened: tuple[sqlite3.Connection, Database],
    table: str,
    column: str,
    half: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Every other value in a column, the others in the next one: tables have columns of both halves."""
    connection, database = opened
    caplog.set_level(logging.CRITICAL)
    change = f"UPDATE {table} SET {column} = ? WHERE id = 1"
    (whole,) = connection.execute(f"SELECT {column} FROM {table} WHERE id = 1").fetchone()
    try:
        for value in VALUES[half::2]:
            try:
                connection.execute(change, (value,))
            except sqlite3.IntegrityError:  # another row has it, in a column of unique values
                continue
            for name, read in READERS.items():
                try:
                    read(database)
                except Exception as error:
                    pytest.fail(f"{name} with {table}.{column} = {value!r:.40}: {error!r:.300}")
            sound = [one for one in database.records() if one.problem == SMALL]
            assert len(sound) == 2 or table in ("candidates", "fingerprints"), (column, value)
    finally:
        connection.execute(change, (whole,))
    assert len(database.records()) == 4


@pytest.mark.parametrize(
    ("statement", "read"),
    [
        ("UPDATE measurements SET evidence = '[1]' WHERE id = 1", lambda d: d.entries(PROBLEM)),
        ("UPDATE measurements SET ratio = -1 WHERE id = 1", lambda d: d.entries(PROBLEM)),
        ("UPDATE measurements SET samples_us = '[]' WHERE id = 1", lambda d: d.entries(PROBLEM)),
        ("UPDATE measurements SET ratio = 9e999 WHERE id = 4", lambda d: d.records()),
        ("UPDATE measurements SET median_us = 'quick' WHERE id = 2", lambda d: d.frame()),
        ("UPDATE records SET ratio = 'fast' WHERE id = 1", lambda d: d.lookup().find(PROBLEM)),
        ("UPDATE fingerprints SET driver = 5 WHERE id = 1", lambda d: d.records()),
        ("UPDATE failures SET stage = 'lost' WHERE id = 1", lambda d: d.failures(PROBLEM, FINGERPRINT)),
    ],
)
def test_a_damaged_row_is_a_named_miss(
    sample: Path, tmp_path: Path, statement: str, read: Read, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "damaged.sqlite"
    shutil.copy(sample, path)
    with Database.open(path) as database:
        whole = len(read(database))
        assert "unreadable" not in caplog.text
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("PRAGMA ignore_check_constraints = ON")
            connection.execute(statement)
        assert len(read(database)) < whole
        assert "unreadable" in caplog.text
