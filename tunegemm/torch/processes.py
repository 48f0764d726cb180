"""Work that a process, and each of its forked children, does until it ends."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from multiprocessing.util import Finalize, register_after_fork

#: Seconds between writes of a process that may be killed at any time.
_WRITE_EVERY_S = 3.0


class Writer:
    """Writes a process's counts again and again, so that a killed process loses only seconds of them."""

    def __init__(
        self, *, write: Callable[[bool], None], clear: Callable[[], None], last: Callable[[bool], None]
    ) -> None:
        """write: called with whether this is a forked child. last: called with the same, once, at the end.
        clear: forgets the counts of a child's parent. None of them raises."""
        self._write, self._clear, self._last = write, clear, last
        self._is_child = False
        os.register_at_fork(after_in_child=self._forked)

    def start(self) -> None:
        self._write(self._is_child)
        threading.Thread(target=self._run, name="tunegemm-count", daemon=True).start()
        self._at_exit()

    def _run(self) -> None:
        while True:
            time.sleep(_WRITE_EVERY_S)  # a killed process loses no more than this
            self._write(self._is_child)

    def _at_exit(self) -> None:
        # Not `atexit`: the children of multiprocessing end without it, and begin without older finalizers.
        Finalize(None, self._last, (self._is_child,), exitpriority=0)
        register_after_fork(self, Writer._at_exit)

    def _forked(self) -> None:
        """In a forked child, which has none of its parent's threads."""
        self._clear()
        self._is_child = True
        self.start()
