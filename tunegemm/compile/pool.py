"""A pool of compile workers: processes that see no GPU, each of which may die without affecting the others.

The compilers are not thread-safe, abort the process on some tiles, and must not run in a process that
uses CUDA. A worker is `python -m tunegemm.compile.worker`, sent one job after the other; a thread of the
pool owns it, kills it at the deadline and replaces it when it dies. The cost is one candidate.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import itertools
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, NamedTuple, Protocol

from tunegemm.compile.artifacts import Artifact, ArtifactStore, Key, digest
from tunegemm.compile.ptxas import Resources
from tunegemm.compile.worker import Failure, one_line
from tunegemm.describe.served import UNATTACHED
from tunegemm.errors import CompileError, is_transient

#: Errors of the disk that the store is on, which fail every kernel: they are raised.
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)

WORKER_BYTES = 400 * 1024**2
"""Host memory to reserve for one worker: 250 MB after import, more while it compiles large tiles."""


@dataclass(frozen=True)
class CompileResult:
    """The object of one kernel key, or the reason why there is none."""

    artifact: Artifact | None
    failure: str = ""
    """One line; empty on success."""
    is_transient: bool = False
    """Whether the machine failed at that moment, not the kernel: a second request may compile."""


class Urgency(IntEnum):
    """The order in which waiting jobs start."""

    NOW = 0
    """A caller waits for it, or will soon."""
    NEXT = 1
    """The kernel will be needed."""
    IDLE = 2
    """The kernel may be needed: for cores that are otherwise idle."""


class Shipped(Protocol):
    """Objects compiled by another program, with any compilers."""

    def find(self, key: Key) -> Artifact | None:
        """The object of a kernel key, as `ArtifactStore.find`."""

    def __contains__(self, key: Key) -> bool:
        """Whether there is one; `find` may still reject it."""

    def each_key(self) -> Iterator[Key]:
        """The keys of all objects, with the compilers that made them."""


@dataclass(frozen=True)
class Ready:
    """The kernels that have an object at some time."""

    own: frozenset[str] = frozenset()
    """The `digest` of each key in the store."""
    shipped: Shipped | None = field(default=None, compare=False)
    store: ArtifactStore | None = field(default=None, compare=False)

    def __contains__(self, key: Key) -> bool:
        return digest(key) in self.own or (self.shipped is not None and key in self.shipped)

    def each_key(self) -> Iterator[Key]:
        """The keys of all objects, and perhaps of some that came later or are of other compilers."""
        if self.store is not None:
            yield from self.store.each_key()
        if self.shipped is not None:
            yield from self.shipped.each_key()


def default_workers() -> int:
    """Workers for this machine: one per core, fewer if memory is short."""
    import psutil

    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores, int(psutil.virtual_memory().available * 0.5 / WORKER_BYTES)))


class CompilePool:
    """Compiles kernels in parallel into an `ArtifactStore`. A context manager; workers start on first use."""

    def __init__(
        self,
        store: ArtifactStore,
        *,
        workers: int | None = None,
        timeout_s: float = 60.0,
        families_module: str = "tunegemm.generate.families",
        shipped: Shipped | None = None,
        low_priority: bool = False,
    ) -> None:
        """
        low_priority: whether workers yield the processors to others, and die with this process; for jobs that
            nobody waits for.
        shipped: further objects, which are not compiled again.
        timeout_s: limit of one compile; the largest tiles take about 3 s on one core.
        families_module: module with ``compiler(name)``, and ``import_compiler()`` to call before the first
            job; tests plant families that misbehave.
        """
        self.store, self._shipped = store, shipped
        self.workers = workers or default_workers()
        self._timeout_s = timeout_s
        self._new_worker = functools.partial(_Worker, families_module, low_priority=low_priority)
        # The most urgent first, then as they came. A job that became urgent is in it twice, and done once.
        self._jobs: queue.PriorityQueue[tuple[int, int, _Job | None]] = queue.PriorityQueue()
        self._order = itertools.count()
        self._waiting: dict[str, _Job] = {}
        self._own: set[str] | None = None
        # Daemon threads, unlike an executor's: the process can end at once, despite waiting jobs.
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._all: set[_Worker] = set()
        self._lock = threading.Lock()
        self._pending: dict[str, Future[CompileResult]] = {}
        self.compiled = 0
        """Kernels compiled by this pool, without those from the store."""

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def processes(self) -> list[subprocess.Popen[bytes]]:
        """The processes of the workers that live."""
        with self._lock:
            return [worker.process for worker in self._all]

    def start(self) -> None:
        """Begin to start all workers, so that the first jobs need not wait for that."""
        with self._lock:
            new = [self._new_worker() for _ in range(self.workers - len(self._all))]
            self._all.update(new)
        for worker in new:
            self._idle.put(worker)

    def submit(self, family: str, key: Key, *, urgency: Urgency = Urgency.NOW) -> Future[CompileResult]:
        """Compile the kernel of a `Family.kernel_key`; returns a finished future if the store has it.

        urgency: less urgent jobs let others pass, until they are requested again. Equal keys share a future.
        Raises CompileError after `close`.
        """
        name = json.dumps(dict(key), sort_keys=True)
        with self._lock:
            if self._closed:
                raise CompileError("the compile pool is closed; create a new one")
            if (job := self._waiting.get(name)) is not None and urgency < job.urgency:
                self._enqueue(job._replace(urgency=urgency))
            if name not in self._pending:
                future: Future[CompileResult] = Future()
                if (cached := self._from_store(key)) is not None:
                    future.set_result(cached)
                else:
                    self._enqueue(_Job(name, future, family, key, urgency))
                    if len(self._threads) < self.workers:
                        thread = threading.Thread(target=self._work, name="compile", daemon=True)
                        self._threads.append(thread)
                        thread.start()
                self._pending[name] = future
            return self._pending[name]

    def ready(self) -> Ready:
        """The kernels that have an object now, without those that other processes compile."""
        with self._lock:
            if self._own is None:  # listing a thousand objects takes 20 ms
                self._own = self.store.names()
            return Ready(frozenset(self._own), self._shipped, self.store)

    def drop_waiting(self, *, least: Urgency = Urgency.NOW) -> None:
        """Forget the jobs that no worker has begun, and cancel their futures. least: forget only jobs of this
        or less urgency.
        """
        with self._lock:
            for name, job in list(self._waiting.items()):
                if job.urgency >= least:
                    del self._waiting[name], self._pending[name]
                    job.future.cancel()

    def close(self) -> None:
        """Drop waiting jobs and kill the workers."""
        with self._lock:
            self._closed = True
            workers, threads = list(self._all), self._threads
            for job in self._waiting.values():
                job.future.cancel()
            self._waiting.clear()
            for _ in threads:
                self._jobs.put((Urgency.NOW, next(self._order), None))
        for worker in workers:
            worker.kill()
        for thread in threads:
            thread.join()
        for worker in workers:  # no thread waits for a reply now
            worker.disconnect()

    def _from_store(self, key: Key) -> CompileResult | None:
        for store in (self.store, self._shipped):
            if store is not None and (artifact := store.find(key)) is not None:
                return CompileResult(artifact)
        failure = self.store.failure(key)
        if failure is None or is_transient(failure):  # older releases also stored transient failures
            return None
        return CompileResult(None, failure)

    def _enqueue(self, job: _Job) -> None:
        self._waiting[job.name] = job
        self._jobs.put((job.urgency, next(self._order), job))

    def _work(self) -> None:
        """Runs jobs until the pool closes."""
        while (job := self._jobs.get()[-1]) is not None:
            with self._lock:
                is_due = self._waiting.get(job.name) is job
                if is_due:
                    del self._waiting[job.name]
            if is_due and job.future.set_running_or_notify_cancel():
                try:
                    result = self._compile(job.family, job.key)
                    if result.is_transient:  # who asks again may have it
                        with self._lock:
                            self._pending.pop(job.name, None)
                    job.future.set_result(result)
                except BaseException as error:  # for who waits for it, not for this thread
                    job.future.set_exception(error)

    def _compile(self, family: str, key: Key) -> CompileResult:
        scratch = self.store.scratch()
        try:
            return self._compile_into(scratch, family, key)
        finally:
            shutil.rmtree(scratch.parent, ignore_errors=True)  # also the files of a worker that was killed

    def _compile_into(self, scratch: Path, family: str, key: Key) -> CompileResult:
        try:
            worker = self._take_worker()
        except OSError as error:  # not enough memory, files or processes
            return CompileResult(None, f"a compile worker cannot start: {one_line(error)}", is_transient=True)
        if worker is None:
            return CompileResult(None, "the compile pool was closed", is_transient=True)
        try:
            reply = worker.ask(family, key, scratch, self._timeout_s)
            if isinstance(reply, Failure) and reply.is_transient and reply.errno not in _DISK:
                worker.kill()  # and its resources
                raise _WorkerDied(reply.reason, killed=True)
        except _WorkerDied as died:
            worker.disconnect()
            with self._lock:
                self._all.discard(worker)
            # An abort is the candidate's fault. A worker that was killed is not: by `close` after Ctrl-C, at
            # the deadline, or for memory. Remembered, it would hide a good kernel from every later tuning.
            if not died.killed:
                self.store.add_failure(key, str(died))
            return CompileResult(None, str(died), is_transient=died.killed)
        self._idle.put(worker)
        failure = reply.reason if isinstance(reply, Failure) else _refusal(reply)
        if isinstance(reply, Failure) or failure:
            if isinstance(reply, Failure) and reply.errno in _DISK:
                raise self.store.refuse_write(OSError(reply.errno, os.strerror(reply.errno)))
            self.store.add_failure(key, failure)
            return CompileResult(None, failure)
        artifact = self.store.add(key, scratch, reply)
        with self._lock:
            self.compiled += 1
            if self._own is not None:
                self._own.add(digest(key))
        return CompileResult(artifact)

    def _take_worker(self) -> _Worker | None:
        """A worker for the calling thread; None once the pool closes, which kills the workers."""
        with suppress(queue.Empty):
            return self._idle.get_nowait()
        with self._lock:
            if self._closed:
                return None
            worker = self._new_worker()
            self._all.add(worker)
        return worker


def _refusal(resources: Resources) -> str:
    """Why a compiled kernel is useless: spills, or serialized WGMMAs. Its rule should reject it."""
    if resources.spill_bytes:
        return f"spills {resources.spill_bytes} B to local memory"
    if resources.warnings:
        return f"ptxas warns {', '.join(resources.warnings)}"
    return ""


class _Job(NamedTuple):
    """A kernel to be compiled."""

    name: str
    future: Future[CompileResult]
    family: str
    key: Key
    urgency: Urgency


class _WorkerDied(Exception):
    """The worker was lost with the job it had."""

    def __init__(self, reason: str, *, killed: bool = False) -> None:
        super().__init__(reason)
        self.killed = killed
        """Whether it was killed from outside, so that the candidate is not to blame."""


def own_process(
    *command: str, output: int | IO[bytes] = subprocess.DEVNULL, **environment: str
) -> tuple[subprocess.Popen[bytes], Connection]:
    """A process of Python, and a pipe to it: its last argument is the number of its end."""
    # Apart from stdout, which compilers write to, even if it is closed here, so that its number is free.
    ours, lowest = Pipe()
    with lowest:
        theirs = Connection(fcntl.fcntl(lowest.fileno(), fcntl.F_DUPFD_CLOEXEC, 3))
    # It must find the same modules: tests and notebooks extend sys.path without installing them.
    path = os.pathsep.join(entry or os.curdir for entry in sys.path)
    process = subprocess.Popen(
        [sys.executable, *command, str(theirs.fileno())],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=[theirs.fileno()],
        env=os.environ | {"PYTHONPATH": path} | UNATTACHED | environment,
        start_new_session=True,  # Ctrl-C reaches only this process, which then ends the other
    )
    theirs.close()
    return process, ours


class _Worker:
    """One worker process, from the side of the thread that owns it."""

    def __init__(self, families_module: str, *, low_priority: bool = False) -> None:
        command = ["-m", "tunegemm.compile.worker", families_module, *["low"] * low_priority]
        self.process, self._connection = own_process(*command, CUDA_VISIBLE_DEVICES="")

    def ask(self, family: str, key: Key, out: Path, timeout_s: float) -> Resources | Failure:
        """Send one job, wait for its reply. Raises _WorkerDied if the worker dies."""
        try:
            self._connection.send((family, dict(key), out))
            if self._connection.poll(timeout_s):
                return self._connection.recv()
        except (EOFError, OSError):
            raise self._death() from None
        self.kill()
        raise _WorkerDied(f"compile took longer than {timeout_s:g} s", killed=True)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def disconnect(self) -> None:
        """Close the connection, once the process has ended and no other thread waits for its reply."""
        self._connection.close()

    def _death(self) -> _WorkerDied:
        code = self.process.wait()
        if code == 1:
            raise CompileError(
                f"the compile worker cannot start: {sys.executable} -m tunegemm.compile.worker exits with 1"
            )
        how = f"aborted by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return _WorkerDied(f"the compiler {how}", killed=code in (-signal.SIGKILL, -signal.SIGTERM))
