from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.choose.test_neighbours import kernel
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate.cublaslt import TORCH_MM
from tunegemm.measure.outcome import STEADY_MS, Failure, Measurement
from tunegemm.measure.statistics import (
    NOISE_FLOOR,
    aa_noise,
    beats,
    choosing_rounds,
    clearly_slower,
    final_choice,
    median_interval,
    ratio_interval,
    rounds_of,
    slowdown,
    slower_by,
    tie,
    winner,
)
from tunegemm.measure.worker import add_seconds

PROBLEM, KERNEL = Problem(64, 64, 64), kernel()


def library(workspace_bytes: int, tile: str = "128x128") -> Candidate:
    return Candidate.make(
        "cublaslt", {"algorithm": "cublaslt", "tile": tile}, {"workspace_bytes": workspace_bytes}
    )


def measured(candidate: Candidate, us: float, noise: float = 0.0, baseline_us: float = 100.0) -> Measurement:
    samples = tuple(us * factor for factor in (0.999, 1.0, 1.0, 1.0, 1.001))
    return Measurement(candidate, samples, (baseline_us,) * 5, 1e-3, noise)


def test_interval_of_the_median_is_the_sign_tests() -> None:
    # Binomial(n, 1/2) tables: 95 % intervals of the median are [x2, x10-1] for n = 10, [x6, x21-5] for 21.
    assert median_interval(range(1, 11)) == (2, 9)
    assert median_interval(range(1, 22)) == (6, 16)
    assert median_interval(range(1, 6)) == (1, 5), "five samples cannot give 95 %"
    assert median_interval([3.0]) == (3.0, 3.0)


def test_interval_covers_the_median_as_often_as_it_says() -> None:
    generator = random.Random(1)
    hits = 0
    for _ in range(1000):
        low, high = median_interval([generator.lognormvariate(0, 1) for _ in range(15)])
        hits += low <= 1.0 <= high
    assert 940 <= hits <= 995  # exactly 96.5 %


def test_ratio_interval_pairs_the_rounds() -> None:
    drift = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]
    m = Measurement(TORCH_MM, tuple(90 * d for d in drift), tuple(100 * d for d in drift), 1e-3, 0.0)
    low, high = ratio_interval(m)
    assert low == pytest.approx(high) == pytest.approx(100 / 90), "clocks that drift cancel out"


def test_noise_is_the_far_end_of_the_aa_interval() -> None:
    assert aa_noise([100.0] * 9, [100.0] * 9) == 0
    noise = aa_noise([100, 101, 100, 102, 99, 100, 101], [100] * 7)
    assert noise == pytest.approx(0.01), "one round of seven may be odd"


def test_clearly_slower_needs_every_doubt_gone() -> None:
    assert clearly_slower([110.0] * 3, [100.0] * 3, 0.05, 0.95)
    assert not clearly_slower([104.0] * 3, [100.0] * 3, 0.05, 0.95)
    assert not clearly_slower([110, 110, 103], [100.0] * 3, 0.05, 0.95), "one good round of three"
    assert clearly_slower([110.0] * 11 + [90.0], [100.0] * 12, 0.05, 0.95), "one bad round of twelve"
    assert not clearly_slower([125.0] * 9, [100.0] * 9, 0.25, 0.95), "the margin itself"


#: What a damaged or hostile row may hold as a time, beside what a GPU measures.
TIMES = st.sampled_from([5e-324, 1e-9, 1.0, 123.4, 1e308]) | st.floats(1e-9, 1e308)


@given(st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=9), st.floats(0, 10))
def test_samples_of_any_size_are_judged(pairs: list[tuple[float, float]], noise: float) -> None:
    """Times of 1e-9 or 1e308 us, whose ratios may be 0 or infinite."""
    ours, torchs = zip(*pairs, strict=True)
    odd, plain = Measurement(library(0), ours, torchs, 1e-3, noise), measured(library(1), 100.0)
    low, high = ratio_interval(odd)
    assert low <= high
    assert tie(odd, plain) == tie(plain, odd)
    assert tie(odd, odd)
    assert winner(PROBLEM, [odd, plain]) in (odd, plain)
    assert clearly_slower(ours, torchs, 0.05, 0.95) in (True, False)
    assert slowdown(replace(odd, telemetry={"sm_clock_mhz": 1}), [plain]) >= 0


