"""The search of one problem: screen, vary, probe, refine.

::

    search = Search(ranked, space.launch_values, EFFORTS["quick"].plan, allowed=feasible)
    while batch := search.ask():
        for candidate, ratio in evaluate(batch):     # compile, measure; None if it failed
            search.tell(candidate, ratio)

A `Search` covers one kernel family; a `Portfolio` runs the searches of several families as one.
"""

from __future__ import annotations

import itertools
import math
import operator
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

from tunegemm.describe.space import Candidate, Value
from tunegemm.search.efforts import Plan, budget_for

#: The stage of a search. `library` covers the vendor's algorithms.
StageName = Literal["library", "screen", "vary", "explore", "probe", "refine", "done"]

#: The study parameter that distinguishes the families.
FAMILY = "family"
#: The screen takes each tile once per cluster shape, with few clusters, before it takes a variant of stages.
_TILE = ("schedule", "tile_m", "tile_n")
_CLUSTER = ("cluster_m", "cluster_n")
_CLUSTERS_PER_TILE = 3
#: Rasterization, if a family has both parameters: which mode comes first, and how many tiles of the other
#: mode are visited at a time.
_RASTER, _SWIZZLE = "raster_order", "swizzle_size"
#: Candidates of each family but the first before the portfolio judges it, as a fraction of its budget: 2 of
#: 32.
_FIRST_ROUND = 0.08


