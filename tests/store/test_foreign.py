"""Files from elsewhere, as a stranger broke them: one test for each case, through the command line."""

from __future__ import annotations

import json
import math
import os
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.store.test_database import DEVICE, FINGERPRINT, KERNEL, PROBLEM, RESOURCES, measurement
from tests.support.commands import printed as run
from tests.support.commands import process
from tests.support.processes import environment
from tunegemm.cli import app
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.errors import BadValueError, DatabaseError, PackError
from tunegemm.generate.cublaslt import TORCH_MM
from tunegemm.measure.outcome import Failure
from tunegemm.store import Database, packing, packs
from tunegemm.store.checks import check_roofline
from tunegemm.store.exchange import dump, load, read
from tunegemm.store.layers import read_records
from tunegemm.store.shipped import read_shipped, write_records

OTHER = KERNEL.with_launch(swizzle_size=8)
SMALL = Problem.parse("64x64x64")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made") / "made.sqlite"
    with Database.open(path, create=True) as database:
        database.publish(PROBLEM, DEVICE, measurement(1.02), resources=RESOURCES, label="first")
        database.publish(PROBLEM, DEVICE, Failure(OTHER, "timeout", "no answer within 10 s"))
        database.confirm(PROBLEM, DEVICE, measurement(1.05, OTHER), label="second")
        database.publish(SMALL, DEVICE, measurement(0.97, TORCH_MM), label="torch.mm")
    return path


@pytest.fixture
def source(made: Path, tmp_path: Path) -> Path:
    """A database of three measurements, a failure and records; a copy that a test may damage."""
    path = tmp_path / "source.sqlite"
    with sqlite3.connect(made) as database, sqlite3.connect(path) as copy:
        database.backup(copy)
    return path


@pytest.fixture
def rows(made: Path) -> list[dict[str, Any]]:
    with Database.open(made, read_only=True) as database:
        return list(dump(database))


@pytest.fixture
def into(tmp_path: Path) -> Path:
    return tmp_path / "into.sqlite"


def as_file(rows: list[Any], path: Path) -> Path:
    path.write_text(json.dumps({"format": "tunegemm-database/1", "rows": rows}))
    return path


class TestNames:
    """Names from data never become paths; names that are alike get files of their own."""

    def named(self, database: Database, *names: str) -> None:
        for name in names:
            device = replace(DEVICE, name=name, fingerprint=replace(FINGERPRINT, device_name=name))
            database.confirm(PROBLEM, device, measurement(1.05))

    def test_no_name_leads_out_of_the_folder(self, tmp_path: Path, into: Path) -> None:
        with Database.open(into, create=True) as database:
            self.named(database, "/../../evil", "..", ".", "a\\b", "\x1b[31m", "x" * 127)
        out = tmp_path / "here" / "records"
        lines = run("db", "export", "--db", into, "--records", out)[0].splitlines()
        assert len(lines) == 6 == len({*out.iterdir()})
        assert {path.parent for path in tmp_path.rglob("*.json")} == {out}
        assert all(path.name[0].isalnum() for path in out.iterdir())

    def test_names_that_are_written_alike(self, tmp_path: Path, into: Path) -> None:
        with Database.open(into, create=True) as database:
            self.named(database, "NVIDIA H200", "NVIDIA-H200", "nvidia h200", "NVIDIA/H200", "NVIDIA H100")
        lines = run("db", "export", "--db", into, "--records", tmp_path / "records")[0].splitlines()
        assert len({*lines}) == 5
        found, problems = read_shipped(tmp_path / "records")
        assert len({record.fingerprint.device_name for record in found}) == 5 and problems == []
        assert (tmp_path / "records" / "NVIDIA-H100.json").is_file()

    def test_nothing_to_write_is_said(self, tmp_path: Path, into: Path) -> None:
        with Database.open(into, create=True) as database:
            database.publish(PROBLEM, DEVICE, measurement(1.05))
        line = run("db", "export", "--db", into, "--records", tmp_path / "records", code=2)[1]
        assert "no confirmed record to write" in line and not (tmp_path / "records").exists()


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


