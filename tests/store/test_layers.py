"""System, user and project: which files they are, which wins, and that one bad layer costs only itself."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.store.test_database import DEVICE, FINGERPRINT, PROBLEM, measurement
from tunegemm.choose.snapshot import read_snapshot
from tunegemm.describe.problem import Problem
from tunegemm.describe.stored import cells_of
from tunegemm.resources import data_path
from tunegemm.store import Database
from tunegemm.store.layers import absent, modified, read_records
from tunegemm.store.locations import project_location, user_location
from tunegemm.store.record import Record
from tunegemm.store.shipped import ShippedLookup, latest_confirmed, read_shipped, write_records

SMALL = Problem.parse("64x64x64")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """No layer but the shipped one, which is empty."""
    monkeypatch.delenv("TUNEGEMM_DB", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr("tunegemm.store.shipped.data_path", lambda *_: tmp_path / "records")
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    yield tmp_path


def fill(location: Path, ratio: float, problem: Problem = PROBLEM) -> None:
    with Database.open(location, create=True) as database:
        database.confirm(problem, DEVICE, measurement(ratio), label=f"at {ratio}")


def test_each_layer_is_read_and_named(home: Path) -> None:
    fill(user_location(), 1.2)
    fill(Path("tunegemm.sqlite"), 1.1)
    with Database.open("elsewhere.sqlite", create=True) as database:
        database.confirm(PROBLEM, DEVICE, measurement(1.3))
        write_records(latest_confirmed(database.records()), home / "records")
    records, warnings = read_records()
    assert warnings == []
    assert [(record.layer, round(record.ratio, 2)) for record in records] == [
        ("system", 1.3), ("user", 1.2), ("project", 1.1),
    ]  # fmt: skip
    found = read_snapshot().find(PROBLEM, FINGERPRINT)
    assert found is not None and found.layer == "project", "the narrower wins, however fast the others are"


def test_what_changes_with_a_file_is_seen_and_of_a_server_nothing_is(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user_location().parent.mkdir(parents=True)
    monkeypatch.setenv("TUNEGEMM_DB", "postgresql://host/name")
    (home / "work" / "postgresql:").mkdir()
    assert modified() == ((0, 0),) * 2, "the user's two files"
    project = home / "project.sqlite"
    monkeypatch.setenv("TUNEGEMM_DB", str(project))
    seen = [modified()]
    for path in (project, Path(f"{project}-wal"), user_location()):
        path.write_text("a")
        seen.append(modified())
        path.write_text("ab")
        seen.append(modified())
    assert len(set(seen)) == len(seen) and {len(each) for each in seen} == {4}


def test_what_is_tuned_goes_into_the_narrowest_that_there_is(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert project_location() is None
    with Database.open() as database:
        assert database.location == user_location()
    Database.open("tunegemm.sqlite", create=True).close()
    with Database.open() as database:
        assert database.location == home / "work" / "tunegemm.sqlite"
    monkeypatch.setenv("TUNEGEMM_DB", str(home / "configured.sqlite"))
    with Database.open() as database:
        assert database.location == home / "configured.sqlite"


def let(mode: int, *path: str) -> Callable[[Path], None]:
    return lambda work: work.joinpath(*path).chmod(mode)


def give_away(*path: str) -> Callable[[Path], None]:
    def give(work: Path) -> None:
        if os.geteuid():
            pytest.skip("only root may give a file away")
        os.chown(work.joinpath(*path), 65534, 65534)

    return give


def link_into_a_shared_folder(work: Path) -> None:
    shared = work.parent / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    (work / "tunegemm.sqlite").rename(shared / "found.sqlite")
    (work / "tunegemm.sqlite").symlink_to(shared / "found.sqlite")


def anothers_log(work: Path) -> None:
    (work / "tunegemm.sqlite-wal").write_bytes(b"")
    (work / "tunegemm.sqlite-wal").chmod(0o666)


@pytest.mark.parametrize(
    "make",
    [
        let(0o664, "tunegemm.sqlite"), let(0o646, "tunegemm.sqlite"), let(0o777), let(0o1777), let(0o775),
        give_away("tunegemm.sqlite"), give_away(), link_into_a_shared_folder, anothers_log,
    ],
)  # fmt: skip
def test_what_others_may_have_written_is_not_read_where_it_was_only_found(
    make: Callable[[Path], None],
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    here = home / "work" / "tunegemm.sqlite"
    fill(here, 1.1)
    make(here.parent)
    for records, warnings in (read_records(), (len(read_snapshot()), read_snapshot().warnings)):
        assert not records
        (warning,) = warnings
        assert str(here) in warning and f"TUNEGEMM_DB={here}" in warning and "\n" not in warning
    assert project_location() is None
    with Database.open() as database:
        assert database.location == user_location(), "nor written"
    assert str(here) in caplog.text
    monkeypatch.setenv("TUNEGEMM_DB", str(here))
    records, warnings = read_records()
    assert len(records) == 1 and not warnings, "named, it is trusted"


def test_ones_own_is_read_through_a_link_too(home: Path) -> None:
    fill(home / "kept.sqlite", 1.1)
    Path("tunegemm.sqlite").symlink_to(home / "kept.sqlite")
    records, warnings = read_records()
    assert len(records) == 1 and not warnings


def test_a_broken_layer_costs_only_itself(home: Path) -> None:
    fill(user_location(), 1.2)
    Path("tunegemm.sqlite").write_bytes(b"no database" * 100)
    records, warnings = read_records()
    assert [record.layer for record in records] == ["user"]
    assert len(warnings) == 1 and "tunegemm.sqlite: not a SQLite database" in warnings[0]
    assert read_snapshot().warnings == tuple(warnings)


def test_without_any_layer_nothing_is_created(home: Path) -> None:
    assert read_records() == ([], [])
    assert [path.name for path in home.iterdir()] == ["work"]


class TestShippedFiles:
    def write(self, home: Path) -> Path:
        with Database.open("t.sqlite", create=True) as database:
            for index, problem in enumerate((PROBLEM, SMALL)):
                database.confirm(problem, DEVICE, measurement(1.1 + index / 10), label="pp128x256")
            older = replace(DEVICE, fingerprint=replace(FINGERPRINT, torch="2.10.0"))
            database.confirm(SMALL, older, measurement(1.5))
            database.confirm(SMALL, DEVICE, measurement(1.3), label="pp128x256")
            database.publish(Problem.parse("8x8x8"), DEVICE, measurement(1.9))
            (path,) = write_records(latest_confirmed(database.records()), home / "records")
        return path

    def test_a_file_is_text_with_a_line_per_record_and_its_bytes_are_its_records(self, home: Path) -> None:
        path = self.write(home)
        assert path.name == "NVIDIA-H200.json"
        before = path.read_text()
        assert sum('"problem"' in line for line in before.splitlines()) == 2
        write_records(read_shipped(home / "records")[0], home / "again")
        assert (home / "again" / path.name).read_text() == before

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"m": 0}, "m=0"), ({"m": "4096"}, "m '4096'"), ({"m": True}, "m True"),
            ({"in_dtype": "int3"}, "'int3'"), ({"extra": 1}, "has an unknown field 'extra'"),
        ],
    )  # fmt: skip
    def test_a_bad_record_is_named_and_left_out(self, home: Path, change: dict, named: str) -> None:
        path = self.write(home)
        data = json.loads(path.read_text())
        data["records"][0]["problem"] |= change
        path.write_text(json.dumps(data))
        records, problems = read_shipped(home / "records")
        assert [record.problem for record in records] == [PROBLEM]
        assert len(problems) == 1 and "skipped record 1" in problems[0] and named in problems[0]

    @pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "tunegemm-records/99"}'])
    def test_a_bad_file_is_named(self, home: Path, text: str) -> None:
        path = self.write(home)
        path.write_text(text)
        records, (problem,) = read_shipped(home / "records")
        assert records == [] and str(path) in problem

    def test_the_shipped_ones_can_all_be_read(self) -> None:
        records, problems = read_shipped(data_path("db", "records"))
        assert problems == []
        assert all(record.confirmed for record in records)


class TestLookup:
    """What dispatch reads of the shipped records."""

    def test_it_finds_what_the_files_hold(self) -> None:
        records, _ = read_shipped()
        lookup = ShippedLookup()
        assert lookup.warnings == [] and len(lookup) == len(records) > 500
        by_problem: dict[Problem, list[Record]] = {}
        for record in records:
            by_problem.setdefault(record.problem, []).append(record)
        assert set(lookup.problems()) == set(map(cells_of, by_problem))
        for problem, held in by_problem.items():
            assert lookup.find(problem) == held
        assert lookup.find(Problem.parse("8x8x8")) == []

    def test_bad_ones_are_left_out(self, home: Path, caplog: pytest.LogCaptureFixture) -> None:
        with Database.open("t.sqlite", create=True) as database:
            for problem in (PROBLEM, SMALL):
                database.confirm(problem, DEVICE, measurement(1.1), label="pp128x256")
            (path,) = write_records(database.records(), home / "records")
        data = json.loads(path.read_text())
        odd = [row | {"problem": row["problem"] | {"m": True}} for row in data["records"]]
        odd += [row | {"problem": [1, 2]} for row in data["records"]]
        data["records"][0]["ratio"] = "fast"
        data["records"] += [*odd, 7]
        path.write_text(json.dumps(data))
        (home / "records" / "broken.json").write_text("{")
        lookup = ShippedLookup()
        assert len(lookup.warnings) == 1 and "broken.json: not a records file" in lookup.warnings[0]
        found = {problem: lookup.find(problem) for problem in (PROBLEM, SMALL)}
        assert sorted(map(len, found.values())) == [0, 1]
        assert "skipped a shipped record" in caplog.text and "ratio" in caplog.text

    def test_a_line_is_looked_into_when_it_is_asked_for(
        self, home: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with Database.open("t.sqlite", create=True) as database:
            for problem in (PROBLEM, SMALL):
                database.confirm(problem, DEVICE, measurement(1.1), label="pp128x256")
            (path,) = write_records(database.records(), home / "records")
        whole = path.read_text()
        path.write_text(whole.replace('"label": "', '"label": ', 1))
        lookup = ShippedLookup()
        assert lookup.warnings == [] and len(lookup) == 2
        assert sorted(len(lookup.find(problem)) for problem in (PROBLEM, SMALL)) == [0, 1]
        assert "skipped a shipped record" in caplog.text
        path.write_text(whole.replace('"m": 4096', '"m": 4096e', 1))
        assert "not a records file" in "".join(ShippedLookup().warnings)
        path.write_text(whole[:-40])
        assert "not a records file" in "".join(ShippedLookup().warnings)
        path.write_text(json.dumps(json.loads(whole), indent=2))
        assert [len(ShippedLookup().find(problem)) for problem in (PROBLEM, SMALL)] == [1, 1]


def test_a_named_file_that_is_missing_has_a_line(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNEGEMM_PACK", "")
    assert absent() == []
    (home / "here.sqlite").touch()
    for place in (str(home / "here.sqlite"), "postgresql://nobody@localhost/nothing"):
        monkeypatch.setenv("TUNEGEMM_DB", place)
        assert absent() == [], place
    monkeypatch.setenv("TUNEGEMM_DB", missing := str(home / "there.sqlite"))
    assert absent() == [f"TUNEGEMM_DB={missing}: no such file; correct it, or let `tunegemm tune` create it"]
