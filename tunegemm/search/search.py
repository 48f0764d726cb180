"""The search of one problem: screen, vary, explore, probe, refine, then name the finalists.

::

    search = Search(ranked, space.launch_values, EFFORTS["quick"].plan, allowed=feasible)
    while batch := search.ask():
        for candidate, ratio in evaluate(batch):     # compile, measure; None where it failed
            search.tell(candidate, ratio)
    race(search.finalists(6))

In the stage `explore` what `search.make_explorer` makes suggests the candidates. That is the search of one
kernel family; a `Portfolio` runs those of several as one.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal, Protocol

from tunegemm.describe.space import Candidate, Value
from tunegemm.errors import SpaceError
from tunegemm.search.efforts import Plan, budget_for

#: What the search is doing. `library` is the vendor's algorithms and the seeds.
StageName = Literal["library", "screen", "vary", "explore", "probe", "refine", "done"]

#: The parameter of a study that tells families apart.
FAMILY = "family"
#: The screen takes each tile once per cluster shape, with few clusters, before it takes a variant of stages.
_TILE = ("schedule", "tile_m", "tile_n")
_CLUSTER = ("cluster_m", "cluster_n")
_CLUSTERS_PER_TILE = 3
#: Rasterization, where a family has both: which mode first, and how many tiles of the other at a time.
_RASTER, _SWIZZLE = "raster_order", "swizzle_size"
#: Suggestions per batch of the exploring stage: the sampler learns between batches only, and finds less by
#: suggestions that it has to make blindly.
_EXPLORE_BATCH = 4
#: Candidates of each family but the first before its chances are judged, as a part of its budget: 2 of 32.
_FIRST_ROUND = 0.08


class Explorer(Protocol):
    """Suggests candidates of a family: `tunegemm.search.surrogate`."""

    def suggest(self) -> Candidate | None:
        """A new, allowed candidate; None where it has nothing new to say."""

    def start(self, candidate: Candidate) -> None:
        """The candidate is being tried."""

    def tell(self, candidate: Candidate, value: float | None) -> None:
        """What came of it."""


class Search:
    """Asks for candidates in batches, each at most once and only feasible ones, and learns from their values.

    Deterministic: the same arguments and the same values in the same batches give the same asks.
    """

    def __init__(
        self,
        ranked: Sequence[Candidate],
        launch_values: Mapping[str, Sequence[Value]],
        plan: Plan,
        *,
        allowed: Callable[[Candidate], bool] | None = None,
        library: Sequence[Candidate] = (),
        seeds: Sequence[Candidate] = (),
        known: Iterable[tuple[Candidate, float | None]] = (),
        trials: int | None = None,
    ) -> None:
        """A search over the kernels of `ranked` and their launches.

        ranked: one candidate per feasible kernel of one family, at its model-best launch, best first.
        launch_values: the values of each launch-time parameter.
        plan, trials: the budget; see `budget_for`.
        allowed: whether a *launch* of these kernels may be asked for; default all. On a replay device,
            whether it was recorded.
        library: candidates outside the space, such as the vendor's algorithms: asked first, all of them,
            and not counted as trials.
        seeds: candidates of the space to begin with, such as winners of older kernels. They are trials, too:
            beyond an effort's, but within a number of trials that is given.
        known: stored results (value None: it failed). They are learned from and never asked again.

        Raises SpaceError for kernels of several families, for kernels with unlike parameters, and for a
        budget that makes no sense.
        """
        _check_alike(ranked)
        self.ranked = list(ranked)
        """The kernels, each at its model-best launch, best first."""
        self._plan = plan
        self.make_explorer: Callable[[], Explorer] | None = None
        """Makes what suggests the candidates of the stage `explore`: on first use, as that needs NumPy."""
        self._explorer: Explorer | None = None
        self.launch_values = {name: tuple(values) for name, values in launch_values.items()}
        """The values of each launch-time parameter."""
        self._allowed = allowed or (lambda candidate: True)
        self._by_kernel = {candidate.kernel: candidate for candidate in self.ranked}
        self._library, self._seeds = list(library), [self._completed(seed) for seed in seeds]
        launches = math.prod(len(values) for values in self.launch_values.values())
        #: Trials per stage.
        self.budget = budget_for(plan, kernels=len(self.ranked), launches=launches, trials=trials)
        if trials is None:
            # They are of older kernels or other software. At 4096x4096x14336 ten of them took the places of
            # the last ten kernels to be screened, the fastest among them (H200, 2026-11-22).
            begun = sum(seed.kernel in self._by_kernel for seed in self._seeds)
            self.budget = replace(self.budget, screen=min(self.budget.screen + begun, len(self.ranked)))
        self.asked: list[Candidate] = []
        """Every candidate asked for, in order."""
        self.results: dict[Candidate, float | None] = {}
        """What came of every candidate that was asked for or is known, None where it failed or is awaited."""
        self._stage_of: dict[Candidate, StageName] = {}
        self._around: dict[Candidate, list[Candidate]] = {}
        self._spent = 0
        self.stage: StageName = "library"
        """The stage of the candidate asked for last; ``done`` when there are no more."""
        self._stream = self._stages()
        for candidate, value in known:
            self.tell(self._completed(candidate), value)

    @property
    def family(self) -> str:
        """The kernel family that is searched; empty when no kernel of one is feasible."""
        return self.ranked[0].family if self.ranked else ""

    @property
    def best(self) -> tuple[Candidate, float] | None:
        """The highest value so far and its candidate."""
        leaders = self.finalists(1)
        return (leaders[0], self.results[leaders[0]] or 0.0) if leaders else None

    def stage_of(self, candidate: Candidate) -> StageName:
        """In which stage a candidate was asked for."""
        return self._stage_of.get(candidate, "library")

    def claim(self, candidate: Candidate) -> None:
        """The candidate is tried whatever the stages say: it is not asked for again."""
        self._claim(candidate, "explore", counted=True)

    def is_open(self, candidate: Candidate) -> bool:
        """Whether the candidate may be asked for and was not yet."""
        return self._is_new(candidate) and self._is_allowed(candidate)

    def planned_screen(self) -> list[Candidate]:
        """What the screen will ask for whatever the results: may be compiled ahead, in this order."""
        chosen = itertools.chain(self._seeds, self._screening_order())
        new = (c for c in chosen if c.kernel in self._by_kernel and self._is_new(c) and self._is_allowed(c))
        return list(itertools.islice(dict.fromkeys(new), self.budget.screen))

    def planned_launches(self) -> list[Candidate]:
        """What the last stage would ask for by the results so far: a launch may need another kernel."""
        new = (c for c in self._launches_of_leaders() if self._is_new(c) and self._is_allowed(c))
        return list(itertools.islice(new, self.budget.refine)) if self.stage != "done" else []

    def ask(self, count: int = 24) -> list[Candidate]:
        """The next candidates, at most `count`; empty when the budget is spent or nothing new is left.

        A batch ends early where the next stage needs the values of this one.
        """
        batch: list[Candidate] = []
        while len(batch) < count:
            candidate = next(self._stream, _END)
            if candidate is _END:
                break
            if candidate is not None:
                batch.append(candidate)
            elif batch:
                break
        return batch

    def tell(self, candidate: Candidate, value: float | None) -> None:
        """What came of a candidate: its speed relative to the baseline, or None when it failed.

        Raises ValueError for a value that is not a positive number.
        """
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ValueError(f"value {value} of {candidate}: a positive ratio, or None for a failure")
        self.results[candidate] = value
        if self._explorer is not None:
            self._explorer.tell(candidate, value)

    def finalists(self, count: int) -> list[Candidate]:
        """The candidates with the highest values, best first; of equals the earlier one."""
        measured = [(candidate, value) for candidate, value in self.results.items() if value is not None]
        return [candidate for candidate, _ in sorted(measured, key=lambda pair: -pair[1])[:count]]

    # The stages are one generator of candidates. It yields None where values of all before are needed.

    def _stages(self) -> Iterator[Candidate | None]:
        yield from self._take(self._library, "library", limit=len(self._library), counted=False)
        budget = self.budget
        seeds = [seed for seed in self._seeds if seed.kernel in self._by_kernel]
        yield from self._take(seeds, "screen", limit=budget.screen)
        yield from self._take(self._screening_order(), "screen", limit=budget.screen)
        yield None
        # Neither waits for the other's values: one batch of both.
        spent = self._spent
        yield from self._take(self._variants(), "vary", limit=spent + budget.vary)
        if budget.explore:
            yield None
            yield from self._explore(spent + budget.vary + budget.explore)
            yield None
        planned = budget.trials - budget.beyond
        if budget.probe:
            yield from self._take(self._other_rasterizations(), "probe", limit=planned - budget.refine)
        yield None
        for left in reversed(range(self._plan.refinements)):
            limit = planned - left * (budget.refine // self._plan.refinements)
            yield from self._take(self._launches_of_leaders(), "refine", limit=limit)
            yield None
        if budget.beyond:
            yield from self._explore(budget.trials)
            yield None
            yield from self._take(self._launches_of_leaders(), "refine", limit=budget.trials)
        self.stage = "done"

    def _take(
        self, candidates: Iterable[Candidate], stage: StageName, *, limit: int, counted: bool = True
    ) -> Iterator[Candidate]:
        """The new and allowed ones of `candidates`, while less than `limit` trials are spent in all."""
        for candidate in candidates:
            if counted and self._spent >= limit:
                return
            if not self._is_new(candidate) or (counted and not self._is_allowed(candidate)):
                continue
            self._claim(candidate, stage, counted=counted)
            yield candidate

    def _claim(self, candidate: Candidate, stage: StageName, *, counted: bool) -> None:
        self.stage = self._stage_of[candidate] = stage
        self._spent += counted
        self.results.setdefault(candidate, None)
        self.asked.append(candidate)

    def _completed(self, candidate: Candidate) -> Candidate:
        """A stored launch with the parameters that came later, at their first values: what it did then."""
        if candidate.kernel not in self._by_kernel:
            return candidate
        later = {n: v[0] for n, v in self.launch_values.items() if n not in candidate.params}
        return candidate.with_launch(**later) if later else candidate

    def _is_new(self, candidate: Candidate) -> bool:
        return candidate not in self.results

    def _is_allowed(self, candidate: Candidate) -> bool:
        best_launch = self._by_kernel.get(candidate.kernel)
        return best_launch is not None and (candidate == best_launch or self._allowed(candidate))

    def _explore(self, limit: int) -> Iterator[Candidate | None]:
        """Without an explorer, or where it has nothing new, the model's next best."""
        if self._explorer is None and self.make_explorer is not None:
            self._explorer = self.make_explorer()
        for number in itertools.count():
            if self._spent >= limit:
                return
            if number and number % _EXPLORE_BATCH == 0:
                yield None
            candidate = self._explorer.suggest() if self._explorer is not None else None
            if candidate is None or not self.is_open(candidate):
                candidate = next(filter(self._is_new, self.ranked), None)
            if candidate is None:
                return
            if self._explorer is not None:
                self._explorer.start(candidate)
            yield from self._take([candidate], "explore", limit=limit)

    def _variants(self) -> Iterator[Candidate]:
        """Kernels that share tile and cluster with the fastest, of each in the model's order, in turn."""
        of_tile: dict[tuple[Value | None, ...], list[Candidate]] = {}
        for candidate in self.ranked:
            of_tile.setdefault(_tile_and_cluster(candidate), []).append(candidate)
        tiles = dict.fromkeys(_tile_and_cluster(leader) for leader in self._best_of_kernels())
        leading = [of_tile[tile] for tile in itertools.islice(tiles, self.budget.leaders)]
        for kernels in itertools.zip_longest(*leading):
            yield from (kernel for kernel in kernels if kernel is not None)

    def _screening_order(self) -> list[Candidate]:
        return _spread(self.ranked, self._plan.trusted)

    def _other_rasterizations(self) -> Iterator[Candidate]:
        """For each kernel, the fastest first, both raster orders with a small and with a large swizzle size.

        The model ranks kernels better than their rasterizations: on an H200 (2026-11-21) the fastest kernel
        of 4096x4096x4096 was at 0.944 of torch.mm as screened, at a swizzle size of one cluster, and 36th;
        at eight it is at 1.049. That of 8192x8192x8192 was at 1.023 and 33rd; along the
        other mode it is at 1.065.
        """
        if _RASTER not in self.launch_values or _SWIZZLE not in self.launch_values:
            return
        orders, widths = self.launch_values[_RASTER], self.launch_values[_SWIZZLE]
        narrow, wide = widths[len(widths) // 4], widths[len(widths) * 3 // 4]
        for leader in self._best_of_kernels():
            # Its own width, or the one of two that is nearer, stands for its side.
            is_narrow = widths.index(leader[_SWIZZLE]) <= len(widths) // 2
            near, far = (narrow, wide) if is_narrow else (wide, narrow)
            others = [order for order in orders if order != leader[_RASTER]]
            for order, width in [*((o, w) for o in others for w in (near, far)), (leader[_RASTER], far)]:
                yield leader.with_launch(**{_RASTER: order, _SWIZZLE: width})

    def _best_of_kernels(self) -> list[Candidate]:
        """The best launch so far of each kernel with a result, the fastest first."""
        best: dict[Candidate, Candidate] = {}
        for candidate in self.finalists(len(self.results)):
            if candidate.kernel in self._by_kernel:
                best.setdefault(candidate.kernel, candidate)
        return list(best.values())

    def _launches_of_leaders(self) -> Iterator[Candidate]:
        """Launches of the fastest kernels in turn, each from its best launch outwards; then of the next."""
        leaders = iter(self._best_of_kernels())
        while group := list(itertools.islice(leaders, self.budget.leaders)):
            for leader in group:
                if leader not in self._around:
                    self._around[leader] = launches_around(leader, self.launch_values)
            for launches in itertools.zip_longest(*(self._around[leader] for leader in group)):
                yield from (launch for launch in launches if launch is not None)


class Portfolio:
    """The searches of a problem's families, run as one: asks and tells as `Search` does.

    The first search is the one expected to win. Every family shows its model's first kernels; the first one's
    search runs to its end; then those that came near the best go on with theirs. So what a family can do on a
    problem is measured, for a few candidates.
    """

    note = ""
    """What is to be said of it at its end: nothing."""

    def __init__(self, searches: Sequence[Search], plan: Plan) -> None:
        """plan: whose margins say which family goes on."""
        self._margin, self._behind = plan.margin, plan.behind
        self.searches = list(searches)
        self._current: Search | None = self.searches[0] if self.searches else None
        self._by_family = {search.family: search for search in self.searches}
        self._values: dict[str, list[float]] = {search.family: [] for search in self.searches}

    @property
    def trials(self) -> int:
        """Candidates asked for whatever the results: the first search, the others' first rounds."""
        others = sum(_first_round(search) for search in self.searches[1:])
        return others + sum(search.budget.trials for search in self.searches[:1])

    @property
    def stage(self) -> StageName:
        """The stage of the candidate asked for last; ``done`` when there are no more."""
        return self._current.stage if self._current is not None else "done"

    def stage_of(self, candidate: Candidate) -> StageName:
        """In which stage a candidate was asked for."""
        return self._by_family.get(candidate.family, self.searches[0]).stage_of(candidate)

    def planned_screen(self) -> list[Candidate]:
        """What will be asked for whatever the results: may be compiled ahead, in this order."""
        planned = [c for search in self.searches[1:] for c in search.planned_screen()[: _first_round(search)]]
        return planned + [c for search in self.searches[:1] for c in search.planned_screen()]

    def planned_launches(self) -> list[Candidate]:
        """As `Search.planned_launches`, of the search that is under way."""
        return self._current.planned_launches() if self._current is not None else []

    def ask(self, count: int = 24) -> list[Candidate]:
        """The next candidates, at most `count`; empty when the budgets are spent.

        The first rounds of all families come together, with the first search's beginning.
        """
        batch: list[Candidate] = []
        for search in self.searches[1:]:
            left = min(_first_round(search) - len(search.asked), count - len(batch))
            if left > 0 and (asked := search.ask(left)):
                self._current = search
                batch += asked
        for search in self.searches:
            if len(batch) < count and (search is self.searches[0] or (not batch and self._is_near(search))):
                asked = search.ask(count - len(batch))
                self._current = search if asked else self._current
                batch += asked
        if not batch:
            self._current = None
        return batch

    def tell(self, candidate: Candidate, value: float | None) -> None:
        """What came of a candidate: its speed relative to the baseline, or None when it failed."""
        self._by_family.get(candidate.family, self.searches[0]).tell(candidate, value)
        if candidate.family in self._values:
            self._values[candidate.family].append(value or 0.0)

    def _is_near(self, search: Search) -> bool:
        # Like is compared with like: the first search has seen many more candidates by now.
        best = {one: self._best_of_first_round(one) for one in self.searches}
        others = [value for name, own in self._values.items() if name != search.family for value in own]
        least = max((1 - self._margin) * max(best.values()), (1 - self._behind) * max(others, default=0.0))
        return best[search] > 0 and best[search] >= least

    def _best_of_first_round(self, search: Search) -> float:
        return max(self._values[search.family][: _first_round(search)], default=0.0)


def _first_round(search: Search) -> int:
    return max(1, int(search.budget.trials * _FIRST_ROUND)) if search.budget.trials else 0


def first_of_each_kernel(ranked: Iterable[Candidate]) -> list[Candidate]:
    """The best-ranked launch of each kernel: what `Search` wants as `ranked`, from any list of candidates."""
    best: dict[Candidate, Candidate] = {}
    for candidate in ranked:
        best.setdefault(candidate.kernel, candidate)
    return list(best.values())


def launches_around(
    leader: Candidate, launch_values: Mapping[str, Sequence[Value]], most: int | None = None
) -> list[Candidate]:
    """Every launch of the leader's kernel that differs in at most so many parameters, those with fewest
    differences first.
    """
    names, lists = launch_values.keys(), launch_values.values()
    grid = (
        leader.with_launch(**dict(zip(names, values, strict=True))) for values in itertools.product(*lists)
    )
    differing = [(_differences(launch, leader), launch) for launch in grid]
    return [
        launch
        for count, launch in sorted(differing, key=lambda pair: pair[0])
        if most is None or count <= most
    ]


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


_END = Candidate("end of the stream")


def _spread(ranked: Sequence[Candidate], trusted: int) -> list[Candidate]:
    """The model's first in its order; then, in case it is wrong, the best of each tile and cluster shape
    first, few clusters per tile, and the rest."""
    clusters_of_tile: Counter[tuple[Value | None, ...]] = Counter()
    seen: set[tuple[Value | None, ...]] = set()
    begin, first, rest = list(ranked[:trusted]), [], []
    for candidate in ranked[trusted:]:
        shape = _tile_and_cluster(candidate)
        if shape in seen or clusters_of_tile[shape[: len(_TILE)]] >= _CLUSTERS_PER_TILE:
            rest.append(candidate)
            continue
        seen.add(shape)
        clusters_of_tile[shape[: len(_TILE)]] += 1
        first.append(candidate)
    return begin + first + rest


def _tile_and_cluster(candidate: Candidate) -> tuple[Value | None, ...]:
    return tuple([candidate.params.get(name) for name in (*_TILE, *_CLUSTER)])


def _check_alike(ranked: Sequence[Candidate]) -> None:
    for candidate in ranked[1:]:
        first = ranked[0]
        if candidate.family != first.family or not _same_names(candidate, first):
            raise SpaceError(f"one search is over one family's parameters; got {first} and {candidate}")


def _same_names(one: Candidate, other: Candidate) -> bool:
    return [name for name, _ in one.compile_params] == [name for name, _ in other.compile_params]


def _differences(one: Candidate, other: Candidate) -> int:
    return sum(a != b for a, b in zip(one.launch_params, other.launch_params, strict=True))
