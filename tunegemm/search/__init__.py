"""Which candidates to try next. Knows candidates and their values; neither GPU nor database.

`search` is that of one family, `portfolio` runs those of several, `sampler` suggests by Optuna, `budget`
says how many trials there are, `importance` which parameters decided. Imports `describe`.
"""

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
