"""Kernels that a record names and nothing here can launch: compiled while torch computes their products.

A wheel without its kernels, another minor version of the DSL, an older driver, a damaged pack: the sources
are there all the same. A call only asks. One thread hands what was asked for to a `CompilePool`, whose
workers see no GPU and leave the processors to others, and which is gone when nothing waits. Objects go to the
user's store; then the plans that fell back for want of them are dropped, so that the next calls find them.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from tunegemm.describe.device import Device
from tunegemm.errors import ArtifactError, TunegemmError
from tunegemm.generate import families
from tunegemm.generate.artifacts import ArtifactStore, Key, digest
from tunegemm.store.record import Record

if TYPE_CHECKING:  # a program whose kernels are all here imports neither pool nor workers
    from tunegemm.generate.compile import CompilePool, CompileResult

#: Of one kernel: workers of low priority wait for others, and nobody waits for them.
_TIMEOUT_S = 600.0
_MOST_WORKERS = 4

_log = logging.getLogger(__name__)


class Answer(NamedTuple):
    """What is done about a kernel; all empty where nothing is."""

    kernel: str = ""
    """Its name, if it is compiled."""
    failure: str = ""
    """Why it does not compile."""
    refusal: str = ""
    """Why no kernel can be compiled here, and the remedy."""


class _Job(NamedTuple):
    kernel: str
    family: str
    key: Key


class _Done(NamedTuple):
    job: _Job
    future: Future[CompileResult]


def make_pool() -> CompilePool:
    """Of a few workers, into the user's store. What others compiled is not asked for: it did not run."""
    from tunegemm.generate.compile import CompilePool

    workers = max(1, min(_MOST_WORKERS, len(os.sched_getaffinity(0)) // 4))
    return CompilePool(ArtifactStore(), workers=workers, timeout_s=_TIMEOUT_S, low_priority=True)


class BackgroundCompiler:
    """Compiles for one planner. Not in a forked child, which has none of its threads."""

    def __init__(
        self, ready: Callable[[str], None], make_pool: Callable[[], CompilePool] = make_pool
    ) -> None:
        """ready: called with a kernel's name once it is in the store, or known never to come."""
        self._ready = ready
        self._make_pool = make_pool
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._events: queue.SimpleQueue[_Job | _Done] = queue.SimpleQueue()
        self._is_running = False
        self._asked: set[str] = set()
        """Kernels that wait or are compiled."""
        self._failures: dict[str, str] = {}
        self._refusal = ""
        self.is_on = True
        """By ``TUNEGEMM_COMPILE``."""

    def ask(self, record: Record, device: Device) -> Answer:
        """For the kernel of a record that could not be loaded or launched. Returns at once."""
        if not self.is_on or os.getpid() != self._pid:
            return Answer()
        problem, candidate = record.problem, record.candidate
        family = families.get(candidate.family)
        if not family.compiled or not family.check(problem, candidate, device).runs:
            return Answer()
        if (missing := family.unavailable()) is not None:
            return Answer(refusal=missing)
        key = family.kernel_key(problem, candidate, device)
        kernel = digest(key)
        with self._lock:
            if kernel in self._failures or self._refusal:
                return Answer(failure=self._failures.get(kernel, ""), refusal=self._refusal)
            if kernel in self._asked:
                return Answer(kernel)
            try:
                if ArtifactStore().find(key) is not None:
                    return Answer()  # compiled by the compilers that are here: it would be the same again
            except ArtifactError:  # the user's to delete
                return Answer()
            self._events.put(_Job(kernel, family.name, key))
            if not self._is_running:
                try:
                    threading.Thread(target=self._work, name="tunegemm-compile", daemon=True).start()
                except RuntimeError:  # the interpreter ends
                    return Answer()
                self._is_running = True
            self._asked.add(kernel)
            return Answer(kernel)

    def _work(self) -> None:
        """The thread, until nothing waits."""
        start, count, under_way = time.monotonic(), 0, 0
        with self._make_pool() as pool:
            while True:
                with self._lock:
                    if not under_way and self._events.empty():
                        self._is_running = False
                        break
                event = self._events.get()
                if isinstance(event, _Job):
                    under_way += 1
                    self._submit(pool, event)
                else:
                    under_way -= 1
                    count += self._finish(pool, event)
        if count:
            seconds = time.monotonic() - start
            _log.info("%d missing kernel(s) compiled in the background in %.0f s: served now", count, seconds)

    def _submit(self, pool: CompilePool, job: _Job) -> None:
        try:
            future = pool.submit(job.family, job.key)
        except (TunegemmError, OSError, RuntimeError) as error:
            future = Future()
            future.set_exception(error)
        future.add_done_callback(lambda future: self._events.put(_Done(job, future)))

    def _finish(self, pool: CompilePool, done: _Done) -> bool:
        """Tell the planner; whether there is an object now."""
        from tunegemm.generate import cute_object

        job, future = done
        artifact = None
        try:
            result = future.result()
            if (artifact := result.artifact) is None:
                self._failures[job.kernel] = result.failure
            elif "cutlass_dsl" in job.key:
                with suppress(ImportError, OSError, RuntimeError):  # the load will say
                    cute_object.prepare_loading(artifact.path)
        except CancelledError:
            pass
        except (TunegemmError, OSError, RuntimeError) as error:  # the cache or the workers fail all
            lines = str(error).strip().splitlines()
            self._refusal = self._refusal or (lines[0] if lines else type(error).__name__)
            pool.drop_waiting()
        # In this order: a plan that is made meanwhile is dropped, too.
        self._ready(job.kernel)
        with self._lock:
            self._asked.discard(job.kernel)
        return artifact is not None
