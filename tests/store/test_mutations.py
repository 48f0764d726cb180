"""Files, packs, shapes and stored cells mutated at random: only named errors, and no good row is lost."""

from __future__ import annotations

import copy
import json
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.store.test_foreign import made  # noqa: F401
from tunegemm.describe import workload
from tunegemm.errors import DatabaseError, PackError, TunegemmError, WorkloadError
from tunegemm.store import Database, packs
from tunegemm.store.exchange import dump, load, merge, read, sound, write
from tunegemm.store.layers import read_lookups, read_records
from tunegemm.store.shipped import read_shipped, write_records

Check = Callable[[st.DataObject], None]

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def cases(thorough: bool) -> int:
    """Per property."""
    return 25 if thorough else 15


#: What JSON texts hold in place of these: more than Python's own writer writes.
LONG, DEEP = "@long@", "@deep@"
WORDS = st.sampled_from(
    ["", "\ud800", "\x1b[31m", "../../x", "[/b]", "$\\foo_{", "\0", "7" * 5000, "\u202e", "x" * 300,
     LONG, DEEP, "0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59", "2026-01-01", "nan",
     "cute_sm90", "measurement"]
)  # fmt: skip
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**30), 10**30), st.just(10**400), st.floats(), st.text(), WORDS
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
)


def prove(check: Check, cases: int) -> None:
    """Runs a check on so many cases; on the same ones each time where they are few."""
    settings(
        max_examples=cases, deadline=None, database=None, derandomize=cases < 20,
        suppress_health_check=list(HealthCheck),
    )(given(st.data())(check))()  # fmt: skip


