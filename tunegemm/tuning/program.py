"""One budget of time over all products of a program, spent where the program loses most of its own.

First a quick pass over each problem, then, where times are measured, a full one: each time the one with the
most headroom, which is the calls times what a call takes above the roofline. A quick pass finds nearly all
there is, so that the second pass of a large problem comes after the first
one of a small one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from tunegemm.describe.device import USUAL_EFFICIENCY, Device
from tunegemm.describe.workload import Demand
from tunegemm.search.efforts import Effort, checked_seconds
from tunegemm.tuning.progress import Progress, Request, TuneResult


@dataclass(frozen=True)
class TunedDemand:
    """A demand, and what tuning has made of it so far."""

    demand: Demand
    floor_us: float
    """Roofline of a call; 0 where the device's peaks are not known."""
    effort: Effort | None = None
    """That of the last pass; None before any."""
    result: TuneResult | None = None
    """That of the last pass."""

    @property
    def before_us(self) -> float:
        """torch's time per call: in the final race, else as recorded, else estimated from the roofline."""
        if self._raced:
            assert self.result is not None and self.result.best is not None
            return self.result.best.baseline_median_us
        if self.demand.call_us is not None:
            return self.demand.call_us
        return self.floor_us / USUAL_EFFICIENCY

    @property
    def after_us(self) -> float | None:
        """Time per call of the tuned kernel, beside `before_us`; None where nothing was timed."""
        if not self._raced:
            return None
        assert self.result is not None and self.result.best is not None
        # By the ratio of the pairs, which the record is chosen by.
        return self.before_us / max(self.result.best.ratio, 1.0)

    @property
    def _raced(self) -> bool:
        best = self.result.best if self.result is not None else None
        return best is not None and bool(best.baseline_us)

    @property
    def total_s(self) -> float:
        """What torch needs for all calls."""
        return self.demand.calls * self.before_us * 1e-6

    @property
    def saving_s(self) -> float:
        """What the tuned kernel saves of that."""
        return self.total_s - self.demand.calls * (self.after_us or self.before_us) * 1e-6

    @property
    def headroom_s(self) -> float:
        """What the fastest kernel that physics allows would still save."""
        return self.total_s - self.saving_s - self.demand.calls * self.floor_us * 1e-6


def by_headroom(demands: Sequence[Demand], device: Device) -> list[TunedDemand]:
    """The demands before any tuning, the most headroom first."""
    found = [TunedDemand(d, device.roofline_us(d.problem)) for d in demands]
    return sorted(found, key=_order)


def _order(tuned: TunedDemand) -> tuple[float, str]:
    return -tuned.headroom_s, str(tuned.demand.problem)


class Tuning(Protocol):
    """What tunes problems: the `Tuner` of one GPU, or the pool of several (`tunegemm.tuning.cluster`)."""

    def tune_all(
        self, requests: Iterable[Request], on_progress: Callable[[Progress], None] | None = None
    ) -> Iterator[TuneResult]:
        """Results as they come. A request is taken from `requests` when there is a GPU for it. Several GPUs
        take one more each, and begin it with what is then left of its budget.
        """


def spend(
    tuning: Tuning,
    plan: Sequence[TunedDemand],
    *,
    budget_seconds: float | None = None,
    effort: Effort | None = None,
    trials: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Iterator[TunedDemand]:
    """Tunes problem after problem until the budget is spent, and yields each with what came of it.

    effort: of one pass over all; by default quick ones, and with a budget full ones in what is left of it, of
    products that are measured.
    Ends after an interrupted tuning. Raises SpaceError for a budget that is not a number from 0.
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
                yield Request(tuned.demand.problem, each, trials, limit_s, later)

        for result in tuning.tune_all(requests(), on_progress):
            problem, interrupted = result.problem, interrupted or result.interrupted
            tuned = current[problem]
            # A pass that was cut short may know less than the one before it.
            kept = result if result.best is not None or tuned.result is None else tuned.result
            current[problem] = replace(tuned, effort=each, result=kept)
            yield current[problem]
            if result.source != "measured" and each != passes[-1]:
                # Nothing is stored of a replay or a model: a second pass would compile for nobody.
                del current[problem]
        if interrupted:
            return
