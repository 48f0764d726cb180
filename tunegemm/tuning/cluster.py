"""Tuning on several GPUs: each has a Ray actor with its own `Tuner`.

Ray starts the actors on its GPUs and reports those that died. Other actors then continue the dead actors'
problems: each outcome is published as it is measured, and a tuning starts from the results in the database.
No work list is stored; the same command requests the remaining problems again.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tunegemm.compile.pool import default_workers
from tunegemm.describe.device import Device, cuda_device_count, find_device
from tunegemm.describe.problem import Problem
from tunegemm.errors import ClusterError, DatabaseError, DeviceError, TunegemmError
from tunegemm.store.waiting import in_time
from tunegemm.tuning.progress import Progress, Request, TuneResult
from tunegemm.tuning.tuner import Tuner
from tunegemm.untrusted import digits

if TYPE_CHECKING:
    from sqlalchemy import URL

#: Opens a worker's tuner, in the worker's process.
OpenTuner = Callable[[], AbstractContextManager[Tuner]]

#: Seconds for the head of a cluster to answer, and for a GPU to become free while all workers wait for one.
_REACH_S, _JOIN_S = 5.0, 120.0
#: Seconds for Ray to join a cluster. Ray 2.60 waits forever for a service that accepts a connection but stays
#: silent.
_CONNECT_S = 30.0
#: Seconds after which a worker without news reports that.
_NEWS_S = 0.5
#: Seconds for workers to end after Ctrl-C. A compile takes 3 s, an interleave less.
STOP_S = 10.0
#: After this many workers died of a problem, it is given up, since it would kill the others, too. The pool
#: counts itself: Ray 2.60 spends its `max_task_retries` within milliseconds on a lost host, before it notices
#: the loss, so they cannot distinguish a problem that kills its workers from a lost host.
_ATTEMPTS = 3
#: Bytes of Ray's shared memory, by default a third of the host's memory; results have some 100 KB.
_OBJECT_STORE_BYTES = 100 * 2**20

_log = logging.getLogger(__name__)


class Worker:
    """One GPU's tuner. While one thread of the actor tunes, another answers `progress` and `stop`."""

    def __init__(self, open_tuner: OpenTuner) -> None:
        self._open_tuner, self._resources = open_tuner, ExitStack()
        self._latest: Progress | None = None
        self._news = threading.Event()
        self._stopped = False

    @functools.cached_property
    def _tuner(self) -> Tuner:
        # Not in `__init__`: Ray returns errors of a method call unchanged.
        return self._resources.enter_context(self._open_tuner())

    def device(self) -> Device:
        return self._tuner.device

    def tune(self, request: Request) -> TuneResult:
        # A study stays in its process: `--study` stores it, and it is large compared with the rest of the
        # result.
        return replace(next(self._tuner.tune_all([request], self._tell)), study=None)

    def progress(self) -> Progress | None:
        """Return the latest progress, once there is news or some time has passed."""
        self._news.wait(_NEWS_S)
        self._news.clear()
        return self._latest

    def stop(self) -> None:
        """Interrupt the tuning as Ctrl-C does, at the next progress report."""
        self._stopped = True

    def close(self) -> None:
        self._resources.close()

    def _tell(self, progress: Progress) -> None:
        if self._stopped:
            raise KeyboardInterrupt
        self._latest = progress
        self._news.set()


@dataclass(eq=False)
class Seat:
    """A worker and its next request."""

    worker: Any
    reserved: Request | None = None

    def take(self) -> Request | None:
        """Return the reserved request, with what is left of a shared budget; None without either."""
        request, self.reserved = self.reserved, None
        if request is None or request.deadline == math.inf:
            return request
        left_s = request.deadline - time.monotonic()
        return replace(request, budget_seconds=left_s) if left_s > 0 else None


