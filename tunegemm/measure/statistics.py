"""What samples say: intervals without assumptions on their distribution, ties, and the winner.

Samples of one round are neighbours in time and share the GPU's clocks; so candidates are compared by
the ratio within each round, and ratios are summed up by their median.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Protocol

from tunegemm.describe.problem import Problem
from tunegemm.errors import MeasureError
from tunegemm.generate import families
from tunegemm.generate.cublaslt import is_torch
from tunegemm.measure.outcome import Measurement

#: Two captures of the same kernel differ by this much even in the quietest interleave (0.05-1.0 % in
#: 20 rounds, H200, 2026-11-20): a smaller measured noise is luck.
NOISE_FLOOR = 0.003
#: No more than that is given away to a cheaper candidate, however noisy the race: of several that cannot be
#: distinguished the one in front is still the likeliest. Steady-state timing has a noise of 1 to 3 %.
_TIE_CEILING = 0.005
#: By how much more than two captures of torch.mm differ a winner has to be ahead of it in interleaved rounds:
#: two that differ little may do so by luck. And by how much at most, however noisy the race.
_LUCK, _MARGIN_CEILING = 0.005, 0.01
#: The same in steady state, where rounds are too few to tell their noise: a sample is within 0.4 to 0.7 %
#: (docs/decisions/0023-turns-outlast-the-power-controller.md), the mean of three and of two captures of
#: torch.mm within 0.3 to 0.5.
_STEADY_MARGIN = 0.009


def median_interval(samples: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Interval of the median from order statistics (the sign test's), at least as sure as asked if possible.

    Few samples cannot be that sure: under six, 95 % is out of reach and the whole range is given.
    Raises MeasureError without samples.
    """
    if not samples:
        raise MeasureError("no samples: an interval needs at least one")
    ordered, n = sorted(samples), len(samples)
    # P(median outside [x_(r+1), x_(n-r)]) = 2 P(Binomial(n, 1/2) <= r)
    tail, r = 0.0, -1
    while 2 * (tail + math.comb(n, r + 1) / 2**n) <= 1 - confidence:
        r += 1
        tail += math.comb(n, r) / 2**n
    r = max(r, 0)
    return ordered[r], ordered[n - 1 - r]


def ratio_interval(measurement: Measurement) -> tuple[float, float]:
    """The 95 % interval of the speed relative to torch.mm, whose point estimate is `Measurement.ratio`."""
    pairs = zip(measurement.baseline_us, measurement.samples_us, strict=True)
    return median_interval([baseline / sample for baseline, sample in pairs])


def aa_noise(first: Sequence[float], second: Sequence[float]) -> float:
    """Noise of an interleave: how far the ratio of two captures of the same kernel may be from 1.

    The far end of the 80 % interval of the median ratio, so that one lucky pair of medians is not called
    silence; 0.004 means that differences under 0.4 % mean nothing.
    """
    low, high = median_interval([a / b for a, b in zip(first, second, strict=True)], confidence=0.8)
    return max(abs(low - 1), abs(high - 1))


def slowdown(measurement: Measurement, earlier: Iterable[Measurement]) -> float:
    """How many times as long torch.mm took as in the quickest earlier interleave of the same problem; 0 where
    clocks are not known.

    In time or in cycles of the SM clock, whichever is less. Under a race the clock falls, as it draws more
    power than a screen: what computes then takes up to 1.28 times as long, in as many cycles (75 races, H200,
    2026-11-21). What waits for memory takes more cycles where the clock rises, in the same time.
    """

    def times(other: Measurement) -> float:
        clock, before = (one.telemetry.get("sm_clock_mhz") for one in (measurement, other))
        if not clock or not before:
            return 0.0
        return measurement.baseline_median_us / other.baseline_median_us * min(1.0, clock / before)

    return max(map(times, earlier), default=0.0)


class Rated(Protocol):
    """What `tie` compares: a `Measurement`, or its row in a table."""

    @property
    def ratio(self) -> float: ...

    @property
    def noise(self) -> float: ...


def tie(a: Rated, b: Rated, noise: float | None = None) -> bool:
    """Whether two candidates of one problem are equally fast, as far as was measured.

    Compared by their ratios to the baseline, so that they may come from two interleaves. `noise`
    defaults to the larger of the two; under NOISE_FLOOR it counts as NOISE_FLOOR.
    """
    limit = max(a.noise, b.noise) if noise is None else noise
    slower, faster = sorted((a.ratio, b.ratio))
    return faster <= slower * (1 + max(limit, NOISE_FLOOR))


