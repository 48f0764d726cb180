"""The one order of results, and by how much torch.mm has to be beaten, over drawn results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from tunegemm.describe.space import Candidate
from tunegemm.measure.evidence import Evidence, best_of_each, choose, leaders, rank, standing
from tunegemm.measure.outcome import Measurement
from tunegemm.measure.statistics import beats


@dataclass(frozen=True)
class Result:
    candidate: int
    ratio: float
    evidence: Evidence
    is_foreign: bool
    is_outdated: bool
    number: int = 0

    @property
    def is_torch(self) -> bool:
        return self.candidate == 0


RESULTS = st.lists(
    st.builds(
        Result, st.integers(0, 3), st.sampled_from([0.9, 1.0, 1.1]), st.sampled_from(Evidence), st.booleans(),
        st.booleans(),
    ),
    max_size=12,
).map(lambda found: [Result(r.candidate, r.ratio, r.evidence, r.is_foreign, r.is_outdated, i)
                     for i, r in enumerate(found)])  # fmt: skip


@given(RESULTS)
def test_of_each_candidate_the_latest_of_the_highest_standing_counts(results: Sequence[Result]) -> None:
    best = {one.candidate: one for one in best_of_each(results)}
    assert best.keys() == {one.candidate for one in results}
    for one in results:
        known = best[one.candidate]
        assert (standing(known), known.number) >= (standing(one), one.number)
    order = leaders(results)
    assert [rank(one) for one in order] == sorted(map(rank, best.values()), reverse=True)
    fit = [one for one in order if one.is_torch or one.ratio >= 1]
    assert choose(results) == (fit[0] if fit else None)


def test_what_is_here_current_and_better_proven_comes_first() -> None:
    here = Result(1, 0.9, Evidence.SCREEN, False, False)
    for worse in (
        Result(2, 1.1, Evidence.FINAL, True, False),
        Result(2, 1.1, Evidence.FINAL, False, True),
    ):
        assert rank(here) > rank(worse)
    assert rank(Result(1, 0.9, Evidence.RACE, False, False)) > rank(
        Result(2, 1.1, Evidence.SCREEN, False, False)
    )
    assert rank(Result(1, 1.1, Evidence.RACE, False, False)) > rank(
        Result(2, 1.0, Evidence.RACE, False, False)
    )


def test_rounds_that_did_not_choose_the_winner_must_not_take_it_back() -> None:
    samples, baseline = (90.0, 90.0, 90.0, 90.0, 101.0, 101.0), (100.0,) * 6
    lucky = Measurement(Candidate.make("cute_sm90", {}), samples, baseline, 0.0, 0.0, {})
    assert not beats(lucky, None)
    assert beats(Measurement(lucky.candidate, (*samples[:4], 100.0, 100.0), baseline, 0.0, 0.0, {}), None)
