"""Compiles kernels and tunes products while calls are served by what there is.

`BackgroundCompiler` compiles recorded kernels that cannot be launched here; torch computes meanwhile. Kernels
may be missing in a wheel, or be for another minor version of the DSL, an older driver or a damaged pack;
their sources are always there. A call only requests a kernel. One thread hands requests to a `CompilePool`,
whose workers see no GPU and run at low priority; the pool closes when nothing waits. Objects go to the user's
store. Then plans that fell back for want of an object are dropped, so the next calls find it.

`OnlineTuning` is ``TUNEGEMM_MODE=online``: it tunes problems without a record while the GPU is idle, within a
time budget. Calls are served as in ``predict`` and wait for nothing. A thread measures predicted kernels
(`tuning.verify`), and tunes problems without a prediction. The first such problem loads the search, its
compile workers and its measuring worker. Results are published, so the next process has them as records.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager, suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

from tunegemm import extras
from tunegemm.compile.artifacts import ArtifactStore, Key, digest
from tunegemm.describe.device import Device, TelemetryReader
from tunegemm.describe.problem import Problem
from tunegemm.dispatch.notices import named_error
from tunegemm.errors import ArtifactError, ProblemError, SpaceError, TunegemmError, is_transient, one_line
from tunegemm.generate import families
from tunegemm.store.record import Record

if TYPE_CHECKING:  # a program whose kernels are all here imports neither pool nor workers
    from tunegemm.choose.neighbours import Offer
    from tunegemm.compile.pool import CompilePool, CompileResult
    from tunegemm.tuning.progress import TuneResult
    from tunegemm.tuning.verify import Measure

#: How long one kernel may take: workers of low priority wait for others, and nobody waits for them.
_TIMEOUT_S = 600.0
_MOST_WORKERS = 4
#: Seconds until the next attempt, if the machine could not compile a kernel, as when memory runs out. After
#: the last attempt this process gives the kernel up.
RETRY_AFTER_S = (1.0, 15.0, 120.0)

#: Seconds of tuning for one problem, at most; about 4 if its kernels are already compiled.
PER_PROBLEM_S = 15.0
#: The GPU is idle if no kernel ran at this many consecutive looks, this many seconds apart.
_IDLE_LOOKS, _LOOK_S = 3, 1.0
#: Seconds of measuring before the next check that the GPU is idle.
_MEASURE_S = 5.0

_SPENT = (
    "the budget for online tuning is spent; new products run as in mode predict; "
    "TUNEGEMM_ONLINE_BUDGET=SECONDS raises it"
)

_log = logging.getLogger(__name__)


class Answer(NamedTuple):
    """How a request for a kernel is handled; all fields are empty if nothing is done."""

    kernel: str = ""
    """The kernel's name, if it is being compiled."""
    failure: str = ""
    """Why it does not compile."""
    refusal: str = ""
    """Why no kernel can be compiled here, and the remedy."""


class _Job(NamedTuple):
    kernel: str
    family: str
    key: Key
    tries: int = 0
    """How many attempts failed."""


