"""How `record` and `run` start another program, and attach to the Python processes that come of it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tunegemm.cli import options

#: Holds the `sitecustomize` that begins in each Python process.
_START = Path(__file__).parent.parent / "serve" / "torch" / "start"


def attached(**variables: str) -> dict[str, str]:
    """The variables that make Python processes attach, with their own."""
    path = os.pathsep.join(filter(None, [str(_START), os.environ.get("PYTHONPATH", "")]))
    return {"PYTHONPATH": path, **variables}


def run(program: list[str], variables: Mapping[str, str], command: str) -> int:
    """The program's exit code; 128 and more where a signal ended it, as in a shell.

    command: the one of ours that runs it, for messages.
    """
    try:
        process = subprocess.Popen(program, env=os.environ | variables)
    except OSError as error:
        raise options.UsageError(
            f"{program[0]}: {error.strerror}; a script runs as: tunegemm {command} -- python {program[0]}"
        ) from None
    before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        while True:
            try:
                code = process.wait()
                break
            except KeyboardInterrupt:  # the terminal told the program, too: it decides how it ends
                continue
    finally:
        signal.signal(signal.SIGTERM, before)
    return code if code >= 0 else 128 - code
