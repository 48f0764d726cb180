"""How problems are shared out, with a stand-in for Ray; test_cluster.py has a real cluster."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.tuning.planted import DEVICE
from tunegemm.describe.problem import Problem
from tunegemm.errors import ClusterError, DatabaseError, DeviceError, MeasureError
from tunegemm.tuning import cluster
from tunegemm.tuning.cluster import Pool, Seat, Worker
from tunegemm.tuning.progress import Request, TuneResult

PROBLEMS = [Problem(64, 64, 64 * number) for number in range(1, 7)]


def result_of(problem: Problem) -> TuneResult:
    return TuneResult(problem, DEVICE, "measured", None, (), (), {}, 0.0, 0)


class Ray:
    """Actors of this process, whose calls run as they are waited for: workers join first, news come last."""

    class RayError(Exception):
        pass

    class RayActorError(RayError):
        pass

    class RayTaskError(RayError):
        def __init__(self, cause: Exception) -> None:
            super().__init__(str(cause))
            self.cause = cause

    def __init__(self, *plants: Any) -> None:
        self.plants, self.killed = [*plants], list[Any]()
        self.exceptions = self
        self.gpus = len(plants)

    def cluster_resources(self) -> dict[str, float]:
        return {"GPU": float(self.gpus)}

    def remote(self, kind: type) -> Any:
        return SimpleNamespace(
            options=lambda **_: SimpleNamespace(remote=lambda _: Actor(self, self.plants.pop(0)))
        )

    def wait(self, refs: Sequence[Ref], num_returns: int = 1, timeout: float | None = None) -> Any:
        ready = sorted(refs, key=lambda ref: ("device", "tune", "close", "progress").index(ref.name))[
            :num_returns
        ]
        return ready, [ref for ref in refs if ref not in ready]

    def get(self, ref: Ref) -> Any:
        try:
            return ref.call()
        except Ray.RayError:
            raise
        except Exception as error:
            raise Ray.RayTaskError(error) from None

    def kill(self, actor: Actor) -> None:
        self.killed.append(actor.plant)


class Ref:
    def __init__(self, name: str, call: Callable[[], Any]) -> None:
        self.name, self.call = name, call


class Actor:
    def __init__(self, ray: Ray, plant: Any) -> None:
        self.ray, self.plant = ray, plant

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *given: Ref(name, lambda: getattr(self.plant, name)(*given)))


class Planted:
    """A GPU's worker: what it was asked for; whether a problem kills it, or its GPU goes."""

    def __init__(
        self, *, kills: Sequence[Problem] = (), fails: Exception | None = None, device: Any = DEVICE
    ) -> None:
        self.asked: list[tuple[Problem, Problem | None]] = []
        self.kills, self.fails, self._device, self.stopped = kills, fails, device, 0

    def device(self) -> Any:
        if isinstance(self._device, Exception):
            raise self._device
        return self._device

    def tune(self, request: Request) -> TuneResult:
        self.asked.append((request.problem, request.following))
        if request.problem in self.kills:
            raise Ray.RayActorError("gone")
        if self.fails is not None:
            raise self.fails
        return result_of(request.problem)

    def progress(self) -> Any:
        return SimpleNamespace(problem=self.asked[-1][0]) if self.asked else None

    def stop(self) -> None:
        self.stopped += 1

    close = stop


@pytest.fixture
def pool_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(*plants: Planted) -> tuple[Pool, Ray]:
        ray = Ray(*plants)
        monkeypatch.setattr(cluster, "import_ray", lambda: ray)
        return Pool(lambda: None), ray  # type: ignore[arg-type, return-value]

    return make


def requests(problems: Sequence[Problem]) -> list[Request]:
    return [Request(problem) for problem in problems]


def test_each_worker_knows_its_next_problem_and_the_last_is_taken_over(pool_of: Any) -> None:
    first, second = Planted(), Planted()
    pool, ray = pool_of(first, second)
    with pool:
        assert pool.device == DEVICE
        found = [result.problem for result in pool.tune_all(requests(PROBLEMS[:5]))]
    one, two, three, four, five = PROBLEMS[:5]
    assert found == [one, three, two, four, five]
    assert first.asked == [(one, two), (two, five), (five, None)]
    assert second.asked == [(three, four), (four, None)]
    assert len(ray.killed) == 2


@pytest.mark.parametrize(("deaths", "given_up"), [(1, False), (2, False), (3, True)])
def test_a_problem_that_kills_three_workers_is_given_up(pool_of: Any, deaths: int, given_up: bool) -> None:
    poison = PROBLEMS[0]
    pool, ray = pool_of(*(Planted(kills=[poison]) for _ in range(deaths)), Planted())
    ray.gpus = 1
    with pool:
        results = {result.problem: result for result in pool.tune_all(requests(PROBLEMS[:3]))}
    assert set(results) == set(PROBLEMS[:3])
    assert ("given up: 3 workers died" in results[poison].note) == given_up
    assert not any(results[problem].note for problem in PROBLEMS[1:3])
    assert len(ray.killed) == deaths + 1 and not ray.plants


