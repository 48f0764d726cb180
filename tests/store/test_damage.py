"""A damaged cell costs its own row alone: each cell by each value, through each reading function."""

from __future__ import annotations

import logging
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.store.test_database import DEVICE, FINGERPRINT, KERNEL, PROBLEM, RESOURCES, measurement
from tunegemm.describe.device import Device, Fingerprint
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.measure.evidence import QUALIFYING, RACE, leaders
from tunegemm.measure.outcome import Failure
from tunegemm.store import Database, queries
from tunegemm.store.damage import damaged_rows
from tunegemm.store.history import changes, related, seeds
from tunegemm.store.lookup import read_file
from tunegemm.store.models import Base
from tunegemm.store.queries import latest_records

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


def _related(database: Database) -> Any:
    found = database.records()
    return [related(found, *pair) for pair in zip(PROBLEMS, FINGERPRINTS, strict=True)]


def _file(database: Database) -> Any:
    lookup = read_file(Path(database.location), "user")
    return lookup and [lookup.find(problem) for problem in (*PROBLEMS, SMALL)]


def _lookup(database: Database) -> Any:
    lookup = database.lookup()
    return [lookup.find(problem) for problem in (*PROBLEMS, SMALL)], len(lookup), lookup.problems()


def _report(database: Database) -> Any:
    found = queries.records(database, FINGERPRINT.device_name)
    counts = queries.measurement_count(database, FINGERPRINT.device_name)
    trials = [queries.trials(database, record, 100) for record in found]
    return counts, trials, queries.failure_counts(database, FINGERPRINT.device_name)


#: Of the whole database.
READERS: dict[str, Read] = {
    "records": lambda d: d.records(),
    "lookup": _lookup,
    "read_file": _file,
    "all measurements": lambda d: d.measurements(),
    "related": _related,
    "problems": lambda d: d.problems(),
    "frame": lambda d: d.frame(),
    "latest_records": latest_records,
    "report": _report,
    "latest_device": queries.latest_device,
    "device_names": queries.device_names,
}
#: Of a problem.
READERS_OF_ONE: dict[str, Callable[[Database, Problem, Fingerprint], Any]] = {
    "best": lambda d, problem, fingerprint: d.best(problem, fingerprint),
    "leaders": lambda d, problem, _: leaders(d.measurements(problem)),
    "history": lambda d, problem, _: d.history(problem),
    "seeds": lambda d, problem, _: seeds(d, problem, OTHER.fingerprint),
    "changes": lambda d, problem, _: changes(d.history(problem, samples=True)),
    "measurements": lambda d, problem, fingerprint: d.measurements(problem, fingerprint),
    "failures": lambda d, problem, fingerprint: d.failures(problem, fingerprint, current=True),
}


