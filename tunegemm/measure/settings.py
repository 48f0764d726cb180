"""What is measured, and how thoroughly."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from tunegemm.describe.space import Candidate
from tunegemm.errors import MeasureError

#: How rows in groups are divided while a product of them is timed. Uniform: evenly. Typical: by shares of a
#: gamma distribution, as a router's tokens are. One hot: all to one group.
SKEWS = ("uniform", "typical", "one_hot")


@dataclass(frozen=True)
class Job:
    """One candidate to measure."""

    candidate: Candidate
    artifact: Path | None = None
    """Its compiled object; None for a family that compiles nothing."""


@dataclass(frozen=True)
class RaceSettings:
    """How an interleave is run: a round replays every candidate and the baseline once, in shuffled order."""

    rounds: int
    """Samples of a candidate that stays to the end."""
    min_replay_ms: float
    """Shortest replay of the baseline: one sample averages over that much device time."""
    race_after: int
    """Rounds before candidates may be dropped."""
    race_margin: float
    """A candidate is dropped when it is slower than the leader by more than this fraction, surely."""
    confidence: float = 0.95
    """How surely: confidence of the interval of the median ratio to the leader."""
    interleave: int = 96
    """Most candidates in one interleave; further ones form another, with its own baseline."""
    settle_ms: float = 0.0
    """Time for which the baseline is replayed before the rounds, so that clocks are those of lasting work."""
    settle_again: float = 1.0
    """Part of `settle_ms` for an interleave that follows another one of the same problem at once, and finds
    the clocks as that left them."""
    steady_ms: float = 0.0
    """For steady-state timing of a GPU that has lowered its clocks: a round takes so long for every four of
    a group of candidates, which run alone in turn, and all but the beginning of a turn is timed. 0, or a GPU
    that holds its clocks: interleaved timing."""
    steady_groups: tuple[int, ...] = (8, 1, 1)
    """In place of `rounds`, for steady-state timing: the most candidates of a group in each round."""
    steady_doubt: tuple[float, float] | None = None
    """By how much the fastest is ahead of the baseline, at least and at most, where one more round like the
    last is to say whether it is. A race of which all are below that ends there. None: neither."""
    steady_spread: float = 0.02
    """In steady-state timing a candidate is dropped when its median after n rounds is slower than the
    leader's by more than `race_margin` and this fraction over the square root of n."""
    steady_left: int | None = None
    """Most candidates that have more than one round in steady state; None for all that may win."""
    energy_ms: float = 0.0
    """Time over which the energy of each candidate that stays is metered after the rounds; 0: not at all."""
    seed: int = 0
    """Decides the operands and the order of rounds."""
    skews: tuple[str, ...] = SKEWS
    """Over which divisions rows in groups are timed."""

    def __post_init__(self) -> None:
        for name in ("rounds", "min_replay_ms", "race_after", "interleave"):
            if getattr(self, name) <= 0:
                raise MeasureError(f"race setting {name}={getattr(self, name)}: must be positive")
        if min(self.steady_groups, default=0) <= 0:
            raise MeasureError(
                f"race setting steady_groups={self.steady_groups}: must be one or more, all positive"
            )
        if not 0 < self.confidence < 1:
            raise MeasureError(f"race setting confidence={self.confidence}: must be between 0 and 1")


#: Many candidates, to find the few that matter. Four captures of one kernel agree to 1 % with replays
#: as short as 1 ms (H200, 2026-11-20); what is 5 % slower in each of three rounds is out. Without settling a
#: screen ends before the power cap is felt, where the order of kernels is another
#: (docs/decisions/0011-clocks-settle-first.md).
SCREEN = RaceSettings(
    rounds=7, min_replay_ms=0.5, race_after=3, race_margin=0.05, settle_ms=100, settle_again=0.25
)

#: The few that matter, and the figures that are stored. What a screen finds on a GPU at its power cap is few
#: cycles at clocks that all share; in steady state each has clocks of its own, and what draws less power has
#: higher ones (docs/decisions/0012-steady-state-at-the-power-cap.md). A round lasts as long as the swings of
#: the power controller: then a sample differs from the kernel's others by 0.6 to 0.8 % (standard deviation)
#: where kernels share it, by 0.3 % where one has it alone
#: (docs/decisions/0023-turns-outlast-the-power-controller.md).
FINAL = RaceSettings(
    rounds=21, min_replay_ms=1.0, race_after=7, race_margin=0.02, settle_ms=300,
    steady_ms=950, steady_groups=(8, 1, 1),
)  # fmt: skip

#: The same in a quick tuning, on a GPU that has just measured the screen. Its third round in steady state
#: says how fast what the first two chose is; where that leaves it open whether torch.mm is as fast, a fourth
#: one says it once more (docs/decisions/0025-what-chose-does-not-report.md).
QUICK_FINAL = replace(
    FINAL, rounds=15, race_after=5, race_margin=0.005, settle_ms=100,
    steady_groups=(8, 4, 4), steady_left=2, steady_doubt=(0.004, 0.016),
)  # fmt: skip
