"""How long reading may wait for others, as for a database's lock: dispatch has one deadline over it all."""

from __future__ import annotations

import contextvars
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

#: When reading must end, by the monotonic clock, in this context; a caller that cannot wait sets it.
deadline_s: contextvars.ContextVar[float] = contextvars.ContextVar("deadline_s", default=math.inf)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Bound all waiting inside together; an earlier deadline of the context stays."""
    token = deadline_s.set(min(deadline_s.get(), time.monotonic() + seconds))
    try:
        yield
    finally:
        deadline_s.reset(token)


def left_s(most: float) -> float:
    """Remaining seconds to wait, up to a limit."""
    return max(0.0, min(most, deadline_s.get() - time.monotonic()))


def in_time(function: Callable[[], T], late: Callable[[T], None]) -> T:
    """The result of a function that asks a network, which may not answer.

    late: called with a result that came after the deadline. Raises TimeoutError if no result came in time,
    and any error of the function.
    """
    if deadline_s.get() == math.inf:
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
        return answer.result(left_s(math.inf))
    except TimeoutError:

        def end(answer: Future[T]) -> None:
            if answer.exception() is None:
                late(answer.result())

        answer.add_done_callback(end)
        raise