def raced(
    *ratios: float, noise: float = 0.0, steady: bool = False, candidate: Candidate = KERNEL
) -> Measurement:
    """Of a race with these ratios in its rounds, beside a baseline of 100 us."""
    telemetry = {STEADY_MS: 237.0} if steady else {}
    samples = tuple(100 / ratio for ratio in ratios)
    return Measurement(candidate, samples, (100.0,) * len(ratios), 1e-3, noise, telemetry)


def test_the_rounds_that_choose_are_the_first() -> None:
    counts = (*range(1, 8), 9, 10)
    assert [choosing_rounds(raced(*(1.0,) * count)) for count in counts] == [0, 2, 2, 3, 4, 4, 5, 6, 7]
    assert [choosing_rounds(raced(*(1.0,) * count, steady=True)) for count in counts] == [0, 1] + [2] * 7
    part = rounds_of(raced(1.0, 1.1, 1.2, 1.3, steady=True), 1, 3)
    assert part.ratio == pytest.approx(1.15, abs=0.002) and part.telemetry["of_rounds"] == 2
    assert part.baseline_us == (100.0, 100.0) and part.is_steady


@pytest.mark.parametrize(
    ("measurement", "wins"),
    [
        (raced(*(1.0074,) * 6, noise=0.0025), False),  # by less than the noise and what is luck
        (raced(*(1.0076,) * 6, noise=0.0025), True),
        (raced(*(1.0099,) * 6, noise=0.9), False),
        (raced(*(1.0101,) * 6, noise=0.9), True),  # the margin has an end, however noisy the race
        (raced(1.1, 1.1, 1.1, 1.1, 0.999, 0.999), False),  # slower in the rounds that did not choose it
        (raced(1.1, 1.1, 1.1, 1.1, 1.0, 1.0), True),
        (raced(1.0089, 1.0089, 1.0089, steady=True), False),
        (raced(1.0091, 1.0091, 1.0091, steady=True), True),
        (raced(1.02, 1.0, 1.0091, steady=True), True),  # the mean of all three
        (raced(1.02, 1.02, 0.9999, steady=True), False),
    ],
)
def test_a_winner_beats_torch_by_more_than_the_noise(measurement: Measurement, wins: bool) -> None:
    assert beats(measurement, None) is wins
    torch = replace(raced(*(1.0,) * len(measurement.samples_us)), candidate=TORCH_MM)
    assert final_choice(PROBLEM, [measurement, torch]).candidate == (KERNEL if wins else TORCH_MM)


def test_the_baseline_is_the_mean_of_torchs_two_captures() -> None:
    ours = raced(*(1.008,) * 6)
    slower, faster = (raced(*(100 / us,) * 6) for us in (102.0, 98.0))
    assert beats(ours, slower) and not beats(ours, faster)
    other = replace(faster, baseline_us=(101.0,) * 6)
    assert beats(ours, other), "of another race, which says nothing of this one's baseline"


def test_a_final_race_reports_the_rounds_that_did_not_choose() -> None:
    other = KERNEL.with_launch(swizzle_size=8)
    lucky, steady = raced(1.2, 1.2, 1.05, steady=True), raced(1.1, 1.1, 1.1, steady=True, candidate=other)
    found = final_choice(PROBLEM, [steady, lucky])
    assert found.candidate == KERNEL and found.ratio == pytest.approx(1.05)
    alone = final_choice(PROBLEM, [raced(0.9)])
    assert alone.candidate == KERNEL and alone.samples_us == (100 / 0.9,)


