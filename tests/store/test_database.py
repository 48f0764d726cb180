"""The store: what is published is kept, by whom and however the process ends; what is damaged is named."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, insert, make_url

from tests.support.processes import environment, loaded_after
from tests.support.stores import Location, Store, damage
from tunegemm.compile.ptxas import Resources
from tunegemm.describe.architectures import PARTS
from tunegemm.describe.device import Device, Fingerprint, device_from_part
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.describe.stored import cells_of, document_of
from tunegemm.errors import DatabaseError
from tunegemm.generate import families
from tunegemm.measure.outcome import Failure, Measurement
from tunegemm.store import Database, Record
from tunegemm.store.connection import display, reason_of, without_passwords
from tunegemm.store.schema import OLDEST_SCHEMA, SCHEMA_VERSION, VERSION_TABLE

FINGERPRINT = Fingerprint(
    "NVIDIA H200", 132, "9.0", "", 132, "580.159.04", "13.0", "2.11.0", "4.8.1", "3.6.0"
)
DEVICE = device_from_part("cuda:0", PARTS["h200"], FINGERPRINT)
PROBLEM = Problem.parse("4096x4096x4096")
KERNEL = families.completed(
    Candidate.make("cute_sm90", {"tile_m": 128, "tile_n": 256, "epi_n": 32}, {"raster_order": "along_m"})
)
SCHEMAS = sorted(
    path.stem.removeprefix("schema-") for path in (Path(__file__).parents[1] / "data").glob("schema-*.sqlite")
)
RESOURCES = Resources(168, 0, 213_016, ("C7510",), 0.75)


def measurement(ratio: float = 1.05, candidate: Candidate = KERNEL, **changes: Any) -> Measurement:
    baseline = (210.5, 211.25, 209.0, 210.0)
    samples = tuple(time / ratio for time in baseline)
    telemetry = {"sm_clock_mhz": 1710, "power_w": 688.5, "throttle_reasons": ("sw_power_cap",), "rounds": 4}
    return dataclasses.replace(Measurement(candidate, samples, baseline, 1.7e-3, 0.002, telemetry), **changes)


class TestPublishing(Store):
    def test_a_measurement_reads_back_as_it_was(self, database: Database) -> None:
        published = measurement()
        database.publish(PROBLEM, DEVICE, published, resources=RESOURCES, label="pp128x256")
        (read,) = database.measurements(PROBLEM, FINGERPRINT)
        assert read.measurement == published
        assert read.telemetry == published.telemetry
        row = database.frame().iloc[0]
        assert (row["registers"], row["spill_bytes"], row["smem_bytes"]) == (168, 0, 213_016)
        assert row["warnings"] == ["C7510"]
        assert row["compile_seconds"] == 0.75

    def test_a_failure_reads_back_and_makes_no_record(self, database: Database) -> None:
        failure = Failure(KERNEL, "timeout", "no answer within 10 s")
        database.publish(PROBLEM, DEVICE, failure)
        assert database.failures(PROBLEM, FINGERPRINT) == [failure]
        assert database.best(PROBLEM, FINGERPRINT) is None
        assert database.problems() == []

    def test_history_is_kept_per_problem_and_fingerprint(self, database: Database) -> None:
        other_problem = dataclasses.replace(PROBLEM, out_dtype="fp32")
        other_fingerprint = dataclasses.replace(FINGERPRINT, driver="590.00")
        database.publish(PROBLEM, DEVICE, measurement(1.01))
        database.publish(PROBLEM, DEVICE, measurement(1.02))
        database.publish(other_problem, DEVICE, measurement(1.03))
        other_device = dataclasses.replace(DEVICE, fingerprint=other_fingerprint)
        database.publish(PROBLEM, other_device, measurement(1.04))
        assert [round(m.ratio, 2) for m in database.measurements(PROBLEM, FINGERPRINT)] == [1.01, 1.02]
        assert len(database.records()) == 3
        assert len(database.records(FINGERPRINT)) == 2
        assert database.problems() == sorted([PROBLEM, other_problem])
        assert sorted(database.lookup().problems()) == sorted(map(cells_of, database.problems()))
        assert [record.ratio for record in database.records(other_fingerprint)] == [pytest.approx(1.04)]

    def test_odd_evidence_is_kept_rather_than_lost(self, database: Database) -> None:
        numpy = pytest.importorskip("numpy")
        telemetry = {
            "sm_clock_mhz": (1700, 1725),  # no number: stays with the rest
            "power_w": numpy.float32(1.5),
            "temperature_c": float("nan"),
            "path": Path("x"),
        }
        database.publish(PROBLEM, DEVICE, measurement(telemetry=telemetry))
        read = database.measurements(PROBLEM, FINGERPRINT)[0].telemetry
        assert read == {"sm_clock_mhz": [1700, 1725], "power_w": 1.5, "temperature_c": None, "path": "x"}

    @pytest.mark.parametrize(
        "changes",
        [
            {"samples_us": ()},
            {"samples_us": (1.0,)},
            {"samples_us": (1.0, 2.0, float("nan"), 3.0)},
            {"samples_us": (1.0, 2.0, 0.0, 3.0)},
            {"relative_error": float("inf")},
        ],
    )
    def test_what_is_no_measurement_is_refused_and_leaves_nothing(
        self, database: Database, changes: dict[str, Any]
    ) -> None:
        with pytest.raises(DatabaseError, match=r"samples|finite"):
            database.publish(PROBLEM, DEVICE, measurement(**changes))
        assert database.frame().empty

    @pytest.mark.parametrize("spec", ["replay:h200", "model:h200"])
    def test_only_a_real_device_is_stored(self, database: Database, spec: str) -> None:
        device = dataclasses.replace(DEVICE, spec=spec)
        with pytest.raises(DatabaseError, match=f"{spec}.*cuda:N"):
            database.publish(PROBLEM, device, measurement())
        with pytest.raises(DatabaseError, match=spec):
            database.confirm(PROBLEM, device, measurement())
        assert database.frame().empty


class TestRecords(Store):
    def test_a_confirmed_record_yields_only_to_another_final_race(self, database: Database) -> None:
        database.publish(PROBLEM, DEVICE, measurement(1.09))
        database.confirm(PROBLEM, DEVICE, measurement(1.04, KERNEL.kernel))
        database.publish(PROBLEM, DEVICE, measurement(1.20))
        confirmed = database.best(PROBLEM, FINGERPRINT)
        assert confirmed is not None and confirmed.confirmed
        assert confirmed.candidate == KERNEL.kernel
        database.confirm(PROBLEM, DEVICE, measurement(1.01))
        again = database.best(PROBLEM, FINGERPRINT)
        assert again is not None and again.candidate == KERNEL
        assert len(database.measurements(PROBLEM, FINGERPRINT)) == 4

    def test_confirming_what_the_race_published_adds_no_second_row(self, database: Database) -> None:
        raced = measurement(1.05)
        database.publish(PROBLEM, DEVICE, measurement(1.06), method="race")
        row_id = database.publish(PROBLEM, DEVICE, raced, method="race")
        assert database.confirm(PROBLEM, DEVICE, raced, stored_as=row_id) == row_id
        assert len(database.measurements(PROBLEM, FINGERPRINT)) == 2
        record = database.best(PROBLEM, FINGERPRINT)
        assert record is not None and record.confirmed and record.ratio == pytest.approx(1.05)

    def test_what_is_confirmed_is_of_that_problem_device_and_candidate(self, database: Database) -> None:
        row_id = database.publish(PROBLEM, DEVICE, measurement())
        failed = database.publish(PROBLEM, DEVICE, Failure(KERNEL.kernel, "crash", "x"))
        smaller = dataclasses.replace(PROBLEM, m=64)
        for problem, one, stored_as in (
            (smaller, measurement(), row_id),
            (PROBLEM, measurement(1.05, KERNEL.kernel), row_id),
            (PROBLEM, measurement(), row_id + 1),
            (PROBLEM, measurement(1.05, KERNEL.kernel), failed),
        ):
            with pytest.raises(DatabaseError, match="does not belong to this candidate, problem and device"):
                database.confirm(problem, DEVICE, one, stored_as=stored_as)
        record = database.best(PROBLEM, FINGERPRINT)
        assert record is not None and not record.confirmed

    @pytest.mark.parametrize(
        "statement",
        [
            "UPDATE candidates SET json = '{' WHERE family = 'bad'",
            "UPDATE candidates SET json = replace(json, '\"x\":1', '\"x\":2') WHERE family = 'bad'",
            "UPDATE problems SET in_dtype = 'int3' WHERE m = 64",
            "UPDATE measurements SET created_at = 'yesterday' WHERE id = 1",
        ],
    )
    def test_a_damaged_row_is_skipped_and_logged(
        self, location: Location, database: Database, statement: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        small = Problem.parse("64x64x64")
        database.publish(small, DEVICE, measurement(candidate=Candidate.make("bad", {"x": 1})))
        database.publish(PROBLEM, DEVICE, measurement())
        damage(location, statement)
        assert [record.problem for record in database.records()] == [PROBLEM]
        assert database.best(small, FINGERPRINT) is None
        assert "skipped 1 unreadable record" in caplog.text

    @pytest.mark.slow
    def test_many_records_are_read_quickly(self, database: Database) -> None:
        # 5,000 rows: 0.05 s here, the bound is for a busy machine.
        from tunegemm.store.models import MeasurementRow, ProblemRow, RecordRow

        database.publish(PROBLEM, DEVICE, measurement())
        with database.engine.connect() as connection, connection.begin():
            first = dict(connection.execute(MeasurementRow.__table__.select()).mappings().one())
            keys = range(2, 5_001)
            problem = document_of(PROBLEM)
            connection.execute(insert(ProblemRow), [{**problem, "id": key, "m": 4096 + key} for key in keys])
            connection.execute(
                insert(MeasurementRow), [{**first, "id": key, "problem_id": key} for key in keys]
            )
            link = {"fingerprint_id": 1, "confirmed": True, "chosen_at": first["created_at"]}
            link |= {name: first[name] for name in ("candidate_id", "ratio", "kernel_source")}
            connection.execute(
                insert(RecordRow),
                [{**link, "id": key, "problem_id": key, "measurement_id": key} for key in keys],
            )
        begin = time.thread_time()  # of the reader; a busy machine takes as long again
        records = database.records(FINGERPRINT)
        assert time.thread_time() - begin < 0.75
        assert len({record.problem for record in records}) == 5_000


class TestFrame(Store):
    def test_the_confirmed_row_is_shown_whatever_follows(self, database: Database) -> None:
        database.confirm(PROBLEM, DEVICE, measurement(1.05))
        database.publish(PROBLEM, DEVICE, measurement(1.01), method="final")
        (row,) = database.frame().to_dict("records")
        assert row["confirmed"] is True and row["record"] is True
        assert row["ratio"] == pytest.approx(1.05)

    def test_filters(self, database: Database) -> None:
        other = dataclasses.replace(
            DEVICE, fingerprint=dataclasses.replace(FINGERPRINT, device_name="NVIDIA H100 NVL")
        )
        database.publish(PROBLEM, DEVICE, measurement())
        database.publish(PROBLEM, DEVICE, measurement(candidate=Candidate.make("cublaslt", {"algorithm": 1})))
        database.publish(Problem.parse("64x64x64"), other, measurement())
        assert len(database.frame()) == 3
        assert len(database.frame(PROBLEM)) == 2
        assert list(database.frame(family="cublaslt")["family"]) == ["cublaslt"]
        assert database.frame(Problem.parse("8x8x8")).empty
        assert list(database.frame(Problem.parse("8x8x8")).columns) == list(database.frame().columns)


def hold_lock(path: str) -> None:
    """Until a line comes in."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    print("holding", flush=True)
    sys.stdin.readline()
    connection.execute("ROLLBACK")
    connection.close()


