"""Problems shared out among the GPUs of a real Ray cluster; only the GPUs' times are made up."""

from __future__ import annotations

import functools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from tests.support.commands import here
from tests.support.postgres import Cluster as Postgres
from tests.support.processes import environment
from tests.support.waiting import until
from tests.tuning.planted import DEVICE, Timed, planted_tuner
from tunegemm.cli import app
from tunegemm.cli.arguments import parse_gpus
from tunegemm.describe.device import cuda_device_count
from tunegemm.describe.problem import Problem
from tunegemm.errors import DatabaseError, MeasureError
from tunegemm.measure.outcome import Outcome
from tunegemm.measure.settings import Job, RaceSettings
from tunegemm.store import Database
from tunegemm.store.models import MeasurementRow
from tunegemm.tuning import cluster
from tunegemm.tuning.cluster import Pool
from tunegemm.tuning.progress import Progress, Request, TuneResult
from tunegemm.tuning.tuner import Tuner

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(180)]

GPUS = 2
SECOND = "127.0.0.2"
PROBLEMS = [Problem.parse(f"512x512x{64 * number}") for number in range(8, 12)]
POISON = PROBLEMS[0]


class Logged(Timed):
    """Writes down which process measures what on which GPU, and takes its time."""

    def __init__(self, log: Path, pause_s: float, deadly: bool, slow: bool) -> None:
        super().__init__(lambda candidate, _: 8.5 + candidate["tile_n"] / 64, is_throttled=lambda _: False)
        self._log, self._pause_s, self._deadly, self._slow = log, pause_s, deadly, slow

    def measure(self, problem: Problem, jobs: Sequence[Job], settings: RaceSettings) -> Iterator[Outcome]:
        if self._log.with_name("gone").exists():
            raise MeasureError("the GPU went away")
        for outcome in super().measure(problem, jobs, settings):
            if self._deadly and problem == POISON:
                os._exit(1)
            with self._log.open("a") as log:
                log.write(f"{os.getpid()} {problem.shape} {os.environ.get('CUDA_VISIBLE_DEVICES')}\n")
            if self._slow and problem == POISON:  # until the other worker has come to every other one
                until(lambda: len(self._log.with_name("asked").read_text().splitlines()) == len(PROBLEMS))
            # As long as a measurement takes: time for what the test does meanwhile.
            time.sleep(self._pause_s)
            yield outcome


@contextmanager
def planted(
    folder: Path, location: str, pause_s: float = 0.0, deadly: bool = False, slow: bool = False
) -> Iterator[Tuner]:
    """What opens a worker's tuner: with all its parts, but made-up times."""
    only = ["cute_sm90", "cublaslt"]
    with (
        Database.open(location, create=True) as database,
        planted_tuner(DEVICE, database, cache=folder / "cache", families=only) as tuner,
    ):
        measurer = Logged(folder / "log", pause_s, deadly, slow)
        tuner.measurer_for = lambda _: measurer  # type: ignore[method-assign]
        tune_all = tuner.tune_all

        def told(requests: Iterable[Request], *given: Any) -> Iterator[TuneResult]:
            for request in requests:
                with (folder / "asked").open("a") as log:
                    following = request.following.shape if request.following else "-"
                    log.write(f"{os.getpid()} {request.problem.shape} {following}\n")
                yield from tune_all([request], *given)

        tuner.tune_all = told  # type: ignore[method-assign]
        yield tuner


