"""The process of a compile worker: it sees no GPU, and compiles one kernel after the other.

`tunegemm.compile.pool` starts it as `python -m tunegemm.compile.worker`, with the name of the module where it
finds families, and the descriptor of its connection last.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
import tempfile
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from tunegemm.compile.ptxas import Resources
from tunegemm.errors import is_transient

_PR_SET_PDEATHSIG = 1
_NICENESS = 15


class Failure(NamedTuple):
    """A worker's report of a job that it could not do."""

    reason: str
    errno: int | None
    is_transient: bool
    """See `tunegemm.errors.is_transient`."""


def serve(connection: Connection, families_module: str) -> None:
    """The worker's loop, until the pool closes the connection."""
    families: Any = importlib.import_module(families_module)  # tunegemm.generate.families, or a test's
    families.import_compiler()
    with suppress(EOFError):
        while True:
            family, key, out = connection.recv()
            tempfile.tempdir = str(out.parent)  # the pool deletes it, even if this process is killed
            try:
                reply: Resources | Failure = families.compiler(family).compile(key, out)
            except Exception as error:  # the compiler may raise anything; it becomes this candidate's failure
                number = error.errno if isinstance(error, OSError) else None
                reason = _with_culprit(family, families, error)
                reply = Failure(reason, number, is_transient(error) or is_transient(reason))
            connection.send(reply)


def _with_culprit(family: str, families: Any, error: Exception) -> str:
    """The error in one line. If code of the family raised it that is in no kernel, the line says so: no hash
    tells when that code is mended, so the failure must not be remembered of its kernels.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    with suppress(Exception):  # a family that cannot be loaded
        assert trace is not None
        place, sources = Path(trace.tb_frame.f_code.co_filename), families.compiler(family).sources
        if place not in sources and place.parent in {source.parent for source in sources}:
            return f"{family}'s own code failed at {place.name}:{trace.tb_lineno}: {one_line(error)}"
    return one_line(error)


def _lower_priority() -> None:
    """Leave the processors to others, and end with the thread that started this process.

    The end of the connection does not stop a compiling worker, or if a fork holds the other end, too.
    """
    os.nice(_NICENESS)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def one_line(error: BaseException) -> str:
    """The error in one line of at most 300 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    fatal = next((line for line in lines if "fatal" in line.lower()), lines[0] if lines else "")
    return f"{type(error).__name__}: {fatal}"[:300]


if __name__ == "__main__":
    if sys.argv[2] == "low":
        _lower_priority()
    # Imported under the pool's name for it, so that sent objects have the pool's classes.
    importlib.import_module("tunegemm.compile.worker").serve(Connection(int(sys.argv[-1])), sys.argv[1])
