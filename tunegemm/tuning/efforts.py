"""How much each effort tries: the one table. What a tuning does by its effort, it reads here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from tunegemm.errors import SpaceError
from tunegemm.measure.settings import FINAL, QUICK_FINAL, RaceSettings
from tunegemm.search.budget import Plan

#: The name of an effort.
Effort = Literal["quick", "full", "exhaustive"]


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
_EXHAUSTIVE = Profile(
    Plan(None, leaders=8, refinements=2, trusted=24, margin=0.02),
    ranked=None, compiling=None,
    final=FINAL, interleaved=Places(12, 4, 6), steady=Places(12, 4, 3), steady_s=25.0,
)  # fmt: skip

EFFORTS: Mapping[Effort, Profile] = MappingProxyType(
    {"quick": _QUICK, "full": _FULL, "exhaustive": _EXHAUSTIVE}
)


def profile(effort: Effort) -> Profile:
    """The numbers of an effort. Raises SpaceError for one that is not known."""
    if not isinstance(effort, str) or effort not in EFFORTS:
        raise SpaceError(f"effort {effort!r} is not known; use one of {', '.join(EFFORTS)}")
    return EFFORTS[effort]