def test_a_worker_whose_tuner_fails_is_left_out_and_its_problem_done_elsewhere(
    pool_of: Any, caplog: pytest.LogCaptureFixture
) -> None:
    lost, good = Planted(fails=MeasureError("the GPU went away")), Planted()
    pool, ray = pool_of(lost, good)
    with pool:
        assert {result.problem for result in pool.tune_all(requests(PROBLEMS[:3]))} == set(PROBLEMS[:3])
    assert ray.killed[0] is lost and caplog.messages == ["a GPU is left out: the GPU went away"]
    pool, _ = pool_of(Planted(fails=MeasureError("the GPU went away")))
    with pool, pytest.raises(MeasureError, match="went away"):
        list(pool.tune_all(requests(PROBLEMS[:1])))
    pool, _ = pool_of(Planted(fails=ZeroDivisionError("a bug")))
    with pool, pytest.raises(Ray.RayTaskError, match="a bug"):
        list(pool.tune_all(requests(PROBLEMS[:1])))


def test_gpus_of_another_kind_or_without_a_tuner_do_not_join(
    pool_of: Any, caplog: pytest.LogCaptureFixture
) -> None:
    other = replace(DEVICE, fingerprint=replace(DEVICE.fingerprint, driver="999"))
    pool, ray = pool_of(
        Planted(), Planted(device=other), Planted(device=Ray.RayActorError("first\nno memory "))
    )
    with pool:
        list(pool.tune_all(requests(PROBLEMS[:2])))
    assert len(ray.killed) == 3
    assert any("driver 999 beside" in line for line in caplog.messages)
    assert any(line.endswith("of the Ray cluster does not start: no memory") for line in caplog.messages)
    pool, _ = pool_of(Planted(device=DeviceError("no GPU")))
    with pytest.raises(DeviceError, match="no GPU"):
        pool.__enter__()
    pool, _ = pool_of()
    with pytest.raises(ClusterError, match="the Ray cluster has no GPU"):
        pool.__enter__()


