"""What the page's numbers come from, at their borders, on stand-ins for trials and winners."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tunegemm.describe.space import Candidate
from tunegemm.report import analysis, charts, html
from tunegemm.report.analysis import best_so_far, gap, ratio_limits, tile_grids
from tunegemm.report.html import headline, place_of, positions, range_of, ticks


def trial(ratio: float, tile: tuple[int, int] | None = None, family: str = "cute_sm90", **more: Any) -> Any:
    params = {"tile_m": tile[0], "tile_n": tile[1]} if tile else {}
    schedule = {"schedule": more.pop("schedule")} if "schedule" in more else {}
    return SimpleNamespace(ratio=ratio, candidate=Candidate.make(family, params | schedule),
                           **{"method": "screen", "confirmed": False} | more)  # fmt: skip


def winner(ratio: float, low: float, high: float, noise: float = 0.0) -> Any:
    return SimpleNamespace(record=SimpleNamespace(ratio=ratio, noise=noise), low=low, high=high)


def test_ticks_are_at_least_as_far_apart_as_a_name_is_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html, "place_of", lambda value, _: 14 * value)
    assert [name for _, name in ticks((1.0, 3.0))] == ["1", "2", "3"]


def test_the_curve_rises_at_better_trials_only() -> None:
    assert best_so_far([trial(each) for each in (0.9, 0.9, 1.1, 1.0, 1.2)]) == [(1, 0.9), (3, 1.1), (5, 1.2)]


def test_a_gap_is_explained_where_it_is_more_than_the_noise() -> None:
    def of(record: Any, *tried: Any) -> str:
        return gap(SimpleNamespace(tried=tried, winner=SimpleNamespace(record=record, rounds=5)))  # type: ignore[arg-type]

    own, other = trial(1.2, (64, 64)), trial(1.2, (64, 128))
    assert of(own) == of(own, own) == of(trial(1.2005, (64, 64)), own) == ""
    assert of(trial(1.3, (64, 64)), other).endswith("at 1.300, is a candidate that this search did not try.")
    raced = trial(1.3, (64, 64), confirmed=True)
    assert "at 1.200, in few" in of(raced, own) and "1.300 is from its final race with 5 r" in of(raced, own)
    assert "is from a later measurement with" in of(trial(1.3, (64, 64)), own)


def test_each_tile_has_its_best_trial_and_the_fastest_grid_comes_first() -> None:
    slow, fast, equal = (
        trial(1.0, (64, 64), schedule="a"),
        trial(1.1, (64, 64), schedule="a"),
        trial(1.1, (64, 64)),
    )
    wide, raced = trial(1.2, (128, 32), schedule="b"), trial(9.0, (64, 64), schedule="a", method="final")
    vendors, strange = trial(3.0, (64, 64), family="cublaslt"), trial(3.0)
    as_fast = trial(1.1, (64, 64), schedule="a", number=2)
    grids = tile_grids([slow, fast, as_fast, equal, wide, raced, vendors, strange])
    assert [(grid.title, grid.best) for grid in grids] == [
        ("cute_sm90 b", {(128, 32): wide}),
        ("cute_sm90 a", {(64, 64): fast}),
        ("cute_sm90", {(64, 64): equal}),
    ]
    assert {(grid.tile_m, grid.tile_n) for grid in grids} == {((64, 128), (32, 64))}
    assert tile_grids([raced])[0].best == {(64, 64): raced}, "without a search all count"


def test_only_our_own_trials_of_a_search_weigh_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(analysis, "finished_trials", dict)
    monkeypatch.setattr(analysis, "importances_of", lambda weighed: weighed)
    own, raced = trial(1.1, (64, 64)), trial(1.3, (64, 128), method="final")
    found = analysis.importances([own, raced, trial(1.2, (64, 64), family="cublaslt")])
    assert found == {own.candidate: 1.1} and analysis.importances([raced]) == {}


def test_the_axis_of_speeds() -> None:
    low, high = ratio_limits([winner(1.0, 0.99, 1.01)])  # type: ignore[list-item]
    margin = (1.02 / 0.98) ** 0.04
    assert (low, high) == pytest.approx((0.98 / margin, 1.02 * margin))
    low, high = ratio_limits([winner(1.5, 0.2, 9.0), winner(0.5, 0.4, 0.6)])  # type: ignore[list-item]
    reach = 3**0.25
    ends = 0.5 / reach, 1.5 * reach
    margin = (ends[1] / ends[0]) ** 0.04
    assert (low, high) == pytest.approx((ends[0] / margin, ends[1] * margin))


def test_places_along_it() -> None:
    limits = 0.5, 2.0
    assert [place_of(value, limits) for value in (0.1, 0.5, 1.0, 2.0, 3.0)] == [0, 0, 50, 100, 100]
    found = positions(winner(1.5, 1.4, 1.6, noise=0.05), limits)  # type: ignore[arg-type]
    values = {"tie": 1 / 1.05, "tie_end": 1.05, "low": 1.4, "high": 1.6, "ratio": 1.5, "unity": 1.0}
    assert found == {name: pytest.approx(place_of(value, limits)) for name, value in values.items()}
    assert [name for _, name in ticks(limits)] == ["1", "0.5", "0.75", "1.25", "1.75"]
    assert [name for _, name in ticks((0.9, 1.3))] == ["1", "0.9", "1.1", "1.2", "1.3"]
    assert [name for _, name in ticks((0.3, 9.0))] == ["1", "2", "4", "8"]
    assert range_of([None, 3.0], "W") == "3 W" and range_of([], "W") == "unknown"
    assert range_of([9.0, 1.0, 2.26], "%", 1) == "1.0 \u2013 2.3 \u2013 9.0 %"


@pytest.mark.parametrize(
    ("ratios", "steady", "says"),
    [
        ([1.2], [], "1 tuned product runs at 1.200 \u00d7 the speed of torch.mm on X"),
        ([1.0, 1.004], [], "2 tuned products run as fast as torch.mm on X"),
        (
            [1.2, 1.2],
            [0.9],
            "1 tuned product runs at 0.900 \u00d7 the speed of torch.mm on X in steady state",
        ),
    ],
)
def test_the_headline(ratios: list[float], steady: list[float], says: str) -> None:
    winners = [winner(ratio, ratio, ratio) for ratio in ratios]
    named = SimpleNamespace(steady=dict(enumerate(steady)), winners=winners, device=SimpleNamespace(name="X"))
    assert headline(named) == says  # type: ignore[arg-type]


def test_shades_of_speed() -> None:
    ratios = 0.69, 0.7, 0.85, 0.949, 0.95, 0.999, 1.0, 1.009, 1.01, 1.029, 1.03, 9.0
    shades = ["h-4", "h-3", "h-2", "h-2", *["h-1"] * 2, *["h1"] * 2, *["h2"] * 2, *["h3"] * 2]
    assert [charts.heat_class(ratio) for ratio in ratios] == shades
