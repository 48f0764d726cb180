"""Optuna's TPE over value lists that never change: suggestions out, results in.

Numbers are ordered: TPE sees their place in the list, so that 192 lies between 176 and 208. Words and
booleans are categories. The study is in memory and seeded; no file is read or written.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tunegemm.describe.space import Candidate, Value

if TYPE_CHECKING:
    import optuna


class Sampler:
    """One study over the parameters of one family."""

    def __init__(self, values: Mapping[str, Sequence[Value]], seed: int) -> None:
        """`values` lists each parameter's values, numbers in ascending order."""
        import optuna

        self._optuna = optuna
        self._values = {name: tuple(listed) for name, listed in values.items() if len(listed) > 1}
        self._distributions = {name: self._distribution(listed) for name, listed in self._values.items()}
        self._suggested: optuna.trial.Trial | None = None
        self._running: dict[Candidate, optuna.trial.Trial] = {}
        # Optuna 4 calls both options experimental; in 5 they are the defaults.
        with quiet_optuna():
            tpe = optuna.samplers.TPESampler(
                seed=seed, n_startup_trials=1, multivariate=True, constant_liar=True
            )
            self._study = optuna.create_study(direction="maximize", sampler=tpe)

    def suggest(self) -> dict[str, Value]:
        """The sampler's next point, a value per parameter with a choice. `start` makes it a trial."""
        if not self._distributions:
            return {}
        self._drop_suggestion()
        self._suggested = self._study.ask(self._distributions)
        return {name: self._decode(name, stored) for name, stored in self._suggested.params.items()}

    def start(self, candidate: Candidate) -> None:
        """The candidate is being tried: suggestions keep away from it until its result (*constant liar*)."""
        if not self._distributions:
            return
        point = self._encode(candidate)
        if self._suggested is not None and self._suggested.params == point:
            trial, self._suggested = self._suggested, None
        else:
            self._drop_suggestion()
            self._study.enqueue_trial(point)
            trial = self._study.ask(self._distributions)
        self._running[candidate] = trial

    def tell(self, candidate: Candidate, value: float | None) -> None:
        """What came of a candidate, started or not; None when it failed.

        A candidate whose values are not all in the lists, as one of an older space may be, is passed over.
        """
        trial = self._running.pop(candidate, None)
        if trial is not None:
            self._study.tell(trial, value, state=self._failed if value is None else None)
        elif value is not None and self._distributions and self.knows(candidate):
            self._study.add_trial(
                self._optuna.trial.create_trial(
                    params=self._encode(candidate), distributions=self._distributions, value=value
                )
            )

    def knows(self, candidate: Candidate) -> bool:
        """Whether the candidate is a point of the value lists."""
        return all(candidate.params.get(name) in listed for name, listed in self._values.items())

    @property
    def _failed(self) -> optuna.trial.TrialState:
        return self._optuna.trial.TrialState.FAIL

    def _drop_suggestion(self) -> None:
        # A failed trial has no part in the densities: a point that is not tried leaves no trace.
        if self._suggested is not None:
            self._study.tell(self._suggested, state=self._failed)
            self._suggested = None

    def _distribution(self, listed: Sequence[Value]) -> Any:
        if is_ordered(listed):
            return self._optuna.distributions.IntDistribution(0, len(listed) - 1)
        return self._optuna.distributions.CategoricalDistribution(listed)

    def _encode(self, candidate: Candidate) -> dict[str, Any]:
        return {
            name: listed.index(candidate[name]) if is_ordered(listed) else candidate[name]
            for name, listed in self._values.items()
        }

    def _decode(self, name: str, stored: Any) -> Value:
        return self._values[name][stored] if is_ordered(self._values[name]) else stored


@contextmanager
def quiet_optuna() -> Iterator[None]:
    """Without Optuna's lines about new studies and experimental options."""
    import optuna

    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(verbosity)


def is_ordered(listed: Sequence[Value]) -> bool:
    """Whether the values are numbers, so that near ones are alike."""
    return all(isinstance(value, int) and not isinstance(value, bool) for value in listed)