LONG = "7" * 5000
#: What is put in place of one row's cell, as JSON text, and what the refusal says.
BAD_CELLS = [
    ("fingerprint", "sm_count", "1" + "0" * 30, "sm_count a number of over 19 digits is not a whole number"),
    ("", "samples_us", f"[200.5, 1{'0' * 400}, 201.0, 200.0]", "samples_us a number of over 19 digits"),
    ("", "samples_us", "[1e308, 1e308, 1e308, 1e308]", "samples_us 1e+308 is not a number"),
    ("", "samples_us", "[1e-9, 1e-9, 1e-9, 1e-9]", "samples_us 1e-09 is not a number from 0.001"),
    ("", "samples_us", "[1, 1, 1, 1]", "beats the roofline of NVIDIA H200, 138.9 us"),
    ("", "samples_us", f"[{LONG}]", "4300"),
    ("", "samples_us", "[NaN, 1, 2, 3]", "samples_us nan is not a number"),
    ("", "measured_at", '"0001-01-01T00:00:00+23:59"', "is not a time since 1970"),
    ("", "measured_at", '"9999-12-31T23:59:59-23:59"', "is not a time since 1970"),
    ("", "label", r'"\ud800"', "label '\\ud800' is not a line"),
    ("", "label", r'"\u001b[31mred"', "is not a line of at most 200 printable characters"),
    ("", "label", r'"\u202eder"', "is not a line"),
    ("resources", "compile_seconds", '"soon"', "compile_seconds 'soon' is not a number"),
    ("resources", "compile_seconds", "1e999", "compile_seconds inf is not a number"),
    ("", "evidence", "[1]", "its evidence is not an object"),
    ("", "evidence", f'{{"a": {"[" * 40}{"]" * 40}}}', "evidence is nested deeper than 12"),
    ("", "evidence", f'{{"a": {"[" * 100_000}{"]" * 100_000}}}', "nested too deep"),
    ("", "noise", "Infinity", "noise inf is not a number"),
    ("fingerprint", "device_name", '"H [/b]"', "device_name 'H [/b]' has characters"),
    ("fingerprint", "device_name", '"$\\\\foo_{"', "has characters that names of devices lack"),
    ("fingerprint", "device_name", '["H200"]', "device_name a list is not a line"),
    ("problem", "m", "9223372036854775807", "m 9223372036854775807 is not a whole number"),
    ("problem", "in_dtype", "[]", "in_dtype a list is not a line"),
]


@pytest.mark.parametrize("layout", ["a line per row", "one line"])
@pytest.mark.parametrize(("table", "name", "cell", "named"), BAD_CELLS)
def test_a_bad_row_is_named_and_the_others_land(
    rows: list[dict[str, Any]],
    into: Path,
    tmp_path: Path,
    layout: str,
    table: str,
    name: str,
    cell: str,
    named: str,
) -> None:
    changed = {**rows[0]}
    if table:
        changed[table] = {**changed[table], name: "@cell@"}
    else:
        changed[name] = "@cell@"
    texts = [json.dumps(row) for row in (changed, *rows[1:])]
    texts[0] = texts[0].replace('"@cell@"', cell)
    between = ",\n" if layout == "a line per row" else ", "
    file = tmp_path / "rows.json"
    file.write_text('{"format": "tunegemm-database/1", "rows": [\n' + between.join(texts) + "]}")
    report = run("db", "import", file, "--db", into)
    assert "3 rows added, 0 known already" in report[0]
    assert report[1].startswith("left out: row 1") and named in report[1].splitlines()[0]
    assert "\x1b" not in report[1] and "\u202e" not in report[1]


@pytest.mark.slow
def test_of_720_rows_one_is_left_out_and_the_next_file_is_read(
    rows: list[dict[str, Any]], into: Path, tmp_path: Path
) -> None:
    many = [
        {**rows[0], "id": f"row{number}", "measured_at": f"2026-01-01T00:{number // 60:02}:{number % 60:02}Z"}
        for number in range(720)
    ]
    many[501] = {**many[501], "samples_us": [10**400] * 4}
    first, second = as_file(many, tmp_path / "a.json"), as_file(rows, tmp_path / "b.json")
    stdout, stderr = run("db", "import", first, second, "--db", into)
    assert "a.json: 719 rows added, 0 known already, 1 left out" in stdout
    assert "b.json: 4 rows added, 0 known already, 0 left out" in stdout
    assert stderr.count("\n") == 1 and "row 502 (measurement of 4096x4096x4096): samples_us" in stderr


