"""The parent's side: keeps a measuring process alive, and identifies the candidate that ended it. It also has
the messages between the two.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import IO, Any, Self

from tunegemm.compile.pool import own_process
from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.errors import DeviceError, MeasureError, one_line
from tunegemm.measure.outcome import Failure, Outcome, Stage
from tunegemm.measure.settings import SCREEN, Job, RaceSettings

CUDA_BACKEND = "tunegemm.measure.backend:CudaBackend"

#: Time limit for importing torch, starting CUDA and making operands, which belong to no candidate.
_SETUP_SECONDS = 300.0

_CHILD = "import sys; from tunegemm.measure.session import main; main(int(sys.argv[2]), sys.argv[1])"


# To the child, after its device:
@dataclass(frozen=True)
class Measure:
    """A request: one `Result` per job, then `Done`."""

    problem: Problem
    jobs: tuple[Job, ...]
    settings: RaceSettings
    function: str = ""
    """Source of the user's function that is the problem's epilogue, which the measuring process lacks."""


@dataclass(frozen=True)
class Discover:
    """A request: `Done` with the candidates that the libraries name for a problem."""

    problem: Problem


def add_seconds(total: dict[str, float], more: Mapping[str, float]) -> None:
    """Add the seconds of phases to earlier ones."""
    for name, seconds in more.items():
        total[name] = total.get(name, 0.0) + seconds


# And to the parent:
@dataclass(frozen=True)
class Step:
    """About to do something that may not return."""

    job: int | None
    """Index in the jobs of the request; None if the step belongs to no candidate."""
    stage: Stage
    """The stage of a failure in this step, unless it is a hang or a crash."""
    device_seconds: float = 0.0
    """Expected device time of this step, beyond the usual."""


@dataclass(frozen=True)
class Result:
    """The outcome of a job."""

    job: int
    outcome: Outcome


@dataclass(frozen=True)
class Done:
    """A request is answered."""

    value: Any = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds of its phases."""


@dataclass(frozen=True)
class Broken:
    """The session ends: this process cannot use the device any more."""

    job: int | None
    """The job that broke it; None if the device cannot be used at all."""
    reason: str
    stage: Stage = "crash"


