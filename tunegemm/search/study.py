"""The search of one problem as an Optuna study: tried, known and infeasible candidates are its trials.

`StudySpace` defines the parameters of trials, `RooflineSampler` suggests candidates in the order of a search,
and `ProblemStudy` asks for them in batches and takes the result of each. A trial's value is the measured
speed relative to torch.mm. Its user attributes have the rest: `stage`, `family`, `label`, `candidate`,
`evidence`, `microseconds`, and `failure` or `rule` and `reason`. A candidate that fails to compile or to run
is FAIL. One that a rule forbids is PRUNED: it was neither compiled nor counted. Importing this module imports
Optuna.
"""

from __future__ import annotations

import hashlib
import itertools
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
from tunegemm.search.search import FAMILY, Portfolio, StageName, lists_of, quiet_optuna

if TYPE_CHECKING:
    from tunegemm.search.delegate import Delegate

#: The parameter of a vendor library's algorithm: its index in the library's list, torch.mm first. The
#: algorithm's own parameters belong to one version of the library; the trial's attribute `candidate` has
#: them.
ALGORITHM, _MOST_ALGORITHMS = "library_algorithm", 1023
#: With fewer trials, the best tenth is at most two candidates, which show nothing.
FEWEST_TRIALS = 24


class StudySpace:
    """The distributions of all parameters of a study's families: value lists that never change within the
    study.

    Families that use the same parameter name share its list, because a study has one distribution per name.
    """

    def __init__(
        self,
        spaces: Iterable[SearchSpace],
        library: Sequence[Candidate] = (),
        candidates: Iterable[Candidate] = (),
    ) -> None:
        """spaces: one of each family. library: algorithms, which have no space. candidates: further
        candidates, whose values are added to the lists: a recording may have values that the space lacks
        today.
        """
        spaces, candidates = list(spaces), list(candidates)
        self._families = {space.family for space in spaces} | {item.family for item in candidates}
        listed = (
            item for space in spaces for item in (*space.compile_values.items(), *space.launch_values.items())
        )
        others = ((name, [value]) for candidate in candidates for name, value in candidate.params.items())
        self.lists: Mapping[str, tuple[Value, ...]] = lists_of(itertools.chain(listed, others))
        self._library = {candidate: place for place, candidate in enumerate(library)}
        self._known: dict[str, BaseDistribution] = {}

    @property
    def digest(self) -> str:
        """A hash of the lists, which differs between spaces."""
        text = json.dumps([sorted(self._families), self.lists])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def distributions(self, candidate: Candidate) -> dict[str, BaseDistribution]:
        """The distributions of a candidate's parameters, by name."""
        return {name: self._distribution(name) for name in self.params(candidate)}

    def params(self, candidate: Candidate) -> dict[str, Any]:
        """Return a candidate as a trial's parameters, without values that no list has."""
        result: dict[str, Any] = {FAMILY: candidate.family}
        if candidate.family not in self._families:
            place = self._library.setdefault(candidate, len(self._library))
            return result | {ALGORITHM: min(place, _MOST_ALGORITHMS)}
        return result | {n: v for n, v in candidate.params.items() if v in self.lists.get(n, ())}

    def _distribution(self, name: str) -> BaseDistribution:
        if name not in self._known:
            # The values themselves, because charts and dashboards show them; a sampler sees numbers in their
            # order.
            if name == ALGORITHM:
                self._known[name] = IntDistribution(0, _MOST_ALGORITHMS)
            elif name == FAMILY:
                library = {candidate.family for candidate in self._library}
                self._known[name] = CategoricalDistribution(sorted({*self._families, *library, "cublaslt"}))
            else:
                self._known[name] = CategoricalDistribution(self.lists[name])
        return self._known[name]


