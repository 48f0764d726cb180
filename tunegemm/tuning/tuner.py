"""Tuning one problem: `Tuner.tune` is the whole story, from a search's first candidate to the record.

Its helpers, in the order of its steps: `begin` (known results, seeds, kernels in the model's order, compiling
before a request), `search` (the next candidates) and `run` (compile, measure, publish, and the race that
chooses the record). They exchange plain data.
"""

from __future__ import annotations

import importlib
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tunegemm import extras
from tunegemm.compile.artifacts import ArtifactStore
from tunegemm.compile.pool import CompilePool, Urgency
from tunegemm.describe.architectures import ALIASES, PARTS
from tunegemm.describe.device import Device, cuda_device_count, find_device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.errors import DeviceError, ProblemError, SpaceError, named_arguments
from tunegemm.generate import families
from tunegemm.generate.cublaslt import TORCH_MM
from tunegemm.measure.groups import checked_skews
from tunegemm.measure.outcome import Failure, Outcome
from tunegemm.measure.replay import open_replay
from tunegemm.measure.settings import SCREEN, SKEWS, Job, RaceSettings
from tunegemm.measure.worker import Child, MeasureWorker
from tunegemm.model import rank as model
from tunegemm.search.efforts import Effort, checked_seconds, checked_seed, checked_trials, profile
from tunegemm.search.samplers import sampler_of
from tunegemm.store import packs
from tunegemm.store.layers import read_texts
from tunegemm.tuning.begin import (
    Ahead,
    rank_by_model,
    screened_before,
    start_search,
    told_from,
)
from tunegemm.tuning.kernels import Kernels
from tunegemm.tuning.progress import Progress, Request, TuneResult, bar
from tunegemm.tuning.run import Measurer, Run, evidence_word, finalists, race
from tunegemm.tuning.studies import Studies
from tunegemm.untrusted import shown

if TYPE_CHECKING:
    import torch

    from tunegemm.search.samplers import Sampler
    from tunegemm.search.study import ProblemStudy
    from tunegemm.store import Database

#: Candidates of one interleave: large enough to share the baseline's cost, small enough to show progress.
_BATCH = 32
#: Seconds for metering a finalist's energy: at least ten steps of NVML's meter.
_ENERGY_MS = 1000.0


