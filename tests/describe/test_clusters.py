"""Which clusters share a GPC, and what kernels make of it; the probe itself on a GPU."""

from __future__ import annotations

import itertools
from contextlib import nullcontext

import pytest

from tunegemm.describe.clusters import gpcs_of_launches, groups, places_of, usual_neighbours
from tunegemm.describe.device import find_device

#: As an H200 hands out 66 clusters of two: four pairs of multiprocessors that no larger cluster has, then in
#: turn to eight GPCs, of which the first has four pairs and the last two nine (2026-11-22).
H200 = (8, 9, 10, 11, *[*range(8)] * 4, *[*range(1, 8)] * 4, 6, 7)


def test_multiprocessors_that_met_in_any_cluster_share_a_gpc() -> None:
    assert groups([[0, 1, 2], [4, 5], [2, 6], [7], [6, 4]]) == dict.fromkeys([0, 1, 2, 4, 5, 6], 0) | {7: 7}


def test_places_are_a_permutation_in_which_a_gpc_has_a_row() -> None:
    places = places_of(H200)
    assert sorted(places) == list(range(66))
    walk = sorted(range(66), key=places.__getitem__)
    by_place = [H200[cluster] for cluster in walk]
    assert sum(one != other for one, other in itertools.pairwise(by_place)) == 11
    assert by_place[:8] == [8, 9, 10, 11, 0, 0, 0, 0], "what is left over fills one block"
    assert by_place[8:16] == [1] * 8 and by_place[-9:] == [7] * 9


def test_usual_neighbours_are_those_of_most_clusters() -> None:
    assert usual_neighbours(H200) == 8
    assert usual_neighbours([0]) == 1


def test_nothing_is_known_of_a_modelled_device() -> None:
    assert find_device("model:h200").gpcs_of_clusters(2, 66) is None


@pytest.mark.parametrize(("again", "known"), [((0, 4), (0, 4)), ((4, 0), None), ((), None)])
def test_what_two_launches_disagree_on_is_not_known(
    monkeypatch: pytest.MonkeyPatch, again: tuple[int, ...], known: tuple[int, ...] | None
) -> None:
    """Beside other work clusters go where it leaves room; then their indices decide."""
    launches = iter([(0, 4), again])

    def multiprocessors(*given: object) -> list[list[int]]:
        return [[sm, sm + 1] for sm in next(launches)] if len(given) == 6 else [[0, 1, 2, 3], [4, 5, 6, 7]]

    monkeypatch.setattr("tunegemm.describe.clusters.loaded", lambda *_: nullcontext((None, None)))
    monkeypatch.setattr("tunegemm.describe.clusters.multiprocessors_of", multiprocessors)
    assert gpcs_of_launches.__wrapped__(0, 2, 2, 1024) == known


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 2, 4])
def test_clusters_lie_on_gpcs_as_larger_clusters_do(size: int) -> None:
    device = find_device("cuda:0")
    clusters = device.resident_clusters(size)
    found = device.gpcs_of_clusters(size, clusters)
    assert found is not None and len(found) == clusters
    assert 4 <= len(set(found)) <= clusters / 2, (
        "a Hopper chip has seven or eight GPCs, and some pairs left over"
    )
    assert usual_neighbours(found) >= clusters // 12
    smem_bytes = device.architecture.smem_bytes_per_block
    assert gpcs_of_launches.__wrapped__(device.index, size, clusters, smem_bytes) == found
