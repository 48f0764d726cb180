"""What is published stays, however processes, disks and files end; and dispatch serves all the same."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import warnings
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from benchmarks import database as benchmark
from tests.store.test_database import DEVICE, FINGERPRINT, KERNEL, PROBLEM, measurement
from tests.support.durability import concurrent, killed
from tests.support.processes import environment
from tunegemm.dispatch.dispatcher import Dispatcher
from tunegemm.dispatch.planning import Planner
from tunegemm.errors import DatabaseError, TunegemmWarning
from tunegemm.store import Database
from tunegemm.store.connection import on_network
from tunegemm.store.schema import VERSION_TABLE

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.long
def test_eight_processes_publish_a_hundred_each_and_lose_none(path: Path) -> None:
    # The file does not exist yet: they race to create and migrate it, too.
    assert concurrent(path, writers=8, each=100)["kept"] == 800


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.long
def test_forty_killed_processes_leave_every_acknowledged_row(path: Path) -> None:
    found = killed(path, kills=40)
    assert (found["kills"], found["missing"], found["integrity"]) == (40, 0, "ok")
    assert found["acknowledged"] > 40


_ON_A_SMALL_DISK = """
import subprocess, sys
from pathlib import Path
from tests.store.test_durability import *
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", sys.argv[1]], check=True)
folder = Path(sys.argv[1])
ballast = folder / "ballast"
ballast.write_bytes(bytes(2_000_000))
kept = 0
with Database.open(folder / "t.sqlite", create=True) as database:
    try:
        for index in range(10_000):
            database.publish(PROBLEM, DEVICE, measurement(candidate=KERNEL.with_launch(index=index)))
            kept += 1
    except DatabaseError as error:
        print(error)
    print(len(database.measurements(PROBLEM, FINGERPRINT)) - kept)
    try:
        Database.open(folder / "other.sqlite", create=True)
    except DatabaseError as error:
        print(error)
    ballast.unlink()
    database.publish(PROBLEM, DEVICE, measurement(candidate=KERNEL.with_launch(index=kept)))
with Database.open(folder / "t.sqlite", create=True) as database:
    indices = [m.candidate["index"] for m in database.measurements(PROBLEM, FINGERPRINT)]
    print(indices == list(range(kept + 1)), kept > 50)
"""


def on_a_small_disk(program: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Runs Python that mounts one at its argument, in a name space of its own, as an ordinary user may."""
    inside = ["unshare", "--user", "--map-root-user", "--mount"]
    probe = subprocess.run([*inside, "mount", "-t", "tmpfs", "tmpfs", str(tmp_path)], capture_output=True)
    if probe.returncode:
        pytest.skip("needs user name spaces, to mount a small disk; there are none here")
    command = [*inside, sys.executable, "-c", program, str(tmp_path)]
    return subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=120)


@pytest.mark.slow
def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    done = on_a_small_disk(_ON_A_SMALL_DISK, tmp_path)
    published, difference, other, after = done.stdout.splitlines() or [done.stderr] * 4
    assert (
        "t.sqlite: the disk is full; free some space and continue: all published rows are kept" in published
    )
    assert difference == "0"
    assert "other.sqlite: the disk is full; free some space" in other
    assert after == "True True"


_WRITES_ON_A_SMALL_DISK = """
import json, subprocess, sys
from pathlib import Path
from tests.store.test_durability import *
from tests.compile.test_pool import PLANTED, key
from tunegemm.compile.artifacts import ArtifactStore
from tunegemm.cli.arguments import UsageError
from tunegemm.compile.pool import CompilePool
from tunegemm.store import exchange
from tunegemm.errors import TunegemmError
from tunegemm.files import write_text
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", sys.argv[1]], check=True)
folder = Path(sys.argv[1])
(folder / "old.json").write_text("old")
rows = [{"text": "x" * 1000}] * 100
for write in (
    lambda: exchange.write(rows, folder / "old.json"),
    lambda: write_text(folder / "old.json", json.dumps(rows), UsageError),
    lambda: write_text(folder / "new.html", json.dumps(rows), UsageError),
):
    try:
        write()
    except TunegemmError as error:
        print(error)
ballast = folder / "ballast"
with ballast.open("wb", buffering=0) as file:
    try:
        while True:
            file.write(bytes(4096))
    except OSError:
        pass
store = ArtifactStore(folder / "cache")
with CompilePool(store, workers=1, families_module=PLANTED) as pool:
    try:
        pool.submit("planted", key("a")).result()
    except TunegemmError as error:
        print(error)
ballast.unlink()
with CompilePool(store, workers=1, families_module=PLANTED) as pool:
    print(pool.submit("planted", key("a")).result().failure or "compiled")
print((folder / "old.json").read_text(), sorted(path.name for path in folder.iterdir()))
"""