def make_pool(families_module: str = families.__name__) -> CompilePool:
    """A pool of a few workers, which writes to the user's store.

    It ignores objects from elsewhere, because they did not run. families_module: as of `CompilePool`.
    """
    from tunegemm.compile.pool import CompilePool

    workers = max(1, min(_MOST_WORKERS, len(os.sched_getaffinity(0)) // 4))
    return CompilePool(
        ArtifactStore(),
        workers=workers,
        timeout_s=_TIMEOUT_S,
        families_module=families_module,
        low_priority=True,
    )


class BackgroundCompiler:
    """Compiles for one planner. Not in a forked child, which has none of its threads."""

    def __init__(
        self, ready: Callable[[str], None], make_pool: Callable[[], CompilePool] = make_pool
    ) -> None:
        """ready: called with a kernel's name once it is in the store, or will never be."""
        self._ready = ready
        self._make_pool = make_pool
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._news: SimpleQueue[_Job | Future[CompileResult]] = SimpleQueue()
        """What the thread has not taken yet: jobs, and those that were compiled."""
        self._is_running = False
        self._asked: set[str] = set()
        """Kernels that wait or are being compiled."""
        self._failures: dict[str, str] = {}
        self._refusal = ""
        self._logged: set[str] = set()
        self.is_on = True
        """By ``TUNEGEMM_COMPILE``."""

    @property
    def waiting(self) -> int:
        """How many kernels wait or are being compiled."""
        return len(self._asked)

    def ask(self, record: Record, device: Device) -> Answer:
        """Request the kernel of a record that could not be loaded or launched. Returns at once."""
        problem, candidate = record.problem, record.candidate
        family = families.get(candidate.family)
        if not self.is_on or not family.compiled or not family.check(problem, candidate, device).runs:
            return Answer()
        if (missing := family.unavailable()) is not None:
            return Answer(refusal=missing)
        return self.ask_for(family.name, family.kernel_key(problem, candidate, device))

    def ask_for(self, family: str, key: Key) -> Answer:
        """Request the kernel of a key. Returns at once."""
        if not self.is_on or os.getpid() != self._pid:
            return Answer()
        kernel = digest(key)
        with self._lock:
            if kernel in self._failures or self._refusal:
                return Answer(failure=self._failures.get(kernel, ""), refusal=self._refusal)
            if kernel in self._asked:
                return Answer(kernel)
            try:
                if ArtifactStore().find(key) is not None:
                    return Answer()  # already from the compilers here: a new one would be identical
            except ArtifactError:  # the user's to delete
                return Answer()
            if not self._put(_Job(kernel, family, key)):
                return Answer()
            self._asked.add(kernel)
            return Answer(kernel)

    def _put(self, job: _Job) -> bool:
        """Queue a job and start a thread if needed; False if that fails."""
        with self._lock:
            if not self._is_running:
                try:
                    threading.Thread(target=self._work, name="tunegemm-compile", daemon=True).start()
                except RuntimeError:  # the interpreter ends, or no thread can be had
                    return False
                self._is_running = True
            self._news.put(job)
            return True

    def _work(self) -> None:
        """Run the thread until nothing waits. An error is logged, and another thread continues."""
        start, count, ends = time.monotonic(), 0, False
        under_way: dict[Future[CompileResult], _Job] = {}
        try:
            with self._make_pool() as pool:
                while not ends:
                    if isinstance(news := self._news.get(), _Job):
                        under_way[self._submit(pool, news)] = news
                    else:
                        count += self._finish(pool, under_way[news], news)
                        del under_way[news]
                    with self._lock:
                        ends = not under_way and self._news.empty()
                        self._is_running = not ends
        except BaseException as error:  # for example no pool: else nobody would notice
            _log_once(self._logged, "compiling in the background", error)
            if not ends:
                jobs = [*under_way.values()]
                with self._lock:
                    while not self._news.empty():
                        if isinstance(news := self._news.get(), _Job):
                            jobs.append(news)
                    self._news, self._is_running = SimpleQueue(), False
                for job in jobs:
                    self._retry(job, named_error(error))
        if count:
            seconds = time.monotonic() - start
            _log.info("%d missing kernel(s) compiled in the background in %.0f s; now in use", count, seconds)

    def _submit(self, pool: CompilePool, job: _Job) -> Future[CompileResult]:
        try:
            future = pool.submit(job.family, job.key)
        except BaseException as error:
            future = Future()
            future.set_exception(error)
        future.add_done_callback(self._news.put)
        return future

    def _finish(self, pool: CompilePool, job: _Job, future: Future[CompileResult]) -> bool:
        """Notify the planner; returns whether the object now exists."""
        artifact = None
        try:
            result = future.result()
            if (artifact := result.artifact) is None and result.is_transient:
                self._retry(job, result.failure)
                return False
            if artifact is None:
                self._failures[job.kernel] = result.failure
        except CancelledError:
            pass
        except BaseException as error:
            if isinstance(error, MemoryError | OSError) and is_transient(error):
                self._retry(job, named_error(error))
                return False
            if isinstance(error, TunegemmError | RuntimeError):  # the cache or the workers fail all
                self._refusal = self._refusal or one_line(error)
                pool.drop_waiting()
            else:
                _log_once(self._logged, "compiling in the background", error)
                self._failures[job.kernel] = named_error(error)
        if artifact is not None and "cutlass_dsl" in job.key:
            with suppress(Exception):  # the load reports it
                from tunegemm.generate import cute_launch

                cute_launch.prepare_loading(artifact.path)
        self._tell(job)
        return artifact is not None

    def _tell(self, job: _Job) -> None:
        """Report that the kernel exists, or will never exist."""
        try:
            # This order also drops a plan made at the same time.
            self._ready(job.kernel)
        except Exception as error:
            _log_once(self._logged, "compiling in the background", error)
        with self._lock:
            self._asked.discard(job.kernel)

    def _retry(self, job: _Job, reason: str) -> None:
        """Retry a job later if the machine could not do it, or give it up."""
        try:
            timer = threading.Timer(
                RETRY_AFTER_S[job.tries], self._put_retry, [job._replace(tries=job.tries + 1)]
            )
            timer.daemon = True
            timer.start()
        except (IndexError, RuntimeError):  # often enough; or no thread can be had
            self._failures[job.kernel] = reason
            self._tell(job)

    def _put_retry(self, job: _Job) -> None:
        if not self._put(job):  # else nobody would compile the kernel, or ask for it again
            self._failures[job.kernel] = "a thread cannot start"
            self._tell(job)


def _log_once(logged: set[str], doing: str, error: BaseException) -> None:
    """Log each kind of error once."""
    if (reason := named_error(error)) not in logged:
        logged.add(reason)
        _log.warning("%s: %s; continuing", doing, reason, exc_info=error)


class _Waiting(NamedTuple):
    """A problem without a record."""

    problem: Problem
    device: Device
    options: Sequence[Offer]
    """The kernels that serve it; empty if it should be tuned."""
    notify: Callable[[TuneResult | None, str], None]


class OnlineTuning:
    """A process's tuning budget and the queue that spends it."""

    def __init__(
        self,
        *,
        measuring: Callable[[Device], AbstractContextManager[Measure]] | None = None,
        wait: Callable[[Device], bool] | None = None,
    ) -> None:
        """measuring: measures and tunes; by default `tuning.verify.measuring`. wait: returns when a device is
        idle, False if that cannot be known; by default `wait_until_idle`.
        """
        self._measuring, self._wait = measuring or _measuring, wait or wait_until_idle
        self._pid = os.getpid()
        self._tried: set[Problem] = set()
        self._left_s: float | None = None
        self._queue: deque[_Waiting] = deque()
        self._changing_queue = threading.Lock()
        self._thread: threading.Thread | None = None
        self._logged: set[str] = set()

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits to be measured."""
        return self._thread is None

    def later(
        self,
        problem: Problem,
        device: Device,
        options: Sequence[Offer],
        notify: Callable[[TuneResult | None, str], None],
    ) -> None:
        """Have a problem measured when the device is idle, once in this process; without options it is tuned.

        notify: another thread calls it with the result and a warning, which may be empty.
        """
        if os.getpid() != self._pid or problem in self._tried:
            return
        with self._changing_queue:
            self._tried.add(problem)
            self._queue.append(_Waiting(problem, device, options, notify))
            if self._thread is None:
                # A daemon: waiting problems do not keep a process from ending.
                thread = threading.Thread(target=self._measure_all, name="tunegemm-online", daemon=True)
                with suppress(RuntimeError):  # no thread can start now: the next product tries again
                    thread.start()
                    self._thread = thread

    def _measure_all(self) -> None:
        """Measure until nothing waits. An unexpected error is logged, and only its product is skipped."""
        while True:
            with self._changing_queue:
                if not self._queue:
                    self._thread = None
                    return
                first = self._queue[0]
            try:
                ends = self._measure_for_a_while(first) if self._wait(first.device) else (
                    f"NVML does not say whether {first.device.name} is idle, so nothing is tuned "
                    "online; use `tunegemm tune` and `tunegemm verify --predicted`"
                )  # fmt: skip
            except (TunegemmError, OSError, RuntimeError, ImportError) as error:
                ends = f"tuning online failed ({one_line(error)})"
            except BaseException as error:
                _log_once(self._logged, "tuning online", error)
                with self._changing_queue:
                    if self._queue:  # the first is the measured one; earlier ones are gone
                        self._queue.popleft()
                continue
            if ends:  # for the others, too
                with self._changing_queue:
                    self._queue.clear()
                try:
                    first.notify(None, ends)
                except BaseException as error:
                    _log_once(self._logged, "tuning online", error)

    def _measure_for_a_while(self, first: _Waiting) -> str:
        """Measure a device's queue for some seconds; returns the reason to stop for good, if any."""
        if self._left_s is None:
            from tunegemm.search.efforts import online_budget

            self._left_s, warning = online_budget()
            if warning:
                first.notify(None, warning)
        if self._left_s <= 0:
            return _SPENT
        start, following = time.monotonic(), first
        with self._measuring(first.device) as measure:
            while following.device == first.device:
                left_s = self._left_s - (time.monotonic() - start)
                seconds = max(0.0, min(PER_PROBLEM_S, left_s))
                result, warning = None, ""
                try:
                    result = measure(following.problem, following.options, seconds)
                except (ProblemError, SpaceError) as error:  # concerns only this product
                    warning = f"tuning {following.problem} online failed ({one_line(error)})"
                following.notify(result, warning)
                with self._changing_queue:
                    self._queue.popleft()
                    if not self._queue:
                        break
                    following = self._queue[0]
                if time.monotonic() - start > min(_MEASURE_S, self._left_s):
                    break
        self._left_s -= time.monotonic() - start
        return _SPENT if self._left_s <= 0 else ""


def wait_until_idle(
    device: Device,
    busy_percent: Callable[[], int | None] | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Returns when no process ran a kernel on the GPU for some seconds; False if NVML cannot tell.

    busy_percent: by default NVML's, of the device. sleep: waits between looks; tests count its calls.
    """
    look = busy_percent or TelemetryReader(device.index).busy_percent
    quiet = 0
    while quiet < _IDLE_LOOKS:
        sleep(_LOOK_S)
        if (percent := look()) is None:
            return False
        quiet = quiet + 1 if percent == 0 else 0
    return True


def _measuring(device: Device) -> AbstractContextManager[Measure]:
    extras.require("tune")
    from tunegemm.tuning.verify import measuring

    return measuring(device)
