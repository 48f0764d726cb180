"""Budgets of efforts, and the numbers that users give to a search, at their borders."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tunegemm.errors import SpaceError
from tunegemm.search.efforts import (
    EFFORTS,
    Budget,
    Effort,
    budget_for,
    checked_seed,
    checked_trials,
    online_budget,
)


@pytest.mark.parametrize(
    ("effort", "space", "budget"),
    [
        ("quick", {"kernels": 500, "launches": 10}, Budget(14, 6, 6, 6, 3)),
        ("quick", {"kernels": 2, "launches": 3}, Budget(2, 22, 4, 4, 2)),
        ("quick", {"kernels": 1, "launches": 2}, Budget(1, 29, 1, 1, 1)),
        ("quick", {"kernels": 40, "launches": 1}, Budget(14, 18, 0, 0, 3)),
        ("quick", {"kernels": 500, "launches": 10, "trials": 5}, Budget(4, 1, 0, 0, 3)),
        ("quick", {"kernels": 500, "launches": 10, "trials": 1}, Budget(1, 0, 0, 0, 3)),
        ("full", {"kernels": 500, "launches": 10}, Budget(187, 89, 110, 54, 6)),
        ("full", {"kernels": 500, "launches": 10, "trials": 4}, Budget(4, 0, 0, 0, 6)),
        ("full", {"kernels": 500, "launches": 10, "trials": 5}, Budget(4, 0, 1, 0, 6)),
        ("full", {"kernels": 500, "launches": 10, "trials": 6}, Budget(4, 0, 1, 1, 6)),
        ("exhaustive", {"kernels": 10, "launches": 4}, Budget(10, 0, 0, 24, 8)),
        ("exhaustive", {"kernels": 10, "launches": 4, "trials": 7}, Budget(7, 0, 0, 0, 8)),
        ("exhaustive", {"kernels": 10, "launches": 4, "trials": 12}, Budget(10, 0, 0, 2, 8)),
        ("exhaustive", {"kernels": 10, "launches": 4, "trials": 40}, Budget(10, 0, 0, 24, 8)),
        ("full", {"kernels": 0, "launches": 10}, Budget(0, 0, 0, 0, 0)),
    ],
)
def test_what_each_stage_gets(effort: Effort, space: dict[str, int], budget: Budget) -> None:
    found = budget_for(EFFORTS[effort].plan, **space)
    assert found == budget
    most = space.get("trials", EFFORTS[effort].plan.trials)
    assert not space["kernels"] or most is None or found.trials <= most


def test_only_a_quick_search_goes_on_without_slow_compiles() -> None:
    assert {name: one.compiling is not None for name, one in EFFORTS.items()} == {
        "quick": True, "full": False, "exhaustive": False
    }  # fmt: skip


def test_numbers_at_their_borders() -> None:
    assert [checked_trials(each) for each in (1, 2**53)] == [1, 2**53]
    assert [checked_seed(each) for each in (0, 2**32 - 1)] == [0, 2**32 - 1]
    for check, wrong in (
        (checked_trials, (0, 2**53 + 1, True, 1.0)), (checked_seed, (-1, 2**32, False, 10**5000))
    ):  # fmt: skip
        for each in wrong:
            with pytest.raises(SpaceError, match="give a whole number from"):
                check(each)  # type: ignore[arg-type]
    word: Any = "x" * 60
    with pytest.raises(SpaceError, match=f"trials = '{word}':"):
        checked_trials(word)
    with pytest.raises(SpaceError, match=re.escape(f"trials = '{word}...':")):
        checked_trials(word + "x")


def test_the_budget_of_tuning_online(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TUNEGEMM_ONLINE_BUDGET", raising=False)
    assert online_budget() == (60.0, "")
    for text, seconds in (("", 60.0), ("5", 5.0), ("0", 0.0), ("1e300", 2.0**53)):
        monkeypatch.setenv("TUNEGEMM_ONLINE_BUDGET", text)
        assert online_budget() == (seconds, "")
    for text in ("soon", "inf", "nan", "-1"):
        monkeypatch.setenv("TUNEGEMM_ONLINE_BUDGET", text)
        seconds, complaint = online_budget()
        assert seconds == 60.0 and complaint.startswith(f"TUNEGEMM_ONLINE_BUDGET='{text}' is not a number")
