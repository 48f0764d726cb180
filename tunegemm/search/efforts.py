"""The table of efforts: how much a search tries at each effort. A tuning reads all such numbers here.

This module also turns a plan into a budget for a space, and checks the numbers that users pass to a search.
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
from tunegemm.untrusted import shown

#: The name of an effort.
Effort = Literal["quick", "full", "exhaustive"]
#: The fewest kernels to screen, if there are enough trials: the first of either ranking, and two more.
_FEWEST = 4
#: Larger than any sensible number of trials or seconds.
_LARGEST = 2**53
#: Seconds that one process may tune if TUNEGEMM_ONLINE_BUDGET is not set. A product whose kernels are already
#: compiled takes 2 to 6 s (H200, benchmarks/results/h200/campaign.json).
_ONLINE_S = 60.0


@dataclass(frozen=True)
class Plan:
    """How a search spends its trials in any space: a part of a `Profile`."""

    trials: int | None
    """Trials of the first family; None for every kernel and every launch of the leaders."""
    screen: float = 1.0
    """Fraction of the trials for kernels at their model-best launch. Further kernels with the leaders' tiles
    get the trials that remain."""
    probe: float = 0.0
    """Fraction for other rasterizations."""
    refine: float = 0.0
    """Fraction for further launches of the leaders."""
    leaders: int = 1
    """How many kernels share the launches of the last stage."""
    refinements: int = 1
    """Rounds of the last stage: each searches around the best launch of the round before."""
    trusted: int = 0
    """Kernels taken in the model's order before tiles are spread: many of them differ only in the depth of
    the ring, which a search with few trials varies for the leaders alone."""
    margin: float = 0.0
    """Another family continues if the best of its first round is slower than the best first round by at most
    this fraction."""
    behind: float = 1.0
    """It must also trail the best of the other families so far by at most this fraction."""


@dataclass(frozen=True)
class Places:
    """How many candidates enter a final race, beside torch.mm."""

    own: int
    """Our own candidates, chosen by expected speed."""
    quickest: int
    """Our own candidates, chosen by time instead of ratio."""
    library: int
    """Algorithms of the library."""


@dataclass(frozen=True)
class Compiling:
    """Most kernels of a family that a search compiles; it compiles more only while it has too few."""

    new: int
    wanted: int


@dataclass(frozen=True)
class Profile:
    """All numbers of one effort."""

    plan: Plan
    """The trials, and each stage's share of them."""
    ranked: int | None
    """How many of a family's several thousand kernels the search considers; None for all."""
    compiling: tuple[Compiling, Compiling] | None
    """Limits on a GPU, whose time is expensive: of the first family, and of each other one. It also goes on
    without the last few kernels of a batch if they compile slowly. None: no limit."""
    final: RaceSettings
    """Settings of the final race: rounds, turns in steady state, and when a candidate drops out."""
    interleaved: Places
    """Finalists in interleaved timing, where a candidate costs milliseconds."""
    steady: Places
    """Finalists in steady-state timing, where it costs a turn in each round."""
    steady_s: float
    """Seconds that a final race in steady-state timing takes. A search with a budget reserves this time for
    the race, but no more than half of the budget."""


# A candidate costs some 15 ms once compiled. On an H200 the model's order, which counts cycles and joules,
# has the winner's tile among its first few; the search then has to find the ring and the launch. A full
# search may look at many launches: the best launch can be one that the model misjudged, of a kernel far from
# the top.
#
# In a quick search another family continues only if its first round is also within 1 % of the best of the
# others, since later rounds gain some 1 % over the first. Of 27 second families that were searched to their
# end three won, and none of the 16 that were further behind (87 products of an H200, 2026-11-24).
#
# In steady state, the best of the four most promising finalists (at most two launches per kernel) is on
# average 0.6 % slower than the fastest of the 15 to 63 candidates timed that way. The best of three finalists
# from three kernels is 0.9 % slower (twelve products of an H200, nine of an H100, 2026-11-25). In both
# figures some 0.4 % is the luck of the candidate that is fastest in three turns.
_QUICK = Profile(
    Plan(32, screen=7 / 16, probe=3 / 16, refine=3 / 16, leaders=3, behind=0.01),
    ranked=512, compiling=(Compiling(8, 20), Compiling(1, 2)),
    final=QUICK_FINAL, interleaved=Places(6, 2, 3), steady=Places(4, 1, 1), steady_s=5.0,
)  # fmt: skip
_FULL = Profile(
    Plan(
        440, screen=17 / 40, probe=1 / 4, refine=13 / 50, leaders=6, refinements=2, trusted=24, margin=0.02
    ),
    ranked=None, compiling=None,
    final=FINAL, interleaved=Places(12, 4, 6), steady=Places(12, 4, 3), steady_s=25.0,
)  # fmt: skip
_EXHAUSTIVE = replace(_FULL, plan=Plan(None, leaders=8, refinements=2, trusted=24, margin=0.02))

