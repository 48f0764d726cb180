"""Decides which candidates to try next. The search for a problem is an Optuna study; it knows neither GPU nor
database.

`study` is a problem's study, `roofline` our sampler, `delegate` lets any other Optuna sampler replace it.
`search` orders candidates, `surrogate` explores among them, `efforts` sets how many trials there are, and
`space` has a study's parameters. Optuna and NumPy load on first use.
"""

from typing import TYPE_CHECKING, Any

from tunegemm.search.efforts import Budget, Plan, budget_for
from tunegemm.search.search import Portfolio, Search, first_of_each_kernel, launches_around

if TYPE_CHECKING:
    from tunegemm.search.roofline import RooflineSampler

__all__ = [
    "Budget",
    "Plan",
    "Portfolio",
    "RooflineSampler",
    "Search",
    "budget_for",
    "first_of_each_kernel",
    "launches_around",
]


def __getattr__(name: str) -> Any:
    if name == "RooflineSampler":
        from tunegemm.search.roofline import RooflineSampler

        return RooflineSampler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
