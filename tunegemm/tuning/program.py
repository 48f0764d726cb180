"""One time budget for all products of a program, spent on the products that cost the program most.

First a quick pass tunes each problem; then, if times are measured, a full pass. Each pass takes the problem
with the most headroom next: the number of calls times the time of a call above the roofline. A quick pass
finds nearly all the gain, so the second pass of a large problem comes after the first pass of a small one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tunegemm.describe.device import USUAL_EFFICIENCY, Device
from tunegemm.describe.workload import Demand
from tunegemm.measure.outcome import Measurement
from tunegemm.search.efforts import Effort, checked_seconds
from tunegemm.tuning.progress import Progress, Request, TuneResult

if TYPE_CHECKING:
    from tunegemm.tuning.cluster import Pool
    from tunegemm.tuning.tuner import Tuner


@dataclass(frozen=True)
class TunedDemand:
    """A demand and the state of its tuning."""

    demand: Demand
    floor_us: float
    """Roofline of a call; 0 if the device's peaks are unknown."""
    effort: Effort | None = None
    """Of the last pass; None before the first."""
    result: TuneResult | None = None
    """Of the last pass."""

    @property
    def before_us(self) -> float:
        """torch's time per call: in the final race, else as recorded, else estimated from the roofline."""
        if self._race is not None:
            return self._race.baseline_median_us
        if self.demand.call_us is not None:
            return self.demand.call_us
        return self.floor_us / USUAL_EFFICIENCY

    @property
    def after_us(self) -> float | None:
        """Time per call of the tuned kernel, comparable with `before_us`; None if nothing was timed."""
        # By the ratio of the pairs, which also chooses the record.
        return self.before_us / max(self._race.ratio, 1.0) if self._race is not None else None

    @property
    def _race(self) -> Measurement | None:
        """The best of the last pass, if torch was timed beside it."""
        best = self.result.best if self.result is not None else None
        return best if best is not None and best.baseline_us else None

    @property
    def total_s(self) -> float:
        """Time that torch needs for all calls."""
        return self.demand.calls * self.before_us * 1e-6

    @property
    def saving_s(self) -> float:
        """Time that the tuned kernel saves over all calls."""
        return self.total_s - self.demand.calls * (self.after_us or self.before_us) * 1e-6

    @property
    def headroom_s(self) -> float:
        """Time that a kernel at the roofline would still save."""
        return self.total_s - self.saving_s - self.demand.calls * self.floor_us * 1e-6


def by_headroom(demands: Sequence[Demand], device: Device) -> list[TunedDemand]:
    """The demands before any tuning, the most headroom first."""
    results = [TunedDemand(d, device.roofline_us(d.problem)) for d in demands]
    return sorted(results, key=_order)


def _order(tuned: TunedDemand) -> tuple[float, str]:
    return -tuned.headroom_s, str(tuned.demand.problem)


def spend(
    tuning: Tuner | Pool,
    plan: Sequence[TunedDemand],
    *,
    budget_seconds: float | None = None,
    effort: Effort | None = None,
    trials: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Iterator[TunedDemand]:
    """Tune problem after problem until the budget is spent, and yield each with its result.

    A GPU takes a request when it is free. Each of several GPUs takes one more in advance, and starts it with
    the budget that remains then.

    effort: for a single pass over all problems. By default a quick pass, and with a budget a full pass over
    measured products in the remaining time.
    Ends after an interrupted tuning. Raises SpaceError if the budget is not a number from 0.
    """
    deadline = time.monotonic() + checked_seconds(budget_seconds)
    passes: list[Effort] = ["quick"] if effort is None else [effort]
    if effort is None and budget_seconds is not None:
        passes.append("full")
    current = {tuned.demand.problem: tuned for tuned in plan}
    interrupted = False
    for each in passes:

        def requests(each: Effort = each) -> Iterator[Request]:
            ordered = sorted(current.values(), key=_order)
            for place, tuned in enumerate(ordered):
                if (left_s := deadline - time.monotonic()) <= 0:
                    return
                limit_s = left_s if budget_seconds is not None else None
                later = ordered[place + 1].demand.problem if place + 1 < len(ordered) else None
                yield Request(tuned.demand.problem, each, trials, limit_s, later, deadline)

        for result in tuning.tune_all(requests(), on_progress):
            problem, interrupted = result.problem, interrupted or result.interrupted
            tuned = current[problem]
            # An interrupted pass may know less than the one before it.
            kept = result if result.best is not None or tuned.result is None else tuned.result
            current[problem] = replace(tuned, effort=each, result=kept)
            yield current[problem]
            if result.source != "measured" and each != passes[-1]:
                # A replay or a model stores nothing, so a second pass would compile in vain.
                del current[problem]
        if interrupted:
            return