def as_text(value: Any) -> str:
    text = json.dumps(value)
    return text.replace(f'"{LONG}"', "7" * 5000).replace(f'"{DEEP}"', "[" * 50_000 + "]" * 50_000)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value inside another one."""
    entries = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, entry in entries:
        yield (*at, key)
        yield from places(entry, (*at, key))


def changed(data: st.DataObject, value: Any) -> Any:
    """A copy with another value in one place, or with none."""
    value = copy.deepcopy(value)
    *way, last = data.draw(st.sampled_from(list(places(value))))
    holder = value
    for key in way:
        holder = holder[key]
    if data.draw(st.integers(0, 5)) == 0:
        del holder[last]
    else:
        holder[last] = data.draw(VALUES)
    return value


def spoiled(data: st.DataObject, content: bytes) -> bytes:
    """A copy with other bytes in one place, more of them, or fewer."""
    start = data.draw(st.integers(0, len(content)))
    end = data.draw(st.sampled_from([start, start + 1, start + 7, len(content)]))
    return content[:start] + data.draw(st.binary(max_size=9)) + content[end:]


@pytest.fixture(scope="module")
def rows(made: Path) -> list[dict[str, Any]]:  # noqa: F811
    with Database.open(made, read_only=True) as database:
        return list(dump(database))


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("empty") / "empty.sqlite"
    Database.open(path, create=True).close()
    return path


@pytest.fixture
def imported(empty: Path, tmp_path: Path) -> Callable[[Path], int]:
    """How many rows of a file land in an empty database; what lands can be exported."""

    def load_all(file: Path) -> int:
        into = tmp_path / "into.sqlite"
        shutil.copyfile(empty, into)
        with Database.open(into, create=True) as database:
            report = load(database, read(file), origin=file.name)
            skipped: list[str] = []
            kept = sum(1 for row in sound(dump(database), skipped) if row["kind"] != "choice")
            assert kept == report.added and skipped == []
        assert all(line.isprintable() for line in report.skipped)
        return report.added + report.known

    return load_all


def test_values_of_imports(
    rows: list[dict[str, Any]],
    imported: Callable[[Path], int],
    tmp_path: Path,
    cases: int,
) -> None:
    good = [row for row in rows if row["kind"] != "choice"]

    def check(data: st.DataObject) -> None:
        place = data.draw(st.integers(0, len(good) - 1))
        bad = changed(data, good[place])
        others = good[:place] + good[place + 1 :]
        file = tmp_path / "rows"
        between = data.draw(st.sampled_from([",", ",\n", "\n,\n"]))
        texts = between.join(map(as_text, (bad, *others)))
        file.write_text(f'{{"format": "tunegemm-database/1", "rows": [\n{texts}]}}')
        assert imported(file) >= len(others)

    prove(check, cases)


def test_bytes_of_a_line(
    rows: list[dict[str, Any]], imported: Callable[[Path], int], tmp_path: Path, cases: int
) -> None:
    good = [row for row in rows if row["kind"] != "choice"]
    write(good, file := tmp_path / "rows")
    lines = file.read_bytes().split(b"\n")

    def check(data: st.DataObject) -> None:
        place = data.draw(st.integers(1, len(good)))
        mutated = [*lines]
        mutated[place] = spoiled(data, lines[place])
        file.write_bytes(b"\n".join(mutated))
        assert imported(file) >= len(good) - 1

    prove(check, cases)


def test_bytes_of_a_file(
    rows: list[dict[str, Any]],
    imported: Callable[[Path], int],
    tmp_path: Path,
    cases: int,
) -> None:
    write(rows, file := tmp_path / "rows")
    content = file.read_bytes()

    def check(data: st.DataObject) -> None:
        file.write_bytes(spoiled(data, content))
        try:
            imported(file)
        except DatabaseError as error:
            assert str(error).startswith(f"{file}: not an export") and str(error).isprintable()

    prove(check, cases)


def test_packs(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cases: int) -> None:  # noqa: F811
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.delenv("TUNEGEMM_DB", raising=False)
    monkeypatch.chdir(tmp_path)
    folder, file = tmp_path / "content", tmp_path / "a.pack"
    with Database.open(made, read_only=True) as database:
        (path,) = write_records(database.records(), folder / "records")
    document = json.loads(path.read_text())
    packs.write(folder, file, toolchain={"triton": "3.6"}, fingerprints=[])
    content = file.read_bytes()

    def check(data: st.DataObject) -> None:
        if data.draw(st.booleans()):  # damage on the way
            file.write_bytes(spoiled(data, content))
        else:  # of a maker who lies, with hashes that are right
            path.write_text(as_text(changed(data, document)))
            packs.write(folder, file, toolchain={"triton": "3.6"}, fingerprints=[])
        packs.forget()
        try:
            pack = packs.install(file)
        except PackError as error:
            assert str(error).isprintable()
            assert packs.installed() == []
            return
        try:
            assert read_records()[1] == []
            # What is on the disk now may be damaged, too.
            (records,) = (pack.folder / "records").glob("*.json")
            records.write_bytes(spoiled(data, records.read_bytes()))
            packs.forget()
            assert len(read_records()[1]) <= 1
        finally:  # Hypothesis ends a case that draws too much wherever it is
            packs.remove(pack.name)

    prove(check, cases)


OWN = {
    "format": "tunegemm-shapes", "version": 1, "program": ["python"], "torch": "2", "device": "NVIDIA H200",
    "processes": 1, "unknown_replays": 0,
    "products": [
        {"m": 16, "n": 64, "k": 64, "batch": 1, "in_dtype": "bf16", "out_dtype": "bf16", "a_major": "k",
         "b_major": "k", "out_major": "n", "alignment": 16, "op": "mm", "bias": "none", "activation": "none",
         "device": "cuda", "calls": 3, "replayed": 0, "captured": 0, "timed": 2, "median_us": 15.25}
    ],
}  # fmt: skip
CUTLASS = [
    {"m": 4096, "n": 2048, "k": 1024, "dtype_a": "bf16", "dtype_b": "bf16", "dtype_d": "bf16",
     "layout": "tnt", "beta": 0.0, "dtype_acc": "f32", "batch_count": 1, "alignment_a": 8, "alignment_b": 8,
     "operation": "gemm"}
]  # fmt: skip
TUNABLE = (
    "Validator,PT_VERSION,2.9.0\nGemmTunableOp_BFloat16_TN,tn_6144_512_4096_ld_4096_4096_6144\n"
    "GemmStridedBatchedTunableOp_BFloat16_NN,nn_24_8_16_B_3_ld_24_16_24,Default,0.1\n"
)


@pytest.mark.parametrize("document", [OWN, CUTLASS, TUNABLE], ids=["ours", "CUTLASS", "TunableOp"])
def test_shapes(tmp_path: Path, document: Any, cases: int) -> None:
    file = tmp_path / "shapes"

    def check(data: st.DataObject) -> None:
        if isinstance(document, str) or data.draw(st.booleans()):
            text = document if isinstance(document, str) else json.dumps(document)
            file.write_bytes(spoiled(data, text.encode()))
        else:
            file.write_text(as_text(changed(data, document)))
        try:
            _, refused = workload.read(file)
        except WorkloadError as error:
            refused = [str(error)]
            assert str(file) in refused[0]
        assert all(line.isprintable() for line in refused), refused

    prove(check, cases)


def test_cells_of_a_database(
    made: Path,  # noqa: F811
    empty: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cases: int,
) -> None:
    source, into, out = tmp_path / "source.sqlite", tmp_path / "into.sqlite", tmp_path / "out"
    monkeypatch.setenv("TUNEGEMM_DB", str(source))
    with sqlite3.connect(made) as connection, sqlite3.connect(tmp_path / "whole.sqlite") as whole:
        connection.backup(whole)
        columns = [
            (table, row[1])
            for (table,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            for row in connection.execute(f"PRAGMA table_info({table})")
        ]
    cells = st.one_of(
        st.none(), st.integers(-(2**63), 2**63 - 1), st.floats(), st.binary(max_size=20),
        st.text(max_size=20), WORDS.filter(lambda word: word.isascii()), VALUES.map(as_text),
    )  # fmt: skip

    def check(data: st.DataObject) -> None:
        table, column = data.draw(st.sampled_from(columns))
        for log in tmp_path.glob("source.sqlite-*"):  # of the case before, which would be applied to this one
            log.unlink()
        shutil.copyfile(tmp_path / "whole.sqlite", source)
        with closing(sqlite3.connect(source)) as connection, connection:
            connection.execute("PRAGMA ignore_check_constraints = ON")
            try:
                connection.execute(
                    f"UPDATE {table} SET {column} = ? WHERE rowid = (SELECT min(rowid) FROM {table})",
                    [data.draw(cells)],
                )
            except (sqlite3.Error, UnicodeEncodeError):  # the schema forbids it
                return
        read_records(), read_lookups()
        shutil.copyfile(empty, into)
        skipped: list[str] = []
        try:
            with Database.open(source, read_only=True) as database:
                whole = list(sound(dump(database), skipped))
                write(whole, out)
                write_records(database.records(), tmp_path / "records")
            merge([str(source)], str(into))
        except TunegemmError as error:
            assert table == "tunegemm_alembic_version", error
            return
        if table in ("measurements", "failures"):
            assert sum(1 for row in whole if row["kind"] != "choice") >= 3, skipped

    prove(check, cases)


def test_names_lead_nowhere(made: Path, tmp_path: Path, cases: int) -> None:  # noqa: F811
    with Database.open(made, read_only=True) as database:
        records = database.records()
    out = tmp_path / "a" / "b" / "records"
    names = st.text(max_size=128) | WORDS | st.text("./\\-~ ", max_size=9)

    def check(data: st.DataObject) -> None:
        devices = data.draw(st.lists(names, max_size=4, unique=True))
        shutil.rmtree(tmp_path / "a", ignore_errors=True)
        written = write_records(
            [
                replace(record, fingerprint=replace(record.fingerprint, device_name=name))
                for record in records
                for name in devices
            ],
            out,
        )
        files = {path for path in tmp_path.rglob("*") if path.is_file()}
        assert files == {*written} and len(files) == len(devices)
        assert all(path.parent == out for path in files)
        read_shipped(out)

    prove(check, cases)
