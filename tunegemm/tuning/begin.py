"""The start of a search: known results, the best candidates from elsewhere, the library's algorithms, and
every generator's kernels in the model's order. If nothing can be timed, that order is the result.

`Ahead` compiles kernels before the searches of this problem and the next request them.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from tunegemm.compile.artifacts import Key
from tunegemm.compile.pool import CompilePool, Ready, Urgency
from tunegemm.describe.command import command_line, options_of
from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate, Value
from tunegemm.generate import families
from tunegemm.generate.feasibility import FEASIBLE, Verdict
from tunegemm.measure.evidence import Evidence
from tunegemm.measure.groups import measured_skews
from tunegemm.measure.outcome import Failure, Measurement, Outcome
from tunegemm.measure.settings import SKEWS
from tunegemm.model import rank as model
from tunegemm.model.grouped import shipped_kernel
from tunegemm.search import Portfolio, Search, first_of_each_kernel
from tunegemm.search.efforts import Effort, budget_for, profile
from tunegemm.store.history import related, seeds
from tunegemm.store.layers import read_texts
from tunegemm.tuning.kernels import Kernels, Ranking
from tunegemm.tuning.progress import TuneResult
from tunegemm.tuning.run import Run, Trial, label, speed

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

    from tunegemm.search.study import ProblemStudy, Told
    from tunegemm.store import Database

#: The parameters of a kernel's shape, which leave out its ring and its epilogue. A compiled kernel of the
#: same shape replaces one that would need compiling, if the model predicts at most this many times its
#: duration.
_SHAPE = ("schedule", "tile_m", "tile_n", "cluster_m", "cluster_n", "swap_ab")
_AS_GOOD = 1.01
#: Kernels by the name of their family and their key.
Named = list[tuple[str, Key]]
#: How many kernels to compile if nothing can be timed, to show that the model's best are real.
_MODELLED = 16


def start_search(
    run: Run,
    kernels: Kernels,
    library: Sequence[Candidate],
    *,
    swept: Collection[Candidate] | None = None,
    compiled: Ready | None = None,
    ready: Ready | None = None,
    effort: Effort = "quick",
    limit: int | None = None,
    seed: int = 0,
    sampler: BaseSampler | None = None,
) -> ProblemStudy:
    """Return the study of a problem: the library's algorithms, and one search per generator that has kernels
    for it. Known results of the problem become trials of the study.

    swept, compiled: see `Kernels.ranked`. ready: see `limit_uncompiled`. effort, limit: how many candidates;
    see `tunegemm.search.efforts`. sampler: an Optuna sampler in place of the project's.
    """
    from tunegemm.search.study import ProblemStudy, StudySpace, Told

    problem, device, numbers = run.problem, run.device, profile(effort)
    if swept is not None and compiled is not None:
        # A kernel may be compiled in one order of clusters and recorded in another.
        generated = set(kernels.generators)
        swept = {c for c in swept if c.family not in generated or kernels.is_compiled(problem, c, compiled)}
    measured = run.screened  # the library's, which the database may have by now
    known = known_results(run.database, problem, device, kernels, library, run.skews)
    run.results += (known := [outcome for outcome in known if outcome.candidate not in measured])
    values = list(run.search_values(outcome.measurement for outcome in known))
    failed = known_failures(run, kernels, library)
    values += [(c, None) for c in failed]
    first_tries = seeds_of(run.database, problem, device, kernels)
    run.known_good = frozenset(first_tries)

    def allowed(launch: Candidate) -> bool:
        if swept is not None:
            return launch in swept
        if compiled is not None and not kernels.is_compiled(problem, launch, compiled):
            return False
        # A redundant launch equals another of its kernel.
        return kernels.is_feasible(problem, launch) and not model.is_redundant_launch(problem, launch, device)

    searches: list[Search] = []
    for name, ranking, ranked in ranked_families(
        kernels, problem, effort, swept=swept, compiled=compiled, ready=ready
    ):
        run.feasible += ranking.feasible
        begin = [seed for seed in first_tries if seed.family == name]
        # Known good candidates are tried whatever the model predicts.
        kernels_ranked = {candidate.kernel for candidate in ranked}
        ranked += [c for c in begin if c.kernel not in kernels_ranked and allowed(c)]
        searches.append(
            Search(
                first_of_each_kernel(ranked),
                ranking.launch_values,
                numbers.plan,
                allowed=allowed,
                seeds=list(dict.fromkeys(begin)),
                known=[(c, value) for c, value in values if c.family == name],
                trials=limit,
            )
        )
    if kernels.generators and not searches:
        run.note = without_kernels(problem, kernels, only_compiled=compiled is not None)
        if swept is not None and set(kernels.generators).isdisjoint(c.family for c in swept):
            run.note = _without_times(problem, kernels, device)

    def verdict(point: Candidate) -> Verdict:
        """Return why a point of the value lists is no candidate, or may not be tried here."""
        if point.family not in kernels.generators:
            return FEASIBLE
        for name, value in point.params.items():
            lists = kernels.space(point.family)
            listed = lists.compile_values.get(name) or lists.launch_values.get(name, ())
            if value not in listed:
                return Verdict("values", f"{name} {value} is not among {', '.join(map(str, listed))}")
        result = families.get(point.family).check(problem, point, device)
        if result and swept is not None and point not in swept:
            return Verdict("recorded", f"{device.spec} has no time for it")
        return result

    study = ProblemStudy(
        Portfolio(searches, numbers.plan),
        StudySpace(
            [kernels.space(name) for name in kernels.generators],
            library,
            [*(search.ranked[0] for search in searches), *first_tries],
        ),
        library=library,
        verdict=verdict,
        label=label,
        sampler=sampler,
        seed=seed,
        name=study_name(problem, device),
        attributes={"problem": str(problem), "device": device.name},
    )
    for outcome in known:
        study.add(outcome.candidate, told_from(outcome.measurement, outcome.evidence.name.lower()), "known")
    for candidate in failed:
        study.add(candidate, Told(None, failure="failed before"), "known")
    run.planned = study.order.trials
    return study


class Ahead:
    """Plans the searches of this problem and the next, as far as they do not depend on measurements."""

    def __init__(
        self, kernels: Kernels, pool: CompilePool, *, compiled_only: bool = False, is_known: bool = True
    ) -> None:
        """compiled_only: whether to try only kernels that have an object. is_known: whether the first
        candidates of a search are known in advance; with a foreign sampler they are not.
        """
        self._kernels, self.pool = kernels, pool
        self._compiled_only, self._is_known = compiled_only, is_known
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ahead")
        self._planned: dict[Problem, Future[Named]] = {}
        self._ready: dict[Problem, Ready] = {}

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)

    def is_planned(self, problem: Problem) -> bool:
        """Whether a problem was planned while the one before was measured."""
        return problem in self._planned

    def plan(self, problem: Problem, effort: Effort, limit: int | None) -> None:
        """Begin to compile, in a thread, the first candidates of the following problem's search."""
        self._planned[problem] = self._thread.submit(self.ranked_by, problem, effort, limit, Urgency.NEXT)

    def start(self, problem: Problem, effort: Effort, limit: int | None) -> None:
        """Begin to compile for the problem whose search starts, by its earlier plan or one made now."""
        planned = self._planned.pop(problem, None)
        if planned is None or planned.exception() is not None:
            self.ranked_by(problem, effort, limit, Urgency.NOW)
        else:
            self._submit(planned.result(), Urgency.IDLE)

    def wait(self) -> None:
        """Wait until all planning is done."""
        self._thread.submit(bool).result()

    def ready(self, problem: Problem, effort: Effort) -> Ready | None:
        """Return the compiled kernels that a quick search on a GPU prefers: the same set before and after it
        began to compile. None for no preference.
        """
        if profile(effort).compiling is None or not self._kernels.device.is_real:
            return None
        return self._ready.setdefault(problem, self.pool.ready())

    def compiled(self) -> Ready | None:
        """Return the only kernels that may be tried; None for all."""
        return self.pool.ready() if self._compiled_only else None

    def forget(self, problem: Problem) -> None:
        """Drop the data of a problem whose tuning is done."""
        self._ready.pop(problem, None)

    def ranked_by(self, problem: Problem, effort: Effort, limit: int | None, urgency: Urgency) -> Named:
        """Submit the first requests of the searches, as far as that does not depend on the database. Also
        submit, for idle cores, and return the kernels that a quick search may ask for later.
        """
        kernels = self._kernels
        if not self._is_known or kernels.device.lacks_memory(problem) is not None:
            return []
        ready = self.ready(problem, effort)
        searches: list[Search] = []
        later: Named = []
        for _, _, ranked in ranked_families(kernels, problem, effort, compiled=self.compiled(), ready=ready):
            if ready is not None and not searches:
                later = self._named(
                    problem, (c for c in ranked if not kernels.is_compiled(problem, c, ready))
                )
            searches.append(Search(ranked, {}, profile(effort).plan, trials=limit))
        first = Portfolio(searches, profile(effort).plan).planned_screen()
        self._submit(self._named(problem, first), urgency)
        self._submit(later, Urgency.IDLE)
        return later

    def _named(self, problem: Problem, candidates: Iterable[Candidate]) -> Named:
        device = self._kernels.device
        return [(c.family, families.generator(c.family).kernel_key(problem, c, device)) for c in candidates]

    def _submit(self, named: Named, urgency: Urgency) -> None:
        for family, key in named:
            self.pool.submit(family, key, urgency=urgency)