class RooflineSampler(TPESampler):
    """Suggests the model's first by cycles and joules and the winners of neighbours, then variants and
    launches of the best.

    `tunegemm.tune` passes it the order of its problem, from which it takes one candidate per trial. Without
    an order, as in a study of something else, and after the last trial of a tuning, it is Optuna's TPE.
    """

    def __init__(
        self,
        order: Portfolio | Delegate | None = None,
        space: StudySpace | None = None,
        *,
        library: Iterable[Candidate] = (),
        seed: int | None = None,
    ) -> None:
        """order, space: the candidates, and their form as a trial's parameters. library: candidates that come
        first and count for nothing in the order. seed: of TPE.
        """
        with quiet_optuna():  # no trial of TPE is random, because it follows another order
            super().__init__(seed=seed, n_startup_trials=1, multivariate=True, constant_liar=True)
        self._order, self.space = order, space
        self._waiting = deque(library)
        self._suggested: dict[int, Candidate] = {}
        #: The values that the search uses instead of the study's stored ones.
        self._search_values: dict[Candidate, float | None] = {}

    def prepare(self, count: int) -> list[Candidate]:
        """Return the candidates of the next trials, at most `count`, up to the first that needs earlier
        values."""
        if self._order is not None and len(self._waiting) < count:
            self._waiting.extend(self._order.ask(count - len(self._waiting)))
        return list(self._waiting)[:count]

    def skip(self, candidate: Candidate) -> None:
        """Leave out a candidate that was about to come, because its result is known."""
        if candidate in self._waiting:
            self._waiting.remove(candidate)

    def expect(self, candidate: Candidate, search_value: float | None) -> None:
        """Set the value that the search uses when the candidate's trial ends."""
        self._search_values[candidate] = search_value

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        if self.space is None or not self.prepare(1):
            return super().infer_relative_search_space(study, trial)
        candidate = self._suggested[trial.number] = self._waiting.popleft()
        return self.space.distributions(candidate)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        candidate = self._suggested.get(trial.number)
        if candidate is None:
            return super().sample_relative(study, trial, search_space)
        assert self.space is not None
        return self.space.params(candidate)

    def after_trial(
        self, study: optuna.Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
    ) -> None:
        candidate = self._suggested.pop(trial.number, None)
        if candidate is None or self._order is None:
            super().after_trial(study, trial, state, values)
            return
        value = values[0] if values and state == TrialState.COMPLETE else None
        self._order.tell(candidate, self._search_values.pop(candidate, value))

    def __getstate__(self) -> Mapping[str, Any]:
        """Leave out the order, which holds kernels of this process: a stored study no longer needs it."""
        lost: dict[str, Any] = {"_order": None, "_waiting": deque(), "_suggested": {}, "_search_values": {}}
        return self.__dict__ | lost


@dataclass(frozen=True)
class Told:
    """The result of a candidate."""

    ratio: float | None
    """Speed relative to torch.mm; None if the candidate failed."""
    microseconds: float | None = None
    evidence: str = ""
    failure: str = ""
    """The stage and reason of a failure."""


class ProblemStudy:
    """Asks and tells in batches as `Portfolio` does, and keeps every candidate as a trial of `study`."""

    def __init__(
        self,
        portfolio: Portfolio,
        space: StudySpace,
        *,
        library: Iterable[Candidate] = (),
        verdict: Callable[[Candidate], Verdict],
        label: Callable[[Candidate], str] = str,
        sampler: BaseSampler | None = None,
        seed: int = 0,
        name: str | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> None:
        """
        portfolio: the order of the default sampler; every sampler suggests candidates of its searches.
            `order` is the portfolio, or its replacement for another sampler.
        library: candidates outside the space, such as the vendor's algorithms: they come first for any
            sampler, all of them, and are not counted as trials.
        verdict: why a point of the space is not a candidate.
        sampler: an Optuna sampler in place of the portfolio's order. seed: of the TPE that follows.
        name, attributes: of the study.
        """
        self.space, self._label = space, label
        self.order: Portfolio | Delegate = portfolio
        self.stage: StageName = "library"
        """The stage of the candidate asked for last; ``done`` when there are no more."""
        if sampler is not None:
            from tunegemm.search.delegate import Delegate

            self.order = Delegate(
                sampler, portfolio.searches, trials=portfolio.trials, verdict=verdict, reject=self.prune
            )
        self._sampler = RooflineSampler(self.order, space, library=library, seed=seed)
        with quiet_optuna():
            self.study = optuna.create_study(direction="maximize", sampler=self._sampler, study_name=name)
        for key, value in {**(attributes or {}), "space": space.digest}.items():
            self.study.set_user_attr(key, value)
        self._done: set[Candidate] = set()
        self._running: dict[Candidate, tuple[optuna.trial.Trial, StageName]] = {}

    def ask(self, count: int = 24) -> list[Candidate]:
        """Start new trials and return their candidates, at most `count`; empty when the budget is spent."""
        batch = self._sampler.prepare(count)
        for candidate in batch:
            trial = self.study.ask(self.space.distributions(candidate))
            self._running[candidate] = trial, self.order.stage_of(candidate)
        self.stage = self.order.stage_of(batch[-1]) if batch else "done"
        return batch

    def tell(self, candidate: Candidate, search_value: float | None, outcome: Told | None = None) -> None:
        """Record the result of a candidate, even if the study did not ask for it.

        search_value: the value that the search learns. outcome: the measured result; by default the same.
        Telling a candidate again updates the search and leaves the trial as it was measured.
        """
        outcome = outcome or Told(search_value)
        if candidate in self._running:
            trial, stage = self._running.pop(candidate)
            self._done.add(candidate)
            for name, value in self._attributes(candidate, stage, outcome).items():
                trial.set_user_attr(name, value)
            self._sampler.expect(candidate, search_value)
            self.study.tell(
                trial, outcome.ratio, state=None if outcome.ratio is not None else TrialState.FAIL
            )
            return
        if candidate not in self._done:
            self.add(candidate, outcome, self.order.stage_of(candidate))
        self.order.tell(candidate, search_value)

    def add(self, candidate: Candidate, outcome: Told, stage: str) -> None:
        """Add a finished trial that the study did not ask for: a known result, or one of the final race."""
        self._done.add(candidate)
        self._sampler.skip(candidate)
        state = TrialState.COMPLETE if outcome.ratio is not None else TrialState.FAIL
        self._add(candidate, state, self._attributes(candidate, stage, outcome), outcome.ratio)

    def prune(self, candidate: Candidate, verdict: Verdict) -> None:
        """Add a point of the space that is not a candidate, with the rule that rejects it."""
        shown = {"rule": verdict.rule or "", "reason": verdict.reason}
        attributes = self._attributes(candidate, "explore", Told(None)) | shown
        self._add(candidate, TrialState.PRUNED, attributes)

    def finish(self) -> None:
        """Mark unfinished trials as failed, because the search ended before their results."""
        for candidate in list(self._running):
            self.tell(candidate, None, Told(None, failure="not measured: the search ended first"))

    def _add(
        self, candidate: Candidate, state: TrialState, attributes: dict[str, Any], value: float | None = None
    ) -> None:
        params, distributions = self.space.params(candidate), self.space.distributions(candidate)
        self.study.add_trial(_finished(params, distributions, value, attributes, state))

    def _attributes(self, candidate: Candidate, stage: str, outcome: Told) -> dict[str, Any]:
        every = {
            "stage": stage, "family": candidate.family, "label": self._label(candidate),
            "candidate": candidate.to_json(), "evidence": outcome.evidence,
            "microseconds": outcome.microseconds, "failure": outcome.failure,
        }  # fmt: skip
        return {name: value for name, value in every.items() if value not in ("", None)}


def of_family(study: optuna.Study, family: str) -> optuna.Study:
    """Return the trials of one family that have a value, as a study in memory: all have the same parameters,
    as Optuna's importances and some of its charts require. Parameters with a single value are left out.
    """
    return _alike([item for item in _complete(study) if item.params.get(FAMILY) == family])


def _complete(study: optuna.Study) -> list[FrozenTrial]:
    return study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))