@pytest.mark.slow
def test_what_a_full_disk_cannot_take_stays_as_it_was(tmp_path: Path) -> None:
    done = on_a_small_disk(_WRITES_ON_A_SMALL_DISK, tmp_path)
    old, again, new, cache, compiled, left = done.stdout.splitlines() or [done.stderr] * 6
    assert (
        "old.json: No space left on device; make room there, or choose another --out" in old and old == again
    )
    assert "new.html: No space left on device" in new
    assert "No space left on device; make room there" in cache and "TUNEGEMM_CACHE_DIR" in cache
    assert compiled == "compiled", "nothing remembers that the disk was full"
    assert left == "old ['cache', 'old.json']"


Mount = namedtuple("Mount", "mountpoint fstype")


@pytest.mark.parametrize(
    ("fstype", "expected"),
    [
        ("ext4", False),
        ("nfs4", True),
        ("lustre", True),
        ("fuse.sshfs", True),
        ("cifs", True),
        ("tmpfs", False),
    ],
)
def test_the_journal_is_chosen_by_the_kind_of_file_system(
    path: Path, monkeypatch: pytest.MonkeyPatch, fstype: str, expected: bool
) -> None:
    """No network file system can be had here: the table of mounts is a stand-in, all else is real."""
    mounts = [Mount("/", "ext4"), Mount(str(path.parent), fstype), Mount(str(path.parent / "sub"), "xfs")]
    monkeypatch.setattr("psutil.disk_partitions", lambda all: mounts)
    assert on_network(path) is expected
    with Database.open(path, create=True) as database:
        database.publish(PROBLEM, DEVICE, measurement())
        with database.engine.connect() as connection:
            mode = connection.exec_driver_sql("PRAGMA journal_mode").scalar()
            careful = connection.exec_driver_sql("PRAGMA synchronous").scalar()
    assert (mode, careful) == (("delete", 2) if expected else ("wal", 1))


