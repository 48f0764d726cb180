"""How many trials each stage of a search may spend; and the numbers that a user gives one."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal, get_args

from tunegemm.errors import SpaceError

Effort = Literal["quick", "full", "exhaustive"]
EFFORTS: tuple[Effort, ...] = get_args(Effort)


@dataclass(frozen=True)
class Budget:
    """Trials per stage. What a stage leaves over, the next one may spend."""

    screen: int
    """Kernels at their model-best launch, in the model's order."""
    vary: int
    """Further kernels of the leaders' tiles: other rings, other epilogues."""
    explore: int
    """Suggestions of the sampler, over compile-time and launch parameters."""
    probe: int
    """Other rasterizations of the many kernels near the top: they cost no compile."""
    refine: int
    """Further launches of the leaders: they cost no compile."""
    leaders: int
    """How many kernels share the launches of the last stage."""

    @property
    def trials(self) -> int:
        return self.screen + self.vary + self.explore + self.probe + self.refine


# A candidate costs some 15 ms once compiled. On an H200 the model's order, which knows cycles and joules, has
# the winner's tile among its first few; the rest is to find its ring and its launch.
_TRIALS = {"quick": 32, "full": 440}
#: Parts of the trials: screen, probe, refine. What a quick search has over is for `vary`; a full one may look
#: at many launches, since one that the model misjudged can be the best of a kernel that is far from the top.
_SHARES = {"quick": (7 / 16, 3 / 16, 3 / 16), "full": (3 / 8, 1 / 4, 13 / 50)}
#: Kernels that are screened at least, if there are so many trials: the first of either ranking, and two more.
_FEWEST = 4
#: Larger than any number of trials or seconds that is meant.
_LARGEST = 2**53
#: Of tuning in one process where TUNEGEMM_ONLINE_BUDGET is not set. With its kernels compiled a product takes
#: 2 to 6 s (H200, benchmarks/results/h200/campaign.json).
_ONLINE_S = 60.0
_LEADERS = {"quick": 3, "full": 6, "exhaustive": 8}


def budget_for(effort: Effort, *, kernels: int, launches: int, trials: int | None = None) -> Budget:
    """The budget of an effort in a space of `kernels`, each with `launches`; `trials` overrides its total.

    Raises SpaceError for an unknown effort and for a number of trials that is not a whole one from 1.
    """
    if not isinstance(effort, str) or effort not in EFFORTS:
        raise SpaceError(f"effort {effort!r} is not known; use one of {', '.join(EFFORTS)}")
    if trials is not None:
        trials = _whole("trials", trials, least=1)
    if not kernels:
        return Budget(0, 0, 0, 0, 0, 0)
    leaders = min(_LEADERS[effort], kernels)
    if effort == "exhaustive":
        grid = leaders * (launches - 1)
        screen = kernels if trials is None else min(kernels, trials)
        return Budget(screen, 0, 0, 0, grid if trials is None else min(grid, trials - screen), leaders)
    total = _TRIALS[effort] if trials is None else trials
    of_screen, of_probe, of_refine = _SHARES[effort]
    screen = min(kernels, max(min(total, _FEWEST), int(total * of_screen)))
    probe = min(total - screen, int(total * of_probe), kernels * (launches - 1))
    refine = min(total - screen - probe, int(total * of_refine), leaders * (launches - 1))
    left = total - screen - probe - refine
    if effort == "quick":
        return Budget(screen, left, 0, probe, refine, leaders)
    vary = min(left, total // 16)
    return Budget(screen, vary, left - vary, probe, refine, leaders)


def checked_seconds(budget_seconds: float | None) -> float:
    """A budget of time, infinite without one. Raises SpaceError for one that is not a number from 0."""
    if budget_seconds is None:
        return math.inf
    is_number = isinstance(budget_seconds, Real) and not isinstance(budget_seconds, bool)
    if not is_number or not budget_seconds >= 0:  # which NaN is not, either
        raise SpaceError(
            f"budget_seconds = {_shown(budget_seconds)}: give a number of seconds from 0, or None"
        )
    return float(min(budget_seconds, _LARGEST)) if budget_seconds < math.inf else math.inf


def online_budget() -> tuple[float, str]:
    """Seconds that ``TUNEGEMM_MODE=online`` may tune in a process, by TUNEGEMM_ONLINE_BUDGET.

    And in one line what is wrong with that variable; empty where nothing is.
    """
    text = os.environ.get("TUNEGEMM_ONLINE_BUDGET", "")
    try:
        seconds = checked_seconds(float(text or _ONLINE_S))
    except ValueError:  # a SpaceError is one
        seconds = math.inf
    if math.isinf(seconds):
        return _ONLINE_S, (
            f"TUNEGEMM_ONLINE_BUDGET={_shown(text)} is not a number of seconds and has no effect; "
            f"the budget is {_ONLINE_S:g} s"
        )
    return seconds, ""


def checked_seed(seed: int) -> int:
    """A seed that every generator of random numbers takes. Raises SpaceError for another one."""
    return _whole("seed", seed, least=0, most=2**32 - 1)


def _whole(name: str, value: int, *, least: int, most: int = _LARGEST) -> int:
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_whole or not least <= value <= most:
        raise SpaceError(f"{name} = {_shown(value)}: give a whole number from {least} to {most}")
    return int(value)


def _shown(value: object) -> str:
    """A value for a message, cut: a number of 5,000 digits cannot even be printed."""
    try:
        text = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= 40 else text[:37] + "..."