def _alike(done: Sequence[FrozenTrial]) -> optuna.Study:
    """Return a study of finished trials, with the parameters that all of them have and that vary."""
    values: dict[str, set[Any]] = {}
    for trial in done:
        for name, value in trial.params.items():
            values.setdefault(name, set()).add(value)
    names = [n for n, result in values.items() if len(result) > 1 and all(n in t.params for t in done)]
    with quiet_optuna():
        result = optuna.create_study(direction="maximize")
    result.add_trials(
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
    return result


def _finished(
    params: dict[str, Any],
    distributions: dict[str, BaseDistribution],
    value: float | None,
    attributes: dict[str, Any] | None = None,
    state: TrialState = TrialState.COMPLETE,
) -> FrozenTrial:
    """Return a finished trial that belongs to no study yet. `optuna.trial.create_trial` compares each
    parameter with each choice, and adding the trial to a study repeats that: for hundreds of trials this
    takes most of the time.
    """
    now = datetime.now()
    return FrozenTrial(
        number=-1, trial_id=-1, state=state, value=value, datetime_start=now, datetime_complete=now,
        params=params, distributions=distributions, user_attrs=attributes or {}, system_attrs={},
        intermediate_values={},
    )  # fmt: skip


def finished_trials(results: Iterable[tuple[Candidate, float]]) -> list[FrozenTrial]:
    """Return measured candidates and their speeds relative to torch.mm as trials that belong to no study
    yet."""
    listed = list(results)
    space = StudySpace([], candidates=[candidate for candidate, _ in listed])
    return [_finished(space.params(item), space.distributions(item), ratio) for item, ratio in listed]


def importances(trials: optuna.Study | Sequence[FrozenTrial]) -> dict[str, dict[str, float]]:
    """Return the parameters of each family that matter most for speed, in descending order, by Optuna's
    PED-ANOVA: it compares the best tenth of the trials with all. Families with too few trials are left out.

    trials: a study, or finished trials.
    """
    families: dict[str, list[FrozenTrial]] = {}
    for trial in _complete(trials) if isinstance(trials, optuna.Study) else trials:
        families.setdefault(trial.params[FAMILY], []).append(trial)
    result = {}
    for family, done in families.items():
        if len(done) >= FEWEST_TRIALS and (own := _alike(done)).get_trials(deepcopy=False)[0].params:
            evaluator = optuna.importance.PedAnovaImportanceEvaluator()
            with quiet_optuna():
                result[family] = optuna.importance.get_param_importances(own, evaluator=evaluator)
    return result