class Hosts:
    """A Ray cluster of somebody else's: two hosts, on loopback addresses of this one, with a GPU each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: list[subprocess.Popen[bytes]] = []
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.address = f"127.0.0.1:{port}"
        self._start("127.0.0.1", "--head", f"--port={port}", "--include-dashboard=false")
        self._start(SECOND, f"--address={self.address}")

    def _start(self, node: str, *options: str) -> None:
        log = self._folder / node
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--node-ip-address={node}"]
        size = ["--num-cpus=0", "--num-gpus=1", "--object-store-memory=100000000", "--disable-usage-stats"]
        with log.open("w") as said:
            running = subprocess.Popen([*ray, *size, *options], env=environment(), stdout=said, stderr=said)
        self._running.append(running)
        until(lambda: "Ray runtime started" in log.read_text() or running.poll() is not None)
        assert running.poll() is None, log.read_text()

    def lose_second(self) -> None:
        """The power of the second host goes."""
        host = psutil.Process(self._running.pop().pid)
        for process in [host, *host.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        host.wait()

    def end(self) -> None:
        for running in reversed(self._running):
            running.terminate()
            running.wait(timeout=30)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with pytest.MonkeyPatch.context() as patch:
        # Stated, since Ray's default goes by whether the user's home holds a token.
        patch.setenv("RAY_AUTH_MODE", "disabled")
        # A host that says nothing for so long counts as dead; else it takes some 20 s.
        patch.setenv("RAY_health_check_period_ms", "500")
        patch.setenv("RAY_health_check_failure_threshold", "4")
        running = Hosts(tmp_path_factory.mktemp("hosts"))
        yield running
        running.end()


@pytest.fixture
def address(hosts: Hosts) -> str:
    return hosts.address


@pytest.fixture
def location(tmp_path: Path) -> str:
    """An empty database."""
    Database.open(path := tmp_path / "tuning.sqlite", create=True).close()
    return str(path)


def requests(problems: Sequence[Problem] = PROBLEMS, trials: int = 6) -> list[Request]:
    return [Request(problem, trials=trials) for problem in problems]


def measured(location: str | Path) -> Counter[tuple[int, int, str]]:
    """How often each candidate of a problem was measured, by what the measurement proves."""
    with Database.open(location, create=True) as database, database.reading() as session:
        rows = session.query(MeasurementRow.problem_id, MeasurementRow.candidate_id, MeasurementRow.method)
        return Counter(tuple(row) for row in rows)


def test_a_worker_that_is_killed_costs_nothing(address: str, postgres: Postgres, tmp_path: Path) -> None:
    """Its problem goes on where it was, in the same database on a server."""
    location = postgres.create()
    Database.open(location, create=True).close()
    told: list[Progress] = []
    killed: list[int] = []

    def on_progress(progress: Progress) -> None:
        told.append(progress)
        if not killed and progress.stage != "library" and progress.measured >= 2:
            lines = (tmp_path / "log").read_text().splitlines()
            pid = next(int(line.split()[0]) for line in lines if progress.problem.shape in line)
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)

    with cluster.connected(address), Pool(functools.partial(planted, tmp_path, location, 0.2)) as pool:
        assert pool.device == DEVICE
        results = list(pool.tune_all(requests(), on_progress))
    assert len(killed) == 1
    assert sorted(result.problem for result in results) == sorted(PROBLEMS)
    assert all(result.best is not None and not result.interrupted for result in results)
    with Database.open(location, create=True) as database:
        records = {record.problem: record for record in database.records()}
    assert set(records) == set(PROBLEMS) and all(record.confirmed for record in records.values())
    assert set(measured(location).values()) == {1}
    pids = {line.split()[0] for line in (tmp_path / "log").read_text().splitlines()}
    assert len(pids) == GPUS + 1
    assert {progress.problem for progress in told} == set(PROBLEMS)
    postgres.drop(location)


def test_ctrl_c_keeps_what_was_measured_and_the_cluster(
    address: str,
    location: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.setattr(cluster, "STOP_S", 60.0)  # workers of a busy host take long; none is to be killed
    begun = threading.Event()
    # A shell starts what it puts in the background with SIGINT ignored, these tests too.
    before_test = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before_test))

    def interrupt() -> None:
        begun.wait()
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with cluster.connected(address), Pool(functools.partial(planted, tmp_path, location, 0.3)) as pool:
        cut = list(pool.tune_all(requests(), lambda one: begun.set() if one.measured >= 2 else None))
    assert len([result for result in cut if result.interrupted]) == GPUS
    before = measured(location)
    assert sum(before.values()) >= 2
    with planted(tmp_path, location) as tuner:
        results = list(tuner.tune_all(requests()))
    assert sorted(result.problem for result in results) == sorted(PROBLEMS)
    assert all(result.best is not None and not result.interrupted for result in results)
    assert before <= measured(location) and set(measured(location).values()) == {1}


def test_a_worker_knows_what_it_takes_next_and_an_idle_one_takes_it_instead(
    address: str, location: str, tmp_path: Path
) -> None:
    with cluster.connected(address), Pool(functools.partial(planted, tmp_path, location, slow=True)) as pool:
        results = list(pool.tune_all(requests()))
    assert sorted(result.problem for result in results) == sorted(PROBLEMS)
    by_worker: dict[str, list[list[str]]] = {}
    for line in (tmp_path / "asked").read_text().splitlines():
        pid, *asked = line.split()
        by_worker.setdefault(pid, []).append(asked)
    slow, quick = sorted(by_worker.values(), key=len)
    ((begun, promised),) = slow
    assert begun == POISON.shape
    assert [shape for shape, _ in quick][-1] == promised  # the slow one never comes to it
    assert [following for _, following in quick][:-2] == [shape for shape, _ in quick][1:-1]
    assert len(quick) == len(PROBLEMS) - 1
    assert set(measured(location).values()) == {1}


def test_workers_that_die_and_gpus_that_go_away(address: str, location: str, tmp_path: Path) -> None:
    deadly = functools.partial(planted, tmp_path, location, deadly=True)
    with cluster.connected(address), Pool(deadly) as pool:
        results = {result.problem: result for result in pool.tune_all(requests(PROBLEMS[:3]))}
        assert results.pop(POISON).note.startswith("given up: 3 workers died while they tuned it")
        assert len(results) == 2 and all(result.best is not None for result in results.values())
        (tmp_path / "gone").touch()
        with pytest.raises(MeasureError, match=r"^the GPU went away$"):
            list(pool.tune_all(requests(PROBLEMS[3:])))
    assert len((tmp_path / "log").read_text()) > 0


def planted_for_command(folder: Path, location: str, **options: Any) -> AbstractContextManager[Tuner]:
    """Stands for `cluster.worker_tuner`."""
    assert set(options) >= {"seed", "families", "study"}
    return planted(folder, location, 0.2)


@pytest.mark.parametrize("flag", ["--devices", "--ray"])
def test_the_command_tunes_on_several_gpus(
    flag: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two products in one Ray cluster, of this host's GPUs or somebody's: both are measured and stored.

    On this host each worker sees one of the named GPUs, by the numbers that this process sees.
    """
    monkeypatch.setattr(cluster, "worker_tuner", functools.partial(planted_for_command, tmp_path))
    shapes = ("--shape", PROBLEMS[0].shape, "--shape", PROBLEMS[1].shape)
    with ExitStack() as stack:
        if flag == "--devices":
            monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
            monkeypatch.setattr("tunegemm.describe.device.cuda_device_count", lambda: 3)
            assert parse_gpus("all") == (0, 1, 2)
            where, location = ("--devices", "0,2"), str(tmp_path / "tuning.sqlite")
        else:
            postgres = request.getfixturevalue("postgres")
            where, location = ("--ray", request.getfixturevalue("address")), postgres.create()
            stack.callback(postgres.drop, location)
        done = here("tune", *shapes, *where, "--trials", "2", "--db", location)
        for problem in PROBLEMS[:2]:
            assert f"{problem}: " in done.stdout and " x torch.mm" in done.stdout
        with Database.open(location) as database:
            assert {record.problem for record in database.records()} == set(PROBLEMS[:2])
    gpus = {line.split()[2] for line in (tmp_path / "log").read_text().splitlines()}
    if flag == "--devices":  # each host of a cluster calls its GPU 0
        assert gpus == {"4", "6"} and os.environ["CUDA_VISIBLE_DEVICES"] == "4,5,6"


