"""Several searches of one problem, one per kernel family, run as one.

Every family shows its model's first kernels; the first family's search runs to its end; then those that came
near the best go on with theirs. So what a family can do on a problem is measured, for a few candidates.
"""

from __future__ import annotations

from collections.abc import Sequence

from tunegemm.describe.space import Candidate
from tunegemm.search.budget import Plan
from tunegemm.search.search import Search, StageName

#: Candidates of each family but the first before its chances are judged, as a part of its budget: 2 of 32.
_FIRST_ROUND = 0.08


class Portfolio:
    """Asks and tells as `Search` does. The first search is the one expected to win."""

    def __init__(self, searches: Sequence[Search], plan: Plan) -> None:
        """plan: whose margins say which family goes on."""
        self._margin, self._behind = plan.margin, plan.behind
        self._searches = list(searches)
        self._current: Search | None = self._searches[0] if self._searches else None
        self._by_family = {search.family: search for search in self._searches}
        self._values: dict[str, list[float]] = {search.family: [] for search in self._searches}

    @property
    def trials(self) -> int:
        """Candidates asked for whatever the results: the first search, the others' first rounds."""
        others = sum(_first_round(search) for search in self._searches[1:])
        return others + sum(search.budget.trials for search in self._searches[:1])

    @property
    def stage(self) -> StageName:
        """The stage of the candidate asked for last; ``done`` when there are no more."""
        return self._current.stage if self._current is not None else "done"

    @property
    def searches(self) -> Sequence[Search]:
        """The search of each family."""
        return self._searches

    def stage_of(self, candidate: Candidate) -> StageName:
        """In which stage a candidate was asked for."""
        return self._by_family.get(candidate.family, self._searches[0]).stage_of(candidate)

    def planned_screen(self) -> list[Candidate]:
        """What will be asked for whatever the results: may be compiled ahead, in this order."""
        planned = [
            c for search in self._searches[1:] for c in search.planned_screen()[: _first_round(search)]
        ]
        return planned + [c for search in self._searches[:1] for c in search.planned_screen()]

    def planned_launches(self) -> list[Candidate]:
        """As `Search.planned_launches`, of the search that is under way."""
        return self._current.planned_launches() if self._current is not None else []

    def ask(self, count: int = 24) -> list[Candidate]:
        """The next candidates, at most `count`; empty when the budgets are spent.

        The first rounds of all families come together, with the first search's beginning.
        """
        batch: list[Candidate] = []
        for search in self._searches[1:]:
            left = min(_first_round(search) - len(search.asked), count - len(batch))
            if left > 0 and (asked := search.ask(left)):
                self._current = search
                batch += asked
        for search in self._searches:
            if len(batch) < count and (search is self._searches[0] or (not batch and self._is_near(search))):
                asked = search.ask(count - len(batch))
                self._current = search if asked else self._current
                batch += asked
        if not batch:
            self._current = None
        return batch

    def tell(self, candidate: Candidate, value: float | None) -> None:
        """What came of a candidate: its speed relative to the baseline, or None when it failed."""
        self._by_family.get(candidate.family, self._searches[0]).tell(candidate, value)
        if candidate.family in self._values:
            self._values[candidate.family].append(value or 0.0)

    def _is_near(self, search: Search) -> bool:
        # Like is compared with like: the first search has seen many more candidates by now.
        best = {one: self._best_of_first_round(one) for one in self._searches}
        others = [value for name, own in self._values.items() if name != search.family for value in own]
        least = max((1 - self._margin) * max(best.values()), (1 - self._behind) * max(others, default=0.0))
        return best[search] > 0 and best[search] >= least

    def _best_of_first_round(self, search: Search) -> float:
        return max(self._values[search.family][: _first_round(search)], default=0.0)


def _first_round(search: Search) -> int:
    return max(1, int(search.budget.trials * _FIRST_ROUND)) if search.budget.trials else 0
