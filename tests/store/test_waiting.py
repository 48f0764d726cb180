"""Reading ends by a deadline: what is left of it, and what becomes of a result that comes later."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator

import pytest

from tunegemm.store.waiting import deadline_s, in_time, left_s


@pytest.fixture
def in_half_a_second() -> Iterator[None]:
    token = deadline_s.set(time.monotonic() + 0.5)
    yield
    deadline_s.reset(token)


def test_without_a_deadline_the_limit_is_left_and_a_function_runs_here() -> None:
    assert left_s(3.0) == 3.0 and left_s(math.inf) == math.inf
    assert in_time(threading.get_ident, lambda _: None) == threading.get_ident()


def test_what_is_left_is_the_less_of_limit_and_deadline_and_never_below_0(in_half_a_second: None) -> None:
    assert 0.0 < left_s(3.0) <= 0.5 and left_s(0.001) == 0.001
    deadline_s.set(time.monotonic() - 1)
    assert left_s(3.0) == 0.0


def test_a_function_in_another_thread_has_the_deadline_and_its_result_or_error_comes_back(
    in_half_a_second: None,
) -> None:
    assert in_time(deadline_s.get, lambda _: None) == deadline_s.get()
    assert in_time(threading.get_ident, lambda _: None) != threading.get_ident()
    with pytest.raises(KeyError, match="lost"):
        in_time(lambda: {}["lost"], lambda _: None)


def test_a_result_after_the_deadline_is_a_timeout_and_goes_to_late(in_half_a_second: None) -> None:
    go_on, ended, late = threading.Event(), threading.Event(), []

    def end(result: str) -> None:
        late.append(result)
        ended.set()

    start = time.monotonic()
    with pytest.raises(TimeoutError):
        in_time(lambda: go_on.wait(30) and "answer", end)
    assert 0.4 < time.monotonic() - start < 10 and not late
    go_on.set()
    assert ended.wait(10) and late == ["answer"]