EFFORTS: Mapping[Effort, Profile] = MappingProxyType(
    {"quick": _QUICK, "full": _FULL, "exhaustive": _EXHAUSTIVE}
)


def profile(effort: Effort) -> Profile:
    """Return the numbers of an effort. Raises SpaceError if the effort is unknown."""
    if not isinstance(effort, str) or effort not in EFFORTS:
        raise SpaceError(f"effort {effort!r} is not known; use one of {', '.join(EFFORTS)}")
    return EFFORTS[effort]


@dataclass(frozen=True)
class Budget:
    """Trials per stage. The next stage may spend the trials that a stage does not use."""

    screen: int
    """Kernels at their model-best launch, in the model's order."""
    vary: int
    """Further kernels with the leaders' tiles: other rings, other epilogues."""
    probe: int
    """Other rasterizations of the many kernels near the top, which need no compiling."""
    refine: int
    """Further launches of the leaders, which need no compiling."""
    leaders: int
    """How many kernels share the launches of the last stage."""

    @property
    def trials(self) -> int:
        return self.screen + self.vary + self.probe + self.refine


def budget_for(plan: Plan, *, kernels: int, launches: int, trials: int | None = None) -> Budget:
    """Return the budget of a plan in a space of `kernels`, each with `launches`; `trials` overrides the
    total.
    """
    if not kernels:
        return Budget(0, 0, 0, 0, 0)
    leaders = min(plan.leaders, kernels)
    if plan.trials is None:
        grid = leaders * (launches - 1)
        screen = kernels if trials is None else min(kernels, trials)
        return Budget(screen, 0, 0, grid if trials is None else min(grid, trials - screen), leaders)
    total = plan.trials if trials is None else trials
    screen = min(kernels, max(min(total, _FEWEST), int(total * plan.screen)))
    probe = min(total - screen, int(total * plan.probe), kernels * (launches - 1))
    refine = min(total - screen - probe, int(total * plan.refine), leaders * (launches - 1))
    return Budget(screen, total - screen - probe - refine, probe, refine, leaders)


def checked_trials(trials: int) -> int:
    """Return the number of trials. Raises SpaceError if it is not a whole number of at least 1."""
    return _whole("trials", trials, least=1)


def checked_seconds(budget_seconds: float | None) -> float:
    """Return a time budget in seconds, infinite for None. Raises SpaceError if it is not a number from 0."""
    if budget_seconds is None:
        return math.inf
    is_number = isinstance(budget_seconds, Real) and not isinstance(budget_seconds, bool)
    if not is_number or not budget_seconds >= 0:  # also rejects NaN
        raise SpaceError(
            f"budget_seconds = {shown(budget_seconds)}: give a number of seconds from 0, or None"
        )
    return float(min(budget_seconds, _LARGEST)) if budget_seconds < math.inf else math.inf


def online_budget() -> tuple[float, str]:
    """Return the seconds that ``TUNEGEMM_MODE=online`` may tune in a process, from TUNEGEMM_ONLINE_BUDGET.

    The second value is a one-line complaint about that variable; it is empty if the variable is valid.
    """
    text = os.environ.get("TUNEGEMM_ONLINE_BUDGET", "")
    try:
        seconds = checked_seconds(float(text or _ONLINE_S))
    except ValueError:  # SpaceError is a ValueError
        seconds = math.inf
    if math.isinf(seconds):
        return _ONLINE_S, (
            f"TUNEGEMM_ONLINE_BUDGET={shown(text)} is not a number of seconds and has no effect; "
            f"the budget is {_ONLINE_S:g} s"
        )
    return seconds, ""


def checked_seed(seed: int) -> int:
    """Return a seed that every random number generator accepts. Raises SpaceError for any other value."""
    return _whole("seed", seed, least=0, most=2**32 - 1)


def _whole(name: str, value: int, *, least: int, most: int = _LARGEST) -> int:
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_whole or not least <= value <= most:
        raise SpaceError(f"{name} = {shown(value)}: give a whole number from {least} to {most}")
    return int(value)
