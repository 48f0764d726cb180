from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.errors import MeasureError
from tunegemm.generate.cublaslt import TORCH_MM
from tunegemm.measure.outcome import Measurement
from tunegemm.measure.statistics import (
    NOISE_FLOOR,
    aa_noise,
    clearly_slower,
    median_interval,
    ratio_interval,
    slowdown,
    tie,
    winner,
)

PROBLEM = Problem(64, 64, 64)


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
    with pytest.raises(MeasureError, match="no samples"):
        median_interval([])


def test_interval_covers_the_median_as_often_as_it_says() -> None:
    generator = random.Random(1)
    hits = 0
    for _ in range(1000):
        low, high = median_interval([generator.lognormvariate(0, 1) for _ in range(15)])
        hits += low <= 1.0 <= high
    assert 940 <= hits <= 995  # exactly 96.5 %


def test_interval_narrows_with_less_confidence() -> None:
    samples = [random.Random(2).random() for _ in range(30)]
    widths = [high - low for low, high in (median_interval(samples, c) for c in (0.99, 0.95, 0.8, 0.5))]
    assert all(wide >= narrow for wide, narrow in pairwise(widths))


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


def test_tie_is_within_the_noise_and_symmetric() -> None:
    a, b = measured(library(0), 100.0), measured(library(1), 100.9, noise=0.01)
    assert tie(a, b) and tie(b, a)
    assert not tie(a, b, noise=0.005)
    assert tie(a, measured(library(1), 100.0 * (1 + NOISE_FLOOR / 2))), "less than the floor is never a win"
    assert not tie(a, measured(library(1), 100.0 * (1 + NOISE_FLOOR * 2)))


def test_tie_compares_ratios_across_interleaves() -> None:
    slow_clock = measured(library(0), 110.0, baseline_us=110.0)
    assert tie(slow_clock, measured(library(1), 100.0, baseline_us=100.0))


def test_winner_is_the_fastest_when_it_is_clear() -> None:
    fast, slow = measured(library(1 << 25), 90.0, 0.01), measured(TORCH_MM, 100.0, 0.01)
    assert winner(PROBLEM, [slow, fast]) is fast is winner(PROBLEM, [fast, slow])


def test_ties_break_by_workspace_then_digest_whatever_the_order() -> None:
    ms = [
        measured(library(1 << 25), 99.6, 0.01),
        measured(library(0, "64x64"), 100.0, 0.01),
        measured(library(0, "128x64"), 100.2, 0.01),
    ]
    expected = min(ms[1:], key=lambda m: m.candidate.digest)
    for seed in range(5):
        assert winner(PROBLEM, random.Random(seed).sample(ms, 3)) is expected


def test_no_measurement_no_winner() -> None:
    with pytest.raises(MeasureError, match=r"64x64x64.*no winner"):
        winner(PROBLEM, [])


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
