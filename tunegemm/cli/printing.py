"""Prints lines, commands to copy, tables, and progress of slow steps."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO, cast

import typer

from tunegemm.report.text import clean

if TYPE_CHECKING:
    from rich.console import Console

#: Most letters of a printed line; a message that lists values may be long.
_LONGEST_LINE = 4000


def say(*lines: object, err: bool = False, hang: int = 0, lead: str = "", colour: str | None = None) -> None:
    """Prints each object as one line, with its control characters removed (`report.text.clean`). A terminal
    wraps it between words, indented by `hang` columns from the second line on; commands and paths stay whole.

    err: on stderr. lead: prefix of each line, on a terminal in `colour`.
    """
    stream = sys.stderr if err else sys.stdout
    width = shutil.get_terminal_size().columns if stream.isatty() else 0
    for line in lines:
        text = lead + clean(line, _LONGEST_LINE)
        if len(text) > width > hang + 20 and not text.lstrip().startswith("tunegemm "):
            text = textwrap.fill(
                text, width, subsequent_indent=" " * hang, break_long_words=False, break_on_hyphens=False
            )
        typer.echo(typer.style(lead, fg=colour) + text.removeprefix(lead) if colour else text, err=err)


def say_command(lead: str, command: str, *, err: bool = False) -> None:
    """A command to copy: whole and alone on its line, under the words that lead to it."""
    say(lead, f"  {command}", err=err)


@contextmanager
def working(step: str) -> Iterator[Callable[[str], None]]:
    """Shows a slow step on a terminal until it is done; the yielded function changes the text."""
    console = stderr_console()
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status(f"{step} ...") as status:
        yield lambda now: status.update(f"{clean(now)} ...")


def stdout_console() -> Console:
    """For tables. Pipes and logs have no width, so nothing is cut to 80 columns there."""
    return _console(sys.stdout)


def stderr_console() -> Console:
    """For output beside the result: progress, notes, warnings."""
    return _console(sys.stderr)


class _Lines:
    """Takes the blanks off the ends of lines, with which a table fills its last column."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(re.sub(r" +(?=\n)", "", text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)  # its encoding, too: tables in others than UTF-8 are of ASCII


def _console(stream: TextIO) -> Console:
    from rich.console import Console

    how: dict[str, Any] = {"markup": False, "emoji": False, "highlight": False}
    console = Console(file=stream, **how)
    return console if console.is_terminal else Console(**how, file=cast(TextIO, _Lines(stream)), width=240)