def test_torch_that_took_longer_says_that_the_device_was_slower() -> None:
    def clocked(mhz: int | None, baseline_us: float) -> Measurement:
        return replace(raced(1.0), baseline_us=(baseline_us,), telemetry={"sm_clock_mhz": mhz} if mhz else {})

    assert slowdown(clocked(1000, 120.0), [clocked(1000, 100.0)]) == pytest.approx(1.2)
    assert slowdown(clocked(1000, 120.0), [clocked(1500, 100.0)]) == pytest.approx(0.8)
    assert slowdown(clocked(1500, 120.0), [clocked(1000, 100.0), clocked(1500, 90.0)]) == pytest.approx(4 / 3)
    assert slowdown(clocked(None, 120.0), [clocked(1000, 100.0)]) == 0
    assert slowdown(clocked(1000, 120.0), [clocked(None, 100.0)]) == slowdown(clocked(1000, 1.0), []) == 0
    assert slower_by((11.0, 12.0, 9.0), (10.0, 10.0, 10.0)) == pytest.approx(0.1)


def test_a_tie_has_its_limit_at_the_noise() -> None:
    for noise, limit in ((0.0, NOISE_FLOOR), (0.01, 0.01)):
        first = raced(1.0, noise=noise)
        assert tie(first, raced(1 + 0.999 * limit)) and tie(raced(1 + 0.999 * limit), first)
        assert not tie(first, raced(1 + 1.001 * limit)) and not tie(raced(1 + 1.001 * limit), first)
    assert not tie(first, raced(1.009), 0.005) and tie(raced(1.0), raced(1.009), 0.01)


def test_figures_of_a_measurement() -> None:
    found = Measurement(KERNEL, (10.0, 20.0, 30.0, 40.0), (20.0, 30.0, 90.0, 40.0), 0.0, 0.0)
    assert (found.median_us, found.baseline_median_us, found.ratio) == (25.0, 35.0, 1.75)
    assert found.spread == pytest.approx((37.5 - 12.5) / 25)
    assert [raced(*(1.0,) * count).spread for count in (1, 2)] == [0.0, 0.0] and not found.is_steady


def test_seconds_of_phases_add_up() -> None:
    total = {"start": 1.5}
    add_seconds(total, {"start": 0.25, "races": 2.0})
    assert total == {"start": 1.75, "races": 2.0}


def test_failures_of_the_moment() -> None:
    reasons = (("timeout", "no answer"), ("compile", "out of memory"), ("launch", "refused"))
    failures = [Failure(KERNEL, stage, reason) for stage, reason in reasons]  # type: ignore[arg-type]
    assert [failure.is_transient for failure in failures] == [True, True, False]


@pytest.mark.parametrize(("noise", "margin"), [(0.002, 0.007), (0.25, 0.01)])
def test_what_equals_the_margin_does_not_beat_torch(noise: float, margin: float) -> None:
    def of(ratio: float, last: float) -> Measurement:
        return Measurement(KERNEL, (1.0,) * 9, (ratio,) * 6 + (last,) * 3, 1e-3, noise)

    border = 1 + min(noise + 0.005, 0.01)
    assert border == pytest.approx(1 + margin)
    assert not beats(of(border, 1.5), None) and beats(of(border + 1e-9, 1.5), None)
    assert beats(of(1.5, 1.0), None) and not beats(of(1.5, 1.0 - 1e-9), None)


def test_tie_compares_ratios_across_interleaves() -> None:
    slow_clock = measured(library(0), 110.0, baseline_us=110.0)
    assert tie(slow_clock, measured(library(1), 100.0, baseline_us=100.0))


def test_winner_is_the_fastest_when_it_is_clear() -> None:
    fast, slow = measured(library(1 << 25), 90.0, 0.01), measured(TORCH_MM, 100.0, 0.01)
    assert winner(PROBLEM, [slow, fast]) is fast is winner(PROBLEM, [fast, slow])
