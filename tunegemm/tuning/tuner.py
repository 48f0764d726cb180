"""Tuning, the whole story: ask, check, compile, measure, record, tell; then race the finalists.

`Tuner.tune` is the place to start reading. What it calls: `families` say what is feasible, `model` ranks it,
`search` picks, `compile` builds, `measure` times beside torch.mm, `database` remembers. `run` has each step,
`workbench` what several tunings share.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from tunegemm.describe.device import Device, cuda_device_count, find_device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.errors import DeviceError
from tunegemm.generate.cublaslt import TORCH_MM
from tunegemm.measure import SCREEN
from tunegemm.measure.replay import open_replay
from tunegemm.search.budget import Effort
from tunegemm.tuning.run import Progress, Run, TuneResult
from tunegemm.tuning.workbench import Workbench

if TYPE_CHECKING:
    from tunegemm.store import Database

#: Candidates of one interleave: large enough to share the baseline's cost, small enough to show progress.
_BATCH = 32
#: Seconds that heats and a final race of turns take, some 18 and 12. A search that has a budget leaves them
#: so much of it, but no more than half.
_TURNS_S = 30.0


def open_device(spec: str | None = None) -> Device:
    """The device of a name; without one the first GPU, or the recorded H200 on a machine that has none."""
    if spec is None:
        spec = "cuda:0" if cuda_device_count() else "replay:h200"
    kind, _, name = spec.partition(":")
    return open_replay(name).device if kind == "replay" else find_device(spec)


def open_gpu(spec: str | None = None) -> Device:
    """The GPU of a name, by default the first, for what is nothing without measuring. Raises DeviceError."""
    spec = spec or "cuda:0"
    if spec.partition(":")[0] in ("replay", "model"):
        raise DeviceError(f"device {spec!r} measures nothing, and this needs measurements; use cuda:N")
    if not cuda_device_count():
        raise DeviceError(f"device {spec!r}: no CUDA device here, and this measures; run it on a GPU")
    return find_device(spec)


class Tuner(Workbench):
    """Tunes one problem after the other. A context manager."""

    def tune(
        self,
        problem: Problem,
        *,
        effort: Effort = "quick",
        trials: int | None = None,
        budget_seconds: float | None = None,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> TuneResult:
        """Search for the problem's fastest kernel.

        effort, trials: how many candidates; see `tunegemm.search`. budget_seconds: no new batch after that;
        the final race follows. Ctrl-C ends it early: the result says so, and everything measured is kept.

        Raises ProblemError for one that the device's memory cannot hold.
        """
        run = Run(self, problem, on_progress, compiled_before=self.pool.compiled)
        budget_s = float("inf") if budget_seconds is None else budget_seconds
        deadline = time.monotonic() + budget_s
        try:
            measurer = self.measurer_for(problem)
            if measurer is None:
                return run.rank_by_model(effort, trials)
            search = run.start_search(measurer, effort, trials)
            run.compile_ahead(search.planned_screen())
            while batch := search.ask(_BATCH):
                reserved_s = min(_TURNS_S, budget_s / 2) if run.is_throttled else 0.0
                if time.monotonic() >= deadline - reserved_s:
                    run.note = (
                        f"the budget of {budget_seconds:g} s ended the search after {len(run.measured)} "
                        "measurements; a larger one goes on"
                    )
                    break
                run.stage = search.stage
                for outcome in run.evaluate(measurer, batch, replace(SCREEN, seed=self.seed)):
                    search.tell(outcome.candidate, run.value(outcome))
            runners = run.qualify(measurer, deadline - time.monotonic())
            return run.settle(run.race(measurer, runners, self.final))
        except KeyboardInterrupt:
            return run.interrupt()
        finally:
            self.pool.drop_waiting()

    def race(
        self,
        problem: Problem,
        candidates: Sequence[Candidate],
        *,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> TuneResult:
        """The final race alone, among the given candidates and torch.mm; its winner becomes the record.

        Kernels that the object store lacks are compiled. Candidates that are not feasible here are left
        out. Raises DeviceError where nothing can be timed, ProblemError as `tune`.
        """
        run = Run(self, problem, on_progress, compiled_before=self.pool.compiled)
        measurer = self.measurer_for(problem)
        if measurer is None:
            raise DeviceError(f"{problem} cannot be timed on {self.device.spec}; use cuda:N")
        try:
            runners = [c for c in dict.fromkeys(candidates) if run.is_feasible(c)]
            if TORCH_MM not in runners:
                runners.append(TORCH_MM)
            return run.settle(run.race(measurer, runners, self.final))
        except KeyboardInterrupt:
            return run.interrupt()
        finally:
            self.pool.drop_waiting()


def tune(
    problem: Problem | str,
    *,
    device: Device | str | None = None,
    database: Database | None = None,
    effort: Effort = "quick",
    trials: int | None = None,
    budget_seconds: float | None = None,
) -> TuneResult:
    """Tune one problem, such as ``"4096x4096x4096"``.

    On a real device the results are published into `database`, by default the user's.
    """
    from tunegemm.store import Database

    if not isinstance(problem, Problem):
        problem = Problem.parse(problem)
    if not isinstance(device, Device):
        device = open_device(device)
    with ExitStack() as stack:
        if database is None and device.is_real:
            database = stack.enter_context(Database.open())
        tuner = stack.enter_context(Tuner(device, database))
        return tuner.tune(problem, effort=effort, trials=trials, budget_seconds=budget_seconds)
