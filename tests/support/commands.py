"""The command line, in this process or in one of its own.

A process of its own costs seconds of imports, so it is for what only that shows: signals, exit codes,
descriptors, the locale, and what a command loads.
"""

from __future__ import annotations

import contextlib
import functools
import subprocess
import sys
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import typer.main
import typer.testing
from typer.testing import CliRunner

from tests.support.processes import environment
from tunegemm.cli import app

#: What a process makes of its functions once, in 23 ms; the runner would do so for each command.
typer.testing._get_command = functools.cache(typer.main.get_command)  # type: ignore[attr-defined]

#: How a process of its own begins.
TUNEGEMM = (sys.executable, "-m", "tunegemm")


def here(*arguments: str | Path, code: int | None = 0, cwd: Path | None = None) -> CompletedProcess[str]:
    """What a command that ends with that code prints, without a traceback; None: with any code."""
    words = [*map(str, arguments)]
    with contextlib.chdir(cwd) if cwd else contextlib.nullcontext():
        result = CliRunner().invoke(app, words)
    if not isinstance(result.exception, SystemExit | None):
        raise AssertionError(words) from result.exception
    done = CompletedProcess(words, result.exit_code, result.stdout, result.stderr)
    assert code is None or done.returncode == code, done
    return done


def printed(*arguments: str | Path, code: int = 0) -> tuple[str, str]:
    """Its standard output and errors."""
    done = here(*arguments, code=code)
    return done.stdout, done.stderr


def process(*arguments: str | Path, code: int | None = 0, **options: Any) -> CompletedProcess[str]:
    """The same in a process of its own."""
    given = {"env": environment(), "capture_output": True, "text": True, "timeout": 170} | options
    done = subprocess.run([*TUNEGEMM, *map(str, arguments)], **given)
    assert code is None or done.returncode == code, done
    return done
