"""Statistics of samples: distribution-free intervals, ties, and the winner of a race.

Samples of one round are close in time and share the GPU's clocks. So candidates are compared by the ratio
within each round, and the median summarizes the ratios.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any

from tunegemm.describe.problem import Problem
from tunegemm.generate import families
from tunegemm.generate.cublaslt import is_torch
from tunegemm.measure.outcome import Measurement

#: Two captures of the same kernel differ by this much even in the quietest interleave (0.05-1.0 % in
#: 20 rounds, H200, 2026-11-20); a smaller measured noise is luck.
NOISE_FLOOR = 0.003
#: The most speed to give up for a cheaper candidate, however noisy the race: among candidates that the race
#: cannot distinguish, the leader is still the most likely winner. Steady-state timing has a noise of 1
#: to 3 %.
_TIE_CEILING = 0.005
#: In interleaved rounds a winner's lead over torch.mm must exceed the noise, the difference between two
#: captures of torch.mm, by this much, since two captures may agree by luck. The second number is the largest
#: lead that is required, however noisy the race.
_LUCK, _MARGIN_CEILING = 0.005, 0.01
#: The same in steady state, where rounds are too few to tell their noise: a sample is within 0.4 to 0.7 %
#: (docs/decisions/0023-turns-outlast-the-power-controller.md), the mean of three and of two captures of
#: torch.mm within 0.3 to 0.5.
_STEADY_MARGIN = 0.009


def median_interval(samples: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """An interval of the median from order statistics (the sign test), with the confidence if possible.

    Few samples cannot reach it: with fewer than six, 95 % is out of reach and the interval is the whole
    range.
    """
    ordered, n = sorted(samples), len(samples)
    # P(median outside [x_(r+1), x_(n-r)]) = 2 P(Binomial(n, 1/2) <= r)
    tail, r = 0.0, -1
    while 2 * (tail + math.comb(n, r + 1) / 2**n) <= 1 - confidence:
        r += 1
        tail += math.comb(n, r) / 2**n
    r = max(r, 0)
    return ordered[r], ordered[n - 1 - r]


def ratio_interval(measurement: Measurement) -> tuple[float, float]:
    """Return the 95 % interval of the speed relative to torch.mm around the estimate `Measurement.ratio`."""
    pairs = zip(measurement.baseline_us, measurement.samples_us, strict=True)
    return median_interval([baseline / sample for baseline, sample in pairs])


def aa_noise(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the noise of an interleave: how far the ratio of two captures of the same kernel may be from 1.

    It is the far end of the 80 % interval of the median ratio, so that two medians which agree by luck do not
    count as no noise. 0.004 says that differences below 0.4 % mean nothing.
    """
    low, high = median_interval([a / b for a, b in zip(first, second, strict=True)], confidence=0.8)
    return max(abs(low - 1), abs(high - 1))


def slowdown(measurement: Measurement, earlier: Iterable[Measurement]) -> float:
    """Return how many times as long torch.mm took as in the quickest earlier interleave of the same problem;
    0 if the clocks are unknown.

    The factor is in time or in cycles of the SM clock, whichever is smaller. The clock falls during a race,
    which draws more power than a screen: a compute-bound product then takes up to 1.28 times as long, in the
    same number of cycles (75 races, H200, 2026-11-21). A memory-bound product takes more cycles when the
    clock rises, in the same time.
    """

    def times(other: Measurement) -> float:
        clock, before = (item.telemetry.get("sm_clock_mhz") for item in (measurement, other))
        if not clock or not before:
            return 0.0
        return measurement.baseline_median_us / other.baseline_median_us * min(1.0, clock / before)

    return max(map(times, earlier), default=0.0)


def tie(a: Measurement | Any, b: Measurement | Any, noise: float | None = None) -> bool:
    """Whether two candidates of one problem, or rows of them in a table, are equally fast within the noise.

    It compares their ratios to the baseline, so they may come from two interleaves. `noise` defaults to the
    larger of the two noises; below NOISE_FLOOR it counts as NOISE_FLOOR.
    """
    limit = max(a.noise, b.noise) if noise is None else noise
    slower, faster = sorted((a.ratio, b.ratio))
    return faster <= slower * (1 + max(limit, NOISE_FLOOR))


def choosing_rounds(measurement: Measurement) -> int:
    """Return how many of a final race's first rounds choose the winner; the later rounds report its speed.

    In steady state two rounds choose, or all but the last if there are fewer; of interleaved rounds 2/3.
    """
    count = len(measurement.samples_us)
    return min(2, count - 1) if measurement.is_steady else math.ceil(2 * count / 3) if count > 1 else 0