def publish(database: Database, problem: Problem, device: Device, kernel: Candidate) -> None:
    """Every kind of row."""
    library = replace(kernel, family="cublaslt")
    database.publish(problem, device, measurement(1.04, kernel), resources=RESOURCES, label="pp")
    database.publish(problem, device, measurement(1.02, kernel.with_launch(swizzle=8)), method=QUALIFYING)
    database.publish(problem, device, measurement(1.01, library), method=RACE, label="a1")
    database.publish(problem, device, Failure(kernel.with_launch(clusters=7), "timeout", "hung"))
    database.confirm(problem, device, measurement(1.05, kernel), label="pp")


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two problems under two fingerprints, with every kind of row."""
    path = tmp_path_factory.mktemp("damage") / "sample.sqlite"
    with Database.open(path, create=True) as database:
        for problem in (PROBLEM, SMALL):
            for device in (DEVICE, OTHER):
                publish(database, problem, device, KERNEL)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
    return path


def cells() -> Iterator[tuple[str, list[str]]]:
    """Three columns of a table at a time."""
    for table in TABLES:
        names = [column.name for column in Base.metadata.tables[table].columns if column.name not in KEYS]
        yield from ((table, names[first : first + 3]) for first in range(0, len(names), 3))


#: A problem for each value, with a fingerprint and candidates that only its rows have: one reading shows
#: what all values do.
PROBLEMS = [replace(PROBLEM, m=PROBLEM.m + 64 * number) for number in range(1, len(VALUES) + 1)]
FINGERPRINTS = [replace(FINGERPRINT, driver=f"600.{number}") for number in range(len(VALUES))]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[sqlite3.Connection, Database]]:
    """A database to damage, open all the while, so that queries are compiled once for all.

    SMALL is what is sound; each of the problems is under a fingerprint to be damaged, and a sound one.
    """
    path = tmp_path_factory.mktemp("damage") / "damaged.sqlite"
    with Database.open(path, create=True) as database:
        for device in (DEVICE, OTHER):
            publish(database, SMALL, device, KERNEL)
        for number, (problem, fingerprint) in enumerate(zip(PROBLEMS, FINGERPRINTS, strict=True)):
            publish(database, problem, replace(DEVICE, fingerprint=fingerprint), kernel_of(number))
            publish(database, problem, OTHER, KERNEL)
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute("PRAGMA ignore_check_constraints = ON")
            connection.execute("PRAGMA synchronous = OFF")
            yield connection, database


def kernel_of(number: int) -> Candidate:
    return KERNEL.with_launch(number=number)


def first_rows(connection: sqlite3.Connection, table: str) -> list[int]:
    """The first row of each problem's damaged fingerprint, in the order of `VALUES`."""
    digests = [fingerprint.digest for fingerprint in FINGERPRINTS]
    column = {"problems": "problem_id", "fingerprints": "fingerprint_id", "candidates": "candidate_id"}
    of = "measurements" if table in column else table
    query = f"""SELECT {column.get(table, "rows.id")} FROM {of} AS rows
        JOIN fingerprints ON fingerprints.id = fingerprint_id WHERE digest = ? ORDER BY rows.id LIMIT 1"""
    return [connection.execute(query, (digest,)).fetchone()[0] for digest in digests]


