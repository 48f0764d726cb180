"""The search of one problem is an Optuna study: what is tried, known or impossible is a trial of it.

`StudySpace` has the parameters of trials, `RooflineSampler` suggests candidates in the order of a search, and
`ProblemStudy` asks for them in batches and is told what came of each. A trial's value is the measured speed
relative to torch.mm. Its user attributes say the rest: `stage`, `family`, `label`, `candidate`, `evidence`,
`microseconds`, and `failure` or `rule` and `reason`. What fails to compile or to run is FAIL; what a rule
forbids is PRUNED, and was neither compiled nor counted. Importing this module imports Optuna.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState

from tunegemm.describe.space import Candidate, SearchSpace, Value
from tunegemm.generate.feasibility import Verdict
from tunegemm.search.search import FAMILY, Portfolio, Search, StageName, in_order, quiet_optuna

if TYPE_CHECKING:
    from tunegemm.search.delegate import Suggested
    from tunegemm.search.surrogate import Features, Surrogate

#: Of the vendor's library: the place of an algorithm among those that it named, torch.mm first. Its own
#: parameters are words of one version of the library; the trial's attribute `candidate` has them.
ALGORITHM, _MOST_ALGORITHMS = "library_algorithm", 1023
#: Under so many trials the best tenth is two candidates or fewer, which show nothing.
FEWEST_TRIALS = 24


class StudySpace:
    """Distributions of all parameters of all families of a study: value lists that never change within it.

    Families that name a parameter alike share its list, as one distribution belongs to a name in a study.
    """

    def __init__(
        self,
        spaces: Iterable[SearchSpace],
        library: Sequence[Candidate] = (),
        candidates: Iterable[Candidate] = (),
    ) -> None:
        """spaces: of the families. library: algorithms, which have no space. candidates: further ones, whose
        values are added to the lists: a recording may have some that the space lacks today.
        """
        lists: dict[str, dict[Value, None]] = {}
        self._families: set[str] = set()
        for space in spaces:
            self._families.add(space.family)
            for name, values in (*space.compile_values.items(), *space.launch_values.items()):
                lists.setdefault(name, {}).update(dict.fromkeys(values))
        for candidate in candidates:
            self._families.add(candidate.family)
            for name, value in candidate.params.items():
                lists.setdefault(name, {})[value] = None
        self.lists: Mapping[str, tuple[Value, ...]] = {
            name: in_order(values) for name, values in sorted(lists.items())
        }
        self._library = {candidate: place for place, candidate in enumerate(library)}
        self._known: dict[str, BaseDistribution] = {}

    @property
    def digest(self) -> str:
        """A hash of the lists: a study of another space has another."""
        text = json.dumps([sorted(self._families), self.lists])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def distributions(self, candidate: Candidate) -> dict[str, BaseDistribution]:
        """The distributions of a candidate's parameters, by name."""
        return {name: self._distribution(name) for name in self.params(candidate)}

    def params(self, candidate: Candidate) -> dict[str, Any]:
        """A candidate as a trial's parameters. A value that no list has is left out."""
        found: dict[str, Any] = {FAMILY: candidate.family}
        if candidate.family not in self._families:
            place = self._library.setdefault(candidate, len(self._library))
            return found | {ALGORITHM: min(place, _MOST_ALGORITHMS)}
        return found | {n: v for n, v in candidate.params.items() if v in self.lists.get(n, ())}

    def _distribution(self, name: str) -> BaseDistribution:
        if name not in self._known:
            # Values as they are, which charts and dashboards show; a sampler sees numbers in their order.
            if name == ALGORITHM:
                self._known[name] = IntDistribution(0, _MOST_ALGORITHMS)
            elif name == FAMILY:
                library = {one.family for one in self._library}
                self._known[name] = CategoricalDistribution(sorted({*self._families, *library, "cublaslt"}))
            else:
                self._known[name] = CategoricalDistribution(self.lists[name])
        return self._known[name]


