"""Tunings with planted faults end right, and leave nothing behind."""

from __future__ import annotations

import pytest

from benchmarks.endurance import endure


@pytest.mark.slow
def test_each_ends_right_and_nothing_is_left_over() -> None:
    found = endure(6)  # one is interrupted, two run out of time, two lose their worker
    assert found["wrong"] == [] and found["left_over"] == []
    assert found["ended"]["ended"] == 6 and found["ended"]["interrupted"] >= 1
