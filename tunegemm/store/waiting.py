"""How long reading may wait for others, as for a database's lock: dispatch has one deadline over it all."""

from __future__ import annotations

import contextvars
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

#: When reading must end, by the monotonic clock, in this context; a caller that cannot wait sets it.
deadline_s: contextvars.ContextVar[float] = contextvars.ContextVar("deadline_s", default=math.inf)


def left_s(most: float) -> float:
    """Remaining seconds to wait, up to a limit."""
    return max(0.0, min(most, deadline_s.get() - time.monotonic()))


def in_time(function: Callable[[], T], late: Callable[[T], None], most: float = math.inf) -> T:
    """The result of a function that asks a network, which may not answer.

    late: called with a result that came after the deadline. most: seconds to wait without one. Raises
    TimeoutError if no result came in time, and any error of the function.
    """
    if min(deadline_s.get(), most) == math.inf:
        return function()
    answer: Future[T] = Future()
    context = contextvars.copy_context()

    def ask() -> None:
        try:
            answer.set_result(context.run(function))
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=ask, name="tunegemm-read", daemon=True).start()
    try:
        return answer.result(left_s(most))
    except TimeoutError:

        def end(answer: Future[T]) -> None:
            if answer.exception() is None:
                late(answer.result())

        answer.add_done_callback(end)
        raise