class TestConflicts:
    """What was imported never outranks what was measured here, and the conflict is printed."""

    def claim(self, rows: list[dict[str, Any]], tmp_path: Path, **changes: Any) -> Path:
        """A confirmed record of another candidate."""
        row = {**rows[0], "id": "claim", "origin": "", "policy": "steady_final", **changes}
        choice = {
            "kind": "choice", "measurement": "claim", "policy": "fastest", "confirmed": True,
            "chosen_at": "2026-11-22T00:00:00Z",
        }  # fmt: skip
        return as_file([row, choice], tmp_path / "claim.json")

    def test_a_claim_does_not_replace_what_was_measured_here(
        self, rows: list[Any], source: Path, tmp_path: Path
    ) -> None:
        file = self.claim(rows, tmp_path, samples_us=[160.0] * 40, baseline_us=[210.0] * 40)
        stdout = run("db", "import", file, "--db", source)[0]
        assert "1 rows added" in stdout
        assert f"conflict {PROBLEM} on NVIDIA H200: second over first, it was measured here" in stdout
        with Database.open(source, create=True) as database:
            assert database.best(PROBLEM, FINGERPRINT).candidate == OTHER  # type: ignore[union-attr]

    def test_what_is_measured_here_later_replaces_a_claim(
        self, rows: list[Any], into: Path, tmp_path: Path
    ) -> None:
        run("db", "import", self.claim(rows, tmp_path), "--db", into)
        with Database.open(into, create=True) as database:
            assert database.best(PROBLEM, FINGERPRINT).candidate == KERNEL  # type: ignore[union-attr]
            database.publish(PROBLEM, DEVICE, measurement(1.001, OTHER))
            assert database.best(PROBLEM, FINGERPRINT).candidate == OTHER  # type: ignore[union-attr]

    def test_beyond_the_roofline(self, rows: list[Any], source: Path, tmp_path: Path) -> None:
        file = self.claim(rows, tmp_path, samples_us=[64.0] * 4)
        stderr = run("db", "import", file, "--db", source, code=1)[1]
        assert "64 us for 4096x4096x4096 bf16 tn beats the roofline of NVIDIA H200, 138.9 us" in stderr
        least_us = DEVICE.roofline_us(PROBLEM) / 1.1  # a chip's clock may exceed the datasheet's
        check_roofline(PROBLEM, FINGERPRINT, least_us)
        with pytest.raises(BadValueError, match="beats the roofline"):
            check_roofline(PROBLEM, FINGERPRINT, math.nextafter(least_us, 0))


#: A cell of a database, what is written over it, and what export and merge say of the row.
DAMAGED = [
    ("measurements", "evidence", "'[1]'", "its evidence is not an object"),
    ("measurements", "samples_us", "'[]'", "0 samples"),
    ("measurements", "samples_us", "'{'", "samples_us: null is not a list"),
    ("measurements", "samples_us", f"'{'[' * 10_000}'", "samples_us: null is not a list"),
    ("measurements", "samples_us", "5", "samples_us: 5 is not a list"),
    ("measurements", "created_at", "'yesterday'", "measured_at null is not a line"),
    ("measurements", "created_at", "'0001-01-01T00:00:00+23:00'", "measured_at"),
    ("measurements", "noise", "'loud'", "noise 'loud' is not a number"),
    ("measurements", "registers", "-1", "registers -1 is not a whole number"),
    ("measurements", "compile_seconds", "9e999", "compile_seconds inf is not a number"),
    ("measurements", "warnings", "'7'", "warnings: 7 is not a list"),
    ("candidates", "json", "'{'", "not a stored candidate"),
    ("candidates", "json", "x'ff'", "not a stored candidate"),
    ("candidates", "json", "replace(json, '128', '256')", "has the parameters of candidate"),
    ("fingerprints", "driver", "'999.9'", "has the facts of fingerprint"),
    ("candidates", "label", "char(27) || '[31m'", "label '\\x1b[31m' is not a line"),
    ("problems", "m", "'many'", "m 'many' is not a whole number"),
    ("problems", "epilogue", "'nonsense('", "nonsense("),
    ("fingerprints", "device_name", "x'00ff'", "device_name"),
]


@pytest.mark.parametrize(("table", "column", "cell", "named"), DAMAGED)
def test_a_damaged_cell_is_a_named_miss_of_export_and_merge(
    source: Path, into: Path, tmp_path: Path, table: str, column: str, cell: str, named: str
) -> None:
    with sqlite3.connect(source) as connection:
        connection.execute(f"UPDATE {table} SET {column} = {cell} WHERE id = 1")
    result = CliRunner().invoke(app, ["db", "export", "--db", str(source), "--out", str(tmp_path / "x.json")])
    assert result.exit_code in (0, 2) and isinstance(result.exception, SystemExit | None), result.exception
    assert named in result.stderr, result.stderr
    result = CliRunner().invoke(app, ["db", "merge", str(source), "--into", str(into)])
    assert result.exit_code == 0 and named in result.stderr, result.exception


