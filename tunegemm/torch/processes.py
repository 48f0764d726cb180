"""Work that a process, and each of its forked children, does until it ends."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from multiprocessing.util import Finalize, register_after_fork

#: Seconds between writes of a process that may be killed at any time.
_WRITE_EVERY_S = 3.0


def keep_writing(*, write: Callable[[], None], clear: Callable[[], None], last: Callable[[], None]) -> None:
    """Write a process's counts again and again, so that a killed process loses only seconds of them.

    last: called once, at the end. clear: forgets the counts of a child's parent. None of them raises.
    """

    def run() -> None:
        while True:
            time.sleep(_WRITE_EVERY_S)
            write()

    def at_exit(*_: object) -> None:
        # Not `atexit`: the children of multiprocessing end without it, and begin without older finalizers.
        Finalize(None, last, exitpriority=0)
        register_after_fork(at_exit, at_exit)

    def start() -> None:
        write()
        threading.Thread(target=run, name="tunegemm-count", daemon=True).start()
        at_exit()

    def forked() -> None:
        """In a forked child, which has none of its parent's threads."""
        clear()
        start()

    os.register_at_fork(after_in_child=forked)
    start()
