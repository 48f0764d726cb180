"""The steps of one problem's tuning, and what it knows so far: evaluate, heat, race, settle, report.

`tunegemm.tuning.tuner.Tuner.tune` has them in their order.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate, Value
from tunegemm.errors import ProblemError
from tunegemm.generate import families, model
from tunegemm.generate.compile import CompileResult
from tunegemm.generate.ptxas import Resources
from tunegemm.measure import HEAT, SCREEN, Job, Policy
from tunegemm.measure.outcome import Failure, Measurement, Outcome
from tunegemm.measure.statistics import slowdown, winner
from tunegemm.search import Portfolio, Search, gathered, launches_around
from tunegemm.search.budget import Effort, budget_for
from tunegemm.store.history import kindred, seeds
from tunegemm.store.layers import read_texts
from tunegemm.tuning import finalists
from tunegemm.tuning.workbench import Measurer, Workbench

if TYPE_CHECKING:
    from concurrent.futures import Future

Source = Literal["measured", "replayed", "modelled"]

#: Kernels of which other launches run in a second heat, and how many.
_HEAT_LEADERS, _HEAT_LAUNCHES = 2, 8
#: Kernels whose clusters run in the GPCs' order there, too.
_HEAT_GATHERED = 6
#: Seconds below which nothing runs in heats: few are raced. They take some 18.
_HEAT_S = 22.0
#: Kernels that draw little power by their tiles, added to what the model has screened anyway; among a number
#: of trials that was asked for one in so many.
_THRIFTY, _TRIALS_PER_THRIFTY = 10, 12
#: Noise of a final race above which nobody had the GPU alone. Of 60 races on H200s that did (2026-11-21) the
#: noisiest had 0.4 %; beside another process 70 and 144 % were seen, with a winner at 1.5 of torch.mm.
_DISTURBED = 0.05
#: Long turns are few, and clocks move between them: alone on H200s the noisiest of 36 races had 3.4 %, of 16
#: interleaves of as many turns 4.9 % (alone-2026-11-22.json and peers-index-2026-11-22.json there).
_DISTURBED_IN_TURNS = 0.1
#: Likewise of torch.mm's time relative to that while searching. 52 races alone had 1.22 and less (H200,
#: 2026-11-22, benchmarks/results/h200/races-2026-11-22.json), most of all large products, whose first
#: interleaves ended before the power cap was felt: clocks did not settle first then. Beside another process
#: 1.38, 3.1 and 3.4 were seen, that of 3.1 with a noise of 0.3 % and a winner at 3.2.
_SLOWED = 1.3
#: Kernels compiled where nothing can be timed, to show that the model's best are real.
_MODELLED = 16


@dataclass(frozen=True)
class Progress:
    """How far a tuning is; passed to `on_progress` whenever something happened."""

    problem: Problem
    stage: str
    """What is being done: library, screen, explore, probe, refine, heat (on a chip at its power cap), final
    and done; or compile and done, where nothing can be timed."""
    feasible: int
    """Kernels that passed feasibility."""
    compiled: int
    """Kernels that are ready to launch."""
    to_compile: int
    """Candidates of this batch whose kernels are not ready yet."""
    library: int
    """Algorithms of the vendor's library that were measured."""
    measured: int
    """Candidates of the generators that were measured by this call, before the final race."""
    planned: int
    """Candidates of the generators that the effort allows; those that fail count, too."""
    failures: Mapping[str, int]
    """Failed candidates by stage."""
    best_label: str
    best_us: float | None
    best_ratio: float | None
    """Speed of the best so far relative to torch.mm."""
    elapsed_s: float


@dataclass(frozen=True)
class TuneResult:
    """What a tuning found."""

    problem: Problem
    device: Device
    source: Source
    """Where the times come from: this GPU, a recording of another, or nothing but the model."""
    best: Measurement | None
    """The winner of the final race, or of what was measured before it was cut short."""
    outcomes: tuple[Outcome, ...]
    """Every outcome, the final race's last."""
    predictions: tuple[model.Prediction, ...]
    """The model's ranking, best first, where nothing was timed; empty otherwise."""
    labels: Mapping[str, str]
    """Candidate digest -> short name."""
    seconds: float
    compiled: int
    """Kernels compiled by this call; those found in the object store are not counted."""
    interrupted: bool = False
    note: str = ""
    """One sentence for the user: what was not done, and how to go on."""


