"""Which candidates go on to the final race, by what was screened."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest

from tests.tuning.planted import kernels, launches, measurement
from tunegemm.describe.space import Candidate
from tunegemm.generate.cublaslt import TORCH_MM
from tunegemm.measure.outcome import Measurement
from tunegemm.tuning.efforts import EFFORTS, Effort
from tunegemm.tuning.finalists import finalists

ALGORITHMS = [Candidate.make("cublaslt", {"algorithm": number}) for number in range(8)]


@pytest.mark.parametrize(("effort", "own", "quickest"), [("quick", 6, 2), ("full", 12, 4)])
def test_the_quickest_reach_the_final_race_whatever_torch_did(
    effort: Effort, own: int, quickest: int
) -> None:
    """256x4096x4096 on an H200: torch.mm took 17.4 us beside some candidates and 15.8 beside others."""
    screened = {TORCH_MM: Measurement(TORCH_MM, (17.4,) * 3, (17.4,) * 3, 1e-3, 0.0)}
    for number in range(30):
        ours, torchs = (16.5, 17.4) if number < 25 else (16.1, 15.8)
        for launch in launches(Candidate.make("cute_sm90", {"kernel": number})):
            screened[launch] = Measurement(launch, (ours,) * 3, (torchs,) * 3, 1e-3, 0.0)
    chosen = finalists(screened, effort)
    assert chosen[-1] == TORCH_MM and len(chosen) == own + quickest + 1
    beside_fast, beside_slow = ([c for c in chosen[:-1] if (c["kernel"] >= 25) == x] for x in (True, False))
    assert len(beside_slow) == own and len(beside_fast) == quickest
    assert len({c.kernel for c in chosen}) == (own + quickest) / 2 + 1, "two launches of a kernel"


def screen_of_tiles() -> dict[Candidate, Measurement]:
    """Small tiles lead a little by their ratio; large ones fetch less."""
    screened = {TORCH_MM: measurement(TORCH_MM, 10.0)}
    for number, algorithm in enumerate(ALGORITHMS):
        screened[algorithm] = measurement(algorithm, 10.1 + number)
    for place, tile in enumerate((64, 96, 128, 160, 192, 224, 256) * 3):
        kernel = Candidate.make(
            "cute_sm90", {"schedule": "cooperative", "tile_m": tile, "tile_n": tile, "stages": place}
        )
        for width, launch in enumerate(launches(kernel)):
            screened[launch] = measurement(launch, 9.0 + 0.001 * tile + 0.01 * width + 0.0001 * place)
    return screened


def at_cap(screened: Mapping[Candidate, Measurement]) -> dict[Candidate, float]:
    """Of a GPU at its power cap: what small tiles lead by they lose by what they draw."""
    return {
        c: m.ratio * (c["tile_n"] / 256) ** 0.2 for c, m in screened.items() if c.family != TORCH_MM.family
    }


@pytest.mark.parametrize(("effort", "own", "algorithms"), [("quick", 4, 1), ("full", 12, 3)])
def test_at_the_power_cap_few_are_raced_by_what_they_draw(effort: Effort, own: int, algorithms: int) -> None:
    screened = screen_of_tiles()
    expected = at_cap(screened)
    chosen = finalists(screened, effort, expected)
    ours = [c for c in chosen if c.family == "cute_sm90"]
    assert max(Counter(c.kernel for c in ours).values()) == 2, "of each kernel its two best launches"
    best_first = sorted(expected, key=lambda c: -expected[c])
    two = [c for c in best_first if [o for o in best_first if o.kernel == c.kernel].index(c) < 2]
    assert ours[:own] == two[:own]
    assert ours[0]["tile_m"] == 256
    # Whatever is expected, the leader of the screen is raced.
    leader = max((c for c in screened if c.family == "cute_sm90"), key=lambda c: screened[c].ratio)
    assert leader in ours and leader["tile_m"] == 64
    assert [c for c in chosen if c.family == "cublaslt"] == [*ALGORITHMS[:algorithms], TORCH_MM]


def test_a_quick_race_at_the_power_cap_has_at_most_seven() -> None:
    """Each costs a turn of 240 ms in a round."""
    screened = screen_of_tiles()
    assert len(finalists(screened, "quick", at_cap(screened))) <= 4 + 1 + 1 + 1


@pytest.mark.parametrize("effort", EFFORTS)
@pytest.mark.parametrize("is_throttled", [True, False])
def test_what_there_is_is_raced_if_it_is_less(effort: Effort, is_throttled: bool) -> None:
    assert finalists({}, effort, {} if is_throttled else None) == []
    only = launches(kernels(32)[0])[0]
    two = {TORCH_MM: measurement(TORCH_MM, 10.0), only: measurement(only, 9.0)}
    assert finalists(two, effort, at_cap(two) if is_throttled else None) == [only, TORCH_MM]


@pytest.mark.parametrize("is_throttled", [True, False])
def test_torch_is_raced_where_only_other_families_were_asked_for(is_throttled: bool) -> None:
    """`tune --families cute_sm90` of 96x80x64, where torch.mm is the fastest, ended without a record."""
    own = Candidate.make("cute_sm90", {"tile_m": 64, "tile_n": 64, "schedule": "cooperative"})
    screened = {own: measurement(own, 11.0)}
    expected = at_cap(screened) if is_throttled else None
    assert finalists(screened, "quick", expected) == [own, TORCH_MM]
