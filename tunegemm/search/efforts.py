"""How much each effort tries: the one table. What a tuning does by its effort, it reads here.

Also what a plan makes of a space, and the checks of numbers that users give a search.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Integral, Real
from types import MappingProxyType
from typing import Literal

from tunegemm.errors import SpaceError
from tunegemm.measure.settings import FINAL, QUICK_FINAL, RaceSettings

#: The name of an effort.
Effort = Literal["quick", "full", "exhaustive"]
#: Kernels that are screened at least, if there are so many trials: the first of either ranking, and two more.
_FEWEST = 4
#: Larger than any number of trials or seconds that is meant.
_LARGEST = 2**53
#: Of tuning in one process where TUNEGEMM_ONLINE_BUDGET is not set. With its kernels compiled a product takes
#: 2 to 6 s (H200, benchmarks/results/h200/campaign.json).
_ONLINE_S = 60.0


@dataclass(frozen=True)
class Plan:
    """How a search spends its trials, in whichever space: a part of a `Profile`."""

    trials: int | None
    """Those of the first family; None for every kernel, and every launch of the leaders."""
    screen: float = 1.0
    """Part of the trials for kernels at their model-best launch."""
    probe: float = 0.0
    """Part for other rasterizations."""
    refine: float = 0.0
    """Part for further launches of the leaders."""
    vary: float = 0.0
    """Part for further kernels of the leaders' tiles, at most; what is over then is explored."""
    leaders: int = 1
    """How many kernels share the launches of the last stage."""
    refinements: int = 1
    """Rounds of the last stage: each turns around the best launch that the one before has found."""
    trusted: int = 0
    """Kernels taken in the model's order before tiles are spread: many of them differ by the depth of the
    ring only, which few trials leave to the leaders."""
    margin: float = 0.0
    """Another family goes on when the best of its first round is at most this part slower than the best
    first round."""
    behind: float = 1.0
    """And at most this part slower than the best of the others so far."""
    beyond: int = 0
    """How many of more trials than the plan's own explore, after all others; the shares grow by the rest. An
    ask costs more with every trial that is known."""


@dataclass(frozen=True)
class Places:
    """How many candidates a final race has, beside torch.mm."""

    own: int
    """Own ones, by what is expected of them."""
    quickest: int
    """Own ones by time, not by ratio."""
    library: int
    """Algorithms of the library."""


@dataclass(frozen=True)
class Compiling:
    """Most kernels of a family that a search compiles: more only where fewer than it wants are compiled."""

    new: int
    wanted: int


@dataclass(frozen=True)
class Profile:
    """All numbers of one effort."""

    plan: Plan
    """Trials, and their shares of the search's stages."""
    ranked: int | None
    """How many kernels of a family the search knows, of several thousand; None for all."""
    compiling: tuple[Compiling, Compiling] | None
    """For the first family and for each other one, on a GPU, whose time is dear; None for no limit."""
    final: RaceSettings
    """The final race: rounds, turns in steady state, what drops out."""
    interleaved: Places
    """Finalists in interleaved timing, where a candidate costs milliseconds."""
    steady: Places
    """Finalists in steady-state timing, where it costs a turn in each round."""
    steady_s: float
    """Seconds that a final race in steady-state timing takes. A search that has a budget leaves it so much,
    but no more than half."""

    @property
    def skips_slow_compiles(self) -> bool:
        """Whether a GPU does not wait for the last few kernels of a batch."""
        return self.compiling is not None