@dataclass
class Run:
    """The state of one `Tuner.tune`."""

    bench: Workbench
    problem: Problem
    on_progress: Callable[[Progress], None] | None
    stage: str = "library"
    started: float = field(default_factory=time.monotonic)
    compiled_before: int = 0
    feasible: int = 0
    planned: int = 0
    ready: set[Candidate] = field(default_factory=set)
    waiting: list[Future[CompileResult]] = field(default_factory=list)
    measured: set[Candidate] = field(default_factory=set)
    """By this call and before the final race, which measures some again."""
    best: Measurement | None = None
    """The winner, once there is one."""
    note: str = ""
    screened: dict[Candidate, Measurement] = field(default_factory=dict)
    heats: dict[Candidate, Measurement] = field(default_factory=dict)
    """What was measured with the chip to itself, by this call and before the final race."""
    outcomes: list[Outcome] = field(default_factory=list)
    resources: dict[Candidate, Resources] = field(default_factory=dict)
    jobs: dict[Candidate, Job] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (lack := self.device.lacks_memory(self.problem)) is not None:
            raise ProblemError(f"{lack}; tune a smaller one")

    @property
    def device(self) -> Device:
        return self.bench.device

    def start_search(self, measurer: Measurer, effort: Effort, trials: int | None) -> Portfolio:
        """Per generator its feasible kernels in the model's order and what the database knows of them; with
        the first one the library's algorithms.
        """
        self._report()
        library = [c for c in measurer.discover(self.problem) if c.family in self.bench.families]
        recorded = self.bench.recorded(self.problem)
        known, started = self._known(), self._seeds()
        searches: list[Search] = []
        for name in self.bench.generators:
            launch_values, ranked = self._ranked_kernels(name)
            if not ranked:
                continue
            begin = [seed for seed in started if seed.family == name]
            if not searches and recorded is None:
                begin += model.low_power(
                    ranked, _THRIFTY if trials is None else min(_THRIFTY, trials // _TRIALS_PER_THRIFTY)
                )
            searches.append(
                Search(
                    [prediction.candidate for prediction in ranked],
                    launch_values,
                    allowed=lambda candidate: (
                        self.is_feasible(candidate)
                        and not model.is_redundant_launch(self.problem, candidate, self.device)
                        if recorded is None
                        else candidate in recorded
                    ),
                    library=() if searches else library,
                    seeds=list(dict.fromkeys(begin)),
                    known=[result for result in known if result[0].family == name or not searches],
                    effort=effort,
                    trials=trials,
                    seed=self.bench.seed,
                )
            )
        if not searches:
            if self.bench.generators:
                self.note = self._without_kernels()
            searches.append(Search([], {}, library=library, known=known, effort=effort, trials=trials))
        portfolio = Portfolio(searches)
        self.planned = portfolio.trials
        return portfolio

    def _known(self) -> list[tuple[Candidate, float | None]]:
        """What the database holds of this problem on this device: values, and None for failures."""
        if self.bench.database is None:
            return []
        # Of several measurements of one candidate the last one counts. Those of long turns do not compare.
        stored = self.bench.database.measurements(self.problem, self.device.fingerprint, current=True)
        self.screened.update({m.candidate: m for m in stored if not m.alone})
        failures = self.bench.database.failures(self.problem, self.device.fingerprint, current=True)
        return [(m.candidate, self.value(m)) for m in self.screened.values()] + [
            (failure.candidate, None)
            for failure in failures
            if failure.candidate not in self.screened and failure.stage != "timeout"
        ]

    def _seeds(self) -> list[Candidate]:
        """What was best of this problem elsewhere: other software, older sources, another GPU of its kind.

        On a real device also what records know of its product, the shipped ones among them.
        """
        database, here = self.bench.database, self.device.fingerprint
        found = [] if database is None else seeds(database, self.problem, here)
        if self.device.is_real:
            records = read_texts()[0] + (database.records() if database else [])
            ours = (one for one in records if one.candidate.family in self.bench.generators)
            found += kindred(ours, self.problem, here)
        return [families.completed(candidate) for candidate in dict.fromkeys(found)]

    def _ranked_kernels(self, family: str) -> tuple[Mapping[str, tuple[Value, ...]], list[model.Prediction]]:
        """Launch values that some kernel can take, and one prediction per feasible kernel, fastest first.

        Each kernel stands at its model-best launch.
        """
        space = self.bench.space(family)
        recorded = self.bench.recorded(self.problem)
        kernels = self.bench.feasible_kernels(self.problem, family)
        if self.bench.compiled_only:
            kernels = [kernel for kernel in kernels if self._is_compiled(kernel)]
        if recorded is None:
            self.feasible += len(kernels)
            # Depth of the ring and of the epilogue have no say in what a launch may be.
            shapes = {model.grid_shape(kernel): kernel for kernel in kernels}.values()
            values = {
                name: tuple(
                    v
                    for v in listed
                    if v == listed[0] or any(self.is_feasible(k.with_launch(**{name: v})) for k in shapes)
                )
                for name, listed in space.launch_values.items()
            }
            return values, model.rank_kernels(
                self.problem, kernels, values, self.device, feasible=self.is_feasible
            )
        # A recording has few launches of each kernel: the model's best among them stands for the kernel.
        best: dict[Candidate, model.Prediction] = {}
        feasible = set(kernels)
        launches = [c for c in recorded if c.kernel in feasible]
        for prediction in model.rank(self.problem, sorted(launches, key=Candidate.to_json), self.device):
            best.setdefault(prediction.candidate.kernel, prediction)
        self.feasible += len(best)
        return space.launch_values, list(best.values())

    def is_feasible(self, candidate: Candidate) -> bool:
        return families.get(candidate.family).check(self.problem, candidate, self.device).feasible

    def _is_compiled(self, kernel: Candidate) -> bool:
        key = families.get(kernel.family).kernel_key(self.problem, kernel, self.device)
        return self.bench.pool.store.holds(key)

    def evaluate(self, measurer: Measurer, batch: Sequence[Candidate], policy: Policy) -> Iterator[Outcome]:
        """Compile a batch and measure it; every outcome is recorded before it is yielded."""
        jobs = []
        for candidate, future in self._submit(batch):
            result = future.result() if future else None
            if result is not None and result.artifact is None:
                yield self._record(Failure(candidate, "compile", result.failure))
                continue
            jobs.append(self._job(candidate, result))
        if jobs:
            for outcome in measurer.measure(self.problem, jobs, policy):
                yield self._record(outcome, policy)

    def compile_ahead(self, candidates: Sequence[Candidate]) -> None:
        """Keep every core compiling while the GPU measures: in the order in which they will be asked for."""
        for candidate in candidates:
            self._future(candidate)

    def _future(self, candidate: Candidate) -> Future[CompileResult] | None:
        family = families.get(candidate.family)
        if not family.compiled:
            return None
        key = family.kernel_key(self.problem, candidate, self.device)
        return self.bench.pool.submit(candidate.family, key)

    def _submit(self, batch: Sequence[Candidate]) -> list[tuple[Candidate, Future[CompileResult] | None]]:
        submitted = [(candidate, self._future(candidate)) for candidate in batch]
        self.waiting = [future for _, future in submitted if future is not None]
        self._report()
        return submitted

    def _job(self, candidate: Candidate, result: CompileResult | None) -> Job:
        if result is not None and result.artifact is not None:
            self.ready.add(candidate.kernel)
            self.resources[candidate] = result.artifact.resources
        job = Job(candidate, result.artifact.path if result is not None and result.artifact else None)
        self.jobs[candidate] = job
        self._report()
        return job

    def value(self, outcome: Outcome) -> float | None:
        """What the search maximizes: speed relative to torch.mm in the same interleave."""
        return outcome.ratio if isinstance(outcome, Measurement) else None

    def race(self, measurer: Measurer, runners: Sequence[Candidate], policy: Policy) -> list[Measurement]:
        """The finalists once more, in one interleave with more rounds."""
        self.stage = "final"
        return [o for o in self.evaluate(measurer, runners, policy) if isinstance(o, Measurement)]

    @property
    def is_throttled(self) -> bool:
        """Whether the chip lowered its clocks for this problem in any screen.

        Not by the latest: the chip cools while kernels compile, and a short screen is over before it is warm.
        At 512x4096x14336 82 of 250 candidates saw no cap, the last ones among them (H200, 2026-11-22).
        """
        lowered = (bool(one.evidence.get("throttle_reasons")) for one in self.screened.values())
        return self.device.is_real and any(lowered)

    def qualify(self, measurer: Measurer, left_s: float) -> list[Candidate]:
        """The finalists, after heats where the chip is at its power cap and there is time for them."""
        if not self.is_throttled:
            return finalists.of_shared_clocks(self.screened)
        return self.heat(measurer) if left_s >= _HEAT_S else finalists.in_a_hurry(self.screened)

    def heat(self, measurer: Measurer) -> list[Candidate]:
        """The finalists of a chip at its power cap: those that are fast with the chip to themselves.

        In an interleave all share their mixture's clocks, so that one which draws less power gives what it
        gains to the others. Of what was screened, those of which most is expected alone; then other launches
        of the best: to read less from L2 and device memory saves power, too.
        """
        self.stage = "heat"
        first = finalists.for_heats(self.screened)
        # Another order of clusters is another kernel; cores are idle while the first heat keeps the GPU busy.
        self.compile_ahead([launch for one in first for launch in self._gathered(one)])
        self._heat(measurer, first)
        launches = []
        for leader in finalists.leaders_of(self.heats, _HEAT_LEADERS):
            values = self.bench.space(leader.family).launch_values
            others = (c for c in launches_around(leader, values) if self._is_worth_a_heat(c))
            launches += list(itertools.islice(others, _HEAT_LAUNCHES))
        for leader in finalists.leaders_of(self.heats, _HEAT_GATHERED):
            launches += self._gathered(leader)
        self._heat(measurer, list(dict.fromkeys(launches)))
        return finalists.of_heats(self.heats)

    def _gathered(self, kernel: Candidate) -> list[Candidate]:
        """Launches of a kernel that are worth a heat as they give a GPC neighbouring tiles."""
        if not families.get(kernel.family).compiled:
            return []
        values = self.bench.space(kernel.family).launch_values
        return [launch for launch in gathered(kernel, values) if self._is_worth_a_heat(launch)]

    def _is_worth_a_heat(self, launch: Candidate) -> bool:
        return (
            launch not in self.heats
            and self.is_feasible(launch)
            and not model.is_redundant_launch(self.problem, launch, self.device)
        )

    def _heat(self, measurer: Measurer, candidates: Sequence[Candidate]) -> None:
        for outcome in self.evaluate(measurer, candidates, replace(HEAT, seed=self.bench.seed)):
            if isinstance(outcome, Measurement):
                self.heats[outcome.candidate] = outcome

    def settle(self, raced: Sequence[Measurement]) -> TuneResult:
        """Choose by evidence, record the choice, report.

        Where somebody else was at work on the GPU, what was measured is kept, and nothing is settled.
        """
        # Who dropped out was clearly slower, if not by the ratio of the few rounds that it was in.
        most = max((len(one.samples_us) for one in raced), default=0)
        stayed = [one for one in raced if len(one.samples_us) == most]
        self.best = best = winner(self.problem, stayed) if stayed else None
        if best is not None and (sign := self._disturbance(best)):
            self.note = (
                f"{sign}: {self.device.spec} does other work, too, so no record is settled; run the same "
                "command again when it is free (nvidia-smi lists who uses it)"
            )
        elif best is not None and self._publishes:
            assert self.bench.database is not None
            self.bench.database.settle(
                self.problem,
                self.device,
                best,
                resources=self.resources.get(best.candidate),
                label=self._label(best.candidate),
            )
        self.stage = "done"
        self._report()
        if best is None and not self.note:
            self.note = "nothing could be measured; see the failures"
        return self._result(best, note=self.note)

    def _disturbance(self, best: Measurement) -> str:
        """What of the race's baseline shows that others used the GPU; empty for nothing."""
        if best.noise > (_DISTURBED_IN_TURNS if best.alone else _DISTURBED):
            return f"torch.mm timed twice differs by {best.noise:.0%}"
        slowed = slowdown(best, (o for o in self.outcomes if isinstance(o, Measurement)))
        return f"torch.mm takes {slowed:.1f} times as long as while searching" if slowed > _SLOWED else ""

    def interrupt(self) -> TuneResult:
        """After Ctrl-C: the best of what was measured. The database has it already."""
        best = self.best or self._leader()
        note = f"interrupted after {len(self.measured)} measurements; run the same command again to go on"
        return self._result(best, note=note, interrupted=True)

    def rank_by_model(self, effort: Effort, trials: int | None) -> TuneResult:
        """Nothing can be timed: compile the model's best for real and report its ranking as such."""
        try:
            self.stage = "compile"
            self._report()
            # Predictions of two families do not compare: the first that has kernels for the problem it is.
            rankings = (self._ranked_kernels(name)[1] for name in self.bench.generators)
            ranked = next(filter(None, rankings), [])
            budget = budget_for(effort, kernels=len(ranked), launches=1, trials=trials)
            ranked = ranked[: min(_MODELLED, budget.trials)]
            self.planned = len(ranked)
            kept = []
            for prediction, (candidate, future) in zip(
                ranked, self._submit([p.candidate for p in ranked]), strict=True
            ):
                result = future.result() if future else None
                if result is not None and result.artifact is None:
                    self._record(Failure(candidate, "compile", result.failure))
                else:
                    self._job(candidate, result)
                    kept.append(prediction)
            self.stage = "done"
            self._report()
        except KeyboardInterrupt:
            return self._result(None, note="interrupted; nothing was timed", interrupted=True)
        finally:
            self.bench.pool.drop_waiting()
        if not ranked:
            return self._result(None, note=self._without_kernels())
        note = f"{self.problem} has no times on {self.device.spec}: ranked by the model, which only ranks"
        return self._result(None, note=note, predictions=tuple(kept))

    def _without_kernels(self) -> str:
        """The note of a problem for which no generator has a kernel to try."""
        if reason := families.refusal_by_all(self.problem, self.bench.generators):
            return f"{self.problem} can have no kernel: {reason}"
        if self.bench.compiled_only:
            return f"no kernel for {self.problem} is compiled; leave out --compiled-only"
        return f"no kernel for {self.problem} is feasible; `tunegemm space` names the rules that reject them"

    @property
    def _publishes(self) -> bool:
        return self.bench.database is not None and self.device.is_real

    def _record(self, outcome: Outcome, policy: Policy = SCREEN) -> Outcome:
        self.outcomes.append(outcome)
        if isinstance(outcome, Measurement) and self.stage not in ("heat", "final"):
            self.screened[outcome.candidate] = outcome
            self.measured.add(outcome.candidate)
        if self._publishes:
            assert self.bench.database is not None
            self.bench.database.publish(
                self.problem,
                self.device,
                outcome,
                resources=self.resources.get(outcome.candidate),
                label=self._label(outcome.candidate),
                policy=self._policy_name(outcome),
            )
        self._report()
        return outcome

    def _policy_name(self, outcome: Outcome) -> str:
        if self.stage == "heat":
            return "heat"
        if self.stage != "final":
            return "screen"
        return "alone" if isinstance(outcome, Measurement) and outcome.alone else "race"

    def _report(self) -> None:
        if self.on_progress is None:
            return
        best = self.best or self._leader()
        library = sum(candidate.family == "cublaslt" for candidate in self.measured)
        self.on_progress(
            Progress(
                problem=self.problem,
                stage=self.stage,
                feasible=self.feasible,
                compiled=len(self.ready),
                to_compile=sum(not future.done() for future in self.waiting),
                library=library,
                measured=len(self.measured) - library,
                planned=self.planned,
                failures=Counter(o.stage for o in self.outcomes if isinstance(o, Failure)),
                best_label=self._label(best.candidate) if best else "",
                best_us=best.median_us if best else None,
                best_ratio=best.ratio if best else None,
                elapsed_s=time.monotonic() - self.started,
            )
        )

    def _leader(self) -> Measurement | None:
        measured = self.heats or self.screened
        return max(measured.values(), key=lambda m: m.ratio, default=None)

    def _label(self, candidate: Candidate) -> str:
        return families.get(candidate.family).label(candidate)

    def _result(
        self,
        best: Measurement | None,
        *,
        note: str = "",
        interrupted: bool = False,
        predictions: tuple[model.Prediction, ...] = (),
    ) -> TuneResult:
        source: Source = "measured"
        if not self.device.is_real:
            source = "modelled" if self.bench.recorded(self.problem) is None else "replayed"
        candidates = [o.candidate for o in self.outcomes] + [p.candidate for p in predictions]
        return TuneResult(
            problem=self.problem,
            device=self.device,
            source=source,
            best=best,
            outcomes=tuple(self.outcomes),
            predictions=predictions,
            labels={c.digest: self._label(c) for c in dict.fromkeys(candidates)},
            seconds=time.monotonic() - self.started,
            compiled=self.bench.pool.compiled - self.compiled_before,
            interrupted=interrupted,
            note=note,
        )