def rounds_of(measurement: Measurement, first: int, last: int | None = None) -> Measurement:
    """Return a measurement reduced to the rounds of these numbers, counted from 0."""
    own, baseline = measurement.samples_us[first:last], measurement.baseline_us[first:last]
    telemetry = measurement.telemetry | {"rounds": len(own), "of_rounds": len(own)}
    return replace(measurement, samples_us=own, baseline_us=baseline, telemetry=telemetry)


def beats(measurement: Measurement, library: Measurement | None) -> bool:
    """Whether a race's winner is faster than torch.mm by more than the noise over all rounds, and no slower
    in the rounds that did not choose it.

    library: torch.mm's own measurement in the race, a second capture; the mean of both captures is the
    steadier baseline. In interleaved rounds the noise is the difference between the two captures, which may
    be small by luck.
    """
    baseline = measurement.baseline_us
    if library is not None and library.baseline_us == baseline:
        baseline = tuple((a + b) / 2 for a, b in zip(baseline, library.samples_us, strict=True))
    ratios = [b / s for b, s in zip(baseline, measurement.samples_us, strict=True)]
    middle = fmean if measurement.is_steady else median  # a median of three rounds uses only one of them
    margin = _STEADY_MARGIN if measurement.is_steady else min(measurement.noise + _LUCK, _MARGIN_CEILING)
    return middle(ratios) > 1 + margin and middle(ratios[choosing_rounds(measurement) :]) >= 1


def final_choice(problem: Problem, raced: Sequence[Measurement]) -> Measurement:
    """Return the record among the finishers of a final race, with the rounds that did not choose it.

    The rounds that choose the fastest of several candidates flatter it: the fastest of six that equal
    torch.mm seems 0.5 to 1 % faster. So the first rounds choose and the others report, and torch.mm stays the
    record unless the winner is faster by more than the noise
    (docs/decisions/0025-what-chose-does-not-report.md).
    """
    library = next((measurement for measurement in raced if is_torch(measurement.candidate)), None)
    others = [measurement for measurement in raced if measurement is not library]
    best = library
    if others:
        first = [rounds_of(other, 0, choosing_rounds(other) or None) for other in others]
        # Steady state has few rounds: a cheaper candidate never replaces the leader.
        steady = all(measurement.is_steady for measurement in first)
        chosen = max(first, key=lambda m: (m.ratio, m.candidate.digest)) if steady else winner(problem, first)
        best = next(other for other in others if other.candidate == chosen.candidate)
        if library is not None and not beats(best, library):
            best = library
    assert best is not None, "a race has finishers"
    return rounds_of(best, choosing_rounds(best))


def winner(problem: Problem, measurements: Sequence[Measurement]) -> Measurement:
    """Return the fastest candidate; among those that tie with it, the cheapest by a fixed rule.

    The rule compares workspace, then shared memory, then the digest; the smallest wins. A library's kernel,
    whose shared memory is unknown, comes last: a launch through torch costs 8.0 us of host time, a compiled
    object 3.4 us (H200 host, 2026-11-20).
    """
    leader = max(measurements, key=lambda m: (m.ratio, m.candidate.digest))

    def ties(measurement: Measurement) -> bool:
        return tie(measurement, leader, min(max(measurement.noise, leader.noise), _TIE_CEILING))

    return min((m for m in measurements if m is leader or ties(m)), key=lambda m: _cost(problem, m))


def _cost(problem: Problem, measurement: Measurement) -> tuple[int, float, str]:
    candidate = measurement.candidate
    family = families.get(candidate.family)
    smem_bytes = family.smem_bytes(problem, candidate) if family.compiled else 0  # unknown for libraries
    return int(candidate.params.get("workspace_bytes", 0)), smem_bytes or math.inf, candidate.digest


def clearly_slower(
    samples: Sequence[float], leader: Sequence[float], margin: float, confidence: float
) -> bool:
    """Whether even the optimistic end of the interval is more than `margin` slower than the leader."""
    low, _ = median_interval([a / b for a, b in zip(samples, leader, strict=True)], confidence)
    return low > 1 + margin


def slower_by(samples: Sequence[float], leader: Sequence[float]) -> float:
    """The fraction by which samples are slower than the leader's of the same rounds; negative if faster."""
    return median(a / b for a, b in zip(samples, leader, strict=True)) - 1
