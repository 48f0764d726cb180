"""What is planned ahead of its tuning, and what is not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tunegemm.compile.pool import Urgency
from tunegemm.describe.device import find_device
from tunegemm.describe.problem import Problem
from tunegemm.tuning import ahead

FITS, TOO_LARGE = Problem(512, 6144, 4096), Problem(400_000, 400_000, 64)


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("problem", [FITS, TOO_LARGE], ids=str)
def test_only_what_is_known_and_fits_is_planned(
    monkeypatch: pytest.MonkeyPatch, problem: Problem, is_known: bool
) -> None:
    asked: list[Problem] = []

    def ranked(kernels: Any, problem: Problem, *_: Any, **__: Any) -> list[Any]:
        asked.append(problem)
        return []

    monkeypatch.setattr(ahead, "ranked_families", ranked)
    kernels: Any = SimpleNamespace(device=find_device("model:h200"))
    pool: Any = SimpleNamespace()
    planning = ahead.Ahead(kernels, pool, is_known=is_known)
    assert planning.ranked_by(problem, "quick", None, Urgency.NOW) == []
    assert asked == [FITS] * (is_known and problem is FITS)
    planning.close()
