"""What explores after our order: the launches and kernels that a Gaussian process expects most of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from tests.search.test_search import LAUNCHES, SUMMIT, kernels, truth
from tunegemm.describe.space import Candidate
from tunegemm.generate.feasibility import Verdict
from tunegemm.search import Search
from tunegemm.search.efforts import EFFORTS
from tunegemm.search.surrogate import Surrogate

#: Kernels that are known, and one of them in another launch.
KNOWN = [*kernels()[::70], kernels()[0].with_launch(swizzle_size=2)]


def search_of(known: Iterable[Candidate], ranked: Sequence[Candidate] = (), **options) -> Search:  # type: ignore[no-untyped-def]
    results = [(candidate, truth(candidate)) for candidate in known]
    return Search(kernels(), LAUNCHES, EFFORTS["quick"].plan, known=results, **options)


def explore(search: Search, surrogate: Surrogate, count: int) -> list[float]:
    """The values of so many candidates, one after the other."""
    found = []
    for _ in range(count):
        candidate = surrogate.suggest()
        assert candidate is not None and search.is_open(candidate)
        search.claim(candidate)
        surrogate.start(candidate)
        search.tell(candidate, truth(candidate))
        surrogate.tell(candidate, truth(candidate))
        found.append(truth(candidate))
    return found


def test_it_climbs_to_the_summit_from_few_results() -> None:
    """Of kernels and their launches of which it has seen every seventieth."""
    search = search_of(KNOWN)
    assert max(explore(search, Surrogate(search), 40)) == pytest.approx(SUMMIT)


def test_what_a_launch_gains_on_one_kernel_is_expected_on_its_like() -> None:
    one, *others = (k for k in kernels() if k["tile_m"] == 128 and k["stages"] == 5)
    sizes = {"swizzle_size": LAUNCHES["swizzle_size"]}
    known = [*(one.with_launch(swizzle_size=size) for size in sizes["swizzle_size"]), *others]
    results = [(candidate, truth(candidate)) for candidate in known]
    suggested = Surrogate(Search([one, *others], sizes, EFFORTS["quick"].plan, known=results)).suggest()
    assert suggested is not None and suggested.kernel != one.kernel
    assert suggested["swizzle_size"] == 4, "which the others were not measured at"


def test_of_launches_it_thinks_once_some_were_compared() -> None:
    """In a full search other launches have stages of their own, after this."""
    search = search_of(kernels()[::20])
    assert Surrogate(search).suggest() in kernels()


def test_the_models_opinion_decides_where_nothing_else_is_known() -> None:
    """It is a multiple of what was measured, whatever its zero."""
    ranked = kernels()
    preferred = ranked[-150]

    def features(candidates: Sequence[Candidate]) -> list[tuple[float]]:
        best = max(truth(candidate) for candidate in candidates)
        return [
            (truth(candidate) - best + (candidate.kernel == preferred.kernel),) for candidate in candidates
        ]

    search = search_of(ranked[:-200:10])
    suggested = Surrogate(search, features=features).suggest()
    assert suggested is not None and suggested.kernel == preferred.kernel


def test_what_is_being_tried_is_not_suggested_again_nor_its_like() -> None:
    search = search_of(KNOWN)
    surrogate = Surrogate(search)
    batch = []
    for _ in range(4):
        candidate = surrogate.suggest()
        assert candidate is not None
        search.claim(candidate)
        surrogate.start(candidate)
        batch.append(candidate)
    assert len({*batch}) == 4
    for candidate in batch:
        surrogate.tell(candidate, None)
        search.tell(candidate, None)
    assert surrogate.suggest() not in batch, "what failed is not tried again"


def test_a_launch_that_a_rule_forbids_is_told_once_with_the_rule() -> None:
    rejected: list[Candidate] = []

    def verdict(candidate: Candidate) -> Verdict:
        return Verdict("swizzle", "4 is not to be had")

    search = search_of(KNOWN, allowed=lambda launch: launch["swizzle_size"] != 4)
    surrogate = Surrogate(search, verdict=verdict, reject=lambda point, _: rejected.append(point))
    explore(search, surrogate, 24)
    assert rejected and len({*rejected}) == len(rejected)
    assert {candidate["swizzle_size"] for candidate in rejected} == {4}


def test_without_a_result_or_a_candidate_it_suggests_nothing() -> None:
    assert Surrogate(search_of([])).suggest() is None
    only = kernels()[0]
    search = Search([only], {"swizzle_size": (1,)}, EFFORTS["quick"].plan, known=[(only, 1.0)])
    assert Surrogate(search).suggest() is None


def test_what_is_of_another_space_is_left_out() -> None:
    """As the library's algorithms, and kernels of an older release."""
    older = Candidate.make("cute_sm90", {"tile_m": 7}, {"swizzle_size": 1})
    search = search_of(KNOWN)
    surrogate = Surrogate(search)
    before = surrogate.suggest()
    for foreign in (older, Candidate.make("cublaslt", {"algorithm": 1})):
        surrogate.start(foreign)
        surrogate.tell(foreign, 9.0)
    assert surrogate.suggest() == before
