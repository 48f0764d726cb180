"""Tiles, grids and k splits, at their borders."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate import tiles

TILE = {"tile_m": 128, "tile_n": 64, "tile_k": 64}


def launch(**parameters: Any) -> Candidate:
    return Candidate.make("planted", TILE | parameters)


@pytest.mark.parametrize(
    ("problem", "parameters", "count"),
    [
        (Problem(128, 64, 8), {}, 1), (Problem(129, 65, 8), {}, 4), (Problem(128, 65, 8, 3), {}, 6),
        (Problem(129, 64, 8), {"cluster_m": 2}, 2), (Problem(257, 64, 8), {"cluster_m": 2}, 4),
        (Problem(128, 129, 8), {"cluster_n": 2}, 4), (Problem(128, 129, 8), {"swap_ab": True}, 4),
        (Problem(64, 128, 8), {"swap_ab": True}, 1),
    ],
)  # fmt: skip
def test_tiles_fill_whole_clusters(problem: Problem, parameters: dict[str, Any], count: int) -> None:
    assert tiles.tile_count(problem, launch(**parameters)) == count


def test_a_swapped_product_is_the_transposed_one() -> None:
    problem = Problem(16, 48, 64, in_dtype="fp8_e4m3_e5m2", a_major="m", out_major="n", epilogue="swiglu")
    seen = tiles.seen_by_kernel(problem, launch(swap_ab=True))
    assert (seen.m, seen.n, seen.k, seen.in_dtype, seen.epilogue) == (48, 16, 64, "fp8_e5m2_e4m3", "")
    assert (seen.a_major, seen.b_major, seen.out_major) == ("k", "n", "m")
    assert tiles.seen_by_kernel(problem, launch()) is problem
    assert tiles.majors(replace(problem, a_major="k", b_major="n", out_major="m"), True) == ("m", "k", "n")


def test_a_balanced_grid_is_the_smallest_of_as_many_waves() -> None:
    for work, resident in itertools.product(range(1, 40), range(1, 12)):
        waves = math.ceil(work / resident)
        least = next(workers for workers in range(1, resident + 1) if math.ceil(work / workers) == waves)
        assert tiles.balanced(work, resident) == least


@pytest.mark.parametrize(
    ("count", "k_tiles", "resident", "clusters"), [(8, 2, 132, 4), (1, 3, 132, 1), (100, 64, 132, 132)]
)
def test_stream_k_has_some_k_tiles_for_each_cluster(
    count: int, k_tiles: int, resident: int, clusters: int
) -> None:
    assert tiles.stream_clusters(count, k_tiles, resident) == clusters


@pytest.mark.parametrize(
    ("count", "k_tiles", "clusters", "cut"),
    [(20, 16, 10, 0), (14, 10, 10, 4), (14, 9, 10, 14), (4, 9, 10, 4), (10, 1, 10, 0), (24, 9, 10, 14)],
)
def test_stream_k_cuts_the_last_wave_and_the_one_before_if_that_is_small(
    count: int, k_tiles: int, clusters: int, cut: int
) -> None:
    assert tiles.stream_tiles(count, k_tiles, clusters) == cut


@pytest.mark.parametrize(
    ("parameters", "blocks"),
    [
        ({"ctas": "all"}, 132), ({"ctas": "all", "occupancy": 2}, 200),
        ({"ctas": "all", "ctas_per_sm": 2}, 200),
        ({"ctas": "two_per_sm"}, 200), ({"ctas": "tiles", "split_k": 3}, 600), ({"ctas": "balanced"}, 100),
        ({"ctas": "balanced", "split_k": 2}, 100), ({"ctas": "two_per_sm", "split_k": 2}, 264),
    ],
)  # fmt: skip
def test_how_many_blocks_a_launch_has(h200: Device, parameters: dict[str, Any], blocks: int) -> None:
    assert tiles.persistent_grid(Problem(128 * 20, 64 * 10, 64), launch(**parameters), h200) == blocks


def test_a_sum_is_ordered_unless_k_is_cut() -> None:
    problem = Problem(64, 64, 64)
    for parameters, ordered in (
        ({}, True), ({"split_k": 1}, True), ({"split_k": 2}, False), ({"tile_scheduler": "stream_k"}, False),
        ({"tile_scheduler": "static"}, True),
    ):  # fmt: skip
        expected = tiles.ORDERED if ordered else ""
        assert tiles.ordered_sum(problem, launch(**parameters)) == expected
        assert tiles.ordered_bf16_sum(problem, launch(**parameters)) == expected
    assert not tiles.ordered_bf16_sum(replace(problem, in_dtype="fp16", out_dtype="fp16"), launch())
    assert not tiles.ordered_bf16_sum(problem, launch(acc_dtype="fp16"))


def test_rules_hold_to_their_borders(h200: Device) -> None:
    def allows(rule: Any, problem: Problem, **parameters: Any) -> bool:
        return rule(problem, launch(**parameters), h200) is None

    swapped = tiles.swapped_rows
    assert [allows(swapped, Problem(m, 64, 64), swap_ab=True) for m in (128, 129)] == [True, False]
    assert allows(swapped, Problem(129, 64, 64)) and allows(swapped, Problem(129, 64, 64), swap_ab=False)
    split = tiles.split_work
    assert [allows(split, Problem(128, 64, k), split_k=3) for k in (12 * 64, 11 * 64, 11 * 64 + 1)] == [
        True, False, True
    ]  # fmt: skip
    assert [allows(split, Problem(128, 64 * n, 4096), split_k=2) for n in (132, 133)] == [True, False]
    assert allows(split, Problem(128, 64 * 999, 64)) and allows(split, Problem(128, 64 * 999, 64), split_k=1)


@pytest.mark.parametrize(
    ("columns", "parameters", "config", "says"),
    [
        (133, {"ctas": "two_per_sm"}, (100_000, 384, 60), None),
        (999, {"ctas": "all"}, (300_000, 384, 600), None),
        (132, {"ctas": "two_per_sm"}, (100_000, 384, 60), "132 work units <= 132 multiprocessors"),
        (67, {"ctas": "two_per_sm", "split_k": 2}, (100_000, 384, 60), None),
        (133, {"ctas": "two_per_sm"}, (116_000, 384, 60), r"2 x \(116000 \+ 1024\) B smem"),
        (133, {"ctas": "two_per_sm"}, (100_000, 256, 103), None),
        (133, {"ctas": "two_per_sm"}, (100_000, 256, 104), None),
        (133, {"ctas": "two_per_sm"}, (100_000, 256, 105), "2 x 256 threads x 129 registers > 65536"),
    ],
)  # fmt: skip
def test_two_blocks_of_a_multiprocessor_need_room_and_work(
    h200: Device, columns: int, parameters: dict[str, Any], config: tuple[int, int, int], says: str | None
) -> None:
    smem_bytes, threads, registers = config
    of = SimpleNamespace(smem_bytes=smem_bytes, threads=threads, accumulator_registers=registers)
    found = tiles.exceeded_by_two(Problem(128, 64 * columns, 4096), launch(**parameters), h200, of, 24)
    assert found is None if says is None else re.match(says, found or "")


def test_splits_keep_sums_and_a_counter_for_each_tile(h200: Device) -> None:
    problem = Problem(256, 64, 4096)
    assert tiles.split_workspace(problem, launch(split_k=1), h200) is None
    memory = tiles.split_workspace(problem, launch(split_k=3), h200)
    assert memory is not None
    assert (memory.partial_bytes, memory.counter_bytes) == (2 * 3 * 128 * 64 * 4, 8)