def choosing_rounds(measurement: Measurement) -> int:
    """How many of a final race's rounds choose the winner, the first ones: the others say how fast it is.

    In steady state two, and all but the last of fewer; of interleaved rounds two thirds.
    """
    count = len(measurement.samples_us)
    return min(2, count - 1) if measurement.is_steady else math.ceil(2 * count / 3) if count > 1 else 0


def rounds_of(measurement: Measurement, first: int, last: int | None = None) -> Measurement:
    """A measurement with some of its rounds only, counted from 0."""
    own, baseline = measurement.samples_us[first:last], measurement.baseline_us[first:last]
    telemetry = measurement.telemetry | {"rounds": len(own), "of_rounds": len(own)}
    return replace(measurement, samples_us=own, baseline_us=baseline, telemetry=telemetry)


def beats(measurement: Measurement, library: Measurement | None) -> bool:
    """Whether a race's winner is faster than torch.mm by more than the noise, by all its rounds, and not
    slower by those that did not choose it.

    library: torch.mm's own measurement of the race, which is a second capture: the mean of both is the
    steadier baseline. Interleaved, the noise is how far the two are apart, and may be by luck.
    """
    baseline = measurement.baseline_us
    if library is not None and library.baseline_us == baseline:
        baseline = tuple((a + b) / 2 for a, b in zip(baseline, library.samples_us, strict=True))
    ratios = [b / s for b, s in zip(baseline, measurement.samples_us, strict=True)]
    middle = fmean if measurement.is_steady else median  # of three rounds a median knows one
    margin = _STEADY_MARGIN if measurement.is_steady else min(measurement.noise + _LUCK, _MARGIN_CEILING)
    return middle(ratios) > 1 + margin and middle(ratios[choosing_rounds(measurement) :]) >= 1


def final_choice(problem: Problem, raced: Sequence[Measurement]) -> Measurement:
    """The record among those that stayed in a final race to its end, with the rounds that did not choose it.

    The rounds that choose the fastest of several flatter it: of six that are as fast as torch.mm it seems
    0.5 to 1 % faster. So the first rounds choose and the others report, and torch.mm keeps what is not faster
    by more than the noise (docs/decisions/0025-what-chose-does-not-report.md). Raises MeasureError without
    measurements.
    """
    library = next((one for one in raced if is_torch(one.candidate)), None)
    others = [one for one in raced if one is not library]
    best = library
    if others:
        first = [rounds_of(one, 0, choosing_rounds(one) or None) for one in others]
        # Of few rounds the one in front is given nothing away to a cheaper one.
        steady = all(one.is_steady for one in first)
        chosen = max(first, key=lambda m: (m.ratio, m.candidate.digest)) if steady else winner(problem, first)
        best = next(one for one in others if one.candidate == chosen.candidate)
        if library is not None and not beats(best, library):
            best = library
    if best is None:
        raise MeasureError(f"no candidate of {problem} was measured: there is no winner")
    return rounds_of(best, choosing_rounds(best))


def winner(problem: Problem, measurements: Sequence[Measurement]) -> Measurement:
    """The fastest; among those that tie with it, the one that costs least, by a fixed rule.

    In this order: least workspace, least shared memory, smallest digest. A library's kernel, whose
    shared memory is not known, comes after those that do: launched through torch it costs 8.0 us of host
    time, a compiled object 3.4 us (H200 host, 2026-11-20). Raises MeasureError without measurements.
    """
    if not measurements:
        raise MeasureError(f"no candidate of {problem} was measured: there is no winner")
    leader = max(measurements, key=lambda m: (m.ratio, m.candidate.digest))

    def ties(one: Measurement) -> bool:
        return tie(one, leader, min(max(one.noise, leader.noise), _TIE_CEILING))

    return min((m for m in measurements if m is leader or ties(m)), key=lambda m: _cost(problem, m))


def _cost(problem: Problem, measurement: Measurement) -> tuple[int, float, str]:
    candidate = measurement.candidate
    family = families.get(candidate.family)
    smem_bytes = family.smem_bytes(problem, candidate) if family.compiled else 0  # a library does not say
    return int(candidate.params.get("workspace_bytes", 0)), smem_bytes or math.inf, candidate.digest


def clearly_slower(
    samples: Sequence[float], leader: Sequence[float], margin: float, confidence: float
) -> bool:
    """Whether even the optimistic end of the interval is more than `margin` slower than the leader."""
    low, _ = median_interval([a / b for a, b in zip(samples, leader, strict=True)], confidence)
    return low > 1 + margin


def slower_by(samples: Sequence[float], leader: Sequence[float]) -> float:
    """By what fraction samples are slower than the leader's of the same rounds; negative for faster."""
    return median(a / b for a, b in zip(samples, leader, strict=True)) - 1
