"""Importance finds the parameter that was made to matter, and none where there is nothing to find."""

from __future__ import annotations

import itertools

from tunegemm.describe.space import Candidate
from tunegemm.search.importance import importance


def results(launches: int) -> list[tuple[Candidate, float]]:
    """64 kernels whose tile decides by far and whose stages by little; of the fastest eight all launches."""
    found = []
    for tile, stages, schedule in itertools.product(range(8), range(4), ("cooperative", "pingpong")):
        kernel = Candidate.make("f", {"tile": 16 * (tile + 1), "stages": stages, "schedule": schedule})
        value = 1 + tile / 10 + stages / 1000
        swizzles = range(launches) if tile == 7 else range(1)
        found += [(kernel.with_launch(swizzle=s, raster="m"), value * (1 + s / 100)) for s in swizzles]
    return found


def test_what_decides_comes_first() -> None:
    found = importance(results(launches=5))
    assert next(iter(found.compile)) == "tile"
    assert found.compile["tile"] > 0.6
    assert sum(found.compile.values()) == 1 or abs(sum(found.compile.values()) - 1) < 1e-9
    assert set(found.compile) == {"tile", "stages", "schedule"}
    assert (found.kernels, found.launches) == (64, 40)


def test_launches_are_judged_within_their_kernel() -> None:
    """Only leaders have many launches: judged with all others, the swizzle would seem to make them fast."""
    found = importance(results(launches=5))
    assert found.launch == {"swizzle": 1.0}  # the raster never varied, so it cannot matter


def test_too_little_tells_nothing() -> None:
    found = importance(results(launches=1)[:20])
    assert (found.compile, found.launch) == ({}, {})
    assert importance([]).kernels == 0


def test_the_same_results_give_the_same_shares() -> None:
    assert importance(results(3)) == importance(results(3))
