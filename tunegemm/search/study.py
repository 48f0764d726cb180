"""The search of one problem is an Optuna study: what is tried, known or impossible is a trial of it.

A trial's value is the measured speed relative to torch.mm. Its user attributes say the rest: `stage`,
`family`, `label`, `candidate`, `evidence`, `microseconds`, and `failure` or `rule` and `reason`. What fails
to compile or to run is FAIL; what a rule forbids is PRUNED, and was neither compiled nor counted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from tunegemm.describe.space import Candidate
from tunegemm.generate.feasibility import Verdict
from tunegemm.search.search import Portfolio, Search, StageName
from tunegemm.search.space import FAMILY, StudySpace, quiet_optuna

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution

    from tunegemm.search.roofline import Order
    from tunegemm.search.surrogate import Features, Surrogate


#: Under so many trials the best tenth is two candidates or fewer, which tell nothing.
FEWEST_TRIALS = 24


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
        sampler: optuna.samplers.BaseSampler | None = None,
        seed: int = 0,
        name: str | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> None:
        """
        portfolio: the order of the default sampler; its searches are what any sampler may suggest of.
        library: candidates outside the space, which come first for any sampler.
        verdict: why a point of the space is no candidate. features: see `Surrogate`.
        sampler: one of Optuna's in place of `RooflineSampler`. seed: of what that hands over to.
        name, attributes: of the study.
        """
        import optuna

        from tunegemm.search.roofline import RooflineSampler

        self.space, self._label = space, label
        self._order: Order = portfolio
        searches = [search for search in portfolio.searches if search.ranked]
        if sampler is not None:
            from tunegemm.search.delegate import Delegate, Suggested

            delegate = Delegate(sampler, searches, verdict=verdict, reject=self.prune)
            self._order = Suggested(delegate, searches, list(library), portfolio.trials)
        else:
            for search in searches:
                search.make_explorer = functools.partial(
                    _surrogate, search, verdict=verdict, reject=self.prune, features=features
                )
        self._sampler = RooflineSampler(self._order, space, beyond=sampler, seed=seed)
        with quiet_optuna():
            self.study = optuna.create_study(direction="maximize", sampler=self._sampler, study_name=name)
        for key, value in {**(attributes or {}), "space": space.digest}.items():
            self.study.set_user_attr(key, value)
        self._done: set[Candidate] = set()
        self._running: dict[Candidate, tuple[optuna.trial.Trial, StageName]] = {}

    @property
    def stage(self) -> StageName:
        """The stage of the candidate asked for last; ``done`` when there are no more."""
        return self._order.stage

    @property
    def trials(self) -> int:
        """Candidates asked for whatever the results."""
        return self._order.trials

    @property
    def note(self) -> str:
        """What is to be said of the sampler; empty for nothing."""
        return self._order.note

    def planned_screen(self) -> list[Candidate]:
        """What will be asked for whatever the results: may be compiled ahead, in this order."""
        return self._order.planned_screen()

    def planned_launches(self) -> list[Candidate]:
        """What the last stage would ask for by the results so far."""
        return self._order.planned_launches()

    def ask(self, count: int = 24) -> list[Candidate]:
        """The candidates of new trials, at most `count`; empty when the budget is spent."""
        batch = self._sampler.prepare(count)
        for candidate in batch:
            trial = self.study.ask(self.space.distributions(candidate))
            self._running[candidate] = trial, self._order.stage_of(candidate)
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
            self.study.tell(trial, told.ratio, state=None if told.ratio is not None else _states().FAIL)
            return
        if candidate not in self._done:
            self.add(candidate, told, self._order.stage_of(candidate))
        self._order.tell(candidate, search_value)

    def add(self, candidate: Candidate, told: Told, stage: str) -> None:
        """A finished trial that nobody asked for: a known result, or one of the final race."""
        import optuna

        self._done.add(candidate)
        state = _states().COMPLETE if told.ratio is not None else _states().FAIL
        self.study.add_trial(
            optuna.trial.create_trial(
                params=self.space.params(candidate),
                distributions=self.space.distributions(candidate),
                value=told.ratio,
                state=state,
                user_attrs=self._attributes(candidate, stage, told),
            )
        )

    def prune(self, candidate: Candidate, verdict: Verdict) -> None:
        """A point of the space that is no candidate, with the rule that says so."""
        import optuna

        shown = {"rule": verdict.rule or "", "reason": verdict.reason}
        self.study.add_trial(
            optuna.trial.create_trial(
                params=self.space.params(candidate),
                distributions=self.space.distributions(candidate),
                state=_states().PRUNED,
                user_attrs=self._attributes(candidate, "explore", Told(None)) | shown,
            )
        )

    def finish(self) -> None:
        """Trials that were not told are failed ones: the search ended before."""
        for candidate, (_, stage) in list(self._running.items()):
            trial, _ = self._running.pop(candidate)
            told = Told(None, failure="not measured: the search ended before")
            for name, value in self._attributes(candidate, stage, told).items():
                trial.set_user_attr(name, value)
            self._sampler.expect(candidate, None)
            self.study.tell(trial, state=_states().FAIL)

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


def _states() -> Any:
    import optuna

    return optuna.trial.TrialState


def of_family(study: optuna.Study, family: str) -> optuna.Study:
    """The trials of one family that have a value, as a study in memory: all have the same parameters, as
    Optuna's importances and some of its charts want it. Parameters with one value are left out.
    """
    return _alike([one for one in _complete(study) if one.params.get(FAMILY) == family])


def _complete(study: optuna.Study) -> list[optuna.trial.FrozenTrial]:
    return study.get_trials(deepcopy=False, states=(_states().COMPLETE,))


def _alike(done: Sequence[optuna.trial.FrozenTrial]) -> optuna.Study:
    """A study of finished trials, with the parameters that they share and that vary."""
    import optuna

    values: dict[str, set[Any]] = {}
    for trial in done:
        for name, value in trial.params.items():
            values.setdefault(name, set()).add(value)
    names = [n for n, found in values.items() if len(found) > 1 and all(n in t.params for t in done)]
    with quiet_optuna():
        found = optuna.create_study(direction="maximize")
    found.add_trials(
        [
            _measured(
                {name: trial.params[name] for name in names},
                {name: trial.distributions[name] for name in names},
                trial.value,
                trial.user_attrs,
            )
            for trial in done
        ]
    )
    return found


def _measured(
    params: dict[str, Any],
    distributions: dict[str, BaseDistribution],
    value: float | None,
    attributes: dict[str, Any] | None = None,
) -> optuna.trial.FrozenTrial:
    """A complete trial of no study yet. `optuna.trial.create_trial` compares each parameter with each choice,
    as adding it to a study does once more: of hundreds of trials that is most of the time.
    """
    import optuna

    now = datetime.now()
    return optuna.trial.FrozenTrial(
        number=-1, trial_id=-1, state=_states().COMPLETE, value=value, datetime_start=now,
        datetime_complete=now, params=params, distributions=distributions, user_attrs=attributes or {},
        system_attrs={}, intermediate_values={},
    )  # fmt: skip


def finished_trials(results: Iterable[tuple[Candidate, float]]) -> list[optuna.trial.FrozenTrial]:
    """Measured candidates and their speeds relative to torch.mm, as trials of no study yet."""
    listed = list(results)
    space = StudySpace([], candidates=[candidate for candidate, _ in listed])
    return [_measured(space.params(one), space.distributions(one), ratio) for one, ratio in listed]


def importances(trials: optuna.Study | Sequence[optuna.trial.FrozenTrial]) -> dict[str, dict[str, float]]:
    """Which of each family's parameters decide about speed, the most first: by Optuna's PED-ANOVA, which asks
    how the best tenth of the trials differs from all. Families with too few trials to tell are left out.

    trials: a study, or finished trials.
    """
    import optuna

    families: dict[str, list[optuna.trial.FrozenTrial]] = {}
    for trial in _complete(trials) if isinstance(trials, optuna.Study) else trials:
        families.setdefault(trial.params[FAMILY], []).append(trial)
    found = {}
    for family, done in families.items():
        if len(done) >= FEWEST_TRIALS and (own := _alike(done)).get_trials(deepcopy=False)[0].params:
            evaluator = optuna.importance.PedAnovaImportanceEvaluator()
            with quiet_optuna():
                found[family] = optuna.importance.get_param_importances(own, evaluator=evaluator)
    return found
