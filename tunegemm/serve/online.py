"""``TUNEGEMM_MODE=online``: tune a problem when dispatch first sees it, within a budget of seconds.

The search, its compile workers and its measuring worker are loaded on the first such problem. One problem is
tuned at a time, by the thread that asked for it; others are served as in ``predict`` meanwhile. What is found
is published, so that the next process has it as a record.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from torch._guards import CompileContext

from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.errors import TunegemmError

#: Seconds of tuning for one problem; with its kernels compiled it takes some 4.
PER_PROBLEM_S = 15.0


class OnlineTuning:
    """The budget of a process, and what it is spent on."""

    def __init__(self, tune: Callable[[Problem, Device, float], None] | None = None) -> None:
        """tune: tunes and publishes within so many seconds; by default `tunegemm.tune`."""
        self._tune = tune or _tune
        self._running = threading.Lock()
        self._pid = os.getpid()
        self._tried: set[Problem] = set()
        self._left_s: float | None = None
        self.warning = ""
        """Why the last attempt did nothing, in one line; empty when it went well, or when none was due."""

    def attempt(self, problem: Problem, device: Device) -> bool:
        """Tune the problem if that may be done now: whether there is something new to read."""
        self.warning = ""
        if problem in self._tried or os.getpid() != self._pid:  # a forked child has no use of CUDA anyway
            return False
        if CompileContext.try_get() is not None or not self._running.acquire(blocking=False):
            return False
        try:
            if self._left_s is None:
                from tunegemm.search.budget import online_budget

                self._left_s, self.warning = online_budget()
            if self._left_s <= 0:
                return False
            self._tried.add(problem)
            start = time.monotonic()
            try:
                self._tune(problem, device, min(self._left_s, PER_PROBLEM_S))
            except (TunegemmError, OSError, RuntimeError, ImportError) as error:
                lines = str(error).strip().splitlines()
                self.warning = (
                    f"tuning {problem} online failed ({lines[0] if lines else type(error).__name__})"
                )
                return False
            finally:
                self._left_s -= time.monotonic() - start
                if self._left_s <= 0:
                    spent = (
                        "the budget for tuning online is spent, what is new is as in mode predict; "
                        "TUNEGEMM_ONLINE_BUDGET=SECONDS raises it"
                    )
                    self.warning = f"{self.warning}; {spent}" if self.warning else spent
            return True
        finally:
            self._running.release()


def _tune(problem: Problem, device: Device, budget_seconds: float) -> None:
    from tunegemm.tuning.tuner import tune

    tune(problem, device=device, budget_seconds=budget_seconds)