class Pool:
    """A worker on each GPU of the Ray cluster that this process is connected to. A context manager.

    It tunes as a `Tuner` does, but several problems at a time. A worker knows its next problem and compiles
    for it while it measures. A worker without work takes the next problem of another one.
    """

    def __init__(self, open_tuner: OpenTuner) -> None:
        """open_tuner: opens the tuner of the GPU that Ray assigned to a process, as `worker_tuner` does."""
        self._ray = import_ray()
        self._open_tuner = open_tuner
        self._device: Device | None = None
        self._joining: dict[Any, Any] = {}  # the worker of each pending call of `device`
        self._idle: list[Seat] = []
        self._tunings: dict[Any, tuple[Seat, Request]] = {}
        self._news: dict[Any, Any] = {}  # each pending call of `progress`: that of `tune`
        self._returned: list[Request] = []
        self._deaths: Counter[Problem] = Counter()
        self._lost: TunegemmError = ClusterError("the Ray cluster has no GPU; see `ray status`")
        """Why the last excluded worker was excluded."""

    def __enter__(self) -> Self:
        for _ in range(int(self._ray.cluster_resources().get("GPU", 0))):
            self._start()
        while not self._idle:
            if not self._joining:
                raise self._lost
            self._join(self._next())
        return self

    def __exit__(self, *_: object) -> None:
        list(self._stop())  # their results are not needed
        if closing := [seat.worker.close.remote() for seat in self._idle]:
            self._ray.wait(closing, num_returns=len(closing), timeout=STOP_S)
        seats = (*self._idle, *(busy for busy, _ in self._tunings.values()))
        for worker in (*self._joining.values(), *(seat.worker for seat in seats)):
            self._ray.kill(worker)

    @property
    def device(self) -> Device:
        """The GPU of the first worker; all workers have the same kind of GPU and the same software."""
        assert self._device is not None, "within `with` only"
        return self._device

    def tune_all(
        self, requests: Iterable[Request], on_progress: Callable[[Progress], None] | None = None
    ) -> Iterator[TuneResult]:
        """Tune all problems and yield results as they come; after Ctrl-C, yield the interrupted ones.

        A free GPU takes a request and a second one that follows it there. The problem of a dead worker goes
        to another worker; a problem that killed several workers gets a result without a winner. A worker
        whose tuner raises is excluded; if the last one raises, its error is raised here.
        """
        waiting = iter(requests)
        try:
            while self._hand_out(waiting):
                ref = self._next()
                if ref in self._joining:
                    self._join(ref)
                elif ref in self._news:
                    self._pass_on(ref, on_progress)
                elif (result := self._result(ref)) is not None:
                    yield result
        except KeyboardInterrupt:
            yield from self._stop()

    def _hand_out(self, waiting: Iterator[Request]) -> bool:
        """Assign each idle worker a problem and a following one. Return False when no work remains."""
        begun: list[tuple[Seat, Request]] = []
        while self._idle and (request := self._request_for(self._idle[0], waiting)) is not None:
            begun.append((self._idle.pop(0), request))
        for seat, request in begun:
            if seat.reserved is None:
                seat.reserved = next(waiting, None)
            following = seat.reserved.problem if seat.reserved is not None else None
            tuning = seat.worker.tune.remote(replace(request, following=following))
            self._tunings[tuning] = seat, request
            self._news[seat.worker.progress.remote()] = tuning
        if self._idle:
            return bool(self._tunings)
        if not self._tunings and not self._joining:
            raise self._lost
        return True

    def _request_for(self, seat: Seat, waiting: Iterator[Request]) -> Request | None:
        """Return a worker's next request: first those given back, at the end one reserved for another
        worker."""
        if self._returned:
            return self._returned.pop()
        if (own := seat.take()) is not None:
            return own
        if (new := next(waiting, None)) is not None:
            return new
        return next((taken for busy, _ in self._tunings.values() if (taken := busy.take())), None)

    def _start(self) -> None:
        """Ask Ray for a worker, which joins once a GPU is free for it."""
        actor = self._ray.remote(Worker).options(num_gpus=1, num_cpus=0, max_concurrency=2)
        worker = actor.remote(self._open_tuner)
        self._joining[worker.device.remote()] = worker

    def _next(self) -> Any:
        """Return the next finished call. Raises ClusterError if no call is running and no GPU becomes
        free."""
        limit_s = None if self._tunings else _JOIN_S
        ready, _ = self._ray.wait([*self._tunings, *self._news, *self._joining], timeout=limit_s)
        if not ready:
            raise ClusterError(
                f"no GPU of the Ray cluster was free within {_JOIN_S:g} s: other jobs hold them, or their "
                "hosts are gone; see `ray status`"
            )
        return ready[0]

    def _join(self, ref: Any) -> None:
        """Let a worker that has a GPU take part, if its GPU is of the same kind as the others'."""
        worker = self._joining.pop(ref)
        try:
            device = self._ray.get(ref)
        except self._ray.exceptions.RayTaskError as error:
            self._leave_out(worker, _cause(error))
        except self._ray.exceptions.RayActorError as error:
            last = str(error).strip().splitlines()[-1].strip()
            self._leave_out(worker, ClusterError(f"a worker of the Ray cluster does not start: {last}"))
        else:
            self._device = self._device or device
            if device.fingerprint == self.device.fingerprint:
                self._idle.append(Seat(worker))
            else:
                here, first = device.fingerprint, self.device.fingerprint
                differing = [
                    f"{name} {value} beside {first.asdict()[name]}"
                    for name, value in here.asdict().items()
                    if value != first.asdict()[name]
                ]
                reason = f"{here.device_name}: {', '.join(differing)}; tune each kind separately"
                self._leave_out(worker, DeviceError(reason))

    def _leave_out(self, worker: Any, error: TunegemmError) -> None:
        self._ray.kill(worker)
        self._lost = error
        if self._idle or self._tunings or self._joining:
            _log.warning("a GPU is left out: %s", error)

    def _pass_on(self, ref: Any, on_progress: Callable[[Progress], None] | None) -> None:
        tuning = self._news.pop(ref)
        if tuning not in self._tunings:
            return
        seat, request = self._tunings[tuning]
        try:
            progress = self._ray.get(ref)
        except self._ray.exceptions.RayActorError:
            return  # the tuning itself reports its end
        if progress is not None and progress.problem == request.problem and on_progress is not None:
            on_progress(progress)
        self._news[seat.worker.progress.remote()] = tuning

    def _result(self, ref: Any) -> TuneResult | None:
        """Return the result of a finished call; None if another worker has to take the problem."""
        seat, request = self._tunings.pop(ref)
        try:
            result: TuneResult = self._ray.get(ref)
        except self._ray.exceptions.RayTaskError as error:
            self._give_back(seat, request)
            self._leave_out(seat.worker, _cause(error))
            return None
        except self._ray.exceptions.RayError:  # the worker died, or the host with its result did
            self._ray.kill(seat.worker)  # it may just be unreachable
            self._start()
            self._deaths[request.problem] += 1
            if self._deaths[request.problem] < _ATTEMPTS:
                self._give_back(seat, request)
                return None
            self._give_back(seat)
            note = f"given up: {_ATTEMPTS} workers died while they tuned it; see `ray logs`"
            return TuneResult(request.problem, self.device, "measured", None, (), (), {}, 0.0, 0, note=note)
        self._idle.append(seat)
        return result

    def _give_back(self, seat: Seat, *begun: Request) -> None:
        """Return the requests of a lost worker to the queue; the one that it had begun comes first."""
        self._returned += [item for item in (seat.take(), *begun) if item is not None]

    def _stop(self) -> Iterator[TuneResult]:
        """Interrupt the tunings as Ctrl-C does and yield their results; kill workers that take too long."""
        if not self._tunings:
            return
        for seat, _ in self._tunings.values():
            seat.worker.stop.remote()
        ended, late = self._ray.wait([*self._tunings], num_returns=len(self._tunings), timeout=STOP_S)
        for ref in late:
            seat, _ = self._tunings.pop(ref)
            self._ray.kill(seat.worker)
        yield from (result for ref in ended if (result := self._result(ref)) is not None)


