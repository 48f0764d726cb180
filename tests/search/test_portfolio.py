"""Several families' searches as one: who is asked, how much, and who goes on."""

from tests.search.test_search import LAUNCHES, kernels, truth
from tunegemm.describe.space import Candidate
from tunegemm.search import Portfolio, Search
from tunegemm.search.efforts import EFFORTS, Effort

QUICK, FULL = EFFORTS["quick"].plan, EFFORTS["full"].plan


def search(family: str) -> Search:
    ranked = [Candidate(family, c.compile_params, c.launch_params) for c in kernels()]
    return Search(ranked, LAUNCHES, QUICK, trials=40)


def run(portfolio: Portfolio, speed: dict[str, float]) -> dict[str, int]:
    """Candidates asked of each family, with each family's landscape scaled by its speed."""
    asked: dict[str, int] = {}
    while batch := portfolio.ask():
        together = {candidate.family for candidate in batch}
        assert len(together) <= 1 or not asked  # the first rounds come at once
        for candidate in batch:
            asked[candidate.family] = asked.get(candidate.family, 0) + 1
            own = speed.get(candidate.family)
            portfolio.tell(candidate, None if own is None else own * truth(candidate))
    assert portfolio.stage == "done"
    return asked


def portfolio() -> Portfolio:
    return Portfolio([search("cute_sm90"), search("triton_tma"), search("cute_sm80")], FULL)


def test_a_family_that_is_far_behind_costs_its_first_round() -> None:
    assert run(portfolio(), {"cute_sm90": 1.0, "triton_tma": 0.7, "cute_sm80": 0.5}) == {
        "cute_sm90": 40,
        "triton_tma": 3,
        "cute_sm80": 3,
    }


def test_a_family_that_is_near_or_ahead_is_searched_to_its_end() -> None:
    assert run(portfolio(), {"cute_sm90": 1.0, "triton_tma": 1.0, "cute_sm80": 0.5})["triton_tma"] == 40
    assert run(portfolio(), {"cute_sm90": 0.5, "triton_tma": 0.5, "cute_sm80": 1.0})["cute_sm80"] == 40


def test_a_quick_search_leaves_a_family_that_the_first_one_has_passed() -> None:
    """Its first round was as fast as that of the first family, whose best is 1 % ahead by now; else it goes
    on, however much faster it gets itself.
    """

    def asked(first: float, effort: Effort, second: float = 1.0) -> int:
        searches = Portfolio([search("cute_sm90"), search("triton_tma")], EFFORTS[effort].plan)
        counts = {"cute_sm90": 0, "triton_tma": 0}
        while batch := searches.ask():
            for candidate in batch:
                counts[candidate.family] += 1
                later = second if candidate.family == "triton_tma" else first
                searches.tell(candidate, later if counts[candidate.family] > 6 else 1.0)
        return counts["triton_tma"]

    assert asked(1.02, "quick") == 3
    assert asked(1.005, "quick") == asked(1.02, "full") == asked(1.0, "quick", second=1.5) == 40


def test_the_plan_is_what_is_asked() -> None:
    planned = portfolio().planned_screen()
    searched, asked = portfolio(), []
    while (batch := searched.ask()) and searched.stage == "screen":
        asked += batch
        for candidate in batch:
            searched.tell(candidate, truth(candidate))
    assert set(planned) >= set(asked)
    assert planned[:8] == asked[:8]
