"""Decides which candidates to try next. The search for a problem is an Optuna study; it knows neither GPU nor
database.

`study` is a problem's study, its trials' parameters and our sampler; `delegate` lets any other
Optuna sampler take its place, which `samplers` finds by name. `search` orders candidates, and `efforts` sets
how many trials there are. Optuna and NumPy load on first use.
"""

from tunegemm.search.search import Portfolio, Search, first_of_each_kernel

__all__ = ["Portfolio", "Search", "first_of_each_kernel"]
