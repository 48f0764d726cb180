"""Export, import and merge: what goes out comes back, bad rows are named, nothing stored is lost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.store.test_database import DEVICE, FINGERPRINT, KERNEL, PROBLEM, RESOURCES, measurement
from tunegemm.describe.problem import OUTPUT_DTYPES, Problem
from tunegemm.describe.space import Candidate
from tunegemm.describe.stored import document_of
from tunegemm.errors import BadValueError, DatabaseError
from tunegemm.generate.cublaslt import TORCH_MM
from tunegemm.measure.outcome import Failure
from tunegemm.resources import data_path
from tunegemm.store import Database
from tunegemm.store.connection import is_same, resolve
from tunegemm.store.exchange import dump, load, merge, read, write

RAGGED = Problem.parse("64x64x1001", dtype="fp16", layout="tt")
OTHER = KERNEL.with_launch(swizzle_size=8)


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Database]:
    """Two problems, a failure, and a record that changed hands."""
    with Database.open(tmp_path / "source.sqlite", create=True) as database:
        deeper = Candidate.make(KERNEL.family, dict(KERNEL.compile_params) | {"stages": 4})
        tiled = deeper.with_launch(**dict(KERNEL.launch_params) | {"swizzle_size": 2})
        database.publish(PROBLEM, DEVICE, measurement(1.02, tiled), resources=RESOURCES, label="first")
        database.publish(PROBLEM, DEVICE, Failure(OTHER, "timeout", "no answer within 10 s"))
        database.confirm(PROBLEM, DEVICE, measurement(1.05, OTHER), label="second, raced")
        database.publish(RAGGED, DEVICE, measurement(0.97), label="ragged")
        yield database


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Database]:
    with Database.open(tmp_path / "target.sqlite", create=True) as database:
        yield database


def without_origin(database: Database) -> list[dict[str, Any]]:
    rows = [{k: v for k, v in row.items() if k != "origin"} for row in dump(database)]
    return sorted(rows, key=lambda row: json.dumps(row, sort_keys=True))


def test_everything_comes_back(source: Database, target: Database, tmp_path: Path) -> None:
    write(dump(source), path := tmp_path / "export.json")
    report = load(target, read(path), origin="colleague")
    assert (report.added, report.known, report.skipped, report.conflicts) == (4, 0, [], [])
    assert without_origin(target) == without_origin(source)
    assert {row["origin"] for row in dump(target) if row["kind"] != "choice"} == {"colleague"}
    assert [r.candidate for r in target.records()] == [r.candidate for r in source.records()]
    assert len(target.history(PROBLEM)) == 2
    again = load(target, read(path), origin="colleague")
    assert (again.added, again.known) == (0, 4)
    assert len(target.history(PROBLEM)) == 2


@pytest.mark.parametrize("in_dtype", OUTPUT_DTYPES)
def test_every_dtype_comes_back(tmp_path: Path, target: Database, in_dtype: str) -> None:
    fast = Problem.parse("64x96x128", dtype=in_dtype)
    kinds = ("fast", "two_level") if in_dtype.startswith("fp8") else ("fast",)
    problems = [replace(fast, accumulation=kind) for kind in kinds]
    with Database.open(tmp_path / "dtypes.sqlite", create=True) as source:
        for problem in problems:
            source.confirm(problem, DEVICE, measurement(1.05, TORCH_MM, relative_error=0.0))
        write(dump(source), path := tmp_path / "export.json")
    load(target, read(path), origin="colleague")
    assert sorted(record.problem for record in target.records()) == sorted(problems)


def test_the_json_schema_describes_the_export(source: Database, tmp_path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads(data_path("db", "exchange.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    write(dump(source), path := tmp_path / "export.json")
    data = json.loads(path.read_text())
    jsonschema.validate(data, schema)
    del data["rows"][0]["samples_us"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data, schema)


def candidate_with(count: int) -> dict[str, Any]:
    """Parameters of which the last is a list."""
    values = {f"p{index}": 0 for index in range(count - 1)} | {f"p{count - 1}": []}
    return {"family": "cute_sm90", "compile": values, "launch": {}}


BAD_ROWS: list[tuple[dict[str, Any], str]] = [
    ({"kind": "record"}, "its kind is not measurement"),
    ({"problem": {"m": 8}}, "its problem lacks n, k"),
    ({"problem": {**document_of(PROBLEM), "extra": 1}}, "has an unknown field 'extra'"),
    ({"samples_us": []}, "0 samples but 4"),
    ({"samples_us": [1.0, 2.0]}, "samples but"),
    ({"samples_us": [200.0, "2", 3.0, 4.0]}, "samples_us '2' is not a number"),
    ({"samples_us": [1.0, -2.0, 3.0, 4.0]}, "samples_us -2.0 is not a number from 0.001"),
    ({"baseline_us": None}, "baseline_us: null is not a list"),
    ({"relative_error": True}, "relative_error True is not a number"),
    ({"noise": None}, "noise null is not a number"),
    (
        {"candidate": {"family": "../../evil", "compile": {}, "launch": {}}},
        "family '../../evil' is not known",
    ),
    ({"candidate": {"family": "os", "compile": {}, "launch": {}}}, "family 'os' is not known"),
    ({"candidate": "x"}, ""),
    (
        {"candidate": {"family": "cute_sm90", "compile": {"tile_m": [1]}, "launch": {}}},
        "parameter tile_m a list is not a whole number",
    ),
    ({"candidate": candidate_with(65)}, "is not an object of at most 64 parameters"),
    ({"candidate": candidate_with(64)}, "parameter p63 a list is not a whole number"),
    ({"candidate": {"family": "cute_sm90", "compile": [], "launch": {}}}, "is not an object of at most 64"),
    ({"measured_at": "yesterday"}, "yesterday"),
    ({"measured_at": "2026-11-20T00:00:00"}, "no time zone"),
    ({"measured_at": "2999-01-01T00:00:00+00:00"}, "is in the future"),
    ({"evidence": {"source": "replayed"}}, "times were replayed"),
    ({"policy": "fianl"}, "policy 'fianl' is not known; use one of screen, race"),
    ({"policy": "x" * 17}, "is not a line of at most 16"),
    ({"label": "two\nlines"}, "is not a line of at most 200 printable"),
    ({"label": "\x1b[31mred"}, "label '\\x1b[31mred' is not a line"),
    ({"resources": {"registers": 1}}, "resources"),
    ({"fingerprint": {}}, "its fingerprint lacks device_name"),
]


@pytest.mark.parametrize(("change", "named"), BAD_ROWS)
def test_a_bad_row_is_named_and_the_rest_is_taken(
    source: Database, target: Database, change: dict[str, Any], named: str
) -> None:
    rows = list(dump(source))
    rows[0] = rows[0] | change
    before = without_origin(target)
    assert before == []
    report = load(target, rows, origin="x")
    assert report.added == 3
    assert report.skipped[0].startswith("row 1") and named in report.skipped[0]
    assert all("\n" not in line for line in report.skipped)
    assert any("choice" in line for line in report.skipped[1:]), "its choice has nothing to point at"


@pytest.mark.parametrize(
    "content",
    ["", "{}", "[1]", '{"format": "other"}', "a,b\n1,2\n", "PAR1", "\n", '{"rows": [], "format": 5}'],
)
def test_a_file_of_another_kind_is_one_error_and_changes_nothing(
    target: Database, tmp_path: Path, content: str
) -> None:
    path = tmp_path / "file"
    path.write_text(content)
    with pytest.raises(DatabaseError, match=f"{path}: not an export") as caught:
        load(target, read(path), origin="x")
    assert "\n" not in str(caught.value)
    assert list(dump(target)) == []


def test_a_cut_file_says_so_and_gives_no_other_row(tmp_path: Path) -> None:
    rows = [{"kind": "a", "m": 4096, "of": {"k": 123}}, {"kind": "b", "m": 16}]
    write(rows, path := tmp_path / "export.json")
    text = path.read_text()
    for cut in range(text.index("4096"), len(text) - len("]}\n")):
        path.write_text(text[:cut])
        *found, last = read(path)
        assert isinstance(last, BadValueError)
        assert all(row in rows for row in found if not isinstance(row, BadValueError)), text[:cut]


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match="No such file"):
        list(read(tmp_path / "none.json"))


class TestMerge:
    def make(self, path: Path, ratio: float, rounds: int, candidate: Any = KERNEL, **facts: str) -> str:
        device = replace(DEVICE, fingerprint=replace(FINGERPRINT, **facts))
        with Database.open(path, create=True) as database:
            full = measurement(ratio, candidate)
            repeated = replace(
                full, samples_us=full.samples_us * rounds, baseline_us=full.baseline_us * rounds
            )
            database.confirm(PROBLEM, device, repeated, label=f"{candidate.launch_params}")
        return str(path)

    @pytest.mark.parametrize("swapped", [False, True])
    def test_of_one_fingerprint_the_higher_ratio_wins(self, tmp_path: Path, swapped: bool) -> None:
        sources = [
            self.make(tmp_path / "few.sqlite", 1.20, 1),
            self.make(tmp_path / "many.sqlite", 1.05, 5, OTHER),
        ]
        into = str(tmp_path / "all.sqlite")
        report = merge(sources[::-1] if swapped else sources, into)
        (conflict,) = report.conflicts
        assert (conflict.kept, conflict.other) == (f"{KERNEL.launch_params}", f"{OTHER.launch_params}")
        assert conflict.reason == "its ratio is higher"
        with Database.open(into, read_only=True) as database:
            (record,) = database.records()
            assert record.candidate == KERNEL
            assert len(database.measurements(PROBLEM, FINGERPRINT)) == 2, "nothing is lost"
            assert len(database.history(PROBLEM)) == 2
        again = merge(sources, into)
        assert (again.added, again.known, again.conflicts) == (0, 2, [])

    def test_of_two_fingerprints_both_are_kept(self, tmp_path: Path) -> None:
        a = self.make(tmp_path / "a.sqlite", 1.20, 1)
        b = self.make(tmp_path / "b.sqlite", 1.05, 5, OTHER, driver="590.1")
        report = merge([a, b], str(tmp_path / "c.sqlite"))
        assert report.conflicts == []
        with Database.open(tmp_path / "c.sqlite", read_only=True) as database:
            assert len(database.records()) == 2

    def test_a_final_race_wins_over_a_search(self, tmp_path: Path) -> None:
        raced = self.make(tmp_path / "raced.sqlite", 1.01, 1)
        with Database.open(tmp_path / "search.sqlite", create=True) as database:
            full = measurement(1.3, OTHER)
            long = replace(full, samples_us=full.samples_us * 9, baseline_us=full.baseline_us * 9)
            database.publish(PROBLEM, DEVICE, long)
        (conflict,) = merge([str(tmp_path / "search.sqlite"), raced], str(tmp_path / "c.sqlite")).conflicts
        assert conflict.kept == f"{KERNEL.launch_params}" and conflict.reason == "it won a final race"

    def test_a_missing_source_changes_nothing(self, tmp_path: Path) -> None:
        a = self.make(tmp_path / "a.sqlite", 1.2, 1)
        with pytest.raises(DatabaseError, match=r"none\.sqlite: no such database"):
            merge([a, str(tmp_path / "none.sqlite")], str(tmp_path / "c.sqlite"))
        assert not (tmp_path / "c.sqlite").exists()

    def test_not_into_a_source_by_whatever_name(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of one, or of the last of two: nothing is written."""
        monkeypatch.chdir(tmp_path)
        a, b = self.make(tmp_path / "a.sqlite", 1.2, 1), self.make(tmp_path / "b.sqlite", 1.1, 1, OTHER)
        (tmp_path / "symbolic").symlink_to(b)
        (tmp_path / "hard").hardlink_to(b)
        before = Path(b).read_bytes()
        for into in (b, "./b.sqlite", str(tmp_path / "symbolic"), str(tmp_path / "hard")):
            for sources in ([b], [a, b]):
                with pytest.raises(DatabaseError, match="cannot be merged into itself; give another --into"):
                    merge(sources, into)
        assert Path(b).read_bytes() == before


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("postgresql://me@host/db", "postgres://you:secret@HOST:5432/db?sslmode=require", True),
        ("postgresql://localhost/db", "postgresql+psycopg://127.0.0.1/db", True),
        ("postgresql://host/db", "postgresql:///db?host=host", True),
        ("postgresql://host/db", "postgresql://host/other", False),
        ("postgresql://host/db", "postgresql://host:5433/db", False),
        ("postgresql://host/db", "db", False),
    ],
)
def test_a_servers_database_has_several_names(one: str, other: str, same: bool) -> None:
    assert is_same(resolve(one), resolve(other)) == same
