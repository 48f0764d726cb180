"""One tuning of a problem: it compiles, measures and publishes candidates, and keeps their outcomes.

It also runs the final race: its finalists, and the choice of the record, unless the GPU did other work.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

from tunegemm.compile.pool import CompilePool, CompileResult
from tunegemm.compile.ptxas import Resources
from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate import families
from tunegemm.generate.cublaslt import TORCH_MM, is_torch
from tunegemm.measure import evidence
from tunegemm.measure.evidence import Evidence, choose, evidence_of
from tunegemm.measure.outcome import Failure, Measurement, Outcome
from tunegemm.measure.replay import ReplayDevice
from tunegemm.measure.settings import SKEWS, Job, RaceSettings
from tunegemm.measure.statistics import final_choice, slowdown
from tunegemm.measure.worker import MeasureWorker
from tunegemm.model import rank as model
from tunegemm.search.efforts import Effort, profile
from tunegemm.tuning.progress import Progress, Source, TuneResult

if TYPE_CHECKING:
    from concurrent.futures import Future

    from tunegemm.store import Database


#: Fraction of a batch that the GPU does not wait for if slow compiles are skipped. An H200 took 365 s for 84
#: products and spent 49 s of these waiting for one to four of 6 to 32 kernels (2026-11-23).
SKIPPED_SHARE = 0.25
#: Most launches of one kernel among the finalists.
_LAUNCHES_PER_FINALIST = 2
#: Noise of a final race above which another process used the GPU. Of 60 races on H200s without one
#: (2026-11-21) the noisiest had 0.4 %; beside another process two races had 70 and 144 %, with a winner at
#: 1.5 of torch.mm.
_DISTURBED = 0.05
#: Steady-state rounds are few, and clocks move between them: with the GPU to itself the noisiest of 36 races
#: had 3.4 % (H200, 2026-11-22).
_DISTURBED_IN_STEADY_STATE = 0.1
#: Likewise the limit of torch.mm's time in the race relative to its time during the search. 52 undisturbed
#: races had at most 1.22 (H200, 2026-11-22). Large products had the highest ratios: their first interleaves
#: ended before the GPU reached its power cap, since clocks did not settle first then. Beside another process
#: races had 1.38, 3.1 and 3.4; the one of 3.1 had a noise of 0.3 % and a winner at 3.2.
_SLOWED = 1.3


#: Times candidates: the worker of a GPU, or a recording.
Measurer: TypeAlias = MeasureWorker | ReplayDevice


@dataclass(frozen=True)
class Trial:
    """One measurement and its evidence, as `tunegemm.measure.evidence` compares them."""

    measurement: Measurement
    evidence: Evidence
    is_foreign: bool = False
    is_outdated: bool = False

    @property
    def candidate(self) -> Candidate:
        return self.measurement.candidate

    @cached_property
    def ratio(self) -> float:
        return self.measurement.ratio

    @property
    def is_torch(self) -> bool:
        return is_torch(self.candidate)


class Run:
    """The state of one tuning of a problem."""

    def __init__(
        self,
        problem: Problem,
        device: Device,
        pool: CompilePool,
        measurer: Measurer | None,
        *,
        database: Database | None = None,
        seed: int = 0,
        skews: tuple[str, ...] = SKEWS,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> None:
        """measurer: None if nothing can be timed. database: publishes outcomes as they come; None if nothing
        is stored. seed: of the operands and of the order of rounds. skews: the divisions over which rows in
        groups are timed.
        """
        self.problem, self.device, self.measurer, self.database = problem, device, measurer, database
        self.stage = "library"
        self.feasible = self.planned = 0
        self.note = ""
        self.outcomes: list[Outcome] = []
        self.stages: list[str] = []
        self.resources: dict[Candidate, Resources] = {}
        self.results: list[Trial] = []
        """Oldest first; results from the database precede those of this tuning."""
        self.chosen: Measurement | None = None
        """The winner of the final race."""
        self._started = time.monotonic()
        self.skews = skews
        self._pool, self._seed, self._on_progress = pool, seed, on_progress
        self._compiled_before = pool.compiled
        self._ready: set[Candidate] = set()
        self._waiting: list[Future[CompileResult]] = []
        self._measured: set[Candidate] = set()
        self._skipped: list[Candidate] = []
        self.known_good: frozenset[Candidate] = frozenset()
        """Candidates that are measured however long they compile, such as what serves without a record."""
        self._compiling_s = 0.0
        self._seconds_before = {} if measurer is None else dict(measurer.seconds)

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds that this tuning has waited, by phase: the start of the measuring process, its operands,
        torch's product, checks and races, and kernels that were compiling. The search itself took the other
        time.
        """
        measured = {} if self.measurer is None else dict(self.measurer.seconds)
        spent = {name: total - self._seconds_before.get(name, 0.0) for name, total in measured.items()}
        return spent | {"compiling": self._compiling_s}

    @property
    def measured(self) -> int:
        """How many candidates this tuning measured before its final race."""
        return len(self._measured)

    @property
    def screened(self) -> dict[Candidate, Measurement]:
        """The latest interleaved measurement of each candidate, from this search and earlier ones."""
        return {
            result.candidate: result.measurement
            for result in self.results
            if result.evidence is Evidence.SCREEN
        }

    @property
    def is_throttled(self) -> bool:
        """Whether the GPU lowered its clocks for this problem: in at least a third of the screens.

        The latest screen alone does not show it: the GPU cools while kernels compile, and a short screen ends
        before the GPU is warm. At 512x4096x14336 82 of 250 candidates saw no cap, the last ones among them
        (H200, 2026-11-22). Nor does any single screen: the first one starts at the clocks that earlier work
        left. So 16x28672x4096, right after 2304x5120x5120, once had the finalists of a GPU at its cap and
        lost 7 %. For 13 products at the cap, 61 to 100 % of the candidates saw it; for 7 products below it, 0
        to 25 % (H200, 2026-11-25).
        """
        screens = [result.measurement for result in self.results if result.evidence is Evidence.SCREEN]
        throttled = sum(bool(screen.telemetry.get("throttle_reasons")) for screen in screens)
        return self.device.is_real and throttled > 0 and 3 * throttled >= len(screens)

    @property
    def at_cap(self) -> dict[Candidate, float] | None:
        """The expected ratios of our own screened candidates at the power cap; None if the cap changes
        little."""
        if not self.is_throttled or model.is_memory_bound(self.problem):
            return None
        own = {c: m.ratio for c, m in self.screened.items() if families.get(c.family).compiled}
        return model.steady_ratios(self.problem, own, self.device)

    def search_values(self, outcomes: Iterable[Outcome]) -> Iterator[tuple[Candidate, float | None]]:
        """Yield the values that a search uses: speed relative to torch.mm, at the power cap the expected
        steady one.

        At the cap, a search by the screen's ratios spends its trials on kernels that lead the screen thanks
        to their power draw: at 4096x4096x4096, on 21 launches of four kernels that are 2 to 4 % behind (H200,
        2026-11-25).
        """
        at_cap = self.at_cap or {}
        for outcome in outcomes:
            ratio = speed(outcome)
            yield outcome.candidate, at_cap.get(outcome.candidate, ratio) if ratio is not None else None

    @property
    def leader(self) -> Measurement | None:
        """The winner, or the best so far by the rule that chooses the record."""
        if self.chosen is None and (best := choose(self.results)) is not None:
            return best.measurement
        return self.chosen

    def compile_ahead(self, candidates: Sequence[Candidate], *, wait: bool = False) -> None:
        """Keep every core compiling while the GPU measures, in the order in which the search will ask.

        wait: whether to wait until all are compiled or have failed.
        """
        futures = [self._future(candidate) for candidate in candidates]
        for future in futures if wait else ():
            if future is not None:
                future.result()

    def compile(self, batch: Sequence[Candidate]) -> Iterator[tuple[Candidate, Job | None]]:
        """Compile a batch: yield each candidate with its measuring job; None if it failed to compile."""
        submitted = [(candidate, self._future(candidate)) for candidate in batch]
        self._waiting = [future for _, future in submitted if future is not None]
        self.report()
        for candidate, future in submitted:
            began = time.monotonic()
            result = future.result() if future is not None else None
            self._compiling_s += time.monotonic() - began
            if result is None:
                job: Job | None = Job(candidate)
            elif result.artifact is None:
                self._publish(Failure(candidate, "compile", result.failure), evidence.SCREEN)
                job = None
            else:
                self._ready.add(candidate.kernel)
                self.resources[candidate] = result.artifact.resources
                job = Job(candidate, result.artifact.path)
            self.report()
            yield candidate, job

    def evaluate(
        self, batch: Sequence[Candidate], settings: RaceSettings, *, stage: str, skip_slow: bool = False
    ) -> Iterator[Outcome]:
        """Compile and measure a batch; publish every outcome before yielding it.

        skip_slow: do not make the GPU wait for the last few kernels of a batch, unless they are `known_good`.
        The next batch measures them; after the last batch, `skipped` returns them.
        """
        self.stage = stage
        if skip_slow:
            batch, self._skipped = [*self._skipped, *batch], []
        ready = [candidate for candidate in batch if self._is_ready(candidate)]
        # While the GPU measures the ready candidates, all cores compile the others.
        self.compile_ahead(batch)
        yield from self._evaluate(ready, settings)
        missing = [candidate for candidate in batch if candidate not in set(ready)]
        if skip_slow:
            others = [candidate for candidate in missing if candidate not in self.known_good]
            self._skipped = self._slowest(others, round(len(batch) * SKIPPED_SHARE))
            missing = [candidate for candidate in missing if candidate not in self._skipped]
        yield from self._evaluate(missing, settings)

    def skipped(self) -> list[Candidate]:
        """Return the skipped candidates that are compiled by now, and give up the others."""
        late, self._skipped = self._skipped, []
        return [candidate for candidate in late if self._is_ready(candidate)]

    def _slowest(self, candidates: Sequence[Candidate], most: int) -> list[Candidate]:
        """Wait until at most `most` of the candidates are not compiled yet, and return these."""
        futures = {candidate: self._future(candidate) for candidate in candidates}
        began = time.monotonic()
        while len(late := [item for item, future in futures.items() if future and not future.done()]) > most:
            wait({future for item in late if (future := futures[item])}, return_when=FIRST_COMPLETED)
        self._compiling_s += time.monotonic() - began
        return late

    def _evaluate(self, batch: Sequence[Candidate], settings: RaceSettings) -> Iterator[Outcome]:
        assert self.measurer is not None
        published = len(self.outcomes)
        jobs = [job for _, job in self.compile(batch) if job is not None]
        yield from self.outcomes[published:]  # the failures to compile
        if jobs:
            yield from self.publish_each(
                self.measurer.measure(self.problem, jobs, self.of_these_operands(settings)), self.stage
            )

    def of_these_operands(self, settings: RaceSettings) -> RaceSettings:
        """Return race settings with the seed and skews of this tuning."""
        return replace(settings, seed=self._seed, skews=self.skews)

    def publish_each(self, outcomes: Iterable[Outcome], stage: str) -> Iterator[Outcome]:
        """Yield outcomes as they come, and publish each before yielding it."""
        self.stage = stage
        for outcome in outcomes:
            self._publish(outcome, evidence_word(outcome, stage))
            self.report()
            yield outcome

    def _is_ready(self, candidate: Candidate) -> bool:
        future = self._future(candidate)
        return future is None or future.done()

    def report(self, stage: str | None = None) -> None:
        """Report the progress."""
        self.stage = stage or self.stage
        if self._on_progress is None:
            return
        best = self.leader
        library = sum(candidate.family == TORCH_MM.family for candidate in self._measured)
        self._on_progress(
            Progress(
                problem=self.problem,
                stage=self.stage,
                feasible=self.feasible,
                compiled=len(self._ready),
                to_compile=sum(not future.done() for future in self._waiting),
                library=library,
                measured=len(self._measured) - library,
                planned=self.planned,
                failures=Counter(o.stage for o in self.outcomes if isinstance(o, Failure)),
                best_label=label(best.candidate) if best else "",
                best_us=best.median_us if best else None,
                best_ratio=best.ratio if best else None,
                elapsed_s=time.monotonic() - self._started,
                seconds=self.seconds,
            )
        )

    def result(
        self,
        best: Measurement | None,
        *,
        note: str = "",
        interrupted: bool = False,
        predictions: tuple[model.Prediction, ...] = (),
    ) -> TuneResult:
        """Return the result of this tuning."""
        source: Source = "modelled" if self.measurer is None else "replayed"
        candidates = [o.candidate for o in self.outcomes] + [p.candidate for p in predictions]
        return TuneResult(
            problem=self.problem,
            device=self.device,
            source="measured" if self.device.is_real else source,
            best=best,
            outcomes=tuple(self.outcomes),
            stages=tuple(self.stages),
            predictions=predictions,
            labels={candidate.digest: label(candidate) for candidate in dict.fromkeys(candidates)},
            seconds=time.monotonic() - self._started,
            compiled=self._pool.compiled - self._compiled_before,
            interrupted=interrupted,
            note=note,
        )

    def interrupted(self) -> TuneResult:
        """Return the result of a tuning that Ctrl-C interrupted: the current record."""
        if self.measurer is None:
            return self.result(None, note="interrupted; nothing was timed", interrupted=True)
        best = self.leader
        if self.database is not None:  # which decides what dispatch uses from now on
            record = self.database.best(self.problem, self.device.fingerprint, samples=True)
            best = record.measurement if record is not None else None
        note = f"interrupted after {self.measured} measurements; run the same command again to go on"
        return self.result(best, note=note, interrupted=True)

    def _future(self, candidate: Candidate) -> Future[CompileResult] | None:
        family = families.get(candidate.family)
        if not family.compiled:
            return None
        return self._pool.submit(candidate.family, family.kernel_key(self.problem, candidate, self.device))

    def _publish(self, outcome: Outcome, word: str) -> None:
        self.outcomes.append(outcome)
        self.stages.append(self.stage)
        if isinstance(outcome, Measurement) and speed(outcome) is not None:
            self.results.append(Trial(outcome, evidence_of(word)))
            if self.stage != "final":
                self._measured.add(outcome.candidate)
        if self.database is not None:
            self.database.publish(
                self.problem,
                self.device,
                outcome,
                resources=self.resources.get(outcome.candidate),
                label=label(outcome.candidate),
                method=word,
            )


