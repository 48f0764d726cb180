"""Which candidates to try next. Knows candidates and told values; neither GPU nor database."""

from tunegemm.search.budget import EFFORTS, Budget, Effort, budget_for
from tunegemm.search.search import Search

__all__ = ["EFFORTS", "Budget", "Effort", "Search", "budget_for"]
