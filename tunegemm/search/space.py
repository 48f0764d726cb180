"""A problem's candidates as parameters of trials: value lists that never change within a study."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tunegemm.describe.space import Candidate, SearchSpace, Value

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

#: The parameter that tells families apart.
FAMILY = "family"
#: Of the vendor's library: the place of an algorithm among those that it named, torch.mm first. Its own
#: parameters are words of one version of the library; the trial's attribute `candidate` has them.
ALGORITHM, _MOST_ALGORITHMS = "library_algorithm", 1023


class StudySpace:
    """Distributions of all parameters of all families of a study.

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
        self._families: dict[str, tuple[frozenset[str], frozenset[str]]] = {}
        for space in spaces:
            self._families[space.family] = frozenset(space.compile_values), frozenset(space.launch_values)
            for name, values in (*space.compile_values.items(), *space.launch_values.items()):
                lists.setdefault(name, {}).update(dict.fromkeys(values))
        for candidate in candidates:
            known = self._families.get(candidate.family, (frozenset(), frozenset()))
            compiled, launched = (
                {name for name, _ in params} for params in (candidate.compile_params, candidate.launch_params)
            )
            self._families[candidate.family] = known[0] | compiled, known[1] | launched
            for name, value in candidate.params.items():
                lists.setdefault(name, {})[value] = None
        self.lists: Mapping[str, tuple[Value, ...]] = {
            name: in_order(values) for name, values in sorted(lists.items())
        }
        self._library = {candidate: place for place, candidate in enumerate(library)}
        self._known: dict[str, Any] = {}

    @property
    def digest(self) -> str:
        """A hash of the lists: a study of another space has another."""
        text = json.dumps([sorted(self._families), self.lists])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def families(self) -> tuple[str, ...]:
        """The choices of the parameter `family`: the library's, too."""
        return tuple(self._distribution(FAMILY).choices)

    def names(self, family: str) -> tuple[str, ...]:
        """The parameters of a family, without `family`."""
        if family not in self._families:
            return (ALGORITHM,)
        return tuple(sorted(frozenset().union(*self._families[family])))

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

    def candidate(self, params: Mapping[str, Any]) -> Candidate | None:
        """The inverse of `params`; None for what it cannot be of."""
        family = params.get(FAMILY)
        if family in self._families:
            compiled, launched = self._families[family]
            if not set(params) - {FAMILY} <= compiled | launched:
                return None
            return Candidate.make(
                family,
                {name: value for name, value in params.items() if name in compiled},
                {name: value for name, value in params.items() if name in launched},
            )
        return next((one for one, place in self._library.items() if place == params.get(ALGORITHM)), None)

    def _distribution(self, name: str) -> Any:
        if name not in self._known:
            from optuna.distributions import CategoricalDistribution, IntDistribution

            # Values as they are, which charts and dashboards show; a sampler sees numbers in their order.
            if name == ALGORITHM:
                self._known[name] = IntDistribution(0, _MOST_ALGORITHMS)
            elif name == FAMILY:
                library = {one.family for one in self._library}
                self._known[name] = CategoricalDistribution(sorted({*self._families, *library, "cublaslt"}))
            else:
                self._known[name] = CategoricalDistribution(self.lists[name])
        return self._known[name]


def is_ordered(listed: Sequence[Value]) -> bool:
    """Whether the values are numbers, so that near ones are alike."""
    return all(isinstance(value, int) and not isinstance(value, bool) for value in listed)


def in_order(values: Iterable[Value]) -> tuple[Value, ...]:
    """Distinct values of a list that stays the same for a whole study."""
    return tuple(sorted(dict.fromkeys(values), key=lambda value: (str(type(value)), value)))


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
