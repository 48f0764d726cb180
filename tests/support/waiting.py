"""Waits for what another process or thread does, in place of a sleep that hopes for it."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(happened: Callable[[], T], *, seconds: float = 60.0) -> T:
    """Returns the condition's value once it is truthy; fails if that takes longer than the time."""
    deadline = time.monotonic() + seconds
    while not (value := happened()):
        assert time.monotonic() < deadline, f"did not happen within {seconds:g} s"
        time.sleep(0.02)  # then asked again, with the deadline above
    return value