def _cause(error: Any) -> TunegemmError:
    """Return the error of a worker's tuner. Any other error is a bug and is raised with its traceback."""
    if isinstance(error.cause, TunegemmError):
        return error.cause
    raise error


@contextmanager
def worker_tuner(location: str, workers: int | None = None, **options: Any) -> Iterator[Tuner]:
    """Open the tuner of the one GPU that Ray lets this process see.

    workers: compile workers; by default this GPU's share of the host's maximum.
    """
    from tunegemm.measure.worker import Child
    from tunegemm.store import Database

    with Child() as child:  # first: it imports torch, and compilers the DSL, while others join
        ray = import_ray()
        own = ray.get_runtime_context().get_node_id()
        gpus = sum(node["Resources"].get("GPU", 0) for node in ray.nodes() if node["NodeID"] == own)
        share = max(1, default_workers() // max(1, int(gpus)))
        device = find_device("cuda:0")
        with (
            Database.open(location) as database,
            Tuner(device, database, workers=workers or share, child=child, **options) as tuner,
        ):
            if not tuner.compiled_only:
                tuner.pool.start()
            yield tuner


@contextmanager
def started_here(gpus: Sequence[int]) -> Iterator[None]:
    """Start a Ray cluster of this host's GPUs with these numbers, for the duration of the context."""
    ray = import_ray()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(number) for number in range(max(gpus) + 1)]
    try:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[number] for number in gpus)
        # Ray starts a process for each CPU while it starts itself: one for each worker, which needs none.
        ray.init(
            address="local", num_gpus=len(gpus), num_cpus=len(gpus),
            object_store_memory=_OBJECT_STORE_BYTES, include_dashboard=False, **_QUIET,
        )  # fmt: skip
    finally:
        if visible is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Connect to a running Ray cluster by the address of its head; the cluster keeps running afterwards.

    ``auto``: RAY_ADDRESS, or else a cluster started here for the duration of the context. It ignores Ray's
    memory of earlier clusters, because Ray tries for minutes to reach a cluster that has ended. Raises
    ClusterError if the cluster does not answer, DeviceError if a cluster has to be started and there is no
    GPU.
    """
    ray = import_ray()
    named = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
    if not named:
        if not (count := cuda_device_count()):
            raise DeviceError("--ray without an address or RAY_ADDRESS: no CUDA device here; give HOST:PORT")
        with started_here(range(count)):
            yield
        return
    host, _, port = named.rpartition(":")
    number = digits(port)
    if not host or number is None or "/" in host:
        raise ClusterError(f"Ray address {named!r}: not HOST:PORT, such as 10.0.0.1:6379")
    try:
        socket.create_connection((host, number), timeout=_REACH_S).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ClusterError(
            f"Ray address {named!r} does not answer ({reason}); start it with `ray start --head`, "
            "which prints the address to give"
        ) from None
    try:
        in_time(functools.partial(ray.init, address=named, **_QUIET), lambda _: None, _CONNECT_S)
    except TimeoutError:
        raise ClusterError(
            f"Ray address {named!r} accepts a connection, but Ray does not answer within {_CONNECT_S:g} s; "
            "something else may use that port: `ray start --head` prints the address of a cluster"
        ) from None
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ClusterError(
            f"Ray address {named!r}: {str(error).strip().splitlines()[0]}; run this on a host of "
            "the cluster, with its RAY_AUTH_TOKEN if it has one"
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


#: Workers' output stays in Ray's logs: this process prints all messages.
_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}


def refuse_file(location: Path | URL) -> None:
    """Raises DatabaseError if workers on the connected cluster's other hosts cannot write the file."""
    if not isinstance(location, Path):
        return
    ray = import_ray()
    hosts = {n["NodeManagerAddress"] for n in ray.nodes() if n["Alive"] and n["Resources"].get("GPU")}
    elsewhere = sorted(hosts - {ray.util.get_node_ip_address()})
    if elsewhere:
        raise DatabaseError(
            f"{location}: a file on this host, and the cluster has GPUs on {', '.join(elsewhere)}; "
            "give a server: --db postgresql://HOST/NAME"
        )


def import_ray() -> Any:
    """Import and return Ray. Raises ClusterError if it is not installed."""
    # Ray reports usage statistics unless that is disabled before it starts.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
        import ray.exceptions
        import ray.util
    except ModuleNotFoundError as error:
        raise ClusterError(f"several GPUs need Ray ({error}): pip install 'tunegemm[ray]'") from None
    return ray