class RooflineSampler(BaseSampler):
    """The model's order by cycles and joules and what won for neighbours, then variants and launches of the
    best; after these what a Gaussian process expects most of (`tunegemm.search.surrogate`).

    `tunegemm.tune` gives it the order of its problem, from which it takes one candidate a trial. Alone, as in
    a study of something else, and after the last trial of a tuning, it is Optuna's TPE.
    """

    def __init__(
        self,
        order: Portfolio | Suggested | None = None,
        space: StudySpace | None = None,
        *,
        beyond: BaseSampler | None = None,
        seed: int | None = None,
    ) -> None:
        """order, space: the candidates, and how they are a trial's parameters. beyond: in place of TPE,
        whose seed is `seed`.
        """
        self._order, self.space = order, space
        self._beyond = beyond or _tpe(seed)
        self._waiting: deque[Candidate] = deque()
        self._given: dict[int, Candidate] = {}
        #: What a search goes by in place of the value that the study is told.
        self._search_values: dict[Candidate, float | None] = {}

    def prepare(self, count: int) -> list[Candidate]:
        """The candidates of the next trials, at most `count`, as far as no value is needed before."""
        if self._order is not None and not self._waiting:
            self._waiting.extend(self._order.ask(count))
        return list(self._waiting)[:count]

    def expect(self, candidate: Candidate, search_value: float | None) -> None:
        """What the search is to go by when the candidate's trial is told."""
        self._search_values[candidate] = search_value

    def reseed_rng(self) -> None:
        self._beyond.reseed_rng()

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        if self.space is None or not self.prepare(1):
            return dict(self._beyond.infer_relative_search_space(study, trial))
        candidate = self._given[trial.number] = self._waiting.popleft()
        return self.space.distributions(candidate)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        candidate = self._given.get(trial.number)
        if candidate is None or self.space is None:
            return dict(self._beyond.sample_relative(study, trial, search_space))
        return self.space.params(candidate)

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return self._beyond.sample_independent(study, trial, param_name, param_distribution)

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        if self._order is None:
            self._beyond.before_trial(study, trial)

    def after_trial(
        self, study: optuna.Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
    ) -> None:
        candidate = self._given.pop(trial.number, None)
        if candidate is None or self._order is None:
            self._beyond.after_trial(study, trial, state, values)
            return
        told = values[0] if values and state == TrialState.COMPLETE else None
        self._order.tell(candidate, self._search_values.pop(candidate, told))

    def __getstate__(self) -> Mapping[str, Any]:
        """Without the order, which knows kernels of this process: a study that is kept needs it no more."""
        lost: dict[str, Any] = {"_order": None, "_waiting": deque(), "_given": {}, "_search_values": {}}
        return self.__dict__ | lost | {"_beyond": _tpe(None)}


def _tpe(seed: int | None) -> BaseSampler:
    """It begins where another order ends: no trial of it is by chance."""
    with quiet_optuna():
        return TPESampler(seed=seed, n_startup_trials=1, multivariate=True, constant_liar=True)


@dataclass(frozen=True)
class Told:
    """What came of a candidate."""

    ratio: float | None
    """Its speed relative to torch.mm; None where it failed."""
    microseconds: float | None = None
    evidence: str = ""
    failure: str = ""
    """Where it failed, and why."""


class ProblemStudy:
    """Asks and tells in batches as `Portfolio` does, and keeps all of it as trials of `study`."""

    def __init__(
        self,
        portfolio: Portfolio,
        space: StudySpace,
        *,
        library: Iterable[Candidate] = (),
        verdict: Callable[[Candidate], Verdict],
        label: Callable[[Candidate], str] = str,
        features: Features | None = None,
        sampler: BaseSampler | None = None,
        seed: int = 0,
        name: str | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> None:
        """
        portfolio: the order of the default sampler; any sampler may suggest what its searches have.
            `order` is this one, or what takes its place for another sampler.
        library: candidates outside the space, which come first for any sampler.
        verdict: why a point of the space is no candidate. features: see `Surrogate`.
        sampler: one of Optuna's in place of `RooflineSampler`. seed: of what that hands over to.
        name, attributes: of the study.
        """
        self.space, self._label = space, label
        self.order: Portfolio | Suggested = portfolio
        searches = [search for search in portfolio.searches if search.ranked]
        if sampler is not None:
            from tunegemm.search.delegate import Delegate, Suggested

            delegate = Delegate(sampler, searches, verdict=verdict, reject=self.prune)
            self.order = Suggested(delegate, searches, list(library), portfolio.trials)
        else:
            for search in searches:
                search.make_explorer = functools.partial(
                    _surrogate, search, verdict=verdict, reject=self.prune, features=features
                )
        self._sampler = RooflineSampler(self.order, space, beyond=sampler, seed=seed)
        with quiet_optuna():
            self.study = optuna.create_study(direction="maximize", sampler=self._sampler, study_name=name)
        for key, value in {**(attributes or {}), "space": space.digest}.items():
            self.study.set_user_attr(key, value)
        self._done: set[Candidate] = set()
        self._running: dict[Candidate, tuple[optuna.trial.Trial, StageName]] = {}

    def ask(self, count: int = 24) -> list[Candidate]:
        """The candidates of new trials, at most `count`; empty when the budget is spent."""
        batch = self._sampler.prepare(count)
        for candidate in batch:
            trial = self.study.ask(self.space.distributions(candidate))
            self._running[candidate] = trial, self.order.stage_of(candidate)
        return batch

    def tell(self, candidate: Candidate, search_value: float | None, told: Told | None = None) -> None:
        """What came of a candidate, also of one that nobody asked for.

        search_value: what the search goes by. told: what was measured; by default the same. A candidate may
        be told again: then the search learns it, and its trial stays as it was measured.
        """
        told = told or Told(search_value)
        if candidate in self._running:
            trial, stage = self._running.pop(candidate)
            self._done.add(candidate)
            for name, value in self._attributes(candidate, stage, told).items():
                trial.set_user_attr(name, value)
            self._sampler.expect(candidate, search_value)
            self.study.tell(trial, told.ratio, state=None if told.ratio is not None else TrialState.FAIL)
            return
        if candidate not in self._done:
            self.add(candidate, told, self.order.stage_of(candidate))
        self.order.tell(candidate, search_value)

    def add(self, candidate: Candidate, told: Told, stage: str) -> None:
        """A finished trial that nobody asked for: a known result, or one of the final race."""
        self._done.add(candidate)
        state = TrialState.COMPLETE if told.ratio is not None else TrialState.FAIL
        self._add(candidate, state, self._attributes(candidate, stage, told), told.ratio)

    def prune(self, candidate: Candidate, verdict: Verdict) -> None:
        """A point of the space that is no candidate, with the rule that says so."""
        shown = {"rule": verdict.rule or "", "reason": verdict.reason}
        attributes = self._attributes(candidate, "explore", Told(None)) | shown
        self._add(candidate, TrialState.PRUNED, attributes)

    def finish(self) -> None:
        """Trials that were not told are failed ones: the search ended before."""
        for candidate in list(self._running):
            self.tell(candidate, None, Told(None, failure="not measured: the search ended before"))

    def _add(
        self, candidate: Candidate, state: TrialState, attributes: dict[str, Any], value: float | None = None
    ) -> None:
        params, distributions = self.space.params(candidate), self.space.distributions(candidate)
        self.study.add_trial(_finished(params, distributions, value, attributes, state))

    def _attributes(self, candidate: Candidate, stage: str, told: Told) -> dict[str, Any]:
        every = {
            "stage": stage, "family": candidate.family, "label": self._label(candidate),
            "candidate": candidate.to_json(), "evidence": told.evidence, "microseconds": told.microseconds,
            "failure": told.failure,
        }  # fmt: skip
        return {name: value for name, value in every.items() if value not in ("", None)}


def _surrogate(search: Search, **options: Any) -> Surrogate:
    """Imports NumPy, which most searches do without."""
    from tunegemm.search.surrogate import Surrogate

    return Surrogate(search, **options)


def of_family(study: optuna.Study, family: str) -> optuna.Study:
    """The trials of one family that have a value, as a study in memory: all have the same parameters, as
    Optuna's importances and some of its charts want it. Parameters with one value are left out.
    """
    return _alike([one for one in _complete(study) if one.params.get(FAMILY) == family])


def _complete(study: optuna.Study) -> list[FrozenTrial]:
    return study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))