def study_name(problem: Problem, device: Device) -> str:
    """Return the name of a problem's study for dashboards. It marks replayed studies, which measure
    nothing."""
    replayed = "" if device.is_real else f", {device.spec}"
    return f"{problem} on {device.name}{replayed}"


def told_from(outcome: Outcome, evidence: str = "") -> Told:
    """Return an outcome in the form that a study's trial stores."""
    from tunegemm.search.study import Told

    if isinstance(outcome, Failure):
        return Told(None, failure=f"{outcome.stage}: {outcome.reason}")
    return Told(speed(outcome), outcome.median_us, evidence)


def ranked_families(
    kernels: Kernels,
    problem: Problem,
    effort: Effort,
    *,
    swept: Collection[Candidate] | None = None,
    compiled: Ready | None = None,
    ready: Ready | None = None,
) -> Iterator[tuple[str, Ranking, list[Candidate]]]:
    """Yield each generator that has kernels for a problem, the expected winner first: its name, its ranking,
    and the kernels that the effort has time for, in the model's order. Arguments as in `start_search`.
    """
    is_first = True
    for name in kernels.generators:
        ranking = kernels.ranked(problem, name, swept=swept, compiled=compiled, most=profile(effort).ranked)
        if ranking.predictions:
            yield name, ranking, limit_uncompiled(kernels, problem, ranking, ready, effort, is_first=is_first)
            is_first = False