def test_a_kernel_that_is_not_the_measured_one_is_on_no_leaderboard(source: Path) -> None:
    with sqlite3.connect(source) as connection:
        connection.execute("UPDATE candidates SET json = replace(json, '128', '256') WHERE label = 'second'")
    for shape in ((), ("--shape", PROBLEM.shape)):
        stdout, stderr = run("leaderboard", "--db", source, *shape)
        assert "second" not in stdout and "torch.mm" in stdout
        assert "skipped 1 unreadable row(s) of a table" in stderr


class TestPacks:
    """Loading is all or nothing; a loaded pack that turns out bad is left out, with one warning."""

    @pytest.fixture(autouse=True)
    def home(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("TUNEGEMM_DB", raising=False)
        monkeypatch.delenv("TUNEGEMM_PACK", raising=False)
        monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
        monkeypatch.setenv("TUNEGEMM_CACHE_DIR", str(tmp_path / "cache"))
        monkeypatch.chdir(tmp_path)

    def make(self, source: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
        """A consistent pack, whose hashes are right, with one record that is changed."""
        folder = tmp_path / "content"
        with Database.open(source, read_only=True) as database:
            (path,) = write_records(database.records(), folder / "records")
        data = json.loads(path.read_text())
        change(data["records"][-1])
        path.write_text(json.dumps(data).replace('"@deep@"', "[" * 100_000 + "]" * 100_000))
        packs.write(folder, tmp_path / "a.pack", toolchain={}, fingerprints=[])
        return tmp_path / "a.pack"

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"measured_at": "0001-01-01T00:00:00+23:00"}, "is not a time since 1970"),
            ({"median_us": 10**400}, "median_us a number of over 19 digits"),
            ({"label": "@deep@"}, "nested too deep"),
            ({"candidate": {"family": "cute_sm90", "compile": {"tile_m": [1]}, "launch": {}}}, "tile_m"),
            ({"fingerprint": ["x"]}, "fingerprint a list is not a line"),
            ({"median_us": 1.0}, "beats the roofline"),
        ],
    )
    def test_one_odd_record(self, source: Path, tmp_path: Path, change: dict[str, Any], named: str) -> None:
        file = self.make(source, tmp_path, lambda record: record.update(change))
        stderr = run("load", file, code=2)[1]
        assert named in stderr and stderr.count("\n") == 1
        assert packs.installed() == [] and "none: see `tunegemm load`" in run("db", "layers")[0]

    def test_a_pack_without_records(self, tmp_path: Path) -> None:
        content = tmp_path / "content"
        (content / "records").mkdir(parents=True)
        (content / "records" / "a.json").write_text(
            json.dumps({"format": "tunegemm-records/1", "fingerprints": {}, "records": []})
        )
        packs.write(content, tmp_path / "a.pack", toolchain={}, fingerprints=[])
        stderr = run("load", tmp_path / "a.pack", code=2)[1]
        assert "it holds no record; the pack is not used" in stderr and packs.installed() == []

    def test_a_pack_that_turns_out_bad(self, source: Path, tmp_path: Path) -> None:
        file = self.make(source, tmp_path, lambda record: None)
        pack = packs.install(file)
        assert any(record.layer == "pack" for record in read_records()[0])
        (records,) = (pack.folder / "records").glob("*.json")
        records.write_text(records.read_text().replace("2026-", "0001-"))
        packs.forget()  # as in the next process
        _, warnings = read_records()
        (warning,) = warnings
        assert str(pack.folder) in warning and "the pack is not used" in warning
        assert f"`tunegemm unload {pack.name}`" in warning
        stdout, stderr = run("db", "layers")
        assert "pack          0 records  none" in stdout and stderr.count(str(pack.folder)) == 1
        run("explain", "--shape", "64x64x64", "--device", "model:h200")
        run("unload", pack.name)
        assert packs.installed() == []

    def test_a_record_whose_candidate_lacks_parameters_is_left_out(
        self, source: Path, tmp_path: Path
    ) -> None:
        with Database.open(source, read_only=True) as database:
            records = database.records()
        further = (*KERNEL.compile_params, ("pingpong", True))
        wrong = [
            replace(one, candidate=Candidate(KERNEL.family, further, KERNEL.launch_params))
            if one.candidate.family == KERNEL.family
            else one
            for one in records
        ]
        packed = packing.pack(wrong, tmp_path / "b.pack", compile_missing=False)
        assert packed.records == 1 and packed.objects == 0
        (why,) = packed.left_out
        assert why.startswith("'pingpong' is not a compile parameter of cute_sm90")


