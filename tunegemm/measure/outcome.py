"""The outcome of a candidate: a measurement, or a failure with its stage and reason."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal

from tunegemm.describe.space import Candidate
from tunegemm.errors import is_transient

#: Where a candidate failed. `wrong` ran but gave another result than fp32; `timeout` hung;
#: `crash` ended its process (an illegal address, an abort).
Stage = Literal["compile", "load", "launch", "wrong", "timeout", "crash"]

#: The telemetry key for the milliseconds of a round of steady-state timing; 0 if timing was interleaved.
STEADY_MS = "turn_ms"


@dataclass(frozen=True)
class Measurement:
    """Samples of one correct candidate, and of the baseline in the same interleave."""

    candidate: Candidate
    samples_us: tuple[float, ...]
    """One per round: device time of one product, in microseconds."""
    baseline_us: tuple[float, ...]
    """torch.mm in the same rounds, in the same order."""
    relative_error: float
    """||D - fp32 reference|| / ||fp32 reference||."""
    noise: float
    """A/A noise of the interleave: relative difference of two captures of the same kernel."""
    telemetry: dict[str, Any] = field(default_factory=dict, compare=False)
    """SM clock (MHz), power (W), temperature (C), throttle reasons, operand sets, rounds, launch values."""

    @property
    def median_us(self) -> float:
        return _statistics().median(self.samples_us)

    @property
    def baseline_median_us(self) -> float:
        return _statistics().median(self.baseline_us)

    @property
    def ratio(self) -> float:
        """Speed relative to the baseline: above 1 is faster than torch.mm. Median of the rounds' ratios."""
        return _statistics().median(b / s for b, s in zip(self.baseline_us, self.samples_us, strict=True))

    @property
    def is_steady(self) -> bool:
        """Whether the timing was steady-state; these ratios compare only with each other."""
        return bool(self.telemetry.get(STEADY_MS))

    @property
    def spread(self) -> float:
        """Interquartile range over the median."""
        if len(self.samples_us) < 2:
            return 0.0
        low, _, high = _statistics().quantiles(self.samples_us, n=4)
        return (high - low) / self.median_us


@dataclass(frozen=True)
class Failure:
    """A candidate that did not compile, launch or finish, or gave a wrong result."""

    candidate: Candidate
    stage: Stage
    reason: str
    """One line."""

    @property
    def is_transient(self) -> bool:
        """Whether the machine, not the candidate, caused the failure, so that another try may succeed."""
        return self.stage == "timeout" or is_transient(self.reason)


Outcome = Measurement | Failure


@functools.cache
def _statistics() -> ModuleType:
    """Loaded on first use: its fractions and decimals are a tenth of the time that dispatch imports take."""
    import statistics

    return statistics
