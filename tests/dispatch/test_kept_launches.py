"""How long decisions of other families are kept, on a clock that stands still."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tunegemm.dispatch import api, extension
from tunegemm.dispatch.extension import LaunchCache
from tunegemm.dispatch.planning import Planner


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(extension, "time", found)
    monkeypatch.setattr(extension, "LOOK_SECONDS", 5.0)
    return found


@pytest.fixture
def planner(serve) -> Iterator[Planner]:
    before = api.serve_by(serve())
    api.dispatcher.planner.quick.until = float("inf")
    yield api.dispatcher.planner
    api.serve_by(before)


@pytest.mark.parametrize(
    ("now_s", "next_look", "looks", "is_known"),
    [(104.9, 1e9, 0, True), (105.0, 1e9, 1, True), (105.1, 1e9, 0, False), (103.0, 103.0, 1, True),
     (102.9, 103.0, 0, True)],
)  # fmt: skip
def test_a_decision_that_waits_holds_for_seconds(
    monkeypatch: pytest.MonkeyPatch, planner: Planner, clock: Clock,
    now_s: float, next_look: float, looks: int, is_known: bool,
) -> None:  # fmt: skip
    looked: list[bool] = []
    monkeypatch.setattr(planner, "look", lambda: looked.append(True) or planner.state)
    planner.quick.until = next_look
    cache, x = LaunchCache(), torch.empty(2, 3)
    known = cache.keep("a key", None, x, waits=True)
    assert known.again == 105.0
    clock.now_s = now_s
    assert cache.find("a key", x) == (known if is_known else None)
    assert len(looked) == looks
    assert cache.find("another", x) is None


def test_a_decision_for_torch_ends_with_new_records(
    monkeypatch: pytest.MonkeyPatch, planner: Planner, clock: Clock
) -> None:
    cache, x = LaunchCache(), torch.empty(2, 3)
    known = cache.keep("a key", None, x)
    launch = cache.keep("another key", "a launch", x)
    assert known.again == float("inf")
    planner.quick.until = 0.0
    monkeypatch.setattr(planner, "look", lambda: "another state")
    assert cache.find("a key", x) is None and cache.find("another key", x) is launch
    monkeypatch.setattr(extension, "capturing", lambda device: True)
    assert cache.find("a key", x) is known, "nothing can be decided in a capture"


@pytest.mark.parametrize("family", ["cute_sm90", ""])
def test_which_family_serves(monkeypatch: pytest.MonkeyPatch, planner: Planner, family: str) -> None:
    asked: list[Any] = []
    record = SimpleNamespace(candidate=SimpleNamespace(family=family))
    result = (None, None, record) if family else None
    monkeypatch.setattr(
        planner, "expected", lambda form, a, b, index: asked.append((a.shape, b.stride(), index)) or result
    )
    for device in (torch.device("cuda", 3), torch.device("cuda")):
        weight: Any = SimpleNamespace(
            shape=(3, 4), stride=lambda: (1, 3), dtype=torch.bfloat16, device=device
        )
        assert extension.serves_by(None, 2, weight) == family  # type: ignore[arg-type]
    assert asked == [((2, 3), (1, 3), 3), ((2, 3), (1, 3), 0)]
    monkeypatch.setattr(planner, "recorded_groups", lambda problem, index: index)
    assert [extension.recorded(None, torch.device(name)) for name in ("cuda:2", "cuda")] == [2, 0]  # type: ignore[arg-type]
    assert extension.gpu_of(torch.device("cpu")) == ""


@pytest.mark.parametrize(
    ("problem", "record", "is_tuned"), [(1, 2, True), (None, 2, False), (1, None, False)]
)
def test_tuned_problems_have_a_plan_with_a_record(
    planner: Planner, problem: Any, record: Any, is_tuned: bool
) -> None:
    planner.state.plans["a key"] = SimpleNamespace(problem=problem, record=record)  # type: ignore[index, assignment]
    planner.state.plans["another"] = None  # type: ignore[index]
    assert planner.tuned() == ([(1, 2)] if is_tuned else [])