def child(call: str) -> subprocess.Popen[str]:
    """Another process that evaluates a call of one of the functions above, in this very file."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, __file__, call], env=environment(), **pipes)


class TestProcesses:
    def test_a_writer_waits_for_another_and_a_reader_does_not(self, database: Database, path: Path) -> None:
        database.publish(PROBLEM, DEVICE, measurement(1.01))
        process = child(f"hold_lock({str(path)!r})")
        assert process.stdout is not None and process.stdout.readline() == "holding\n"
        assert database.best(PROBLEM, FINGERPRINT) is not None
        with ThreadPoolExecutor() as pool:
            written = pool.submit(database.publish, PROBLEM, DEVICE, measurement(1.02))
            with pytest.raises(TimeoutError):
                written.result(timeout=0.3)
            process.communicate("now\n", timeout=30)
            written.result(timeout=30)
        assert len(database.measurements(PROBLEM, FINGERPRINT)) == 2

    def test_threads_share_a_database(self, database: Database) -> None:
        def publish(thread: int) -> None:
            for index in range(20):
                database.publish(
                    PROBLEM, DEVICE, measurement(candidate=KERNEL.with_launch(t=thread, i=index))
                )

        threads = [threading.Thread(target=publish, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(database.measurements(PROBLEM, FINGERPRINT)) == 80


class TestOpening:
    def test_a_sqlite_url_is_a_path(self, path: Path) -> None:
        with Database.open(f"sqlite:///{path}", create=True) as database:
            assert database.location == path

    def test_a_path_with_odd_letters(self, tmp_path: Path) -> None:
        path = tmp_path / "a folder" / "50% ?mode=memory#ä.sqlite"
        with Database.open(path, create=True) as database:
            database.publish(PROBLEM, DEVICE, measurement())
        assert path.stat().st_size > 0

    @pytest.mark.parametrize("location", ["sqlite://", "sqlite:///:memory:"])
    def test_memory_is_refused(self, location: str) -> None:
        with pytest.raises(DatabaseError, match=f"{location}: .* lost at exit; give a path"):
            Database.open(location, create=True)

    @pytest.mark.parametrize(
        ("location", "shown"),
        [
            ("postgresql://me:s%3Acret@host/db", "postgresql://me:***@host/db"),
            (
                "postgresql://host/db?PASSWORD=s%3Acret&sslmode=require",
                "host/db?PASSWORD=...&sslmode=require",
            ),
            ("postgresql://me:s%3Acret@host:no-port/db", "postgresql://..."),
            ("/folder/a file", "/folder/a file"),
        ],
    )
    def test_a_location_in_a_message(self, location: str, shown: str) -> None:
        assert display(location).endswith(shown)
        said = without_passwords(f"cannot reach {location}, which says s:cret", location)
        assert "s%3Acret" not in said and (
            "s:cret" not in said or "no-port" in location or location[0] == "/"
        )

    @pytest.mark.parametrize(
        ("state", "said", "explained"),
        [
            (
                "42501",
                "permission denied\nDETAIL",
                r"this user lacks the right to do that on the server; .* \(permission denied\)",
            ),
            ("", 'FATAL: role "me" is not permitted', r'user or password; .* \(role "me" is not permitted\)'),
            ("", 'FATAL: database "x" does not exist', r"createdb` \(database"),
            ("57P01", "FATAL: terminating", r"shutting down; try again \(terminating\)"),
            ("", "connection refused", "^connection refused; check the address"),
            ("", "FATAL: something else", "^FATAL: something else; check the address"),
        ],
    )
    def test_what_a_server_says_is_explained(self, state: str, said: str, explained: str) -> None:
        error = type("Error", (Exception,), {"sqlstate": state})(said)
        assert re.search(explained, reason_of(make_url("postgresql://host/db"), error))

    def test_a_server_of_another_kind_is_named_without_its_password(self) -> None:
        with pytest.raises(DatabaseError, match=r"nosuchserver://\.\.\.: unknown kind of database") as caught:
            Database.open("nosuchserver://user:secret@host/tunegemm", create=True)
        assert "secret" not in str(caught.value)
        # The last one's host would be its password's end.
        for url in ("postgresql://user:secret@host:no-port/x", "postgresql://user:a@secret@host/x"):
            with pytest.raises(DatabaseError, match=r"not a URL; .* @ of the password is %40") as caught:
                Database.open(url, create=True)
            assert "secret" not in str(caught.value)

    def test_a_missing_file_is_not_created_by_a_reader(self, path: Path) -> None:
        with pytest.raises(DatabaseError, match=f"{path}: no such database; `tunegemm tune`"):
            Database.open(path, read_only=True)
        assert not path.exists()

    def test_a_folder_that_cannot_be_made(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(DatabaseError, match="while creating its folder; choose another path"):
            Database.open(tmp_path / "file" / "x" / "tuning.sqlite", create=True)

    @pytest.mark.parametrize("read_only", [False, True])
    def test_what_is_no_database_is_left_alone(self, path: Path, read_only: bool) -> None:
        text = b"shape,median_us\n" * 100
        path.write_bytes(text)
        with pytest.raises(DatabaseError, match=f"{path}: not a SQLite database; choose another path"):
            Database.open(path, read_only=read_only)
        assert path.read_bytes() == text

    @pytest.mark.parametrize("read_only", [False, True])
    def test_a_truncated_file(self, path: Path, read_only: bool) -> None:
        with Database.open(path, create=True) as database:
            database.publish(PROBLEM, DEVICE, measurement())
        os.truncate(path, path.stat().st_size // 2)
        with pytest.raises(DatabaseError, match=f"{path}: the database is damaged; .*recover"):
            Database.open(path, read_only=read_only)

    def test_damage_met_later_is_named_too(self, path: Path) -> None:
        with Database.open(path, create=True) as database:
            for index in range(50):
                database.publish(PROBLEM, DEVICE, measurement(candidate=KERNEL.with_launch(index=index)))
        content = bytearray(path.read_bytes())
        page = content.index(b"sw_power_cap") // 4096 * 4096
        content[page : page + 4096] = b"\xa5" * 4096
        path.write_bytes(content)
        with Database.open(path, create=True) as database:
            for read in (database.frame, lambda: database.measurements(PROBLEM, FINGERPRINT)):
                with pytest.raises(DatabaseError, match=f"{path}: the database is damaged"):
                    read()

    @pytest.mark.parametrize("read_only", [False, True])
    def test_another_programs_database_is_left_alone(self, path: Path, read_only: bool) -> None:
        connection = sqlite3.connect(path)
        connection.execute("CREATE TABLE alembic_version (version_num)")
        connection.close()
        before = path.read_bytes()
        with pytest.raises(DatabaseError, match=f"{path}: a database of another program .*'alembic_version'"):
            Database.open(path, read_only=read_only)
        assert path.read_bytes() == before

    def test_a_reader_neither_writes_nor_publishes(self, path: Path) -> None:
        with Database.open(path, create=True) as database:
            database.publish(PROBLEM, DEVICE, measurement())
        before = path.read_bytes()
        with Database.open(path, read_only=True) as database:
            assert isinstance(database.best(PROBLEM, FINGERPRINT), Record)
            with pytest.raises(DatabaseError, match="opened read-only"):
                database.publish(PROBLEM, DEVICE, measurement())
        assert path.read_bytes() == before

    def test_an_empty_file_is_no_database_to_a_reader(self, path: Path) -> None:
        path.touch()
        with pytest.raises(DatabaseError, match=r"schema \(none\)"):
            Database.open(path, read_only=True)
        Database.open(path, create=True).close()
        Database.open(path, read_only=True).close()

    def test_write_ahead_log_where_it_can_be_had(self, database: Database, path: Path) -> None:
        assert sqlite3.connect(path).execute("PRAGMA journal_mode").fetchone() == ("wal",)

    def test_rollback_journal_where_memory_cannot_be_shared(self, path: Path) -> None:
        # A folder of that name keeps SQLite from making the shared-memory file, as some file systems do.
        path.with_name(path.name + "-shm").mkdir()
        with Database.open(path, create=True) as database:
            database.publish(PROBLEM, DEVICE, measurement())
        with Database.open(path, read_only=True) as database:
            assert database.best(PROBLEM, FINGERPRINT) is not None
        assert sqlite3.connect(path).execute("PRAGMA journal_mode").fetchone() == ("delete",)

    def test_foreign_keys_hold(self, database: Database) -> None:
        from tunegemm.store.models import FailureRow

        with pytest.raises(Exception, match="FOREIGN KEY"), database.engine.begin() as connection:
            row = {"stage": "crash", "reason": "", "created_at": None, "problem_id": 7, "candidate_id": 7}
            from datetime import UTC, datetime

            connection.execute(
                insert(FailureRow), [{**row, "fingerprint_id": 7, "created_at": datetime.now(UTC)}]
            )

    def test_a_full_disk_is_named_and_nothing_is_lost(self, path: Path) -> None:
        with Database.open(path, create=True) as database:
            database.publish(PROBLEM, DEVICE, measurement())
        with Database.open(path, create=True) as database:
            pages = path.stat().st_size // 4096 + 5
            event.listen(
                database.engine, "begin", lambda c: c.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
            )
            kept = 1
            with pytest.raises(DatabaseError, match=f"{path}: the disk is full; free some space"):
                for index in range(200):
                    database.publish(PROBLEM, DEVICE, measurement(candidate=KERNEL.with_launch(index=index)))
                    kept += 1
            assert len(database.measurements(PROBLEM, FINGERPRINT)) == kept > 1


def _as_nobody(path: Path, mode: str) -> str:
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    read_only = mode == "ro"
    try:
        with Database.open(path, read_only=read_only, create=not read_only) as database:
            return f"records: {len(database.records())}"
    except DatabaseError as error:
        return f"error: {error}"


class TestPermissions:
    """In a fork that has given up root's rights, where it had them: to root nothing is read-only."""

    @pytest.fixture
    def folder(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory() as name:  # not tmp_path, whose parents only its owner may enter
            folder = Path(name)
            with Database.open(folder / "t.sqlite", create=True) as database:
                database.publish(PROBLEM, DEVICE, measurement())
            yield folder
            folder.chmod(0o755)

    def run(self, path: Path, mode: str) -> str:
        import alembic.command  # noqa: F401 - which nobody may not be able to read

        with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as child:
            return child.submit(_as_nobody, path, mode).result(60)

    def test_a_reader_works_in_a_read_only_folder(self, folder: Path) -> None:
        (folder / "t.sqlite").chmod(0o444)
        folder.chmod(0o555)
        assert self.run(folder / "t.sqlite", "ro") == "records: 1"
        assert [file.name for file in folder.iterdir()] == ["t.sqlite"]

    def test_a_writer_names_a_read_only_folder(self, folder: Path) -> None:
        folder.chmod(0o555)
        assert f"t.sqlite: {folder} is read-only; change" in self.run(folder / "t.sqlite", "rw")
        assert f"new.sqlite: {folder} is read-only; change" in self.run(folder / "new.sqlite", "rw")
        assert "while creating its folder" in self.run(folder / "sub" / "new.sqlite", "rw")

    def test_a_writer_names_a_read_only_file(self, folder: Path) -> None:
        (folder / "t.sqlite").chmod(0o444)
        folder.chmod(0o777)
        assert "t.sqlite is read-only; change its permissions" in self.run(folder / "t.sqlite", "rw")

    @pytest.mark.parametrize("mode", ["ro", "rw"])
    def test_a_file_one_may_not_read(self, folder: Path, mode: str) -> None:
        (folder / "t.sqlite").chmod(0o000)
        folder.chmod(0o755)
        assert "t.sqlite: no permission to read it; change its permissions" in self.run(
            folder / "t.sqlite", mode
        )


class TestReleasedSchemas:
    def test_there_is_one_of_every_schema(self) -> None:
        released = range(int(OLDEST_SCHEMA), int(SCHEMA_VERSION) + 1)
        assert [f"{number:04}" for number in released] == SCHEMAS

    @pytest.mark.parametrize("version", SCHEMAS)
    def test_a_database_of_that_schema_is_read(self, path: Path, version: str) -> None:
        shutil.copy(Path(__file__).parents[1] / "data" / f"schema-{version}.sqlite", path)
        with Database.open(path, create=True) as database:
            (problem,) = database.problems()
            assert str(problem) == "4096x4096x4096 bf16 tn"
            (record,) = database.records()
            assert record.confirmed and record.label == "pp128x256" and record.ratio == pytest.approx(1.05)
            first, second, final = database.measurements(problem, record.fingerprint)
            assert final.candidate == first.candidate == record.candidate != second.candidate
            assert final.telemetry["throttle_reasons"] == ("sw_power_cap",)
            (failure,) = database.failures(problem, record.fingerprint)
            assert (failure.stage, failure.reason) == ("timeout", "no answer within 10 s")
            database.publish(problem, DEVICE, measurement())
        connection = sqlite3.connect(path)
        assert connection.execute(f"SELECT version_num FROM {VERSION_TABLE}").fetchall() == [
            (SCHEMA_VERSION,)
        ]
        connection.close()


def test_the_package_loads_without_sqlalchemy() -> None:
    assert not {"sqlalchemy", "alembic", "pandas"} & loaded_after("import tunegemm.store")


def test_opening_a_current_database_does_not_load_alembic(path: Path) -> None:
    Database.open(path, create=True).close()
    code = "import sys; from tunegemm.store import Database; Database.open(sys.argv[1], create=True)"
    assert "alembic" not in loaded_after(code, str(path))


def write_sample(path: Path, device: Device = DEVICE) -> None:
    """How tests/data/schema-NNNN.sqlite was made, by the version of that schema."""
    with Database.open(path, create=True) as database:
        database.publish(PROBLEM, device, measurement(1.04), resources=RESOURCES, label="pp128x256")
        database.publish(
            PROBLEM, device, measurement(0.97, KERNEL.kernel), resources=RESOURCES, label="co128x256"
        )
        database.publish(
            PROBLEM, device, Failure(KERNEL.with_launch(clusters=7), "timeout", "no answer within 10 s")
        )
        database.confirm(PROBLEM, device, measurement(1.05), resources=RESOURCES, label="pp128x256")


if __name__ == "__main__":
    eval(sys.argv[1])


def test_a_name_that_is_misspelt_creates_nothing(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "tuning.sqlite"
    with pytest.raises(DatabaseError, match=r"tuning\.sqlite: no such database; create=True"):
        Database.open(path)
    assert not path.parent.exists()
    with Database.open(path, create=True) as database:
        assert repr(database) == f"<tunegemm.Database {path}>"
    with Database.open(path, read_only=True) as database:
        assert repr(database) == f"<tunegemm.Database {path}, read-only>"
