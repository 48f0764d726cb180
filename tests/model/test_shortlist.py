"""The kernels for products that nobody tuned, and the launches that suit one."""

from __future__ import annotations

import pytest

from tunegemm.describe.device import find_device
from tunegemm.describe.problem import Problem
from tunegemm.generate import families, tiles
from tunegemm.model import shortlist

DEVICE = find_device("model:h200")


def test_every_listed_kernel_is_one_of_its_family() -> None:
    kernels = shortlist.listed()
    assert len(set(kernels)) == len(kernels)
    for kernel in kernels:
        for name, value in kernel.compile_params:
            assert families.expected(kernel.family, name, value) is None, (kernel, name)


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
