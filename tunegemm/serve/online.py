"""``TUNEGEMM_MODE=online``: what dispatch first sees is tuned or measured, within a budget of seconds.

A problem that has neither record nor prediction is tuned by the thread that asked for it, one at a time;
others are served as in ``predict`` meanwhile. One that is served by prediction is measured (`serve.feedback`)
by a thread of its own, once the GPU is idle. The search, its compile workers and its measuring worker are
loaded on the first of either. What is found is published, so that the next process has it as a record.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch._guards import CompileContext

from tunegemm import extras
from tunegemm.describe.device import Device, TelemetryReader
from tunegemm.describe.problem import Problem
from tunegemm.errors import TunegemmError, one_line

if TYPE_CHECKING:
    from tunegemm.choose.fitted import Predicted
    from tunegemm.serve.feedback import Feedback, Measure

_log = logging.getLogger(__name__)

#: Seconds of tuning for one problem; with its kernels compiled it takes some 4.
PER_PROBLEM_S = 15.0
#: The GPU is idle when no kernel ran at so many looks in turn, seconds apart.
_IDLE_LOOKS, _LOOK_S = 3, 1.0
#: Seconds of measuring after which it is looked again whether the GPU is idle.
_MEASURE_S = 5.0

_SPENT = (
    "the budget for tuning online is spent, what is new is as in mode predict; "
    "TUNEGEMM_ONLINE_BUDGET=SECONDS raises it"
)


@dataclass(frozen=True)
class _Waiting:
    """A problem that is served by prediction."""

    problem: Problem
    device: Device
    options: Sequence[Predicted]
    notify: Callable[[Feedback | None, str], None]


class OnlineTuning:
    """The budget of a process, and what it is spent on."""

    def __init__(
        self,
        tune: Callable[[Problem, Device, float], None] | None = None,
        *,
        measuring: Callable[[Device], AbstractContextManager[Measure]] | None = None,
        wait: Callable[[Device], bool] | None = None,
    ) -> None:
        """tune: tunes and publishes within so many seconds; by default `tunegemm.tune`. measuring: what
        measures predictions; by default `feedback.measuring`. wait: returns when a device is idle, False
        where that cannot be known; by default `wait_until_idle`.
        """
        self._tune = tune or _tune
        self._measuring, self._wait = measuring or _measuring, wait or wait_until_idle
        self._running = threading.Lock()
        self._is_measuring = False
        """Whether predictions are measured, which is over soon."""
        self._pid = os.getpid()
        self._tried: set[Problem] = set()
        self._left_s: float | None = None
        self._queue: deque[_Waiting] = deque()
        self._changing_queue = threading.Lock()
        self._thread: threading.Thread | None = None
        self._logged: set[str] = set()
        self.warning = ""
        """Why the last attempt did nothing, in one line; empty when it went well, or when none was due."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits to be measured."""
        return self._thread is None

    def attempt(self, problem: Problem, device: Device) -> bool:
        """Tune the problem if that may be done now: whether there is something new to read."""
        self.warning = ""
        if problem in self._tried or os.getpid() != self._pid:  # a forked child has no use of CUDA anyway
            return False
        if CompileContext.try_get() is not None or not self._running.acquire(blocking=self._is_measuring):
            return False
        try:
            self.warning = self._read_budget()
            if self._remaining_s <= 0:
                return False
            self._tried.add(problem)
            start = time.monotonic()
            try:
                self._tune(problem, device, min(self._remaining_s, PER_PROBLEM_S))
            except Exception as error:  # a product is torch's then, whatever went wrong
                self.warning = f"tuning {problem} online failed ({one_line(error)})"
                return False
            finally:
                if self._spend(start):
                    self.warning = f"{self.warning}; {_SPENT}" if self.warning else _SPENT
            return True
        finally:
            self._running.release()

    def later(
        self,
        problem: Problem,
        device: Device,
        options: Sequence[Predicted],
        notify: Callable[[Feedback | None, str], None],
    ) -> None:
        """Have the predictions of a problem measured when the device is idle, once in this process.

        notify: is called by another thread with what became of them, and with a warning, which may be empty.
        """
        if os.getpid() != self._pid or problem in self._tried:
            return
        with self._changing_queue:
            self._tried.add(problem)
            self._queue.append(_Waiting(problem, device, options, notify))
            if self._thread is None:
                # A daemon: what is not measured yet does not keep a process from ending.
                thread = threading.Thread(target=self._measure_all, name="tunegemm-online", daemon=True)
                with suppress(RuntimeError):  # none can be had now: the next product asks for one again
                    thread.start()
                    self._thread = thread

    def _measure_all(self) -> None:
        """Measures until nothing waits any more. An unexpected error is logged, and costs one product."""
        while True:
            with self._changing_queue:
                if not self._queue:
                    self._thread = None
                    return
                first = self._queue[0]
            try:
                ends = self._measure_for_a_while(first) if self._wait(first.device) else (
                    f"NVML does not say whether {first.device.name} is idle, so that predictions are not "
                    "measured; `tunegemm verify --predicted` does it"
                )  # fmt: skip
            except (TunegemmError, OSError, RuntimeError, ImportError) as error:
                ends = f"measuring predictions online failed ({one_line(error)})"
            except BaseException as error:
                self._log(error)
                with self._changing_queue:
                    if self._queue:  # the first is the one that was measured: those before it are gone
                        self._queue.popleft()
                continue
            if ends:  # for the others, too
                with self._changing_queue:
                    self._queue.clear()
                try:
                    first.notify(None, ends)
                except BaseException as error:
                    self._log(error)

    def _log(self, error: BaseException) -> None:
        """Logs each kind of error once."""
        if (reason := f"{type(error).__name__}: {one_line(error)}") not in self._logged:
            self._logged.add(reason)
            _log.warning("measuring predictions online: %s; it goes on", reason, exc_info=error)

    def _measure_for_a_while(self, first: _Waiting) -> str:
        """Measure what waits on a device, for some seconds; the reason to stop for good, if there is one."""
        with self._running:
            self._is_measuring = True
            try:
                if warning := self._read_budget():
                    first.notify(None, warning)
                if self._remaining_s <= 0:
                    return _SPENT
                start, following = time.monotonic(), first
                with self._measuring(first.device) as measure:
                    while following.device == first.device:
                        following.notify(measure(following.problem, following.options), "")
                        with self._changing_queue:
                            self._queue.popleft()
                            if not self._queue:
                                break
                            following = self._queue[0]
                        if time.monotonic() - start > min(_MEASURE_S, self._remaining_s):
                            break
                return _SPENT if self._spend(start) else ""
            finally:
                self._is_measuring = False

    @property
    def _remaining_s(self) -> float:
        return self._left_s or 0.0

    def _read_budget(self) -> str:
        """Once: the seconds of this process. What is wrong with the variable that says them, if anything."""
        if self._left_s is not None:
            return ""
        from tunegemm.search.budget import online_budget

        self._left_s, warning = online_budget()
        return warning

    def _spend(self, start: float) -> bool:
        """Take the seconds since then from the budget: whether nothing is left."""
        self._left_s = self._remaining_s - (time.monotonic() - start)
        return self._left_s <= 0


def wait_until_idle(
    device: Device,
    busy_percent: Callable[[], int | None] | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Returns when no process ran a kernel on the GPU for some seconds; False where NVML does not say.

    busy_percent: by default NVML's, of the device.
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
    from tunegemm.serve.feedback import measuring

    return measuring(device)


def _tune(problem: Problem, device: Device, budget_seconds: float) -> None:
    extras.require("tune")
    from tunegemm.tuning.tuner import tune

    if tune(problem, device=device, budget_seconds=budget_seconds).interrupted:
        raise KeyboardInterrupt  # of a command it is the end; here it is for the user's program