class TestOut:
    """What is written: to regular files, descriptors, pipes and devices; with the mode that they had."""

    def test_standard_output(self, source: Path) -> None:
        done = process("db", "export", "--db", source, "--out", "/dev/stdout")
        assert json.loads(done.stdout)["format"] == "tunegemm-database/1"

    @pytest.mark.slow
    def test_a_shells_redirection_is_appended_to(self, source: Path, tmp_path: Path) -> None:
        file = tmp_path / "log"
        file.write_text("before\n")
        with file.open("a") as stream:
            process(
                "db", "export", "--db", source, "--out", "/dev/stdout", capture_output=False, stdout=stream
            )
        text = file.read_text()
        assert text.startswith("before\n{") and text.endswith("\n]}\n")

    @pytest.mark.slow
    def test_process_substitution(self, source: Path, tmp_path: Path) -> None:
        command = f"{sys.executable} -m tunegemm db export --db {source} --out >(cat > {tmp_path}/got); wait"
        done = subprocess.run(
            ["bash", "-c", command], env=environment(), capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        for _ in range(100):
            if (tmp_path / "got").exists() and (tmp_path / "got").read_text().endswith("]}\n"):
                break
            threading.Event().wait(0.05)  # for cat, which the shell does not wait for
        assert json.loads((tmp_path / "got").read_text())["format"] == "tunegemm-database/1"

    def test_the_mode_is_kept(self, source: Path, tmp_path: Path) -> None:
        out = tmp_path / "rows.json"
        out.touch(mode=0o600)
        run("db", "export", "--db", source, "--out", out)
        assert stat.S_IMODE(out.stat().st_mode) == 0o600 and out.stat().st_size > 1000

    @pytest.mark.slow
    def test_utf8_whatever_the_locale(self, source: Path, tmp_path: Path) -> None:
        with sqlite3.connect(source) as connection:
            connection.execute("UPDATE candidates SET label = 'größer'")
        out = tmp_path / "rows.json"
        latin = environment(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
        process("db", "export", "--db", source, "--out", out, env=latin)
        rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
        assert "größer" in {row.get("label") for row in rows}
        done = process("db", "import", out, "--db", tmp_path / "into.sqlite", env=latin)
        assert "4 rows added" in done.stdout, done.stderr

    @pytest.mark.parametrize(
        ("out", "named"),
        [
            ("/nowhere/x.json", "No such file or directory"),
            ("/dev/full", "No space left on device; make room"),
            (".", "Is a directory; give a file in it"),
            ("/etc/passwd/x", "Not a directory"),
        ],
    )  # fmt: skip
    def test_what_cannot_be_written(self, source: Path, out: str, named: str) -> None:
        stderr = run("db", "export", "--db", source, "--out", out, code=2)[1]
        assert named in stderr and stderr.count("\n") == 1

    @pytest.mark.parametrize("command", ["report", "leaderboard", "db export", "pack --no-compile"])
    def test_no_command_writes_over_the_database_that_it_reads(self, source: Path, command: str) -> None:
        stderr = run(*command.split(), "--db", source, "--out", source, code=2)[1]
        assert f"{source}: a database, which is never overwritten" in stderr
        with Database.open(source, read_only=True) as database:
            assert database.records()

    def test_records_into_a_file(self, source: Path, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        for folder, named in (
            (tmp_path / "file", "File exists"),
            (tmp_path / "file" / "x", "Not a directory"),
        ):
            stderr = run("db", "export", "--db", source, "--records", folder, code=2)[1]
            assert named in stderr and stderr.count("\n") == 1


class TestPlaces:
    """Paths that lead nowhere: one line with the true cause, and nothing waits for ever."""

    @pytest.mark.parametrize("command", [("db", "export", "--out", "x.json"), ("db", "import", "/dev/null")])
    def test_a_user_that_is_not_there(self, command: tuple[str, ...], tmp_path: Path) -> None:
        stderr = run(*command, "--db", "~nosuchuser/x", code=2)[1]
        if command[1] == "export":
            assert "database '~nosuchuser/x': Could not determine home directory" in stderr

    def test_a_file_whose_name_begins_as_a_users(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        with Database.open("./~x.sqlite", create=True):
            pass
        assert (tmp_path / "~x.sqlite").is_file()

    def test_a_user_that_is_not_there_in_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TUNEGEMM_DB", "~nosuchuser/x")
        assert "~nosuchuser" in run("db", "layers")[1]

    @pytest.mark.parametrize(("make", "kind"), [(os.mkfifo, "a named pipe"), (os.mkdir, "a folder")])
    def test_a_database_that_is_not_a_file(
        self, make: Callable[[Path], None], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        make(path := tmp_path / "x")
        for arguments in (
            ("export", "--out", tmp_path / "y"),
            ("import", as_file([{}], tmp_path / "r.json")),
        ):
            assert f"{path}: {kind}, not a database file" in run("db", *arguments, "--db", path, code=2)[1]
        monkeypatch.setenv("TUNEGEMM_DB", str(path))
        assert f"{path}: {kind}" in run("db", "layers")[1]

    def test_a_pipe_as_a_file_to_read(self, tmp_path: Path, into: Path) -> None:
        os.mkfifo(path := tmp_path / "x.json")
        assert "a named pipe, not a file" in run("db", "import", path, "--db", into, code=2)[1]
        assert "a named pipe, not a file" in run("load", path, code=2)[1]
        assert "a named pipe" in run("tune", "--from", path, "--device", "model:h200", code=2)[1]
        assert "a device, not a file" in run("db", "import", "/dev/zero", "--db", into, code=2)[1]

    def test_standard_input_is_read(self, rows: list[Any], tmp_path: Path, into: Path) -> None:
        with as_file(rows, tmp_path / "rows.json").open() as stream:
            done = process("db", "import", "/dev/stdin", "--db", into, stdin=stream)
        assert "4 rows added" in done.stdout, done.stderr

    @pytest.mark.slow
    def test_a_deleted_working_directory(self, source: Path, tmp_path: Path) -> None:
        gone = tmp_path / "gone"
        command = (
            f"mkdir {gone} && cd {gone} && rmdir {gone} && "
            f"{sys.executable} -P -m tunegemm db export --db {{}} --out {tmp_path}/x"
        )
        for database, code in (("there.sqlite", 2), (source, 0)):
            done = subprocess.run(
                ["bash", "-c", command.format(database)],
                env=environment(PYTHONPATH=os.pathsep.join(filter(None, sys.path))),
                capture_output=True, text=True, timeout=120,
            )  # fmt: skip
            assert done.returncode == code and "Traceback" not in done.stderr, done.stderr

    def test_a_folder_that_cannot_be_searched(self, source: Path, tmp_path: Path) -> None:
        closed = tmp_path / "closed"
        closed.mkdir()
        source.rename(closed / "a.sqlite")
        closed.chmod(0o700)
        code = (
            "import os\n"
            "from pathlib import Path\n"
            "from tunegemm.errors import TunegemmError\n"
            "from tunegemm.files import read_bytes, write_text\n"
            "from tunegemm.store import Database\n"
            f"path = Path('{closed}/a.sqlite')\n"
            "Database.open(path, create=True).close()  # what is imported then, that user need not find\n"
            f"os.chmod('{closed}', 0)\n"
            "if os.geteuid() == 0: os.setuid(65534)  # whom a folder's mode binds\n"
            "for attempt in (lambda: Database.open(path, read_only=True),\n"
            "                lambda: Database.open(path, create=True),\n"
            "                lambda: read_bytes(path), lambda: write_text(path, '')):\n"
            "    try: attempt()\n"
            "    except TunegemmError as error: print(error)\n"
        )
        for folder in (tmp_path, *tmp_path.parents):
            if folder != Path("/tmp") and folder.is_relative_to("/tmp"):
                folder.chmod(0o755)
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=120
        )
        lines = done.stdout.splitlines()
        assert len(lines) == 4, done.stderr
        assert all("Permission denied" in line or "read-only" in line for line in lines), lines
        assert not any("no such database" in line or "make room" in line for line in lines)


def test_an_error_while_rows_are_read_is_of_the_file(tmp_path: Path) -> None:
    """A file that is not of the format is one error, before anything is loaded."""
    (tmp_path / "x").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DatabaseError, match="not an export"):
        list(read(tmp_path / "x"))
    with pytest.raises(PackError, match="not a pack"):
        packs.install(tmp_path / "x", tmp_path / "packs")


def test_an_origin_of_a_strange_file_name(rows: list[Any], into: Path) -> None:
    with Database.open(into, create=True) as database:
        load(database, rows, origin="a\nb\udcff\x1b")
        assert {row["origin"] for row in dump(database) if row["kind"] != "choice"} == {"a b  "}
