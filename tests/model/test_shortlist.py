"""The kernels for products that nobody tuned, and the launches that suit one."""

from __future__ import annotations

from collections import Counter

import pytest

from tunegemm.describe.device import find_device
from tunegemm.describe.problem import Problem
from tunegemm.generate import families, tiles
from tunegemm.model import shortlist

DEVICE = find_device("model:h200")


SKINNY = {kernel["tile_m"] for kernel in shortlist.listed() if kernel.family == "skinny"}


def test_every_listed_kernel_is_one_of_its_family() -> None:
    kernels = shortlist.listed()
    assert len(set(kernels)) == len(kernels)
    for kernel in kernels:
        for name, value in kernel.compile_params:
            assert families.expected(kernel.family, name, value) is None, (kernel, name)


@pytest.mark.parametrize(
    "shape", ["1x4096x4096", "17x264x8192", "100x896x9216", "200x11008x1160", "5000x6912x2880"]
)
def test_launches_that_suit_a_product_run(shape: str) -> None:
    problem = Problem.parse(shape)
    found = shortlist.choices(problem, DEVICE)
    candidates = [found.candidate(problem, number) for number in range(len(found))]
    for candidate in candidates:
        assert families.get(candidate.family).check(problem, candidate, DEVICE).runs, candidate
    launches = Counter((c.kernel, c.params.get("split_k", 1) > 1) for c in candidates)
    assert set(launches.values()) == {1}  # one that leaves k whole and one that splits it


@pytest.mark.parametrize("shape", ["504x368x448", "4184x536x11072", "1040x4184x1984", "4096x4096x4096"])
def test_stream_k_is_chosen_only_where_it_cuts_tiles(shape: str) -> None:
    problem = Problem.parse(shape)
    found = shortlist.choices(problem, DEVICE)
    streaming = [found.candidate(problem, int(number)) for number in found.columns.streams.nonzero()[0]]
    assert streaming or shape != "4096x4096x4096"
    for candidate in streaming:
        size = candidate["cluster_m"] * candidate["cluster_n"]
        counts = tiles.tile_count(problem, candidate) // size, -(-problem.k // candidate["tile_k"])
        grid = tiles.stream_clusters(*counts, DEVICE.resident_clusters(size))
        assert tiles.stream_tiles(*counts, grid) > 0, candidate


def test_few_tiles_and_a_long_k_are_split() -> None:
    few = shortlist.choices(Problem.parse("16x512x16384"), DEVICE)
    assert (few.columns.split_k > 1).any()
    many = shortlist.choices(Problem.parse("4096x8192x8192"), DEVICE)
    assert (many.columns.split_k == 1).all()


@pytest.mark.parametrize(
    ("problem", "taken"),
    [
        (Problem.parse("64x4096x4096"), True),
        (Problem.parse("64x4096x4096", layout="nt"), False),
        (Problem.parse("64x4096x4100"), False),  # lines of 8 bytes
        (Problem.parse("64x4096x4096", dtype="fp8_e4m3"), False),
    ],
)
def test_which_products_the_list_is_for(problem: Problem, taken: bool) -> None:
    assert shortlist.covers(problem) is taken


def test_kernels_of_one_order_of_sums_are_all_that_have_it() -> None:
    found = shortlist.ordered_lists()
    for problem, kernels in found.items():
        assert kernels, problem
        for kernel in kernels:
            assert families.reduction_class(problem, shortlist.launched(problem, kernel)) == tiles.ORDERED, (
                problem,
                kernel,
            )
    plain = Problem.parse("64x4096x4096")
    others = set(shortlist.listed()) - set(found[plain])
    assert others
    for kernel in others:
        assert families.reduction_class(plain, shortlist.launched(plain, kernel)) != tiles.ORDERED, kernel


def test_kernels_of_few_rows_are_those_of_the_next_eight() -> None:
    for m, tile in ((1, 8), (8, 8), (9, 16), (16, 16), (17, 24), (24, 24)):
        found = shortlist.choices(Problem.parse(f"{m}x4096x4096"), DEVICE)
        problem = Problem.parse(f"{m}x4096x4096")
        candidates = [found.candidate(problem, number) for number in range(len(found))]
        tiles = {one["tile_m"] for one in candidates if one.family == "skinny"}
        assert tiles == ({tile} if tile in SKINNY else set()), (m, tiles)


def test_launches_without_splits_come_first_and_each_kernel_has_one_of_either_kind() -> None:
    problem = Problem.parse("16x4096x14336")
    found = shortlist.choices(problem, DEVICE)
    launches = [found.candidate(problem, number) for number in range(len(found))]
    splits = [int(launch.params.get("split_k", 1)) > 1 for launch in launches]
    assert splits == sorted(splits) and 0 < sum(splits) < len(splits)
    kinds = [(launch.kernel, is_split) for launch, is_split in zip(launches, splits, strict=True)]
    assert len(set(kinds)) == len(kinds)
    for launch, is_split in zip(launches, splits, strict=True):
        assert is_split or tiles.streams(launch) or launch.params.get("reduction", "pairs") == "pairs"
        assert families.get(launch.family).check(problem, launch, DEVICE).runs