class MeasureWorker:
    """Measures candidates on one GPU, in a child process that is replaced when a candidate breaks it.

    The child starts on first use, and only the child touches CUDA. Close the worker, or use it in a ``with``
    statement. No child outlives the worker or this process, however this process ends.

        with MeasureWorker(device) as worker:
            for outcome in worker.measure(problem, jobs, SCREEN):
                ...
    """

    def __init__(
        self,
        device: Device,
        *,
        timeout_s: float = 30.0,
        backend: str = CUDA_BACKEND,
        child: Child | None = None,
    ) -> None:
        """`timeout_s`: how long one step of one candidate (load, first launch, replay) may take before it
        counts as hung. `backend`: ``module:attribute`` of another class with the methods of
        `tunegemm.measure.backend.CudaBackend`.
        `child`: the first child, with the same backend, if it is already running.

        Raises DeviceError if the device is not real.
        """
        if backend == CUDA_BACKEND and not device.is_real:
            raise DeviceError(f"device {device.spec!r} measures nothing; use cuda:N")
        self._device, self._timeout_s, self._backend = device, timeout_s, backend
        self._child: Child | None = None
        self._early = child
        self.seconds: dict[str, float] = {}
        """Seconds waited so far: for the child's start, and for each phase of its requests."""

    def __enter__(self) -> MeasureWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the child, which frees the GPU. The worker may be used again."""
        for child in filter(None, (self._child, self._early)):
            child.kill()
        self._child = self._early = None

    @property
    def pid(self) -> int | None:
        """The child's process id; None if there is no child."""
        return None if self._child is None else self._child.process.pid

    def discover(self, problem: Problem) -> list[Candidate]:
        """torch.mm, and the algorithms that the vendor's library lists for this problem on this GPU.

        Raises MeasureError if the library or the GPU fails.
        """
        child = self._started()
        child.connection.send(Discover(problem))
        message = self._receive(child, _SETUP_SECONDS)
        while isinstance(message, Step):
            message = self._receive(child, _SETUP_SECONDS)
        if isinstance(message, Done):
            add_seconds(self.seconds, message.seconds)
            return list(message.value)
        self.close()
        raise MeasureError(f"asking the library for algorithms of {problem} failed: {message.reason}")

    def swept(self, problem: Problem) -> None:
        """None, because there is no recording: every candidate can be measured."""

    def measure(
        self, problem: Problem, jobs: Sequence[Job], settings: RaceSettings = SCREEN
    ) -> Iterator[Outcome]:
        """One outcome per job: failures as they happen, measurements when their interleave is done.

        Up to `settings.interleave` jobs share an interleave with the baseline. If a job ends the child, its
        outcome is a Failure, and a new child runs the interleave again without it. Raises MeasureError if the
        GPU fails and no candidate is to blame.
        """
        for first in range(0, len(jobs), settings.interleave):
            yield from self._interleave(problem, list(jobs[first : first + settings.interleave]), settings)

    def _interleave(self, problem: Problem, jobs: list[Job], settings: RaceSettings) -> Iterator[Outcome]:
        while jobs:
            child = self._started()
            function = problem.fused.function
            source = function.source if function else ""
            child.connection.send(Measure(problem, tuple(jobs), settings, source))
            answered: set[int] = set()
            finished = False
            try:
                for index, outcome in self._outcomes(child, problem, jobs):
                    answered.add(index)
                    yield outcome
                finished = True
            finally:
                # An exception (Ctrl-C), or the caller stopped early: the child is in the middle of this
                # request, and would answer the next request with the rest of this one.
                if not finished:
                    self.close()
            jobs = [job for index, job in enumerate(jobs) if index not in answered]

    def _outcomes(self, child: Child, problem: Problem, jobs: list[Job]) -> Iterator[tuple[int, Outcome]]:
        """Outcomes of one request, with the index of each job; stops early if a candidate ends the child."""
        step = Step(None, "load")
        while True:
            limit_s = _SETUP_SECONDS if step.job is None else self._timeout_s
            message = self._receive(child, limit_s + step.device_seconds, step.job)
            if isinstance(message, Step):
                step = message
            elif isinstance(message, Result):
                yield message.job, message.outcome
            elif isinstance(message, Done):
                add_seconds(self.seconds, message.seconds)
                return
            else:
                self.close()
                if (job := message.job) is None:
                    raise MeasureError(f"measuring {problem} failed before any candidate: {message.reason}")
                yield job, Failure(jobs[job].candidate, message.stage, message.reason)
                return

    def _receive(self, child: Child, limit_s: float, job: int | None = None) -> Any:
        """The next message; a `Broken` for this job if none arrives."""
        try:
            if child.connection.poll(limit_s):
                return child.connection.recv()
        except (EOFError, OSError):
            return Broken(job, child.last_words())
        return Broken(job, f"no answer within {limit_s:.3g} s", "timeout")

    def _started(self) -> Child:
        """The child, started if there is none. Raises MeasureError if it cannot use the device."""
        if self._child is None:
            began = time.monotonic()
            self._child, self._early = self._early or Child(self._backend), None
            with suppress(OSError):  # it has ended already; its last message is read next
                self._child.connection.send(self._device)
            message = self._receive(self._child, _SETUP_SECONDS)
            if not isinstance(message, Done):
                self.close()
                raise MeasureError(f"the measuring process cannot use {self._device.spec}: {message.reason}")
            add_seconds(self.seconds, {"start": time.monotonic() - began})
        return self._child


class Child:
    """One measuring process and its pipe; as a context manager, it ends the process.

    It can be started before its device is known.
    """

    def __init__(self, backend: str = CUDA_BACKEND) -> None:
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        self.process, self.connection = own_process("-c", _CHILD, backend, output=self._output)
        self._finalizer = weakref.finalize(self, _end, self.process, self.connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """End the process; further calls do nothing."""
        self._finalizer()
        self._output.close()

    def last_words(self) -> str:
        """A line with the process's exit status and its last line of output."""
        try:
            code = self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            return "the process closed its pipe but is still running"
        cause = f"killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        size = self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, size - 4096))
        lines = [line for line in self._output.read().decode(errors="replace").splitlines() if line.strip()]
        return one_line(f"{cause}: {lines[-1].strip()}" if lines else cause)


def _end(process: subprocess.Popen[bytes], connection: Connection) -> None:
    """Kill and reap the process. If it hangs in the driver, it takes a while until the driver releases it."""
    connection.close()
    process.kill()
    deadline = time.monotonic() + 30
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)  # then poll again, for as long as the driver may take
