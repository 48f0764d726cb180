"""How `record` and `run` start another program, attach to its Python processes, and pass on each signal once.

A terminal, a batch system and ``kill -- -GROUP`` signal all processes of a group, so the program receives the
signal, too. A signal to this process alone, as to the first process of a container, is meant for the program
and must be passed on. A signal does not reveal its kind. So a *witness* waits in the same group: if it, too,
receives a signal, that signal went to the whole group.
"""

from __future__ import annotations

import math
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from tunegemm.cli import arguments
from tunegemm.errors import WorkloadError
from tunegemm.files import cause

#: Signals that cannot be caught, that stop and continue, that are ignored by default, and of a process's
#: own errors and timers.
_OTHERS = {
    signal.SIGKILL, signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGCONT,
    signal.SIGCHLD, signal.SIGURG, signal.SIGWINCH, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE,
    signal.SIGILL, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS, signal.SIGPIPE, signal.SIGALRM,
    signal.SIGVTALRM, signal.SIGPROF,
}  # fmt: skip
#: How long the witness may take to report a signal.
_WITNESS_S = 1.0
#: The system merges two equal signals if the second arrives before the first is handled. So a report of the
#: witness counts for a further signal of ours for this long, and is kept this long until ours is handled.
_AT_ONCE_S, _STALE_S = 0.1, 2.0

_WITNESS = """
import os, signal, sys, time
parent, heard = int(sys.argv[1]), {int(number) for number in sys.argv[2:]}
while os.getppid() == parent:
    if (found := signal.sigtimedwait(heard, 1.0)) is not None:
        os.write(1, b"%d %f\\n" % (found.si_signo, time.monotonic()))
"""


class Signals:
    """While it is entered, no signal that can be caught ends this process. A context manager."""

    def __init__(self) -> None:
        defaults = (signal.SIG_DFL, signal.default_int_handler)
        ends = signal.valid_signals() - _OTHERS
        self._numbers = {number for number in ends if signal.getsignal(number) in defaults}
        """Signals that nobody ignores (as under `nohup`) or handles; the program starts with the others."""
        self._before: dict[int, Any] = {}
        self._program: subprocess.Popen[bytes] | None = None
        self._early: list[int] = []
        """What came before there was a program."""
        self.witnessed_s: dict[int, list[float]] = {}
        """When the witness got each signal."""
        self.matched_s: dict[int, float] = {}
        """The times at which we received them last."""

    def __enter__(self) -> Self:
        for number in self._numbers:
            self._before[number] = signal.signal(number, self._receive)
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, self._numbers)  # the witness begins with them so
        try:
            self.witness = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _WITNESS, str(os.getpid()), *map(str, self._numbers)],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0,
                cwd="/",
            )  # fmt: skip
        except OSError:
            self._restore()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()
        self.witness.kill()
        self.witness.communicate()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def run(self, program: list[str], variables: Mapping[str, str], command: str) -> int:
        """Runs a program: its exit code; 128 or more if a signal ended it, as in a shell.

        command: our command that runs it, for messages.
        """
        try:
            self._program = subprocess.Popen(program, env=os.environ | variables)
        except OSError as error:
            raise arguments.UsageError(
                f"{program[0]}: {error.strerror}; a script runs as: tunegemm {command} -- python {program[0]}"
            ) from None
        for number in self._early:
            self._program.send_signal(number)
        code = self._program.wait()
        return code if code >= 0 else 128 - code

    def _receive(self, number: int, _: Any) -> None:
        if self._program is None:
            self._early.append(number)
        elif not self.is_for_all(number):
            with suppress(ProcessLookupError, PermissionError):
                self._program.send_signal(number)  # a no-op if it has ended

    def is_for_all(self, number: int) -> bool:
        """Whether the witness got the signal, too."""
        start = time.monotonic()
        while True:
            for moment in self.witnessed_s.get(number, ()):
                if moment > start - _STALE_S:
                    self.witnessed_s[number] = []
                    self.matched_s[number] = moment
                    return True
            if self.matched_s.get(number, -math.inf) > start - _AT_ONCE_S:
                return True
            if not self.listen(start + _WITNESS_S):
                return False

    def listen(self, deadline: float) -> bool:
        """Whether the witness reported anything before the deadline; false if it was killed."""
        pipe = self.witness.stdout
        assert pipe is not None
        ready, _, _ = select.select([pipe], [], [], max(0, deadline - time.monotonic()))
        words = pipe.read(4096).split() if ready else []
        for item, moment in zip(words[::2], words[1::2], strict=True):
            self.witnessed_s.setdefault(int(item), []).append(float(moment))
        return bool(words)


#: Holds the `sitecustomize` that begins in each Python process.
_START = Path(__file__).parent.parent / "torch" / "start"


def attached(**variables: str) -> dict[str, str]:
    """The variables that make Python processes attach, with their own."""
    path = os.pathsep.join(filter(None, [str(_START), os.environ.get("PYTHONPATH", "")]))
    return {"PYTHONPATH": path, **variables}


def folder(prefix: str) -> tempfile.TemporaryDirectory[str]:
    """For the files of each process. Raises WorkloadError if it cannot be created."""
    try:
        return tempfile.TemporaryDirectory(prefix=prefix)
    except OSError as error:
        raise WorkloadError(f"no temporary folder: {cause(error, 'set TMPDIR')}") from None