def label(candidate: Candidate) -> str:
    """Return the family's short name of a candidate."""
    return families.get(candidate.family).label(candidate)


def speed(outcome: Outcome) -> float | None:
    """Return the value that a search maximizes: speed relative to torch.mm in the same interleave. None for a
    failure, and for samples that are not times.
    """
    if not isinstance(outcome, Measurement) or not len(outcome.samples_us) == len(outcome.baseline_us) > 0:
        return None
    if not all(0 < us < math.inf for us in outcome.samples_us + outcome.baseline_us):
        return None
    return ratio if 0 < (ratio := outcome.ratio) < math.inf else None


def evidence_word(outcome: Outcome, stage: str) -> str:
    """Return the stored word for the evidence of a stage's outcome."""
    if stage != "final":
        return evidence.SCREEN
    is_steady = isinstance(outcome, Measurement) and outcome.is_steady
    return evidence.STEADY_FINAL if is_steady else evidence.RACE


def finalists(
    screened: Mapping[Candidate, Measurement], effort: Effort, at_cap: Mapping[Candidate, float] | None = None
) -> list[Candidate]:
    """Return the most promising candidates, those with the least time, the library's best, and torch.mm.

    at_cap: for a GPU at its power cap, the expected ratio of each of our own candidates there
    (`tunegemm.model.rank.steady_ratios`). The fastest candidate of an interleaved screen need not be the
    fastest in use: all candidates share the clocks that their mixture allows, so a candidate that draws less
    power passes its gain on to the others (docs/decisions/0012-steady-state-at-the-power-cap.md).

    Time counts too, because for some shapes torch.mm has two speeds, some 10 % apart, and mostly keeps one
    throughout an interleave: a candidate that was timed beside the slow one leads by ratio (H200,
    2026-11-22).
    """
    numbers = profile(effort)
    places = numbers.interleaved if at_cap is None else numbers.steady
    fastest_first = sorted(screened.values(), key=lambda m: -m.ratio)
    own = [m for m in fastest_first if m.candidate.family != TORCH_MM.family]
    library = [m.candidate for m in fastest_first if m.candidate.family == TORCH_MM.family]
    if at_cap is None:
        expected, quickest = own, sorted(own, key=lambda m: m.median_us)
    else:
        expected, quickest = sorted(own, key=lambda m: -at_cap[m.candidate]), own
    chosen = [*_of_several_kernels(expected, places.own), *_of_several_kernels(quickest, places.quickest)]
    algorithms = [candidate for candidate in library if not is_torch(candidate)][: places.library]
    # torch.mm takes part even if the requested families exclude it: it is the record when all of them lose.
    return [*dict.fromkeys([*chosen, *algorithms]), TORCH_MM] if screened else []


