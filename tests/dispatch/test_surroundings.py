"""First products where the surroundings are broken: torch's product, soon, and one warning of the remedy."""

from __future__ import annotations

import functools
import json
import math
import os
import shutil
import socket
import sqlite3
import sys
import threading
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import tunegemm
from tests.support.forks import Forks
from tests.support.serving import Row, dispatcher_of, operands, quietly
from tunegemm.choose.policies import Policy
from tunegemm.choose.snapshot import Snapshot
from tunegemm.describe.problem import Problem
from tunegemm.dispatch.dispatcher import Dispatcher
from tunegemm.dispatch.launchers import Prepared
from tunegemm.dispatch.planning import READ_SECONDS, Planner
from tunegemm.errors import TunegemmWarning
from tunegemm.store import Database
from tunegemm.store.layers import modified, read_records
from tunegemm.store.waiting import deadline_s

PACKAGE = Path(tunegemm.__file__).parent

#: Products of CPU tensors, planned as an H200's by whatever this process finds; one line of JSON at the end.
PROGRAM = """
import json, logging, sys, time, warnings
import torch, tunegemm
from tunegemm.describe.device import find_device
from tunegemm.dispatch import api
from tunegemm.dispatch.dispatcher import Dispatcher
from tunegemm.dispatch.planning import Planner
device = find_device("model:h200")
api.serve_by(Dispatcher(Planner(device_type="cpu", find=lambda spec: device)))
a = torch.ones(8, 8, dtype=torch.bfloat16)
tunegemm.matmul, tunegemm.linear  # loaded
{prelude}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    start = time.perf_counter()
    results = [tunegemm.matmul(a, a).sum().item(), tunegemm.linear(a, a, a[0]).sum().item()]
    seconds = time.perf_counter() - start
{end}
print(json.dumps({{"results": results, "seconds": seconds, "said": [str(one.message) for one in caught]}}))
"""


FirstProduct = Callable[..., dict]


@pytest.fixture
def first_product(forks: Forks, tmp_path: Path) -> FirstProduct:
    """What a program's first products give, in an environment of its own; None takes a variable away."""
    return functools.partial(_first_product, forks, tmp_path)


