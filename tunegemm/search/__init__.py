"""Which candidates to try next. Knows candidates and their values; neither GPU nor database."""

from tunegemm.search.budget import EFFORTS, Budget, Effort, budget_for
from tunegemm.search.portfolio import Portfolio
from tunegemm.search.search import Search, first_of_each_kernel, launches_around

__all__ = [
    "EFFORTS",
    "Budget",
    "Effort",
    "Portfolio",
    "Search",
    "budget_for",
    "first_of_each_kernel",
    "launches_around",
]
