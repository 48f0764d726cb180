"""What explores where our order ends: a Gaussian process over kernels and their launches.

The logarithm of a candidate's speed is taken to be the sum of a constant, a multiple of each opinion of the
model, a part that kernels like it have and a part that launches like it have. So what a launch gained on one
kernel is expected on its like. Every kernel is looked at, and launches of the fastest ones; of all these that
with the largest expected improvement is suggested (Jones et al., 1998).

Lengths and variances are fixed. Over 16 sweeps of an H100, each also without a fifth of its candidates, the
regret after 64 trials was no smaller with lengths fitted to the results, and much the same for lengths of 0.2
to 0.5 (decision 26; docs/results has the regret beside that of Optuna's samplers).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy

from tunegemm.describe.space import Candidate, Value
from tunegemm.generate.feasibility import FEASIBLE, Verdict
from tunegemm.search.search import Search, in_order, is_ordered, launches_around

#: What the model thinks of candidates: a row of numbers each, higher for better.
Features = Callable[[Sequence[Candidate]], Sequence[Sequence[float]]]

#: How far a result tells of others: this part of a parameter's range, or of a change of a word.
_LENGTH = 0.37
#: The variance of what is measured twice, as a part of that of the results.
_NOISE = 0.007
#: Kernels, the fastest ones, of which further launches are looked at: those that differ from the best one in
#: so many parameters. Of other kernels it is the one that the model prefers.
_LEADERS, _DIFFERENCES = 12, 2


class Surrogate:
    """An explorer (`tunegemm.search.search.Explorer`) of the candidates of one search."""

    def __init__(
        self,
        search: Search,
        *,
        verdict: Callable[[Candidate], Verdict] = lambda candidate: FEASIBLE,
        reject: Callable[[Candidate, Verdict], None] = lambda candidate, verdict: None,
        features: Features | None = None,
    ) -> None:
        """
        search: whose candidates are suggested, and whose results are known.
        verdict: why a launch is no candidate; reject: called with each such one that would be suggested.
        features: what the model thinks of a candidate.
        """
        self._search, self._verdict, self._reject = search, verdict, reject
        self._features = features or (lambda candidates: [()] * len(candidates))
        first = search.ranked[0]
        self._of_kernel = [
            _Axis(name, {kernel[name] for kernel in search.ranked}) for name, _ in first.compile_params
        ]
        self._of_launch = [_Axis(name, values) for name, values in search.launch_values.items()]
        self._candidates: list[Candidate] = []
        self._places: dict[Candidate, int] = {}
        self._rows: list[Any] = []
        self._results: dict[int, float] = {}
        self._believed: set[int] = set()
        self._opened: set[Candidate] = set()
        self._closed: set[Candidate] = set()
        self._look_at(search.ranked)
        for candidate, value in search.results.items():
            self.tell(candidate, value)

    def suggest(self) -> Candidate | None:
        """A candidate that may be asked for and was not yet; None before any result, and after the last."""
        if not self._results:
            return None
        self._open_leaders()
        gains = self._expected_improvements()
        for place in numpy.argsort(-gains, kind="stable"):
            candidate = self._candidates[place]
            if candidate in self._closed:
                continue
            if self._search.is_open(candidate):
                return candidate
            self._closed.add(candidate)
            if candidate not in self._search.results and not (verdict := self._verdict(candidate)):
                self._reject(candidate, verdict)
        return None

    def start(self, candidate: Candidate) -> None:
        """Until its result it counts as what is expected of it: its like wait (*kriging believer*)."""
        if not self._results or not self._look_at([candidate]):
            return
        if (place := self._places[candidate]) not in self._results:
            self._results[place] = float(self._predict()[0][place])
            self._believed.add(place)

    def tell(self, candidate: Candidate, value: float | None) -> None:
        """What came of a candidate; None when it failed, which tells nothing of others."""
        if not self._look_at([candidate]):
            return
        place = self._places[candidate]
        if value is not None:
            self._results[place] = math.log(value)
        elif place in self._believed:
            del self._results[place]
        self._believed.discard(place)

    def _open_leaders(self) -> None:
        """Looks at further launches of the kernels that were measured to be the fastest, once one kernel was
        measured in two launches: before that nothing is known of launches but that they differ.
        """
        leaders: dict[Candidate, Candidate] = {}
        for place in sorted(self._results, key=lambda one: -self._results[one]):
            leaders.setdefault(self._candidates[place].kernel, self._candidates[place])
        if len(leaders) == len(self._results):
            return
        for leader in itertools.islice(leaders.values(), _LEADERS):
            if leader not in self._opened:
                self._opened.add(leader)
                self._look_at(launches_around(leader, self._search.launch_values, most=_DIFFERENCES))

    def _look_at(self, candidates: Sequence[Candidate]) -> bool:
        """Makes them rows; whether the last one is a row, which it is not with a value of no list."""
        new = [one for one in candidates if one not in self._places and self._is_known(one)]
        if new:
            # Opinions compare with the best of those that are asked for: the first kernel's is the measure.
            anchor = self._search.ranked[0]
            opinions = numpy.array(self._features([anchor, *new]))
            opinions = opinions[1:] - opinions[:1]
            for candidate, opinion in zip(new, opinions, strict=True):
                self._places[candidate] = len(self._candidates)
                self._candidates.append(candidate)
                axes = (*self._of_kernel, *self._of_launch)
                point = itertools.chain.from_iterable(axis.encode(candidate.params) for axis in axes)
                self._rows.append([*point, 1.0, *opinion])
        return bool(candidates) and candidates[-1] in self._places

    def _is_known(self, candidate: Candidate) -> bool:
        params = candidate.params
        return all(params.get(axis.name) in axis.places for axis in (*self._of_kernel, *self._of_launch))

    def _predict(self) -> tuple[Any, Any]:
        """Of each row the expected logarithm of its speed, and its standard deviation."""
        rows = numpy.array(self._rows)
        done = numpy.array(list(self._results))
        values = numpy.array(list(self._results.values()))
        middle, scale = values.mean(), max(values.std(), 1e-6)
        kernel = sum(axis.width for axis in self._of_kernel)
        launch = kernel + sum(axis.width for axis in self._of_launch)
        parts = rows[:, :kernel], rows[:, kernel:launch]
        trend = rows[:, launch:]
        covariance = trend @ trend[done].T + sum(_matern(part, part[done]) / 2 for part in parts)
        known = covariance[done] + (_NOISE + 1e-6) * numpy.eye(len(done))
        lower = numpy.linalg.cholesky(known)
        seen = numpy.linalg.solve(lower, covariance.T)
        mean = seen.T @ numpy.linalg.solve(lower, (values - middle) / scale)
        variance = 1.0 + (trend**2).sum(1) - (seen**2).sum(0)
        return mean * scale + middle, numpy.sqrt(numpy.maximum(variance, 1e-10)) * scale

    def _expected_improvements(self) -> Any:
        mean, deviation = self._predict()
        above = (mean - max(self._results.values())) / deviation
        below = numpy.array([math.erfc(-one / math.sqrt(2)) / 2 for one in above])
        density = numpy.exp(-(above**2) / 2) / math.sqrt(2 * math.pi)
        return deviation * (above * below + density)


class _Axis:
    """A parameter as coordinates: a number is its place in the list, a word one of as many directions."""

    def __init__(self, name: str, values: Iterable[Value]) -> None:
        listed = in_order(values)
        self.name, self._is_ordered = name, is_ordered(listed)
        self.places: dict[Value | None, int] = {value: place for place, value in enumerate(listed)}
        self.width = 1 if self._is_ordered else len(listed)

    def encode(self, params: Mapping[str, Value]) -> list[float]:
        place = self.places[params[self.name]]
        if self._is_ordered:
            return [place / max(len(self.places) - 1, 1) / _LENGTH]
        return [math.sqrt(0.5) / _LENGTH * (place == each) for each in range(self.width)]


def _matern(some: Any, others: Any) -> Any:
    """Matérn's covariance of smoothness 5/2, for each of some and each of the others."""
    squares = (some**2).sum(1)[:, None] + (others**2).sum(1)[None, :] - 2 * some @ others.T
    distance = numpy.sqrt(5 * numpy.maximum(squares, 0))
    return (1 + distance + distance**2 / 3) * numpy.exp(-distance)
