"""`tunegemm db` as a user meets it, and `tunegemm explain` over the layers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.store.test_database import DEVICE, PROBLEM, measurement
from tests.support.commands import printed as run
from tests.support.postgres import Cluster
from tests.support.processes import ROOT
from tunegemm.describe.device import find_device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.store import Database
from tunegemm.store.locations import user_location
from tunegemm.store.shipped import read_shipped, write_records

SMALL = Problem.parse("64x48x32")
#: torch.mm again, under another name.
TWIN = Candidate.make("cublaslt", {"algorithm": "torch.mm"}, {"workspace_mib": 1})


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "tuning.sqlite"
    with Database.open(path, create=True) as database:
        database.confirm(PROBLEM, DEVICE, measurement(1.1), label="pp128x256")
    return path


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--shape", "1x1x1"), "nothing of that kind to export"),
        (("--records", "."), "export needs --out FILE, or --records FOLDER"),
    ],
)
def test_an_export_that_cannot_be(
    database: Path, tmp_path: Path, arguments: tuple[str, ...], named: str
) -> None:
    file = tmp_path / "rows.json"
    assert named in run("db", "export", "--db", database, "--out", file, *arguments, code=2)[1]
    assert not file.exists()


def test_records_are_not_filtered(database: Path, tmp_path: Path) -> None:
    arguments = ("db", "export", "--db", database, "--records", tmp_path / "records")
    assert "to choose some, use --out" in run(*arguments, "--shape", PROBLEM.shape, code=2)[1]
    assert not (tmp_path / "records").exists()


def test_an_import_of_no_file_makes_no_database(tmp_path: Path) -> None:
    into = tmp_path / "new.sqlite"
    assert "No such file" in run("db", "import", tmp_path / "none.json", "--db", into, code=2)[1]
    assert not into.exists()


def test_a_bad_file_makes_no_database_and_stops_no_other(database: Path, tmp_path: Path) -> None:
    bad, good, into = tmp_path / "bad.json", tmp_path / "good.json", tmp_path / "new.sqlite"
    run("db", "export", "--db", database, "--out", good)
    for text in (good.read_text()[1:], "[" * 100_000):
        bad.write_text(text)
        assert f"{bad}: not an export" in run("db", "import", bad, "--db", into, code=2)[1]
        assert not into.exists()
    stdout, stderr = run("db", "import", bad, tmp_path / "none.json", good, "--db", into, code=2)
    assert [line.partition(":")[0] for line in stdout.splitlines()] == [
        str(bad), str(tmp_path / "none.json"), str(good),
    ]  # fmt: skip
    assert "No such file" in stderr
    with Database.open(into, read_only=True) as opened:
        assert opened.records()


def test_a_file_that_is_cut_off_gives_its_whole_rows(database: Path, tmp_path: Path) -> None:
    file, into = tmp_path / "cut.json", tmp_path / "new.sqlite"
    run("db", "export", "--db", database, "--out", file)
    file.write_text(file.read_text()[:-40])
    stdout, stderr = run("db", "import", file, "--db", into)
    assert "1 rows added, 0 known already, 2 left out" in stdout
    assert "left out: row 2: " in stderr and "row 3: the file ends within this row" in stderr


def test_an_import_of_nothing_usable_is_told_by_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "theirs.json").write_text('{"format": "tunegemm-database/1", "rows": [\n{"kind": "other"}]}')
    stdout, stderr = run("db", "import", tmp_path / "theirs.json", "--db", tmp_path / "t.sqlite", code=1)
    assert "0 rows added, 0 known already, 1 left out" in stdout and "left out: row 1" in stderr


def test_an_import_beside_what_ships(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shipped records are no export, and the import says why. What is imported comes before what ships."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("TUNEGEMM_DB", str(tmp_path / "own.sqlite"))
    folder = ROOT / "db" / "records"
    stdout, stderr = run("db", "import", *sorted(folder.glob("*.json")), code=2)
    assert stdout.count("0 rows added, not read") == len(list(folder.glob("*.json"))) == stderr.count("\n")
    assert "it is a file of shipped records, which lack the samples that an import checks" in stderr
    assert not (tmp_path / "own.sqlite").exists()

    known = {one.problem: one for one in read_shipped()[0] if one.fingerprint.device_name == DEVICE.name}
    theirs, words = tmp_path / "theirs.sqlite", ("--shape", PROBLEM.shape)
    with Database.open(theirs, create=True) as database:
        database.confirm(PROBLEM, DEVICE, measurement(1.1), label="theirs")
    assert known[PROBLEM].label in run("history", *words)[0]
    run("db", "export", "--db", theirs, "--out", tmp_path / "rows.json")
    assert "1 rows added, 0 known already" in run("db", "import", tmp_path / "rows.json")[0]
    assert "0 rows added, 1 known already" in run("db", "import", tmp_path / "rows.json")[0]
    assert "theirs" in (text := run("history", *words)[0]) and "shipped" not in text
    (board,) = json.loads(run("leaderboard", "--device", DEVICE.name, "--format", "json")[0])
    assert len(board["rows"]) == len(known)
    assert {row["candidate"] for row in board["rows"]} == {"theirs"} | {
        one.label for problem, one in known.items() if problem != PROBLEM
    }


class TestLayers:
    @pytest.fixture(autouse=True)
    def layers(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A record in the user's layer, and a project's layer without one."""
        monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
        monkeypatch.setenv("TUNEGEMM_DB", str(tmp_path / "project.sqlite"))
        self.device = find_device("model:h200")
        with Database.open(user_location(), create=True) as database:
            database.confirm(SMALL, replace(self.device, spec="cuda:0"), measurement(1.2, TWIN), label="mine")
        Database.open(tmp_path / "project.sqlite", create=True).close()

    def test_explain_names_the_layer(self) -> None:
        arguments = ("explain", "--shape", SMALL.shape, "--device", "model:h200")
        assert "mine: " in (text := run(*arguments)[0]) and "[user layer]" in text
        (document,) = json.loads(run(*arguments, "--json")[0])
        assert document["record"]["layer"] == "user"
        (document,) = json.loads(run(*arguments, "--json", "--db", user_location())[0])
        assert document["record"]["layer"] == ""

    def board(self, *arguments: str | Path) -> list[tuple[str, float]]:
        (board,) = json.loads(run("leaderboard", "--format", "json", *arguments)[0])
        return [(row["candidate"], row["ratio_to_torch_mm"]) for row in board["rows"]]

    def test_the_leaderboard_is_of_all_and_of_a_problem_the_narrowest_counts(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        device = replace(self.device, spec="cuda:0")
        with Database.open(tmp_path / "shipped.sqlite", create=True) as database:
            database.confirm(SMALL, device, measurement(1.4, TWIN), label="shipped")
            database.confirm(PROBLEM, device, measurement(1.3), label="shipped")
            write_records(database.records(), tmp_path / "records")
        monkeypatch.setattr("tunegemm.store.shipped.data_path", lambda *_: tmp_path / "records")
        assert self.board() == [("mine", 1.2), ("shipped", 1.3)]
        assert self.board("--shape", SMALL.shape)[0] == ("mine", 1.2)
        assert self.board("--shape", PROBLEM.shape) == [("shipped", 1.3), ("torch.mm", 1.0)]
        assert self.board("--family", "cute_sm90")[0] == ("shipped", 1.3)
        assert self.board("--db", user_location()) == [("mine", 1.2)]
        with Database.open(tmp_path / "project.sqlite", create=True) as database:
            database.confirm(SMALL, device, measurement(1.1, TWIN), label="project's")
        assert self.board() == [("project's", 1.1), ("shipped", 1.3)]

    def test_a_layer_that_cannot_be_read_is_a_line_and_the_others_are_shown(self, tmp_path: Path) -> None:
        (tmp_path / "project.sqlite").write_bytes(b"no database" * 100)
        stdout, stderr = run("leaderboard", "--format", "csv")
        assert "mine" in stdout and "project.sqlite: not a SQLite database" in stderr

    def test_they_are_listed(self, tmp_path: Path) -> None:
        lines = run("db", "layers")[0].splitlines()
        assert [line.split()[0] for line in lines] == ["system", "pack", "user", "project"]
        assert [line.split()[1] for line in lines[1:]] == ["0", "1", "0"]
        assert lines[3].endswith(str(tmp_path / "project.sqlite"))

    @pytest.mark.parametrize(
        ("url", "shown"),
        [
            ("postgresql://me:sec@ret@127.0.0.1:9/db", "postgresql://me:***@127.0.0.1:9/db"),
            ("postgresql://127.0.0.1:9/db?user=me&password=secret", "postgresql://127.0.0.1:9/db"),
            ("mysql://me:secret@host/db", "mysql://me:***@host/db"),
        ],
    )
    def test_the_password_of_a_url_is_not_listed(
        self, monkeypatch: pytest.MonkeyPatch, url: str, shown: str
    ) -> None:
        monkeypatch.setenv("TUNEGEMM_DB", url)
        assert run("db", "layers")[0].splitlines()[3].endswith(f"records  {shown}")


def test_merge_does_not_print_the_password_of_its_target(postgres: Cluster, tmp_path: Path) -> None:
    Database.open(tmp_path / "a.sqlite", create=True).close()
    url = postgres.create()
    out, _ = run("db", "merge", tmp_path / "a.sqlite", "--into", url.replace("@", ":secret@"))
    assert out == f"{url.replace('@', ':***@')}: 0 rows added, 0 known already, 0 left out\n"
    postgres.drop(url)