def _of_several_kernels(measurements: Iterable[Measurement], count: int) -> list[Candidate]:
    """Return the first candidates, with few launches of any one kernel.

    Launches of one kernel often lead together and would leave no room for others. The screen's few rounds, at
    other clocks and power, may have ranked those too low.
    """
    chosen: list[Candidate] = []
    launches: Counter[Candidate] = Counter()
    for candidate in (measurement.candidate for measurement in measurements):
        launches[candidate.kernel] += 1
        if len(chosen) < count and launches[candidate.kernel] <= _LAUNCHES_PER_FINALIST:
            chosen.append(candidate)
    return chosen


def race(run: Run, runners: Sequence[Candidate], settings: RaceSettings) -> TuneResult:
    """Race the finalists again, in one interleave with more rounds; the winner becomes the record."""
    raced = run.evaluate(runners, settings, stage="final")
    run.chosen = confirm(run, [outcome for outcome in raced if isinstance(outcome, Measurement)])
    run.report(stage="done")
    return run.result(run.chosen, note=run.note)


def confirm(run: Run, raced: Sequence[Measurement]) -> Measurement | None:
    """Make the winner of a final race the confirmed record, with the rounds that did not choose it.

    If the GPU did other work, the measurements are kept, and the note says why nothing is confirmed.
    """
    # Dropouts were clearly slower, even if not by the ratio of the few rounds that they ran. A replayed
    # measurement has the rounds of its own recording.
    stayed = [item for item in raced if len(item.samples_us) >= item.telemetry.get("of_rounds", 0)]
    # A candidate that the race shows to be even slightly slower than torch.mm does not replace it.
    stayed = [item for item in stayed if (speed(item) or 0.0) >= 1 or is_torch(item.candidate)]
    if not stayed or (all(is_torch(item.candidate) for item in stayed) and none_compiled(run.outcomes)):
        run.note = run.note or "no kernel could be measured; see the failures"
        return None
    best = final_choice(run.problem, stayed)
    if run.problem.groups and not measured_kernels(run.outcomes):
        # A record of torch.mm would override the shipped table, although no kernel of ours was measured.
        run.note = f"{run.note}; " * bool(run.note) + "no kernel was measured, so no record is confirmed"
    elif sign := disturbance(best, run.outcomes):
        run.note = (
            f"{sign}: {run.device.spec} does other work, too, so no record is confirmed; run the same "
            "command again when it is free (nvidia-smi lists who uses it)"
        )
    elif run.database is not None:
        run.database.confirm(
            run.problem,
            run.device,
            best,
            resources=run.resources.get(best.candidate),
            label=label(best.candidate),
        )
    return best


def measured_kernels(outcomes: Iterable[Outcome]) -> bool:
    """Whether the race measured a kernel of ours."""
    return any(
        isinstance(outcome, Measurement) and outcome.candidate.family != TORCH_MM.family
        for outcome in outcomes
    )


def none_compiled(outcomes: Collection[Outcome]) -> bool:
    """Whether kernels of ours were tried and none compiled: no evidence that torch.mm is faster. A kernel
    that is wrong or does not run is evidence against it.
    """
    own = [outcome for outcome in outcomes if outcome.candidate.family != TORCH_MM.family]
    return bool(own) and all(isinstance(o, Failure) and o.stage == "compile" for o in own)


def disturbance(best: Measurement, outcomes: Iterable[Outcome]) -> str:
    """Return the sign in the race's baseline that other processes used the GPU; empty if there is none."""
    if best.noise > (_DISTURBED_IN_STEADY_STATE if best.is_steady else _DISTURBED):
        return f"torch.mm timed twice differs by {best.noise:.0%}"
    sound = (o for o in outcomes if isinstance(o, Measurement) and speed(o) is not None)
    slowed = slowdown(best, sound)
    return f"torch.mm takes {slowed:.1f} times as long as while searching" if slowed > _SLOWED else ""
