"""Which candidates to try next: the search of a problem is an Optuna study. Neither GPU nor database.

`study` is that of a problem, `roofline` its own sampler, `delegate` lets any other of Optuna's take its
place. `search` is the order in which candidates are tried, `surrogate` what explores in it, `efforts` how
many trials there are, `space` a study's parameters. Optuna and NumPy are loaded on first use.
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