class Tuner:
    """Tunes one problem after another, with one pool of compile workers and one measuring worker.

    Use it as a context manager.
    """

    def __init__(
        self,
        device: Device,
        database: Database | None = None,
        *,
        families: Sequence[str] | str | None = None,
        workers: int | None = None,
        seed: int = 0,
        skews: Sequence[str] | str = SKEWS,
        cache: Path | str | None = None,
        compiled_only: bool = False,
        energy: bool = False,
        matching: str | None = None,
        sampler: Sampler | None = None,
        study: str | Path | None = None,
        child: Child | None = None,
    ) -> None:
        """
        device: from `open_device`.
        database: where measurements of a real device are published; None keeps them in memory.
        families: names of the kernel families to try; default all whose packages are installed.
        workers: compile workers; default by cores and memory.
        seed: of operands, of the order of rounds and of the sampler.
        skews: the divisions over which rows in groups are timed: uniform, typical and one_hot, default all.
        cache: folder of compiled objects; default the user's cache directory.
        compiled_only: try only kernels that are in that folder or shipped.
        energy: also meter the finalists' energy, a second each.
        matching: a regular expression over the labels of generated kernels; others are not tried.
        sampler: of a search's study: a name of `tunegemm.search.samplers.NAMES`, a class as
            ``package.module:Class``, or an object of a class of Optuna's; default the project's own.
        study: a file or a URL that stores studies (`tunegemm.tuning.studies`); default in memory only.
        child: a measuring process that was started before the device was known.

        Raises SpaceError if a family, the seed or the sampler is invalid, ProblemError if the skews are,
        DeviceError if a family cannot be used here, StudyError if a study cannot be stored there, ExtraError
        if only the packages for serving are installed.
        """
        extras.require("tune")
        self.device, self.database = device, database
        store = ArtifactStore(cache)
        self.kernels = Kernels(device, families, store.root.with_name("kernels"), matching)
        self.pool = CompilePool(store, workers=workers, shipped=packs.shipped())
        self.compiled_only, self._seed = compiled_only, checked_seed(seed)
        self._skews = checked_skews(skews)
        # An invalid sampler is refused now; each problem gets its own.
        is_own = sampler_of(sampler, seed=self._seed) is None
        self._sampler = None if is_own else sampler
        self.ahead = Ahead(self.kernels, self.pool, compiled_only=compiled_only, is_known=is_own)
        place = database.location if database is not None else None
        self._studies = Studies(study, database=place) if study is not None else None
        self._energy_ms = _ENERGY_MS if energy else 0.0
        self._measurer: Measurer | None = None
        self._child = child
        self._resources = ExitStack()
        self._library = ThreadPoolExecutor(1, thread_name_prefix="library")

    def __enter__(self) -> Self:
        self._resources.enter_context(self.pool)
        return self

    def __exit__(self, *_: object) -> None:
        self.ahead.close()
        self._resources.close()  # the measuring worker, too, which another thread may be waiting for
        self._library.shutdown()
        self._measurer = None
        if self._studies is not None:
            self._studies.close()

    def tune(
        self,
        problem: Problem,
        *,
        effort: Effort = "quick",
        trials: int | None = None,
        budget_seconds: float | None = None,
        following: Problem | None = None,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> TuneResult:
        """Search for the problem's fastest kernel.

        effort, trials: how many candidates; see `tunegemm.search`. budget_seconds: no new batch starts after
        that, and the final race follows. following: the problem that probably follows; its kernels are
        compiled meanwhile. Ctrl-C ends the tuning early: the result says so and keeps every measurement.

        Raises ProblemError if the device's memory cannot hold the problem, SpaceError if the effort, the
        number of trials or the budget is invalid.
        """
        numbers = profile(effort)  # refuse invalid arguments first
        limit = checked_trials(trials) if trials is not None else None
        budget_s = checked_seconds(budget_seconds)
        deadline = time.monotonic() + budget_s
        run = self._begin(problem, on_progress)
        # GPU time is expensive; a recording needs none, and has to give the same result each time.
        measurer, skip_slow = run.measurer, numbers.compiling is not None and self.device.is_real
        library: Future[tuple[list[Candidate], list[Outcome]]] | None = None
        search: ProblemStudy | None = None
        try:
            if measurer is None:
                return rank_by_model(run, self.kernels, effort, limit, compiled=self.ahead.compiled())

            # The start: known results of the problem and of related ones, the library's algorithms, and
            # every generator's feasible kernels in the model's order. All cores begin to compile.
            # Kernels are ranked here while the worker starts CUDA and measures the library's algorithms.
            run.report()
            at_once = self.device.is_real and not self.ahead.is_planned(problem)
            library = self._library.submit(self._begin_with_library, run, measurer, at_once)
            if self.device.is_real:
                if not self.compiled_only:
                    self.pool.start()
                self.ahead.start(problem, effort, limit)
                # While the worker is busy: import Optuna (0.25 s) and load known results.
                importlib.import_module("tunegemm.search.study")
                read_texts()
            algorithms, measured = library.result()
            deadline += run.seconds.get("start", 0.0)  # not part of the search
            search = start_search(
                run, self.kernels, algorithms,
                swept=measurer.swept(problem), compiled=self.ahead.compiled(),
                ready=self.ahead.ready(problem, effort), effort=effort, limit=limit, seed=self._seed,
                sampler=None if self._sampler is None else sampler_of(self._sampler, seed=self._seed),
            )  # fmt: skip
            if self._studies is not None:
                self._studies.begin(search.study)
            run.compile_ahead(search.order.planned_screen())
            _tell(search, run, measured)
            if following is not None and self.device.is_real and not self.compiled_only:
                # Now, while the GPU measures: earlier, its thread would compete with this one.
                self.ahead.plan(following, effort, limit)

            # The search asks for a batch. It is compiled, measured beside torch.mm and published, and the
            # search learns how fast each candidate was.
            while batch := search.ask(_BATCH):
                # torch's product alone needs no steady-state timing: it is raced beside kernels.
                reserved_s = min(numbers.steady_s, budget_s / 2) if run.at_cap else 0.0
                if time.monotonic() >= deadline - reserved_s:
                    self.pool.drop_waiting()
                    run.note = (
                        f"the budget of {budget_seconds:g} s ended the search after {run.measured} "
                        "measurements; a larger one goes on"
                    )
                    break
                later = search.order.planned_launches() if skip_slow else []
                run.compile_ahead([*batch, *later])
                was_throttled = run.is_throttled
                results = list(run.evaluate(batch, SCREEN, stage=search.stage, skip_slow=skip_slow))
                # Tell the study again the results from before the clocks fell.
                if run.is_throttled > was_throttled:
                    failed = [outcome for outcome in results if isinstance(outcome, Failure)]
                    results = [*run.screened.values(), *failed]
                _tell(search, run, results)
                self._keep(search)
            else:
                _tell(search, run, run.evaluate(run.skipped(), SCREEN, stage=run.stage))
                run.note = run.note or search.order.note

            # The best once more, in many rounds: at the power cap in steady state, as there a GPU slows each
            # kernel by what it draws. The winner becomes the record.
            runners, before = finalists(run.screened, effort, run.at_cap), len(run.outcomes)
            result = race(run, runners, self._final(problem, effort))
            for outcome in run.outcomes[before:]:
                told = told_from(outcome, evidence_word(outcome, "final"))
                search.add(outcome.candidate, told, "final")
            return self._with_study(result, search)
        except KeyboardInterrupt:
            self.pool.drop_waiting()
            return self._with_study(run.interrupted(), search)
        finally:
            if library is not None:
                wait([library])  # the worker is still busy with it
            self.pool.drop_waiting(least=Urgency.IDLE)
            self.ahead.forget(problem)

    def tune_all(
        self, requests: Iterable[Request], on_progress: Callable[[Progress], None] | None = None
    ) -> Iterator[TuneResult]:
        """Tune one problem after another; a result that Ctrl-C interrupted is the last one.

        While one problem is measured, the kernels of the next are compiled.
        """
        for asked in requests:
            result = self.tune(
                asked.problem, effort=asked.effort, trials=asked.trials, following=asked.following,
                budget_seconds=asked.budget_seconds, on_progress=on_progress,
            )  # fmt: skip
            yield result
            if result.interrupted:
                return

    def race(self, problem: Problem, candidates: Sequence[Candidate]) -> TuneResult:
        """Run only the final race, among these candidates and torch.mm; its winner becomes the record.

        Kernels that the object store lacks are compiled. Infeasible candidates are left out. Raises
        DeviceError if nothing can be timed, ProblemError as `tune` does.
        """
        run = self._begin(problem)
        if run.measurer is None:
            raise DeviceError(f"{problem} cannot be timed on {self.device.spec}; use cuda:N")
        try:
            feasible = [c for c in candidates if self.kernels.is_feasible(problem, c)]
            # All in one interleave: if torch.mm were timed while they compile and the tuning ended, it would
            # be the record.
            run.compile_ahead(feasible, wait=True)
            return race(run, list(dict.fromkeys([*feasible, TORCH_MM])), self._final(problem, "full"))
        except KeyboardInterrupt:
            return run.interrupted()
        finally:
            self.pool.drop_waiting()

    def _with_study(self, result: TuneResult, search: ProblemStudy | None) -> TuneResult:
        """Return the result with the study of its search."""
        if search is None:
            return result
        search.finish()
        self._keep(search)
        return replace(result, study=search.study)

    def _keep(self, search: ProblemStudy) -> None:
        if self._studies is not None:
            self._studies.keep(search.study)

    def measurer_for(self, problem: Problem) -> Measurer | None:
        """Return the worker of a real device; a recording if it has the families' times for the problem; else
        None.
        """
        if self.device.is_real:
            if self._measurer is None:
                self._measurer = self._resources.enter_context(MeasureWorker(self.device, child=self._child))
            return self._measurer
        if not self.device.spec.startswith("replay:"):
            return None
        if self._measurer is None:
            self._measurer = open_replay(self.device.spec)
        swept = self._measurer.swept(problem) or ()
        return self._measurer if any(c.family in self.kernels.families for c in swept) else None

    def _begin_with_library(
        self, run: Run, measurer: Measurer, at_once: bool
    ) -> tuple[list[Candidate], list[Outcome]]:
        """Return the vendor library's candidates for a problem, and their outcomes if they are measured at
        once. If the kernels are ranked already, they are not, because one interleave with the kernels costs
        less.
        """
        library = [c for c in measurer.discover(run.problem) if c.family in self.kernels.families]
        if not at_once:
            return library, []
        known = screened_before(run.database, run.problem, self.device, run.skews)
        jobs = [Job(c) for c in library if c not in known and not families.get(c.family).compiled]
        measured = measurer.measure(run.problem, jobs, run.of_these_operands(SCREEN))
        return library, list(run.publish_each(measured, "library"))

    def _begin(self, problem: Problem, on_progress: Callable[[Progress], None] | None = None) -> Run:
        if (lack := self.device.lacks_memory(problem)) is not None:
            raise ProblemError(f"{lack}; tune a smaller one")
        return Run(
            problem,
            self.device,
            self.pool,
            self.measurer_for(problem),
            database=self.database if self.device.is_real else None,  # nothing replayed is stored
            seed=self._seed,
            skews=self._skews,
            on_progress=on_progress,
        )

    def _final(self, problem: Problem, effort: Effort) -> RaceSettings:
        settings = profile(effort).final
        steady_ms = 0.0 if model.is_memory_bound(problem) else settings.steady_ms
        return replace(settings, steady_ms=steady_ms, energy_ms=self._energy_ms)


def _tell(search: ProblemStudy, run: Run, outcomes: Iterable[Outcome]) -> None:
    outcomes = list(outcomes)
    for outcome, (candidate, value) in zip(outcomes, run.search_values(outcomes), strict=True):
        search.tell(candidate, value, told_from(outcome, evidence_word(outcome, "screen")))


@named_arguments
def tune(
    problem: Problem | str | Sequence[int],
    *,
    device: Device | str | torch.device | None = None,
    database: Database | None = None,
    families: Sequence[str] | str | None = None,
    effort: Effort = "quick",
    trials: int | None = None,
    budget_seconds: float | None = None,
    sampler: Sampler | None = None,
    study: str | Path | None = None,
    seed: int = 0,
    callback: Callable[[Progress], None] | None = None,
    progress: bool | None = None,
) -> TuneResult:
    """Find the fastest kernel for one product and store it, so that `tunegemm.matmul` calls it.

    problem: a `Problem`, or the extents of a bf16 k-major one, as ``"4096x4096x4096"`` or ``(4096, 4096,
    4096)``. device: a GPU, such as ``"cuda:0"`` or a torch.device, by default the first. Without a GPU it is
    the recorded H200; its results are not stored. database: where results go, by default the user's.
    families: kernel families to try, by default all. effort: ``quick``, ``full`` or ``exhaustive``. trials:
    most candidates to measure. budget_seconds: most time for the search; the final race follows. sampler,
    study: see `Tuner`. seed: for operands, rounds and the search. callback: called with a `Progress` whenever
    something happened. progress: whether to show a bar, by default in notebooks.

    Returns a `TuneResult`; print it for a short table. `best` is the winner, a measurement with its
    `candidate`, `ratio` to torch.mm, `median_us` and `baseline_median_us`. `outcomes` has every measurement
    and failure, `labels` their short names, `predictions` the model's ranking if nothing could be timed,
    `note` the missing steps, `study` the search as an Optuna study. Ctrl-C ends it early; `interrupted` says
    so.

    Raises ProblemError for an invalid problem and for operands that exceed the device's memory; SpaceError
    for an unknown family, effort or sampler, and for trials, a budget or a seed out of range; DeviceError for
    a missing device; StudyError for a study that cannot be stored in that place.
    """
    extras.require("tune")
    from tunegemm.store import Database
    from tunegemm.store.codec import require

    checked_seconds(budget_seconds)  # before anything is opened
    if callback is not None and not callable(callback):
        raise SpaceError(f"callback {shown(callback)}: give a function of a Progress")
    if database is not None:
        require(database, Database, "database")
    problem = as_problem(problem)
    if not isinstance(device, Device):
        named = device is not None and type(device).__name__ == "device"  # torch's
        device = open_device(str(device) if named else device)  # type: ignore[arg-type]
    with ExitStack() as stack:
        if "ipykernel" in sys.modules:  # Optuna's import warns where a notebook has no ipywidgets
            warnings.filterwarnings("ignore", "IProgress not found")
        if progress or (progress is None and "ipykernel" in sys.modules):
            callback = stack.enter_context(bar(callback))
        if database is None and device.is_real:
            database = stack.enter_context(Database.open())
        tuner = stack.enter_context(
            Tuner(device, database, families=families, seed=seed, sampler=sampler, study=study)
        )
        return tuner.tune(
            problem, effort=effort, trials=trials, budget_seconds=budget_seconds, on_progress=callback
        )


def as_problem(problem: Problem | str | Sequence[int], **how: Any) -> Problem:
    """Return a problem itself, or the problem of extents: ``"4096x4096x4096"`` or ``(4096, 4096, 4096)``.
    Raises ProblemError for anything else. how: as for `Problem.parse`; a `Problem` already has it.
    """
    if isinstance(problem, Problem):
        return problem
    if isinstance(problem, tuple | list) and all(type(extent) is int for extent in problem):
        problem = "x".join(map(str, problem))
    if not isinstance(problem, str):
        value = "None" if problem is None else shown(problem)
        raise ProblemError(f"problem {value}: give a Problem, (m, n, k) or text such as 4096x4096x4096")
    return Problem.parse(problem, **how)


def open_device(spec: str | None = None) -> Device:
    """Open a device by name; by default the first GPU, or the recorded H200 on a machine without a GPU."""
    if spec is None:
        spec = "cuda:0" if cuda_device_count() else "replay:h200"
    if not isinstance(spec, str):
        raise DeviceError(f"device {shown(spec)}: give a tunegemm.Device, or text such as cuda:0")
    kind, _, name = spec.partition(":")
    return open_replay(name).device if kind == "replay" else find_device(spec)


def open_gpu(spec: str | None = None) -> Device:
    """Open a GPU by name, by default the first, for work that needs measuring. Raises DeviceError if it
    fails."""
    spec = "cuda:0" if spec is None else spec
    if spec.partition(":")[0] in ("replay", "model", *PARTS, *ALIASES):
        raise DeviceError(f"device {spec!r} measures nothing, and this needs measurements; use cuda:N")
    if spec.partition(":")[0] == "cuda" and not cuda_device_count():
        raise DeviceError(f"device {spec!r}: no CUDA device here, and this measures; run it on a GPU")
    return find_device(spec)
