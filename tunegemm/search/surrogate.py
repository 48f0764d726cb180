"""The explorer that follows our order: a Gaussian process over kernels and their launches.

It models the logarithm of a candidate's speed as the sum of a constant, a multiple of each feature from the
model, a term shared by similar kernels and a term shared by similar launches. So if a launch is faster on one
kernel, it expects the same gain on similar kernels. It considers every kernel, and further launches of the
fastest ones, and suggests the candidate with the largest expected improvement (Jones et al., 1998).

Length scales and variances are fixed. Over 16 sweeps of an H100, each also without a fifth of its candidates,
the regret after 64 trials was no smaller with fitted length scales, and much the same for length scales of
0.2 to 0.5 (decision 26; docs/results has the regret beside that of Optuna's samplers).
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

#: The model's features of candidates: a row of numbers each; higher is better.
Features = Callable[[Sequence[Candidate]], Sequence[Sequence[float]]]

#: The length scale: a fraction of a parameter's range, or of the distance between two words.
_LENGTH = 0.37
#: Measurement noise, as a fraction of the variance of the results.
_NOISE = 0.007
#: How many of the fastest kernels have further launches considered, and in how many parameters these may
#: differ from the kernel's best launch. Other kernels have only the launch that the model prefers.
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
        search: its candidates may be suggested, and its results are known.
        verdict: why a launch is no candidate; reject: called with each such launch that came up.
        features: the model's features of candidates.
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
        """Return an open candidate; None before the first result, and when no candidate is left."""
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
        """Take the expected value as the candidate's result until the real one (*kriging believer*), so that
        similar candidates wait."""
        if not self._results or not self._look_at([candidate]):
            return
        if (place := self._places[candidate]) not in self._results:
            self._results[place] = float(self._predict()[0][place])
            self._believed.add(place)

    def tell(self, candidate: Candidate, value: float | None) -> None:
        """Learn the value of a candidate; None if it failed, which says nothing about others."""
        if not self._look_at([candidate]):
            return
        place = self._places[candidate]
        if value is not None:
            self._results[place] = math.log(value)
        elif place in self._believed:
            del self._results[place]
        self._believed.discard(place)

    def _open_leaders(self) -> None:
        """Add further launches of the fastest measured kernels, once two launches of one kernel were
        measured. Before that, no result shows how launches differ.
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
        """Add candidates as rows. Return whether the last one is a row; a value outside the lists prevents
        that."""
        new = [one for one in candidates if one not in self._places and self._is_known(one)]
        if new:
            # Features are relative to the best of one call: the first kernel, in every call, makes them
            # comparable.
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
        """Return the expected logarithm of each row's speed, and its standard deviation."""
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
    """A parameter as coordinates: a number is its place in the list, a word is one-hot."""

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
    """Return the Matérn 5/2 covariance between each row of `some` and each row of `others`."""
    squares = (some**2).sum(1)[:, None] + (others**2).sum(1)[None, :] - 2 * some @ others.T
    distance = numpy.sqrt(5 * numpy.maximum(squares, 0))
    return (1 + distance + distance**2 / 3) * numpy.exp(-distance)