def test_a_file_that_other_hosts_cannot_write(address: str, tmp_path: Path) -> None:
    path = tmp_path / "tuning.sqlite"
    with (
        cluster.connected(address),
        pytest.raises(DatabaseError, match=f"tuning.sqlite: a file on this host, .* on {SECOND}; give a ser"),
    ):
        cluster.refuse_file(path)


@pytest.mark.skipif(cuda_device_count() > 0, reason="with a GPU it tunes")
def test_the_command_on_hosts_whose_gpus_are_not_there(
    address: str, postgres: Postgres, capfd: pytest.CaptureFixture[str]
) -> None:
    """All the way to a worker, which finds no GPU; its reason is the one line."""
    location = postgres.create()
    done = CliRunner().invoke(app, ["tune", "--shape", "64x64x64", "--ray", address, "--db", location])
    assert done.exit_code == 2
    assert done.stderr.splitlines()[-1].startswith("tunegemm: device 'cuda:0': 0 CUDA device(s) here; ")
    assert "Traceback" not in done.output + capfd.readouterr().err
    postgres.drop(location)


def test_a_host_that_dies_is_done_without(hosts: Hosts, location: str, tmp_path: Path) -> None:
    """The last test: afterwards the cluster has one host. The product of the other goes on on its GPU."""
    lost: list[Problem] = []

    def on_progress(progress: Progress) -> None:
        begun.add(progress.problem)
        if len(begun) == GPUS and not lost:
            hosts.lose_second()
            lost.append(progress.problem)

    begun: set[Problem] = set()
    opening = functools.partial(planted, tmp_path, location, 0.3)
    with cluster.connected(hosts.address), Pool(opening) as pool:
        results = list(pool.tune_all(requests(PROBLEMS[:GPUS]), on_progress))
    assert lost and sorted(result.problem for result in results) == sorted(PROBLEMS[:GPUS])
    assert all(result.best is not None for result in results)
    assert set(measured(location).values()) == {1}
