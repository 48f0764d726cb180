"""How `record` and `run` start another program, and attach to the Python processes that come of it."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tunegemm.cli import arguments
from tunegemm.cli.signals import Signals
from tunegemm.errors import WorkloadError
from tunegemm.files import cause

#: Holds the `sitecustomize` that begins in each Python process.
_START = Path(__file__).parent.parent / "serve" / "torch" / "start"


def attached(**variables: str) -> dict[str, str]:
    """The variables that make Python processes attach, with their own."""
    path = os.pathsep.join(filter(None, [str(_START), os.environ.get("PYTHONPATH", "")]))
    return {"PYTHONPATH": path, **variables}


def folder(prefix: str) -> tempfile.TemporaryDirectory[str]:
    """For what each process writes. Raises WorkloadError where none can be made."""
    try:
        return tempfile.TemporaryDirectory(prefix=prefix)
    except OSError as error:
        raise WorkloadError(f"no temporary folder: {cause(error, 'name one in TMPDIR')}") from None


def run(program: list[str], variables: Mapping[str, str], command: str, signals: Signals) -> int:
    """The program's exit code; 128 and more where a signal ended it, as in a shell.

    command: the one of ours that runs it, for messages.
    """

    def start() -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(program, env=os.environ | variables)
        except OSError as error:
            raise arguments.UsageError(
                f"{program[0]}: {error.strerror}; a script runs as: tunegemm {command} -- python {program[0]}"
            ) from None

    code = signals.run(start)
    return code if code >= 0 else 128 - code