# A candidate costs some 15 ms once compiled. On an H200 the model's order, which knows cycles and joules, has
# the winner's tile among its first few; the rest is to find its ring and its launch. A full search may look
# at many launches, since one that the model misjudged can be the best of a kernel that is far from the top.
#
# In a quick search another family goes on only if its first round is no more than 1 % behind the best of the
# others, either: what follows gains some 1 % over it. Of 27 second families that were searched to their end
# three won, and none of the 16 that were further behind (87 products of an H200, 2026-11-24).
#
# In steady state the four finalists of which most is expected, two launches of a kernel at most, lack 0.6 %
# of the fastest of 15 to 63 that were timed so, in the mean, and three of as many kernels 0.9 % (twelve
# products of an H200, nine of an H100, 2026-11-25; of either some 0.4 % is the luck of the fastest in three
# turns).
_QUICK = Profile(
    Plan(32, screen=7 / 16, probe=3 / 16, refine=3 / 16, vary=1.0, leaders=3, behind=0.01, beyond=96),
    ranked=512, compiling=(Compiling(8, 20), Compiling(1, 2)),
    final=QUICK_FINAL, interleaved=Places(6, 2, 3), steady=Places(4, 1, 1), steady_s=5.0,
)  # fmt: skip
_FULL = Profile(
    Plan(
        440, screen=3 / 8, probe=1 / 4, refine=13 / 50, vary=1 / 16, leaders=6, refinements=2, trusted=24,
        margin=0.02,
    ),
    ranked=None, compiling=None,
    final=FINAL, interleaved=Places(12, 4, 6), steady=Places(12, 4, 3), steady_s=25.0,
)  # fmt: skip
_EXHAUSTIVE = replace(_FULL, plan=Plan(None, leaders=8, refinements=2, trusted=24, margin=0.02))

EFFORTS: Mapping[Effort, Profile] = MappingProxyType(
    {"quick": _QUICK, "full": _FULL, "exhaustive": _EXHAUSTIVE}
)


def profile(effort: Effort) -> Profile:
    """The numbers of an effort. Raises SpaceError for one that is not known."""
    if not isinstance(effort, str) or effort not in EFFORTS:
        raise SpaceError(f"effort {effort!r} is not known; use one of {', '.join(EFFORTS)}")
    return EFFORTS[effort]


@dataclass(frozen=True)
class Budget:
    """Trials per stage. What a stage leaves over, the next one may spend."""

    screen: int
    """Kernels at their model-best launch, in the model's order."""
    vary: int
    """Further kernels of the leaders' tiles: other rings, other epilogues."""
    explore: int
    """Suggestions of the surrogate, over compile-time and launch parameters."""
    probe: int
    """Other rasterizations of the many kernels near the top: they cost no compile."""
    refine: int
    """Further launches of the leaders: they cost no compile."""
    leaders: int
    """How many kernels share the launches of the last stage."""
    beyond: int = 0
    """Suggestions of the surrogate after all these."""

    @property
    def trials(self) -> int:
        return self.screen + self.vary + self.explore + self.probe + self.refine + self.beyond


def budget_for(plan: Plan, *, kernels: int, launches: int, trials: int | None = None) -> Budget:
    """The budget of a plan in a space of `kernels`, each with `launches`; `trials` overrides its total.

    Raises SpaceError for a number of trials that is not a whole one from 1.
    """
    if trials is not None:
        trials = checked_trials(trials)
    if not kernels:
        return Budget(0, 0, 0, 0, 0, 0)
    leaders = min(plan.leaders, kernels)
    if plan.trials is None:
        grid = leaders * (launches - 1)
        screen = kernels if trials is None else min(kernels, trials)
        return Budget(screen, 0, 0, 0, grid if trials is None else min(grid, trials - screen), leaders)
    asked = plan.trials if trials is None else trials
    beyond = min(max(asked - plan.trials, 0), plan.beyond)
    total = asked - beyond
    screen = min(kernels, max(min(total, _FEWEST), int(total * plan.screen)))
    probe = min(total - screen, int(total * plan.probe), kernels * (launches - 1))
    refine = min(total - screen - probe, int(total * plan.refine), leaders * (launches - 1))
    left = total - screen - probe - refine
    vary = min(left, int(total * plan.vary))
    return Budget(screen, vary, left - vary, probe, refine, leaders, beyond)


def checked_trials(trials: int) -> int:
    """A number of trials that is asked for. Raises SpaceError for one that is not a whole one from 1."""
    return _whole("trials", trials, least=1)


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
