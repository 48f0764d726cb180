"""Waits for what another process or thread does, in place of a sleep that hopes for it."""

import time
from collections.abc import Callable


def until(happened: Callable[[], object], *, seconds: float = 60.0) -> None:
    """Returns once the condition holds; fails when it does not within the time."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, f"did not happen within {seconds:g} s"
        time.sleep(0.02)  # then asked again, with the deadline above
