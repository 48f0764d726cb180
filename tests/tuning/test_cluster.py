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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.postgres import Cluster as Postgres
from tests.support.processes import environment
from tests.tuning.planted import DEVICE, Timed, planted_tuner
from tunegemm.describe.problem import Problem
from tunegemm.errors import MeasureError
from tunegemm.measure.outcome import Outcome
from tunegemm.measure.policy import Job, Policy
from tunegemm.store import Database
from tunegemm.store.models import MeasurementRow
from tunegemm.tuning import cluster
from tunegemm.tuning.cluster import Pool
from tunegemm.tuning.progress import Progress, Request
from tunegemm.tuning.tuner import Tuner

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

GPUS = 2
PROBLEMS = [Problem.parse(f"512x512x{64 * number}") for number in range(8, 12)]
POISON = PROBLEMS[0]


class Logged(Timed):
    """Writes down which process measures what, and takes its time."""

    def __init__(self, log: Path, pause_s: float, deadly: bool) -> None:
        super().__init__(lambda candidate, _: 8.5 + candidate["tile_n"] / 64, is_throttled=lambda _: False)
        self._log, self._pause_s, self._deadly = log, pause_s, deadly

    def measure(self, problem: Problem, jobs: Sequence[Job], policy: Policy) -> Iterator[Outcome]:
        if self._log.with_name("gone").exists():
            raise MeasureError("the GPU went away")
        for outcome in super().measure(problem, jobs, policy):
            if self._deadly and problem == POISON:
                os._exit(1)
            with self._log.open("a") as log:
                log.write(f"{os.getpid()} {problem.shape}\n")
            time.sleep(self._pause_s)  # as long as a measurement takes: time for what the test does meanwhile
            yield outcome


@contextmanager
def planted(folder: Path, location: str, pause_s: float = 0.0, deadly: bool = False) -> Iterator[Tuner]:
    """What opens a worker's tuner: with all its parts, but made-up times."""
    only = ["cute_sm90", "cublaslt"]
    with (
        Database.open(location) as database,
        planted_tuner(DEVICE, database, cache=folder / "cache", families=only) as tuner,
    ):
        tuner._measurer = Logged(folder / "log", pause_s, deadly)
        tuner.measurer_for = lambda _: tuner._measurer  # type: ignore[method-assign]
        yield tuner


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Ray cluster of somebody else's, for this host only, with more GPUs than there are."""
    # Stated, since Ray's default goes by whether the user's home holds a token; the cluster is on loopback.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        yield from _cluster(tmp_path_factory.mktemp("ray") / "log")


def _cluster(log: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ray = [sys.executable, "-m", "ray.scripts.scripts"]
    head = [
        "start", "--head", "--block", f"--port={port}", "--num-cpus=0", f"--num-gpus={GPUS}",
        "--node-ip-address=127.0.0.1", "--include-dashboard=false", "--disable-usage-stats",
        "--object-store-memory=100000000",
    ]  # fmt: skip
    with log.open("w") as said:
        running = subprocess.Popen([*ray, *head], env=environment(), stdout=said, stderr=said)
    deadline = time.monotonic() + 60
    while "Ray runtime started" not in log.read_text():
        assert running.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
    yield f"127.0.0.1:{port}"
    running.terminate()
    running.wait(timeout=30)


def requests(problems: Sequence[Problem] = PROBLEMS, trials: int = 6) -> list[Request]:
    return [Request(problem, trials=trials) for problem in problems]


def measured(location: str | Path) -> Counter[tuple[int, int, str]]:
    """How often each candidate of a problem was measured, by what the measurement proves."""
    with Database.open(location) as database, database._reading() as session:
        rows = session.query(MeasurementRow.problem_id, MeasurementRow.candidate_id, MeasurementRow.policy)
        return Counter(tuple(row) for row in rows)


def test_a_worker_that_is_killed_costs_nothing(address: str, postgres: Postgres, tmp_path: Path) -> None:
    """Its problem goes on where it was, in the same database on a server."""
    location = postgres.create()
    Database.open(location).close()
    told: list[Progress] = []
    killed: list[int] = []

    def on_progress(progress: Progress) -> None:
        told.append(progress)
        if not killed and progress.stage != "library" and progress.measured >= 2:
            lines = (tmp_path / "log").read_text().splitlines()
            pid = next(int(line.split()[0]) for line in lines if line.endswith(f" {progress.problem.shape}"))
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)

    with cluster.connected(address), Pool(functools.partial(planted, tmp_path, location, 0.2)) as pool:
        assert pool.device == DEVICE
        results = list(pool.tune_all(requests(), on_progress))
    assert len(killed) == 1
    assert sorted(result.problem for result in results) == sorted(PROBLEMS)
    assert all(result.best is not None and not result.interrupted for result in results)
    with Database.open(location) as database:
        records = {record.problem: record for record in database.records()}
    assert set(records) == set(PROBLEMS) and all(record.confirmed for record in records.values())
    assert set(measured(location).values()) == {1}
    pids = {line.split()[0] for line in (tmp_path / "log").read_text().splitlines()}
    assert len(pids) == GPUS + 1
    assert {progress.problem for progress in told} == set(PROBLEMS)
    postgres.drop(location)


def test_ctrl_c_keeps_what_was_measured_and_the_cluster(address: str, tmp_path: Path) -> None:
    location = str(tmp_path / "tuning.sqlite")
    Database.open(location).close()
    begun = threading.Event()

    def interrupt() -> None:
        begun.wait()
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with cluster.connected(address), Pool(functools.partial(planted, tmp_path, location, 0.3)) as pool:
        cut = list(pool.tune_all(requests(), lambda one: begun.set() if one.measured >= 2 else None))
    assert len([result for result in cut if result.interrupted]) == GPUS
    before = measured(location)
    assert sum(before.values()) >= 2
    with cluster.connected(address), Pool(functools.partial(planted, tmp_path, location)) as pool:
        results = list(pool.tune_all(requests()))
    assert sorted(result.problem for result in results) == sorted(PROBLEMS)
    assert all(result.best is not None and not result.interrupted for result in results)
    assert before <= measured(location) and set(measured(location).values()) == {1}


def test_workers_that_die_and_gpus_that_go_away(address: str, tmp_path: Path) -> None:
    location = str(tmp_path / "tuning.sqlite")
    Database.open(location).close()
    deadly = functools.partial(planted, tmp_path, location, deadly=True)
    with cluster.connected(address), Pool(deadly) as pool:
        results = {result.problem: result for result in pool.tune_all(requests(PROBLEMS[:3]))}
        assert results.pop(POISON).note.startswith("given up: 3 workers died while they tuned it")
        assert len(results) == 2 and all(result.best is not None for result in results.values())
        (tmp_path / "gone").touch()
        with pytest.raises(MeasureError, match=r"^the GPU went away$"):
            list(pool.tune_all(requests(PROBLEMS[3:])))
    assert len((tmp_path / "log").read_text()) > 0