def limit_uncompiled(
    kernels: Kernels,
    problem: Problem,
    ranking: Ranking,
    ready: Ready | None,
    effort: Effort = "quick",
    *,
    is_first: bool,
) -> list[Candidate]:
    """Return a family's kernels in the model's order, with few that have no object yet.

    ready: the kernels that have an object; None: no limit. is_first: whether the family is the expected
    winner.
    """
    ranked = model.alternate_rankings(ranking.predictions)
    compiling = profile(effort).compiling
    if ready is None or compiling is None:
        return [prediction.candidate for prediction in ranked]
    is_ready = [kernels.is_compiled(problem, prediction.candidate, ready) for prediction in ranked]
    siblings: dict[tuple[Value | None, ...], list[model.Prediction]] = {}
    for prediction in itertools.compress(ranked, is_ready):
        siblings.setdefault(_shape(prediction.candidate), []).append(prediction)

    def is_new(prediction: model.Prediction) -> bool:
        """Whether no compiled kernel of the same shape is as good by the model."""
        return not any(
            item.total_us <= _AS_GOOD * prediction.total_us
            and item.steady_us <= _AS_GOOD * prediction.steady_us
            for item in siblings.get(_shape(prediction.candidate), ())
        )

    most = compiling[0 if is_first else 1]
    left = max(most.new, most.wanted - sum(is_ready))
    unready = (item for item, has_object in zip(ranked, is_ready, strict=True) if not has_object)
    new = {prediction.candidate for prediction in itertools.islice(filter(is_new, unready), left)}
    return [
        prediction.candidate
        for prediction, has_object in zip(ranked, is_ready, strict=True)
        if has_object or prediction.candidate in new
    ]


def _shape(candidate: Candidate) -> tuple[Value | None, ...]:
    return tuple([candidate.params.get(name) for name in _SHAPE])


def known_results(
    database: Database | None,
    problem: Problem,
    device: Device,
    kernels: Kernels,
    library: Collection[Candidate],
    skews: tuple[str, ...] = SKEWS,
) -> list[Trial]:
    """Return the latest earlier screen here of each candidate, if it is a kernel of this program."""
    latest = screened_before(database, problem, device, skews)
    result = ((_usable(candidate, kernels, library), m) for candidate, m in latest.items())
    return [Trial(replace(m, candidate=c), Evidence.SCREEN) for c, m in result if c is not None]


def screened_before(
    database: Database | None, problem: Problem, device: Device, skews: tuple[str, ...] = SKEWS
) -> dict[Candidate, Measurement]:
    """Return each candidate's latest screen of a problem in a database, from this device and software and
    over these skews.
    """
    if database is None:
        return {}
    screened = (
        entry
        for entry in database.measurements(problem)
        if entry.fingerprint == device.fingerprint
        and entry.evidence is Evidence.SCREEN
        and not (entry.is_foreign or entry.is_outdated)
        and (not problem.groups or measured_skews(entry.measurement.telemetry) == skews)
    )
    return {
        outcome.candidate: outcome.measurement
        for outcome in screened
        if speed(outcome.measurement) is not None
    }