def test_a_file_brought_to_a_network_file_system_leaves_write_ahead_logging(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Database.open(path, create=True) as database:
        database.publish(PROBLEM, DEVICE, measurement())
    monkeypatch.setattr("psutil.disk_partitions", lambda all: [Mount("/", "nfs4")])
    with Database.open(path, create=True) as database:
        assert [one.measurement for one in database.measurements(PROBLEM, FINGERPRINT)] == [measurement()]
        with database.engine.connect() as connection:
            assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "delete"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A database of thirty problems and their records, as one file."""
    path = tmp_path_factory.mktemp("sound") / "tuning.sqlite"
    benchmark.build(path, shapes=30, toolchains=1, measured=3)
    return path.read_bytes()


def read_everything(path: Path) -> int:
    with Database.open(path, read_only=True) as database:
        problems = database.problems()
        database.frame()
        for problem in problems[:3]:
            database.measurements(problem, benchmark.device().fingerprint)
            database.lookup().find(problem)
        return len(database.records())


@pytest.mark.parametrize("seed", range(24))
def test_a_damaged_file_is_read_around_or_named(path: Path, sound: bytes, seed: int) -> None:
    """Bits flipped, or the end cut off: never another error than ours, and nothing is written to the file."""
    chance, content = random.Random(seed), bytearray(sound)
    if seed % 3:
        for _ in range(chance.choice((1, 10, 100))):
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    else:
        del content[chance.randrange(len(content)) :]
    path.write_bytes(content)
    try:
        assert read_everything(path) <= 60
    except DatabaseError as error:
        assert str(path) in str(error) and "\n" not in str(error)
    assert path.read_bytes() == content
    try:
        Database.open(path, create=True).close()
    except DatabaseError as error:
        assert str(path) in str(error)


def test_text_that_is_no_utf8_costs_its_own_row_only(path: Path, sound: bytes) -> None:
    path.write_bytes(sound)
    with Database.open(path, read_only=True) as database:
        hurt = database.records()[0].candidate
    content = bytearray(sound)
    content[content.index(hurt.to_json().encode()) + 5] = 0xFF
    path.write_bytes(content)
    with Database.open(path, read_only=True) as database:
        readable = database.records()
        assert 50 < len(readable) < 60 and hurt not in {record.candidate for record in readable}


@pytest.mark.parametrize("fault", ["truncated", "flipped", "newer", "folder", "server"])
def test_dispatch_leaves_its_products_to_torch_with_one_warning(
    path: Path, sound: bytes, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_bytes(sound)
    location = str(path)
    if fault == "truncated":
        os.truncate(path, len(sound) // 2 + 7)
    elif fault == "flipped":
        path.write_bytes(bytes(byte ^ 0x10 for byte in sound))
    elif fault == "newer":
        from tests.support.stores import damage

        damage(path, f"UPDATE {VERSION_TABLE} SET version_num = '0999'")
    elif fault == "folder":
        path.unlink()
        path.mkdir()
    else:
        location = "postgresql://tunegemm:secret@127.0.0.1:9/nothing"
    monkeypatch.setenv("TUNEGEMM_DB", location)
    monkeypatch.setattr("platformdirs.user_data_dir", lambda name: str(path.parent / "none"))
    dispatcher = Dispatcher(Planner(device_type="cpu", find=lambda _: benchmark.device()))
    a, b = torch.ones(16, 32, dtype=torch.bfloat16), torch.ones(32, 64, dtype=torch.bfloat16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            assert torch.equal(dispatcher.matmul(a, b), torch.matmul(a, b))
    said = [str(w.message) for w in caught if issubclass(w.category, TunegemmWarning)]
    named = [line for line in said if path.name in line or "127.0.0.1" in line]
    assert len(named) == 1 and "secret" not in named[0]


def test_a_server_that_cannot_be_used_is_named(postgres) -> None:
    with pytest.raises(DatabaseError, match=r"no such database; create it with `createdb`"):
        Database.open(postgres.url("missing"), create=True)
    with pytest.raises(DatabaseError, match=r"rejects this user or password; check the URL"):
        Database.open(postgres.url("postgres").replace("tunegemm@", "nobody-known:secret@"), create=True)
    with pytest.raises(DatabaseError, match=r"check the address and that the server is running") as caught:
        Database.open("postgresql://tunegemm:secret@127.0.0.1:9/nothing", create=True)
    assert "secret" not in str(caught.value)


def test_a_server_that_went_away_and_came_back(postgres) -> None:
    url = postgres.create()
    with Database.open(url, create=True) as database:
        database.publish(PROBLEM, DEVICE, measurement())
        postgres.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            f" WHERE datname = '{url.rpartition('/')[2]}'"
        )
        database.publish(PROBLEM, DEVICE, measurement(candidate=KERNEL.kernel))
        assert len(database.measurements(PROBLEM, FINGERPRINT)) == 2
    postgres.drop(url)


def test_a_copy_is_a_database(path: Path, tmp_path: Path) -> None:
    with Database.open(path, create=True) as database:
        database.publish(PROBLEM, DEVICE, measurement())
    shutil.copy(path, tmp_path / "copy.sqlite")
    with Database.open(tmp_path / "copy.sqlite", read_only=True) as database:
        assert [one.measurement for one in database.measurements(PROBLEM, FINGERPRINT)] == [measurement()]