def test_nothing_that_answers_is_an_error_after_a_time(pool_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, ray = pool_of(Planted())
    waited: list[float | None] = []
    monkeypatch.setattr(ray, "wait", lambda refs, timeout: waited.append(timeout) or ([], refs))
    with pytest.raises(ClusterError, match="was free within 120 s"):
        pool.__enter__()
    assert waited == [120.0]


def test_ctrl_c_keeps_what_is_done_and_kills_what_takes_too_long(
    pool_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick, late = Planted(), Planted()
    pool, ray = pool_of(quick, late)

    def interrupted(progress: Any) -> None:
        raise KeyboardInterrupt

    wait = ray.wait

    def half(refs: Sequence[Ref], num_returns: int = 1, timeout: float | None = None) -> Any:
        if num_returns == 1:  # news, before the tunings end
            return wait([ref for ref in refs if ref.name != "tune"] or refs)
        return wait(refs, num_returns - 1)

    with pool:
        quick.asked.append((PROBLEMS[0], None))
        monkeypatch.setattr(ray, "wait", half)
        found = [result.problem for result in pool.tune_all(requests(PROBLEMS[:2]), interrupted)]
        assert found == [PROBLEMS[0]] and ray.killed == [late]


def test_a_reserved_problem_has_what_is_left_of_its_budget() -> None:
    seat = Seat(None)
    for spent, left in ((20.0, 40.0), (60.0, None), (61.0, None)):
        seat.reserve(Request(PROBLEMS[0], budget_seconds=60.0))
        seat.since -= spent
        taken = seat.take()
        assert (taken and taken.budget_seconds) == (left and pytest.approx(left, abs=1.0))
        assert seat.take() is None
    seat.reserve(Request(PROBLEMS[0]))
    assert seat.take() == Request(PROBLEMS[0])


def test_a_worker_tunes_without_the_study_until_it_is_stopped() -> None:
    closed: list[bool] = []
    study: Any = "a study"

    class Tuner:
        device = DEVICE

        def tune_all(self, requests: Sequence[Request], tell: Callable[[Any], None]) -> Any:
            for request in requests:
                tell("news")
                yield replace(result_of(request.problem), study=study)

    @contextmanager
    def opened() -> Any:
        yield Tuner()
        closed.append(True)

    worker = Worker(opened)
    assert worker.device() == DEVICE
    assert worker.tune(Request(PROBLEMS[0])).study is None and worker.progress() == "news"  # type: ignore[comparison-overlap]
    worker.stop()
    with pytest.raises(KeyboardInterrupt):
        worker.tune(Request(PROBLEMS[0]))
    worker.close()
    assert closed == [True]


@pytest.mark.parametrize(
    ("nodes", "elsewhere"),
    [([("a", True, 1.0)], None), ([("a", True, 1.0), ("b", True, 1.0), ("c", True, 2.0)], "b, c"),
     ([("a", True, 1.0), ("b", False, 1.0), ("c", True, 0.0)], None)],
)  # fmt: skip
def test_a_file_is_for_one_host(
    monkeypatch: pytest.MonkeyPatch, nodes: list[tuple[str, bool, float]], elsewhere: str | None
) -> None:
    known = [
        {"NodeManagerAddress": address, "Alive": alive, "Resources": {"GPU": gpus}}
        for address, alive, gpus in nodes
    ]
    ray = SimpleNamespace(nodes=lambda: known, util=SimpleNamespace(get_node_ip_address=lambda: "a"))
    monkeypatch.setattr(cluster, "import_ray", lambda: ray)
    cluster.refuse_file("a URL")  # type: ignore[arg-type]
    if elsewhere is None:
        cluster.refuse_file(Path("a.sqlite"))
    else:
        with pytest.raises(DatabaseError, match=f"the cluster has GPUs on {elsewhere};"):
            cluster.refuse_file(Path("a.sqlite"))


@pytest.mark.parametrize(
    ("visible", "gpus", "seen"), [(None, [0, 2], "0,2"), ("4,5,6", [0, 2], "4,6"), ("4,5,6", [1], "5")]
)
def test_a_cluster_of_this_host_has_the_gpus_that_are_named(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, gpus: list[int], seen: str
) -> None:
    began: list[tuple[str, int]] = []

    def init(**words: Any) -> None:
        began.append((os.environ["CUDA_VISIBLE_DEVICES"], words["num_gpus"]))

    ray = SimpleNamespace(init=init, shutdown=lambda: began.append(("", 0)))
    monkeypatch.setattr(cluster, "import_ray", lambda: ray)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with cluster.started_here(gpus):
        assert os.environ.get("CUDA_VISIBLE_DEVICES") == visible
        assert began == [(seen, len(gpus))]
    assert began[1:] == [("", 0)]


@pytest.mark.parametrize("address", ["host", ":6379", "host:port", "http://host:1", "host:99999999"])
def test_an_address_that_is_none_or_does_not_answer(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setattr(cluster, "import_ray", lambda: None)

    def refuse(place: Any, timeout: float) -> Any:
        raise OSError(111, "Connection refused")

    monkeypatch.setattr(cluster.socket, "create_connection", refuse)
    says = "does not answer" if address == "host:99999999" else "not HOST:PORT"
    with pytest.raises(ClusterError, match=says), cluster.connected(address):
        pass
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(cluster, "cuda_device_count", lambda: 0)
    with pytest.raises(DeviceError, match="no CUDA device here"), cluster.connected("auto"):
        pass


@pytest.mark.parametrize(
    ("gpus", "most", "workers", "share"), [(4, 9, None, 2), (0, 9, None, 9), (4, 2, None, 1), (4, 9, 7, 7)]
)
@pytest.mark.parametrize("compiled_only", [True, False])
def test_a_workers_tuner_has_its_share_of_the_hosts_processors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    gpus: int, most: int, workers: int | None, share: int, compiled_only: bool,
) -> None:  # fmt: skip
    started: list[Any] = []

    class Tuner:
        def __init__(
            self, device: Any, database: Any, *, workers: int, child: Any, compiled_only: bool
        ) -> None:
            self.workers, self.compiled_only = workers, compiled_only
            self.pool = SimpleNamespace(start=lambda: started.append(workers))

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    nodes = [
        {"NodeID": "own", "Resources": {"GPU": float(gpus)}}, {"NodeID": "other", "Resources": {"GPU": 64.0}},
    ]  # fmt: skip
    context = SimpleNamespace(get_node_id=lambda: "own")
    ray = SimpleNamespace(get_runtime_context=lambda: context, nodes=lambda: nodes)
    monkeypatch.setattr(cluster, "import_ray", lambda: ray)
    monkeypatch.setattr(cluster, "Tuner", Tuner)
    monkeypatch.setattr(cluster, "default_workers", lambda: most)
    monkeypatch.setattr(cluster, "find_device", lambda spec: DEVICE)
    child = ModuleType("tunegemm.measure.worker")
    child.Child = contextmanager(lambda: iter([None]))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tunegemm.measure.worker", child)
    from tunegemm.store import Database

    Database.open(tmp_path / "a.sqlite", create=True).close()
    with cluster.worker_tuner(str(tmp_path / "a.sqlite"), workers, compiled_only=compiled_only) as tuner:
        assert tuner.workers == share  # type: ignore[attr-defined]
    assert started == ([] if compiled_only else [share])
