"""Stored cells damaged at random, through every command that reads a database: never a traceback.

A damaged row is a miss that is named or counted; every other row is still there.
"""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.support.recorded import SHAPES, fill
from tunegemm.cli import app
from tunegemm.describe.device import cuda_device_count

#: Each reads the database that stands for DB; OUT is a file to write.
COMMANDS = [
    *(f"leaderboard --db DB --format {form}" for form in ("table", "csv", "json", "md")),
    f"leaderboard --db DB --shape {SHAPES[0]}",
    f"leaderboard --db DB --shape {SHAPES[0]} --format md",
    "leaderboard --db DB --family cute_sm90",
    "leaderboard --db DB --device h200",
    "report --db DB --out OUT.html",
    f"report --db DB --shape {SHAPES[0]} --out OUT.html",
    f"explain --db DB --shape {SHAPES[0]} --device model:h200",
    f"explain --db DB --shape {SHAPES[0]} --device model:h200 --json",
    f"history --db DB --shape {SHAPES[0]}",
    f"history --db DB --shape {SHAPES[0]} --json",
    "db export --db DB --out OUT.json",
    "db export --db DB --records OUT",
    "db layers",
    "doctor --db DB",
    "doctor --db DB --json",
    *(["verify --db DB --all"] if not cuda_device_count() else []),
]  # fmt: skip

TABLES = ("problems", "fingerprints", "candidates", "measurements", "failures", "records", "choices")

NASTY = [
    None, "", "x", "[/b]", "\x1b[31mred\x1b[0m", "$\\foo_{", "<script>alert(1)</script>", "a|b", "two\nlines",
    "\u202eright to left\u200f", "\ud800".encode("utf-8", "surrogatepass"), b"\xff\xfe\x00", "a" * 5000,
    "9" * 5000, 0, -1, 1, 10**18, -(10**18), 1e-9, 1e-320, 1e308, float("inf"), float("-inf"), "NaN", True,
    "[]", "{}", "[1]", "null", '"text"', "[1e400]", "[1e-9, 1e-9]", "[1e308, 1e308, 1e308]", '["a"]',
    "[null]", "[-1, -1]", '{"a": 1}', "[" * 2000, '{"source": "replayed"}',
    '{"source": "replayed", "recorded_at": "0"}', "0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59",
    "2026-01-01", "m", "int8", "fp8_e4m3", "bias_n", "screen", "final", "cublaslt", "nothing",
    "custom:f@0123456789abcdef",
]  # fmt: skip

#: Nothing that moves the cursor, colours, or turns the direction of writing may reach a terminal.
FORBIDDEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = fill(tmp_path_factory.mktemp("db") / "tuning.sqlite", each=12)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
    return path


@pytest.fixture(scope="module")
def cells(original: Path) -> list[tuple[str, str]]:
    with closing(sqlite3.connect(original)) as connection:
        return [
            (table, row[1]) for table in TABLES for row in connection.execute(f"PRAGMA table_info({table})")
        ]


def damage(path: Path, table: str, column: str, value: Any, number: int) -> None:
    """Puts a value into one cell, whatever the schema says of it."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("PRAGMA ignore_check_constraints = ON")
        keys = [key for (key,) in connection.execute(f"SELECT rowid FROM {table} ORDER BY rowid")]
        if keys:
            change = f"UPDATE {table} SET {column} = ? WHERE rowid = ?"
            with suppress(sqlite3.IntegrityError):  # the schema itself forbids it, as a key's second row
                connection.execute(change, (value, keys[number % len(keys)]))


def run(command: str, database: Path, out: Path) -> None:
    words = [word.replace("DB", str(database)).replace("OUT", str(out)) for word in command.split()]
    result = CliRunner().invoke(app, words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise AssertionError(command) from result.exception
    assert result.exit_code in (0, 1, 2), command
    assert "Traceback" not in result.stderr
    assert result.exit_code != 2 or result.stderr.splitlines()[-1].startswith("tunegemm: ")
    if "html" not in command:
        assert not FORBIDDEN.search(result.stdout + result.stderr), (command, result.stdout + result.stderr)
    if "json" in words and "--out" not in words and result.exit_code == 0:
        json.loads(result.stdout, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", [0, 1, 2, 3])
def test_damaged_cells(
    original: Path, cells: list[tuple[str, str]], tmp_path: Path, part: int, thorough: bool
) -> None:
    """A quarter of the commands at a time, for processes to share."""
    cases = 20 if thorough else 3
    database, out = tmp_path / "damaged.sqlite", tmp_path / "out"

    def check(data: st.DataObject) -> None:
        shutil.copy(original, database)
        table, column = data.draw(st.sampled_from(cells), "cell")
        value = data.draw(st.sampled_from(NASTY), "value")
        damage(database, table, column, value, data.draw(st.integers(0, 40), "row"))
        run(data.draw(st.sampled_from(COMMANDS[part::4]), "command"), database, out)

    settings(
        max_examples=cases, deadline=None, database=None, derandomize=cases < 20,
        phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck),
    )(given(st.data())(check))()  # fmt: skip
