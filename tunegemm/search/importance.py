"""Which parameters decide about speed, by Optuna's PED-ANOVA on a study rebuilt from stored results.

PED-ANOVA asks how differently the best tenth of the trials chose a parameter's values from all trials
(S. Watanabe et al., IJCAI 2023). It needs no further package and takes some 0.1 s for thousands of trials.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tunegemm.describe.space import Candidate, Value
from tunegemm.search.sampler import is_ordered, quiet_optuna

#: Under so many trials the best tenth is two candidates or fewer, which tell nothing.
FEWEST_TRIALS = 24


@dataclass(frozen=True)
class Importance:
    """Shares of each table of parameters, largest first; each sums to 1. Empty where too few were tried."""

    compile: Mapping[str, float]
    """Of compile-time parameters, over the kernels, each at its best launch."""
    launch: Mapping[str, float]
    """Of launch-time parameters, over the launches of kernels that were measured at several."""
    kernels: int
    """Kernels that the first is from."""
    launches: int
    """Launches that the second is from."""


def importance(results: Iterable[tuple[Candidate, float]]) -> Importance:
    """Of one family's measured candidates and their speeds relative to the baseline.

    The two tables are judged apart, since a search varies the launches of its leaders only: in one study a
    launch parameter would seem to matter because leaders have all its values.
    """
    launches: dict[Candidate, dict[Candidate, float]] = defaultdict(dict)
    for candidate, value in results:
        launches[candidate.kernel][candidate] = value
    best = {kernel: max(values.values()) for kernel, values in launches.items()}
    varied = [
        (dict(candidate.launch_params), value / best[kernel])
        for kernel, values in launches.items()
        if len(values) > 1
        for candidate, value in values.items()
    ]
    kernels = [(dict(kernel.compile_params), value) for kernel, value in best.items()]
    return Importance(_shares(kernels), _shares(varied), len(kernels), len(varied))


def _shares(trials: list[tuple[dict[str, Value], float]]) -> dict[str, float]:
    if len(trials) < FEWEST_TRIALS:
        return {}
    import optuna

    names = sorted(set.intersection(*(set(params) for params, _ in trials)))
    lists = {name: sorted({params[name] for params, _ in trials}, key=_order) for name in names}
    lists = {name: listed for name, listed in lists.items() if len(listed) > 1}
    if not lists:
        return {}
    distributions: dict[str, optuna.distributions.BaseDistribution] = {
        name: optuna.distributions.IntDistribution(0, len(listed) - 1)
        if is_ordered(listed)
        else optuna.distributions.CategoricalDistribution([str(value) for value in listed])
        for name, listed in lists.items()
    }
    places = {
        name: {value: place if is_ordered(listed) else str(value) for place, value in enumerate(listed)}
        for name, listed in lists.items()
    }
    trial, began = _given_trial(), datetime.now()
    with quiet_optuna():
        study = optuna.create_study(direction="maximize")
        study.add_trials(
            [
                trial(
                    number=0,
                    trial_id=0,
                    state=optuna.trial.TrialState.COMPLETE,
                    value=value,
                    datetime_start=began,
                    datetime_complete=began,
                    params={name: places[name][params[name]] for name in lists},
                    distributions=distributions,
                    user_attrs={},
                    system_attrs={},
                    intermediate_values={},
                )
                for params, value in trials
            ]
        )
        shares = optuna.importance.get_param_importances(
            study, evaluator=optuna.importance.PedAnovaImportanceEvaluator()
        )
    return dict(sorted(shares.items(), key=lambda share: -share[1]))


@functools.cache
def _given_trial() -> Any:
    """Optuna's trial, which a study takes as it is: to copy thousands takes most of a report's time."""
    import optuna

    class Given(optuna.trial.FrozenTrial):
        def __deepcopy__(self, memo: object) -> Any:
            return self

    return Given


def _order(value: Value) -> tuple[str, Value]:
    return str(type(value)), value
