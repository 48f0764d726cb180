"""Compiles recorded kernels that cannot be launched here; torch computes meanwhile.

Kernels may be missing in a wheel, or be for another minor version of the DSL, an older driver or a damaged
pack; their sources are always there. A call only requests a kernel. One thread hands requests to a
`CompilePool`, whose workers see no GPU and run at low priority; the pool closes when nothing waits. Objects
go to the user's store. Then plans that fell back for want of an object are dropped, so the next calls find
it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

from tunegemm.compile.artifacts import ArtifactStore, Key, digest
from tunegemm.describe.device import Device
from tunegemm.dispatch.notices import named_error
from tunegemm.errors import ArtifactError, TunegemmError, is_transient, one_line
from tunegemm.generate import families
from tunegemm.store.record import Record

if TYPE_CHECKING:  # a program whose kernels are all here imports neither pool nor workers
    from tunegemm.compile.pool import CompilePool, CompileResult

#: How long one kernel may take: workers of low priority wait for others, and nobody waits for them.
_TIMEOUT_S = 600.0
_MOST_WORKERS = 4
#: Seconds until the next attempt, if the machine could not compile a kernel, as when memory runs out. After
#: the last attempt this process gives the kernel up.
RETRY_AFTER_S = (1.0, 15.0, 120.0)

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
        self._lock = threading.Lock()
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
        """Queue a job and start a thread if needed; False if that fails. The caller holds the lock."""
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
            self._log(error)
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
                self._log(error)
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
            self._log(error)
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
        with self._lock:
            is_put = self._put(job)
        if not is_put:
            self._failures[job.kernel] = "a thread cannot start"
            self._tell(job)

    def _log(self, error: BaseException) -> None:
        """Logs each kind of error once."""
        if (reason := named_error(error)) not in self._logged:
            self._logged.add(reason)
            _log.warning("compiling in the background: %s; continuing", reason, exc_info=error)
