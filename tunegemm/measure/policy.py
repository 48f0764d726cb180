"""What is measured, and how thoroughly."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tunegemm.errors import MeasureError
from tunegemm.space import Candidate


@dataclass(frozen=True)
class Job:
    """One candidate to measure."""

    candidate: Candidate
    artifact: Path | None = None
    """Its compiled object; None for a family that compiles nothing."""


@dataclass(frozen=True)
class Policy:
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
    energy_ms: float = 0.0
    """Time over which the energy of each candidate that stays is metered after the rounds; 0: not at all."""
    seed: int = 0
    """Of the operands and of the order of rounds."""

    def __post_init__(self) -> None:
        for name in ("rounds", "min_replay_ms", "race_after", "interleave"):
            if getattr(self, name) <= 0:
                raise MeasureError(f"policy {name}={getattr(self, name)}: must be positive")
        if not 0 < self.confidence < 1:
            raise MeasureError(f"policy confidence={self.confidence}: must be between 0 and 1")


#: Many candidates, to find the few that matter. Four captures of one kernel agree to 1 % with replays
#: as short as 1 ms (H200, 2026-11-20); what is 5 % slower in each of three rounds is out. Without settling a
#: screen ends before the power cap is felt, where the order of kernels is another
#: (docs/decisions/0011-clocks-settle-first.md).
SCREEN = Policy(rounds=7, min_replay_ms=0.5, race_after=3, race_margin=0.05, settle_ms=100)

#: The few that matter, and the figures that are stored.
FINAL = Policy(rounds=21, min_replay_ms=1.0, race_after=7, race_margin=0.02, settle_ms=300)
