"""What is measured, and how thoroughly."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from tunegemm.describe.space import Candidate

#: Divisions of rows into groups for timing. Uniform: equal groups. Typical: shares of a gamma distribution,
#: as of a router's tokens. One hot: all rows in one group.
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
    """Samples of a candidate that does not drop out."""
    min_replay_ms: float
    """Shortest replay of the baseline: a sample averages over at least this device time."""
    race_after: int
    """Rounds before candidates may be dropped."""
    race_margin: float
    """A candidate drops out if it is slower than the leader by more than this fraction, with `confidence`."""
    confidence: float = 0.95
    """Confidence of the interval of the median ratio to the leader."""
    interleave: int = 96
    """Most candidates in one interleave; further ones form another, with its own baseline."""
    settle_ms: float = 0.0
    """Time to replay the baseline before the rounds, so that clocks settle as under sustained work."""
    settle_again: float = 1.0
    """Fraction of `settle_ms` for an interleave that directly follows another one of the same problem and
    starts at its clocks."""
    steady_ms: float = 0.0
    """Steady-state timing of a GPU that has lowered its clocks: a round takes this long for every four
    candidates of a group. They run alone in turn, and all but the beginning of a turn is timed. Timing is
    interleaved if this is 0 or the GPU holds its clocks."""
    steady_groups: tuple[int, ...] = (8, 1, 1)
    """For steady-state timing, in place of `rounds`: the largest group of candidates in each round."""
    steady_doubt: tuple[float, float] | None = None
    """The range of leads over the baseline that calls for one more round like the last. A race ends early if
    all leads are below the range. None: neither happens."""
    steady_spread: float = 0.02
    """In steady-state timing a candidate drops out if its median after n rounds is slower than the
    leader's by more than `race_margin` and this fraction over the square root of n."""
    steady_left: int | None = None
    """Most candidates that run more than one round in steady state; None for all that may win."""
    energy_ms: float = 0.0
    """Time to meter the energy of each remaining candidate after the rounds; 0 for no metering."""
    seed: int = 0
    """Seed of the operands and of the order of rounds."""
    skews: tuple[str, ...] = SKEWS
    """The divisions over which rows in groups are timed."""


#: Many candidates, to find the few that matter. Four captures of one kernel agree to 1 % with replays as
#: short as 1 ms (H200, 2026-11-20); a candidate that is 5 % slower in each of three rounds drops out. Without
#: settling, a screen ends before the GPU reaches its power cap, at which kernels rank differently
#: (docs/decisions/0011-clocks-settle-first.md).
SCREEN = RaceSettings(
    rounds=7, min_replay_ms=0.5, race_after=3, race_margin=0.05, settle_ms=100, settle_again=0.25
)

#: The few that matter, and the figures that are stored. On a GPU at its power cap, a screen finds kernels
#: with few cycles at shared clocks. In steady state each candidate has its own clocks, which are higher if it
#: draws less power (docs/decisions/0012-steady-state-at-the-power-cap.md). A round lasts as long as a swing
#: of the power controller. Then a kernel's samples differ by 0.6 to 0.8 % (standard deviation) if kernels
#: share the round, by 0.3 % if one kernel has it alone
#: (docs/decisions/0023-turns-outlast-the-power-controller.md).
FINAL = RaceSettings(
    rounds=21, min_replay_ms=1.0, race_after=7, race_margin=0.02, settle_ms=300,
    steady_ms=950, steady_groups=(8, 1, 1),
)  # fmt: skip

#: The same for a quick tuning, on a GPU that has just measured the screen. The third steady-state round
#: reports the speed of the candidate that the first two chose. If it leaves open whether torch.mm is as fast,
#: a fourth round repeats it (docs/decisions/0025-what-chose-does-not-report.md).
QUICK_FINAL = replace(
    FINAL, rounds=15, race_after=5, race_margin=0.005, settle_ms=100,
    steady_groups=(8, 4, 4), steady_left=2, steady_doubt=(0.004, 0.016),
)  # fmt: skip