def known_failures(run: Run, kernels: Kernels, library: Collection[Candidate]) -> list[Candidate]:
    """Return the candidates that failed here before and would again, without failures that the machine may
    have caused.
    """
    if run.database is None:
        return []
    failures = run.database.failures(run.problem, run.device.fingerprint, current=True)
    measured = run.screened
    result = (_usable(f.candidate, kernels, library) for f in failures if not f.is_transient)
    return [c for c in result if c is not None and c not in measured]


def seeds_of(
    database: Database | None, problem: Problem, device: Device, kernels: Kernels
) -> list[Candidate]:
    """Return the best candidates of this problem from elsewhere: under other software, with older sources, on
    another GPU of its kind. For groups, add the kernel that serves them without a record. On a real device,
    add candidates from records of related problems, including the shipped records.
    """
    here = device.fingerprint
    result = [] if database is None else seeds(database, problem, here)
    if problem.groups and (shipped := shipped_kernel(problem, here.device_name)) is not None:
        result.append(shipped)
    if device.is_real:
        records = read_texts()[0] + (database.records() if database else [])
        result += related((r for r in records if r.candidate.family in kernels.generators), problem, here)
    usable = map(kernels.usable, dict.fromkeys(result))
    return list(dict.fromkeys(candidate for candidate in usable if candidate is not None))


def rank_by_model(
    run: Run,
    kernels: Kernels,
    effort: Effort,
    limit: int | None,
    *,
    compiled: Ready | None = None,
) -> TuneResult:
    """Compile the model's best kernels and return its ranking as such; for devices that cannot be timed."""
    problem = run.problem
    run.report(stage="compile")
    # Predictions of two families do not compare, so the first family with kernels for the problem is ranked.
    rankings = (kernels.ranked(problem, name, compiled=compiled) for name in kernels.generators)
    ranked = next(filter(None, (ranking.predictions for ranking in rankings)), [])
    run.feasible = len(ranked)
    budget = budget_for(profile(effort).plan, kernels=len(ranked), launches=1, trials=limit)
    if not ranked:
        return run.result(None, note=without_kernels(problem, kernels, only_compiled=compiled is not None))
    ranked = ranked[: min(_MODELLED, budget.trials)]
    run.planned = len(ranked)
    jobs = run.compile([prediction.candidate for prediction in ranked])
    compiled_ones = (item for item, (_, job) in zip(ranked, jobs, strict=True) if job is not None)
    kept = tuple(sorted(compiled_ones, key=lambda prediction: prediction.total_us))
    run.report(stage="done")
    how = "the model, which only ranks"
    if not run.device.architecture.wgmma:  # the model's figures are Hopper's
        how = "roofline: a model's ranking, never run"
    note = f"{_without_times(problem, kernels, run.device)}: ranked by {how}"
    return run.result(None, note=note, predictions=kept)


def without_kernels(problem: Problem, kernels: Kernels, *, only_compiled: bool) -> str:
    """Return the note for a problem without a kernel to try in any generator."""
    if not kernels.generators:
        known = _without_times(problem, kernels, kernels.device)
        return f"{known}, and only a GPU times a library's kernels; name another family, or tune it on one"
    if reason := families.refusal_by_all(problem, kernels.generators):
        return f"{problem} can have no kernel: {reason}"
    if only_compiled:
        return f"no kernel for {problem} is compiled; leave out --compiled-only"
    if kernels.matching is not None:
        return f"no kernel for {problem} has a label that {kernels.matching!r} matches, and is feasible"
    space = command_line("space", options_of(problem))
    return f"no kernel for {problem} is feasible; `{space}` names the rules that reject them"


def _without_times(problem: Problem, kernels: Kernels, device: Device) -> str:
    """Return the note that no candidate has times on a device; it names the families if some were chosen."""
    by_default = set(kernels.families) == set(families.of_device(device))
    chosen = "" if by_default else f" of {', '.join(kernels.generators or kernels.families)}"
    return f"{problem} has no times{chosen} on {device.spec}"


def _usable(stored: Candidate, kernels: Kernels, library: Collection[Candidate]) -> Candidate | None:
    """Return a stored candidate if it can be tried again: a generator's, or one that the library names
    today."""
    return stored if stored in library else kernels.usable(stored)