@pytest.mark.slow
@pytest.mark.parametrize(("table", "columns"), list(cells()))
def test_a_damaged_cell_costs_its_own_row_alone(
    opened: tuple[sqlite3.Connection, Database],
    table: str,
    columns: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each of the columns has a third of the values, which differ from one test to the next."""
    connection, database = opened
    caplog.set_level(logging.CRITICAL)
    sound = [one for one in database.records() if one.problem == SMALL]
    count = len(database.records())
    keys = first_rows(connection, table)
    assert len({*keys}) == len(VALUES)
    turned = [columns[(number + len(columns[0])) % len(columns)] for number in range(len(VALUES))]

    def change(values: Sequence[Any]) -> None:
        for column, value, key in zip(turned, values, keys, strict=True):
            with suppress(sqlite3.IntegrityError):  # another row has it, in a column of unique values
                connection.execute(f"UPDATE {table} SET {column} = ? WHERE id = ?", (value, key))

    whole = [
        connection.execute(f"SELECT {column} FROM {table} WHERE id = ?", (key,)).fetchone()[0]
        for column, key in zip(turned, keys, strict=True)
    ]
    try:
        change(VALUES)
        for name, read in READERS.items():
            try:
                read(database)
            except Exception as error:
                pytest.fail(f"{name} with {table}.{columns}: {error!r:.300}")
        for problem, fingerprint, column, value in zip(PROBLEMS, FINGERPRINTS, turned, VALUES, strict=True):
            for name, read_one in READERS_OF_ONE.items():
                try:
                    read_one(database, problem, fingerprint)
                except Exception as error:
                    pytest.fail(f"{name} with {table}.{column} = {value!r:.40}: {error!r:.300}")
        assert [one for one in database.records() if one.problem == SMALL] == sound and len(sound) == 2
    finally:
        change(whole)
    assert len(database.records()) == count == 2 + 2 * len(VALUES)


@pytest.mark.parametrize(
    ("statement", "read"),
    [
        ("UPDATE measurements SET evidence = '[1]' WHERE id = 1", lambda d: d.measurements(PROBLEM)),
        ("UPDATE measurements SET ratio = -1 WHERE id = 1", lambda d: d.measurements(PROBLEM)),
        ("UPDATE measurements SET samples_us = '[]' WHERE id = 1", lambda d: d.measurements(PROBLEM)),
        ("UPDATE measurements SET samples_us = '[1.0,' WHERE id = 1", lambda d: d.measurements(PROBLEM)),
        ("UPDATE measurements SET median_us = 'quick' WHERE id = 4", lambda d: d.records()),
        ("UPDATE problems SET m = 'many' WHERE m = 64", lambda d: d.records()),
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
    with Database.open(path, create=True) as database:
        whole = len(read(database))
        assert "unreadable" not in caplog.text
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("PRAGMA ignore_check_constraints = ON")
            connection.execute(statement)
        assert len(read(database)) < whole
        assert "unreadable" in caplog.text


#: Each cell changed in a row of its own, with the word that the message begins with.
DAMAGE = [
    ("problems", 1, "m", -1, "m"), ("fingerprints", 1, "driver", "591.0", "its digest is not"),
    ("candidates", 1, "json", "{", "not a stored candidate"),
    ("measurements", 1, "evidence", "[1]", "evidence is not an object"),
    ("measurements", 2, "ratio", -1, "ratio -1"), ("measurements", 3, "samples_us", "[]", "samples_us []"),
    ("measurements", 4, "baseline_us", "[1.0]", "samples_us and baseline_us are from different"),
    ("measurements", 5, "median_us", 5.0, "median_us 5.0 is not the median"),
    ("measurements", 6, "noise", "loud", "noise 'loud'"), ("measurements", 7, "policy", "x", "policy 'x'"),
    ("measurements", 8, "relative_error", -0.5, "relative_error -0.5"),
    ("measurements", 9, "created_at", "noon", "created_at its time"),
    ("failures", 1, "created_at", "noon", "created_at its time"),
    ("records", 1, "measurement_id", 16, "measurement 16 belongs to another problem or fingerprint"),
    ("records", 2, "chosen_at", "noon", "chosen_at its time"),
    ("choices", 1, "measurement_id", 5, "measurement 5 belongs to another problem or fingerprint"),
]  # fmt: skip


def test_each_damaged_row_is_named_with_its_error_and_no_other(sample: Path, tmp_path: Path) -> None:
    path = tmp_path / "damaged.sqlite"
    shutil.copy(sample, path)
    with Database.open(path, create=True) as database:
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("UPDATE measurements SET relative_error = 0, noise = 0 WHERE id = 10")
        assert damaged_rows(database) == []
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("PRAGMA ignore_check_constraints = ON")
            for table, key, column, value, _ in DAMAGE:
                connection.execute(f"UPDATE {table} SET {column} = ? WHERE id = ?", (value, key))
        found = damaged_rows(database)
    for line, (table, key, *_, said) in zip(found, DAMAGE, strict=True):
        assert line.startswith(f"{table} {key}: {said}")


def test_only_the_measurement_of_a_record_under_its_own_problem_and_fingerprint_is_confirmed(
    sample: Path, tmp_path: Path
) -> None:
    def confirmed() -> list[bool]:
        return [one.confirmed for one in database.measurements(PROBLEM, FINGERPRINT)]

    path = tmp_path / "damaged.sqlite"
    shutil.copy(sample, path)
    with Database.open(path, create=True) as database:
        assert confirmed() == [False, False, False, True]
        assert [one.confirmed for one in queries.trials(database, database.records()[0], 9)] == confirmed()
        for record in (2, 3):  # under the other fingerprint, of the other problem
            with closing(sqlite3.connect(path)) as connection, connection:
                connection.execute("UPDATE records SET measurement_id = 9 WHERE id = 1")
                connection.execute(f"UPDATE records SET measurement_id = 4 WHERE id = {record}")
            assert not any(confirmed())
