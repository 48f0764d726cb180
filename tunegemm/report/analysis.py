"""What the figures and tables of the page show, computed."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tunegemm.measure.statistics import NOISE_FLOOR
from tunegemm.report.contents import Details, Winner
from tunegemm.store.record import Record


def best_so_far(trials: Sequence[Record]) -> list[tuple[int, float]]:
    """Number of the trial and the ratio, wherever a trial was better than all before."""
    steps: list[tuple[int, float]] = []
    for number, trial in enumerate(trials, 1):
        if not steps or trial.ratio > steps[-1][1]:
            steps.append((number, trial.ratio))
    return steps


def gap(details: Details) -> str:
    """Why the record's ratio is not where the curve of its search ends; empty where the two agree."""
    record, tried = details.winner.record, details.tried
    if not tried or abs(math.log(best_so_far(tried)[-1][1] / record.ratio)) <= math.log1p(NOISE_FLOOR):
        return ""
    own = [trial.ratio for trial in tried if trial.candidate == record.candidate]
    if not own:
        return f"The record, at {record.ratio:.3f}, is a candidate that this search did not try."
    race = "its final race" if record.confirmed else "a later measurement"
    return (
        f"The search measured the record's candidate at {own[-1]:.3f}, in few rounds beside many others; its "
        f"{record.ratio:.3f} is of {race}, of {details.winner.rounds} rounds. The two do not compare."
    )


def ratio_limits(winners: Sequence[Winner]) -> tuple[float, float]:
    """Ends of a common axis for speed-ups: every ratio and 1 are in it, and intervals up to twice as wide."""
    low = min(min(winner.record.ratio for winner in winners), 0.98)
    high = max(max(winner.record.ratio for winner in winners), 1.02)
    reach = (high / low) ** 0.25
    low = max(low / reach, min(min(winner.low for winner in winners), low))
    high = min(high * reach, max(max(winner.high for winner in winners), high))
    margin = (high / low) ** 0.04
    return low / margin, high * margin


def linear_ticks(low: float, high: float) -> list[float]:
    """Some six round values between two ends of a linear axis."""
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * power for unit in (1, 2, 2.5, 5, 10) if unit * power >= raw * 0.999999)
    return [
        number * step for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    ]