def _alike(done: Sequence[FrozenTrial]) -> optuna.Study:
    """A study of finished trials, with the parameters that they share and that vary."""
    values: dict[str, set[Any]] = {}
    for trial in done:
        for name, value in trial.params.items():
            values.setdefault(name, set()).add(value)
    names = [n for n, found in values.items() if len(found) > 1 and all(n in t.params for t in done)]
    with quiet_optuna():
        found = optuna.create_study(direction="maximize")
    found.add_trials(
        [
            _finished(
                {name: trial.params[name] for name in names},
                {name: trial.distributions[name] for name in names},
                trial.value,
                trial.user_attrs,
            )
            for trial in done
        ]
    )
    return found


def _finished(
    params: dict[str, Any],
    distributions: dict[str, BaseDistribution],
    value: float | None,
    attributes: dict[str, Any] | None = None,
    state: TrialState = TrialState.COMPLETE,
) -> FrozenTrial:
    """A finished trial of no study yet. `optuna.trial.create_trial` compares each parameter with each choice,
    as adding it to a study does once more: of hundreds of trials that is most of the time.
    """
    now = datetime.now()
    return FrozenTrial(
        number=-1, trial_id=-1, state=state, value=value, datetime_start=now, datetime_complete=now,
        params=params, distributions=distributions, user_attrs=attributes or {}, system_attrs={},
        intermediate_values={},
    )  # fmt: skip


def finished_trials(results: Iterable[tuple[Candidate, float]]) -> list[FrozenTrial]:
    """Measured candidates and their speeds relative to torch.mm, as trials of no study yet."""
    listed = list(results)
    space = StudySpace([], candidates=[candidate for candidate, _ in listed])
    return [_finished(space.params(one), space.distributions(one), ratio) for one, ratio in listed]


def importances(trials: optuna.Study | Sequence[FrozenTrial]) -> dict[str, dict[str, float]]:
    """Which of each family's parameters decide about speed, the most first: by Optuna's PED-ANOVA, which asks
    how the best tenth of the trials differs from all. Families with too few trials to tell are left out.

    trials: a study, or finished trials.
    """
    families: dict[str, list[FrozenTrial]] = {}
    for trial in _complete(trials) if isinstance(trials, optuna.Study) else trials:
        families.setdefault(trial.params[FAMILY], []).append(trial)
    found = {}
    for family, done in families.items():
        if len(done) >= FEWEST_TRIALS and (own := _alike(done)).get_trials(deepcopy=False)[0].params:
            evaluator = optuna.importance.PedAnovaImportanceEvaluator()
            with quiet_optuna():
                found[family] = optuna.importance.get_param_importances(own, evaluator=evaluator)
    return found
