"""The project's sampler: candidates in the order of a search, then another sampler's suggestions.

It is one of Optuna's kind (`optuna.samplers.BaseSampler`), so that it can be compared with any other over the
same study, and passes Optuna's own conformance suite. Importing this module imports Optuna.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from tunegemm.describe.space import Candidate
from tunegemm.search.search import StageName
from tunegemm.search.space import StudySpace, quiet_optuna


class Order(Protocol):
    """What asks for candidates in batches, and learns from their values: `Portfolio` or `Suggested`."""

    @property
    def stage(self) -> StageName: ...

    @property
    def trials(self) -> int: ...

    @property
    def note(self) -> str: ...

    def stage_of(self, candidate: Candidate) -> StageName: ...

    def planned_screen(self) -> list[Candidate]: ...

    def planned_launches(self) -> list[Candidate]: ...

    def ask(self, count: int = 24) -> list[Candidate]: ...

    def tell(self, candidate: Candidate, value: float | None) -> None: ...


class RooflineSampler(BaseSampler):
    """The model's order by cycles and joules and what won for neighbours, then variants and launches of the
    best; after these what a Gaussian process expects most of (`tunegemm.search.surrogate`).

    `tunegemm.tune` gives it the order of its problem, from which it takes one candidate a trial. Alone, as in
    a study of something else, and after the last trial of a tuning, it is Optuna's TPE.
    """

    def __init__(
        self,
        order: Order | None = None,
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

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        if self.space is None or not self.prepare(1):
            return dict(self._beyond.infer_relative_search_space(study, trial))
        candidate = self._given[trial.number] = self._waiting.popleft()
        return self.space.distributions(candidate)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        candidate = self._given.get(trial.number)
        if candidate is None or self.space is None:
            return dict(self._beyond.sample_relative(study, trial, search_space))
        return self.space.params(candidate)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return self._beyond.sample_independent(study, trial, param_name, param_distribution)

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        if self._order is None:
            self._beyond.before_trial(study, trial)

    def after_trial(
        self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
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