class Search:
    """Asks for feasible candidates in batches, each at most once, and learns from their values.

    Deterministic: the same arguments and the same values in the same batches give the same asks.
    """

    def __init__(
        self,
        ranked: Sequence[Candidate],
        launch_values: Mapping[str, Sequence[Value]],
        plan: Plan,
        *,
        allowed: Callable[[Candidate], bool] | None = None,
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
        seeds: candidates of the space to start with, such as winners of older kernels. They count as trials:
            on top of an effort's own number, but within the number that `trials` sets.
        known: stored results (value None: it failed). The search learns from them and never asks for them
        again.
        """
        self.ranked = list(ranked)
        """The kernels, each at its model-best launch, best first."""
        self._plan = plan
        #: Whether the model's next kernels take the trials that the stages leave.
        self._fills = trials is not None
        self.launch_values = {name: tuple(values) for name, values in launch_values.items()}
        """The values of each launch-time parameter."""
        self._allowed = allowed or (lambda candidate: True)
        self._by_kernel = {candidate.kernel: candidate for candidate in self.ranked}
        self._seeds = [self._completed(seed) for seed in seeds]
        launches = math.prod(len(values) for values in self.launch_values.values())
        #: Trials per stage.
        self.budget = budget_for(plan, kernels=len(self.ranked), launches=launches, trials=trials)
        if trials is None:
            # Seeds come from older kernels or other software. At 4096x4096x14336 ten of them took the places
            # of the last ten kernels to be screened, the fastest among them (H200, 2026-11-22).
            begun = sum(seed.kernel in self._by_kernel for seed in self._seeds)
            self.budget = replace(self.budget, screen=min(self.budget.screen + begun, len(self.ranked)))
        self.asked: list[Candidate] = []
        """Every candidate asked for, in order."""
        self.results: dict[Candidate, float | None] = {}
        """The value of every candidate that was asked for or is known; None if it failed or is pending."""
        self._stage_of: dict[Candidate, StageName] = {}
        self._around: dict[Candidate, list[Candidate]] = {}
        self._spent = 0
        self.stage: StageName = "screen"
        """The stage of the candidate asked for last; ``done`` when there are no more."""
        self._stream = self._stages()
        for candidate, value in known:
            self.tell(self._completed(candidate), value)

    @property
    def family(self) -> str:
        """The kernel family of the search; empty if no kernel is feasible."""
        return self.ranked[0].family if self.ranked else ""

    def stage_of(self, candidate: Candidate) -> StageName:
        """In which stage a candidate was asked for."""
        return self._stage_of.get(candidate, "library")

    def claim(self, candidate: Candidate, stage: StageName = "explore") -> None:
        """Count the candidate as tried, so that the search does not ask for it again."""
        self.stage = self._stage_of[candidate] = stage
        self._spent += 1
        self.results.setdefault(candidate, None)
        self.asked.append(candidate)

    def is_open(self, candidate: Candidate) -> bool:
        """Whether the search may ask for the candidate and has not done so yet."""
        best_launch = self._by_kernel.get(candidate.kernel)
        if best_launch is None or candidate in self.results:
            return False
        return candidate == best_launch or self._allowed(candidate)

    def planned_screen(self) -> list[Candidate]:
        """The candidates that the screen will ask for whatever the results, in order; to compile ahead."""
        chosen = itertools.chain(self._seeds, self._screening_order())
        new = filter(self.is_open, chosen)
        return list(itertools.islice(dict.fromkeys(new), self.budget.screen))

    def planned_launches(self) -> list[Candidate]:
        """Return the launches that the last stage would ask for after the results so far: a launch may need
        another kernel."""
        new = filter(self.is_open, self._launches_of_leaders())
        return list(itertools.islice(new, self.budget.refine)) if self.stage != "done" else []

    def ask(self, count: int = 24) -> list[Candidate]:
        """The next candidates, at most `count`; empty when the budget is spent or nothing new is left.

        A batch ends early if the next stage needs its values.
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
        """What came of a candidate: its speed relative to the baseline, or None when it failed."""
        self.results[candidate] = value

    # The stages are one generator of candidates. It yields None when it needs the values of all earlier ones.

    def _stages(self) -> Iterator[Candidate | None]:
        budget = self.budget
        seeds = [seed for seed in self._seeds if seed.kernel in self._by_kernel]
        yield from self._take(seeds, "screen", limit=budget.screen)
        yield from self._take(self._screening_order(), "screen", limit=budget.screen)
        yield None
        # Neither needs the other's values, so both go into one batch.
        spent = self._spent
        yield from self._take(self._variants(), "vary", limit=spent + budget.vary)
        if budget.probe:
            yield from self._take(self._other_rasterizations(), "probe", limit=budget.trials - budget.refine)
        yield None
        for left in reversed(range(self._plan.refinements)):
            limit = budget.trials - left * (budget.refine // self._plan.refinements)
            yield from self._take(self._launches_of_leaders(), "refine", limit=limit)
            yield None
        if self._fills and self._best_of_kernels():
            yield from self._take(self.ranked, "screen", limit=budget.trials)
        self.stage = "done"

    def _take(self, candidates: Iterable[Candidate], stage: StageName, *, limit: int) -> Iterator[Candidate]:
        """Yield the new and allowed `candidates` while fewer than `limit` trials are spent in total."""
        for candidate in candidates:
            if self._spent >= limit:
                return
            if self.is_open(candidate):
                self.claim(candidate, stage)
                yield candidate

    def _completed(self, candidate: Candidate) -> Candidate:
        """Return a stored launch with later parameters added at their first values, which match its old
        behaviour."""
        if candidate.kernel not in self._by_kernel:
            return candidate
        later = {n: v[0] for n, v in self.launch_values.items() if n not in candidate.params}
        return candidate.with_launch(**later) if later else candidate

    def _variants(self) -> Iterator[Candidate]:
        """Yield kernels that share tile and cluster with the leaders: in turn for each leader, in the model's
        order."""
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
        """Yield for each kernel, fastest first, both raster orders with a small and with a large swizzle
        size.

        The model ranks kernels better than their rasterizations: on an H200 (2026-11-21) the fastest kernel
        for 4096x4096x4096 screened at 0.944 of torch.mm and in 36th place with a swizzle size of one cluster;
        with eight it reaches 1.049. The fastest for 8192x8192x8192 screened at 1.023 and in 33rd place; along
        the other mode it reaches 1.065.
        """
        if _RASTER not in self.launch_values or _SWIZZLE not in self.launch_values:
            return
        orders, widths = self.launch_values[_RASTER], self.launch_values[_SWIZZLE]
        narrow, wide = widths[len(widths) // 4], widths[len(widths) * 3 // 4]
        for leader in self._best_of_kernels():
            # The kernel's own width stands for the nearer of the two widths.
            is_narrow = widths.index(leader[_SWIZZLE]) <= len(widths) // 2
            near, far = (narrow, wide) if is_narrow else (wide, narrow)
            others = [order for order in orders if order != leader[_RASTER]]
            for order, width in [*((o, w) for o in others for w in (near, far)), (leader[_RASTER], far)]:
                yield leader.with_launch(**{_RASTER: order, _SWIZZLE: width})

    def _best_of_kernels(self) -> list[Candidate]:
        """The best launch of each kernel with a result, the fastest first; of equal ones the earlier."""
        measured = [(candidate, value) for candidate, value in self.results.items() if value is not None]
        best: dict[Candidate, Candidate] = {}
        for candidate, _ in sorted(measured, key=lambda pair: -pair[1]):
            if candidate.kernel in self._by_kernel:
                best.setdefault(candidate.kernel, candidate)
        return list(best.values())

    def _launches_of_leaders(self) -> Iterator[Candidate]:
        """Yield launches of the leading kernels in turn, each from its best launch outwards; then of the next
        ones."""
        leaders = iter(self._best_of_kernels())
        while group := list(itertools.islice(leaders, self.budget.leaders)):
            for leader in group:
                if leader not in self._around:
                    self._around[leader] = _launches_around(leader, self.launch_values)
            for launches in itertools.zip_longest(*(self._around[leader] for leader in group)):
                yield from (launch for launch in launches if launch is not None)


class Portfolio:
    """Runs the searches of a problem's families as one search, with the methods of `Search`.

    The first search is of the family that is expected to win. Every family first tries its model's best
    kernels. Then the first search runs to its end, and the families that came near the best continue with
    theirs. So a few candidates measure how fast each family is on the problem.
    """

    note = ""
    """The note for the user when the search ends: none."""

    def __init__(self, searches: Sequence[Search], plan: Plan) -> None:
        """plan: its margins decide which families continue."""
        self._margin, self._behind = plan.margin, plan.behind
        self.searches = list(searches)
        self._current: Search | None = self.searches[0] if self.searches else None
        self._by_family = {search.family: search for search in self.searches}
        self._values: dict[str, list[float]] = {search.family: [] for search in self.searches}

    @property
    def trials(self) -> int:
        """The number of candidates that any results lead to: the first search and the others' first
        rounds."""
        others = sum(_first_round(search) for search in self.searches[1:])
        return others + sum(search.budget.trials for search in self.searches[:1])

    @property
    def stage(self) -> StageName:
        return self._current.stage if self._current is not None else "done"

    def stage_of(self, candidate: Candidate) -> StageName:
        search = self._by_family.get(candidate.family)
        return search.stage_of(candidate) if search is not None else "library"

    def planned_screen(self) -> list[Candidate]:
        planned = [c for search in self.searches[1:] for c in search.planned_screen()[: _first_round(search)]]
        return planned + [c for search in self.searches[:1] for c in search.planned_screen()]

    def planned_launches(self) -> list[Candidate]:
        return self._current.planned_launches() if self._current is not None else []

    def ask(self, count: int = 24) -> list[Candidate]:
        """The next candidates, at most `count`; empty when the budgets are spent.

        One batch has the first rounds of all families and the beginning of the first search.
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
        """What came of a candidate: its speed relative to the baseline, or None when it failed. The library's
        algorithms teach nothing.
        """
        if (search := self._by_family.get(candidate.family)) is not None:
            search.tell(candidate, value)
            self._values[candidate.family].append(value or 0.0)

    def _is_near(self, search: Search) -> bool:
        # First rounds compare with first rounds: the first search has seen many more candidates by now.
        best = {
            search: max(self._values[search.family][: _first_round(search)], default=0.0)
            for search in self.searches
        }
        others = [value for name, own in self._values.items() if name != search.family for value in own]
        least = max((1 - self._margin) * max(best.values()), (1 - self._behind) * max(others, default=0.0))
        return best[search] > 0 and best[search] >= least


def _first_round(search: Search) -> int:
    return max(1, int(search.budget.trials * _FIRST_ROUND)) if search.budget.trials else 0


def first_of_each_kernel(ranked: Iterable[Candidate]) -> list[Candidate]:
    """Return the best-ranked launch of each kernel of a list, as `Search` takes them in `ranked`."""
    best: dict[Candidate, Candidate] = {}
    for candidate in ranked:
        best.setdefault(candidate.kernel, candidate)
    return list(best.values())


def _launches_around(leader: Candidate, launch_values: Mapping[str, Sequence[Value]]) -> list[Candidate]:
    """Return every launch of the leader's kernel, those with the fewest differences from the leader first."""
    names, lists = launch_values.keys(), launch_values.values()
    grid = (
        leader.with_launch(**dict(zip(names, values, strict=True))) for values in itertools.product(*lists)
    )
    own = leader.launch_params
    return sorted(grid, key=lambda launch: sum(map(operator.ne, launch.launch_params, own)))


def is_ordered(listed: Sequence[Value]) -> bool:
    """Whether the values are numbers, so that near ones are alike."""
    return all(isinstance(value, int) and not isinstance(value, bool) for value in listed)


def lists_of(parameters: Iterable[tuple[str, Iterable[Value]]]) -> dict[str, tuple[Value, ...]]:
    """Return the distinct values of each parameter, in an order that stays the same for a whole study."""
    lists: dict[str, dict[Value, None]] = {}
    for name, values in parameters:
        lists.setdefault(name, {}).update(dict.fromkeys(values))
    return {name: tuple(sorted(lists[name], key=lambda v: (str(type(v)), v))) for name in sorted(lists)}


@contextmanager
def quiet_optuna() -> Iterator[None]:
    """Suppress Optuna's messages about new studies and experimental options."""
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
    """Return the model's first kernels in its order; then, in case the model is wrong, the best kernel of
    each tile and cluster shape, with few clusters per tile; then the rest."""
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
