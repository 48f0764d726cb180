"""``TUNEGEMM_MODE=online``: tune problems without a record while the GPU is idle, within a time budget.

Calls are served as in ``predict`` and wait for nothing. A thread measures predicted kernels
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
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tunegemm import extras
from tunegemm.describe.device import Device, TelemetryReader
from tunegemm.describe.problem import Problem
from tunegemm.dispatch.notices import named_error
from tunegemm.errors import ProblemError, SpaceError, TunegemmError, one_line

if TYPE_CHECKING:
    from tunegemm.choose.neighbours import Offer
    from tunegemm.tuning.progress import TuneResult
    from tunegemm.tuning.verify import Measure

_log = logging.getLogger(__name__)

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


@dataclass(frozen=True)
class _Waiting:
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
                self._log(error)
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
                    self._log(error)

    def _log(self, error: BaseException) -> None:
        """Logs each kind of error once."""
        if (reason := named_error(error)) not in self._logged:
            self._logged.add(reason)
            _log.warning("tuning online: %s; continuing", reason, exc_info=error)

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