def _first_product(
    forks: Forks, tmp_path: Path, prelude: str = "", end: str = "", **changes: str | None
) -> dict:
    own = {
        "HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path / "data"), "XDG_CACHE_HOME": str(tmp_path / "c"),
        "TUNEGEMM_DB": str(tmp_path / "own.sqlite"), "TUNEGEMM_CACHE_DIR": str(tmp_path / "c" / "k"),
        "PYTHONPATH": str(PACKAGE.parent),
    }  # fmt: skip
    environment = {k: v for k, v in (os.environ | own | changes).items() if v is not None}
    run = forks.run(PROGRAM.format(prelude=prelude, end=end), env=environment, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["results"] == [512.0, 576.0]
    return found


# No home, no data, no descriptors


NO_ENTRY = "import pwd\ndef none(uid): raise KeyError(uid)\npwd.getpwuid = none"
HOMELESS = {"HOME": None, "XDG_DATA_HOME": None, "XDG_CACHE_HOME": None}


UNNAMED = {"TUNEGEMM_DB": None, "TUNEGEMM_CACHE_DIR": None}


@pytest.mark.parametrize(
    ("prelude", "changes"),
    [(NO_ENTRY, HOMELESS | UNNAMED), (NO_ENTRY, HOMELESS), ("", dict.fromkeys(HOMELESS, "file") | UNNAMED)],
    ids=["none", "none, database and cache named", "a file"],
)
def test_without_a_home(
    tmp_path: Path, first_product: FirstProduct, prelude: str, changes: dict[str, str | None]
) -> None:
    """What ships serves on, and the miss is what it would be anywhere."""
    Database.open(tmp_path / "own.sqlite", create=True).close()
    (tmp_path / "file").touch()
    changes = {name: value and str(tmp_path / value) for name, value in changes.items()}
    said = first_product(prelude, **changes)["said"]
    assert len(said) == 2 and all("Tune it with" in line for line in said)
    assert not (tmp_path / "~").exists()


def test_what_was_asked_for_without_a_home_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from tunegemm.compile.artifacts import ArtifactStore
    from tunegemm.errors import ArtifactError, DatabaseError

    for name in ("TUNEGEMM_DB", "TUNEGEMM_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    for folder in ("data", "cache"):
        monkeypatch.setattr(f"platformdirs.user_{folder}_dir", lambda name: f"~/.local/{name}")
    with pytest.raises(DatabaseError, match=r"no home folder.*choose another path"):
        Database.open()
    with pytest.raises(ArtifactError, match=r"no home folder.*TUNEGEMM_CACHE_DIR"):
        ArtifactStore().scratch()
    assert modified() and read_records()[1] == []


def without_data(folder: Path) -> Path:
    """The package with its bytecode: to compile it again takes longer than to import it."""
    left_out = shutil.ignore_patterns("db", "search_spaces")
    return Path(shutil.copytree(PACKAGE, folder / "app" / "tunegemm", ignore=left_out))


def test_a_package_without_its_data(tmp_path: Path, first_product: FirstProduct) -> None:
    app = without_data(tmp_path).parent
    said = first_product(PYTHONPATH=str(app), TUNEGEMM_DB=None)["said"]
    assert len(said) == 1 and "db/records" in said[0] and "--collect-all tunegemm" in said[0]


def test_a_package_in_a_zip(tmp_path: Path, first_product: FirstProduct) -> None:
    app = without_data(tmp_path)
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        for path in app.rglob("*.py"):
            archive.write(path, path.relative_to(app.parent))
    shutil.rmtree(app)
    Database.open(tmp_path / "own.sqlite", create=True).close()
    said = first_product(PYTHONPATH=str(tmp_path / "app.zip"))["said"]
    assert len(said) == 1 and "db/records" in said[0]


@pytest.mark.parametrize("name", ["selector.toml", "invariant.toml", "order.json", "predictions-h200.jsonl"])
def test_truncated_data(tmp_path: Path, first_product: FirstProduct, name: str) -> None:
    app = without_data(tmp_path)
    data = next(place for place in (PACKAGE / "db", PACKAGE.parent / "db") if place.is_dir())
    shutil.copytree(data, app / "db", ignore=shutil.ignore_patterns("kernels", "sweeps", "records"))
    (app / "db" / "records").mkdir()
    os.truncate(app / "db" / name, 100)
    said = first_product(PYTHONPATH=str(app.parent), TUNEGEMM_DB=None)["said"]
    assert all("Tune it with" in line or "predict" in line or "planning failed" in line for line in said)


def test_without_descriptors(first_product: FirstProduct) -> None:
    """More are not to be had at the first product."""
    prelude = "import os, resource; resource.setrlimit(resource.RLIMIT_NOFILE, (3, 1024))"
    end = "resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))"
    said = first_product(prelude, end)["said"]
    assert len(said) == 1 and "oo many open files" in said[0]


# Databases that do not answer


@contextmanager
def said() -> Iterator[list[str]]:
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    found += [str(one.message) for one in caught if issubclass(one.category, TunegemmWarning)]


def in_time(dispatcher: Dispatcher) -> list[str]:
    """What is said of products that come no later than reading may wait, and what imports take."""
    import psycopg  # noqa: F401
    import sqlalchemy.orm  # noqa: F401

    a, b = operands()
    start = time.monotonic()
    with said() as lines:
        for m in (32, 16, 8):
            assert torch.equal(dispatcher.matmul(a[:m], b), torch.matmul(a[:m], b))
    assert time.monotonic() - start < READ_SECONDS + 3
    return lines


@contextmanager
def locked(path: Path) -> Iterator[None]:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    connection.execute("BEGIN EXCLUSIVE")
    yield
    connection.close()


def test_a_locked_database_is_not_waited_for(tmp_path, monkeypatch):
    path = tmp_path / "locked.sqlite"
    Database.open(path, create=True).close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
    monkeypatch.setenv("TUNEGEMM_DB", str(path))
    with locked(path):
        (line,) = in_time(dispatcher_of())
    assert "locked by another process" in line and str(path) in line
    with locked(path), pytest.MonkeyPatch.context() as policy:
        policy.setenv("TUNEGEMM_POLICY", "deterministic")
        assert len(in_time(dispatcher_of())) == 1


class Silent:
    """A server that takes connections and says nothing."""

    def __enter__(self) -> int:
        self._socket = socket.create_server(("127.0.0.1", 0))
        return self._socket.getsockname()[1]

    def __exit__(self, *_: object) -> None:
        self._socket.close()


def test_a_server_that_says_nothing_is_not_waited_for(monkeypatch):
    pytest.importorskip("psycopg")
    with Silent() as first, Silent() as second:
        hosts = f"host=127.0.0.1:{first}&host=127.0.0.1:{second}"
        monkeypatch.setenv("TUNEGEMM_DB", f"postgresql://user:secret@/db?{hosts}&connect_timeout=60")
        (line,) = in_time(dispatcher_of())
    assert "no answer in time; check the address" in line and "secret" not in line


def test_tables_that_are_locked_are_not_waited_for(postgres, monkeypatch):
    url = postgres.create()
    Database.open(url, create=True).close()
    import psycopg

    with psycopg.connect(url) as connection:
        connection.execute("LOCK TABLE problems IN ACCESS EXCLUSIVE MODE")
        monkeypatch.setenv("TUNEGEMM_DB", url)
        (line,) = in_time(dispatcher_of())
    assert "another session holds its tables' lock" in line
    postgres.drop(url)


def test_who_asks_for_the_database_waits_as_long_as_before(tmp_path):
    path = tmp_path / "locked.sqlite"
    Database.open(path, create=True).close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
    lock = locked(path)
    lock.__enter__()
    timer = threading.Timer(READ_SECONDS + 1, lock.__exit__, (None, None, None))
    timer.start()
    Database.open(path, read_only=True).close()
    timer.join()


# Databases behind a link


def linked(tmp_path: Path) -> tuple[Path, Path]:
    real, link = tmp_path / "real" / "db.sqlite", tmp_path / "links" / "db.sqlite"
    for path in (real, link):
        path.parent.mkdir()
    link.symlink_to(real)
    return real, link


def test_publishing_is_noticed_through_a_link(tmp_path, monkeypatch):
    real, link = linked(tmp_path)
    monkeypatch.setenv("TUNEGEMM_DB", str(link))
    with Database.open(link, create=True):  # a link to a file that does not exist yet
        assert real.exists()
        before = modified()
        with sqlite3.connect(real) as connection:
            connection.execute("CREATE TABLE more (id INTEGER)")
        assert modified() != before, "it is in the write-ahead log, beside the file"


def test_a_link_in_a_folder_that_is_read_only(tmp_path, monkeypatch):
    real, link = linked(tmp_path)
    monkeypatch.setattr("os.access", lambda path, mode, access=os.access: (
        Path(path) != link.parent and access(path, mode)
    ))  # fmt: skip
    Database.open(link, create=True).close()
    assert real.exists()


def test_a_write_ahead_log_is_looked_for_beside_the_file(tmp_path, monkeypatch):
    """Else a file whose log cannot be read is read without what is in its log."""
    from tunegemm.store import connection

    real, link = linked(tmp_path)
    database = Database.open(link, create=True)  # keeps the log there
    (real.parent / "db.sqlite-wal").touch()

    class Blocked(sqlite3.Connection):
        def execute(self, *_: object) -> sqlite3.Cursor:
            error = sqlite3.OperationalError("unable to open database file")
            error.sqlite_errorname = "SQLITE_CANTOPEN"
            raise error

    monkeypatch.setattr(connection, "open_file", lambda *_: sqlite3.connect(":memory:", factory=Blocked))
    assert connection.read_only_options(link) == "mode=ro"
    database.close()


def test_one_deadline_holds_for_all_that_a_product_reads(device):
    """Records, files and rivals together, not each; without dispatch, as for `explain`, reading may wait."""
    seen: list[float] = []
    row = Row(Problem(32, 48, 64), device.fingerprint)

    def read() -> Snapshot:
        seen.append(deadline_s.get())
        time.sleep(0.05)  # a deadline that began anew for the next reader would be later by this
        return Snapshot([row])

    def rivals(_: Problem) -> list[Row]:
        seen.append(deadline_s.get())
        return []

    dispatcher = dispatcher_of(read=read, rivals=rivals)
    dispatcher.planner.use(Policy(max_sms=100))
    start = time.monotonic()
    with pytest.warns(TunegemmWarning):
        dispatcher.matmul(*operands())
    assert len(seen) == 2 and seen[0] == seen[1] <= time.monotonic() + READ_SECONDS - 0.05
    assert seen[0] >= start + READ_SECONDS and deadline_s.get() == math.inf


# Whatever planning raises


@pytest.mark.parametrize("error", [KeyError("epi_n"), OSError(28, "No space left on device"), MemoryError(),
                                   RecursionError(), ZeroDivisionError(), ImportError("numpy")])  # fmt: skip
@pytest.mark.parametrize("place", ["read", "find", "modified", "prepare", "select"])
def test_whatever_is_raised_is_torchs_product_and_one_warning(device, monkeypatch, place, error):
    def fail(*_: object, **__: object) -> None:
        raise error

    rows = [Row(Problem(m, 48, 64), device.fingerprint) for m in (32, 16, 8)]
    if place == "select":
        monkeypatch.setattr("tunegemm.dispatch.planning.select", fail)
    dispatcher = dispatcher_of(rows, **({} if place == "select" else {place: fail}))
    lines = in_time(dispatcher)
    dispatcher.planner.quick.until = 0
    assert len(in_time(dispatcher)) == 0, "nor later, when files are looked at"
    # What cannot be prepared is a miss of its own for each product.
    assert 1 <= len(lines) <= (3 if place == "prepare" else 1), lines


def test_interrupts_and_warnings_as_errors_pass():
    def interrupt() -> Snapshot:
        raise KeyboardInterrupt

    a, b = operands()
    with pytest.raises(KeyboardInterrupt):
        dispatcher_of(read=interrupt).matmul(a, b)
    with pytest.raises(TunegemmWarning, match="no record"):
        quietly(dispatcher_of([]).matmul, a, b)


def test_torchs_own_error_is_the_users():
    a, b = operands()
    with said(), pytest.raises(RuntimeError, match="mat1 and mat2"):
        dispatcher_of(read=lambda: 1 / 0).matmul(a, b.t())


def test_nvml_may_be_missing_or_fail(monkeypatch):
    from tunegemm.describe import device

    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr("pathlib.Path.read_text", lambda *_: (_ for _ in ()).throw(OSError))
    assert device.driver_version() == ""
    assert device.TelemetryReader(0).read() == {
        "sm_clock_mhz": None, "power_w": None, "temperature_c": None, "throttle_reasons": []
    }  # fmt: skip


# Children


def product_in_worker(_: object) -> tuple[bool, int]:
    torch.set_num_threads(1)  # OpenMP's other threads are not in a forked child, and torch waits for them
    a, b = operands()
    with said() as lines:
        same = torch.equal(dispatcher_of().matmul(a, b), torch.matmul(a, b))
    return same, len(lines)


class Products(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> tuple[bool, int]:
        if index == 2:
            raise IndexError
        return product_in_worker(index)


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_first_products_of_workers(method: str) -> None:
    loader = torch.utils.data.DataLoader(
        Products(), num_workers=1, batch_size=None, multiprocessing_context=method
    )
    assert [tuple(each) for each in loader] == [(True, 1)] * 2


def test_a_launch_that_fails_in_any_way_is_torchs(device):
    def launch(*_: object) -> None:
        raise AttributeError("no such symbol")

    row = Row(Problem(32, 48, 64), device.fingerprint)
    planner = Planner(
        device_type="cpu", read=lambda: Snapshot([row]), find=lambda _: device,
        prepare=lambda *_: Prepared(launch),
    )  # fmt: skip
    assert "failed to launch (no such symbol)" in in_time(Dispatcher(planner))[0]
