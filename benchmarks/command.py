"""The command lines of benchmarks and fits: how they begin and how they end."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tunegemm.errors import TunegemmError

#: Takes the arguments after the module's name; None: this process's arguments.
Main = Callable[[Sequence[str] | None], int | None]


def parser_of(
    name: str, text: str | None, *, gpu: bool = True, rounds: int | None = None
) -> argparse.ArgumentParser:
    """The parser of the module with that name, such as benchmarks.peers; text: the module's docstring.

    gpu: whether it measures on a GPU: it then has `--device` and `--out`, whose help the module may replace.
    rounds: by default, of a program that times rows in rounds until `--seconds` are over.
    """
    description = (text or "").partition("\n")[0]
    parser = argparse.ArgumentParser(
        prog=f"python -m {name}", description=description, conflict_handler="resolve"
    )
    if gpu:
        parser.add_argument("--device", default="cuda:0", help="cuda:N (default: %(default)s)")
        parser.add_argument("--out", type=Path, help="folder of the result file (default: results/GPU)")
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds, help="interleaved rounds; fewer with turns")
        parser.add_argument("--seconds", type=float, default=0, help="begin no further row after so many")
    return parser


def add_names(
    parser: argparse.ArgumentParser, option: str, known: Iterable[str], *, default: str | None = None,
    help: str = "some of %(default)s",
) -> None:  # fmt: skip
    """Adds an option whose value is a list of known names, such as ``--modes eager,graph``; by default all.

    An unknown name is a TunegemmError.
    """
    those = tuple(known)
    parser.add_argument(
        f"--{option}", default=",".join(those) if default is None else default, help=help,
        type=lambda text: chosen(text, those, option) if text or default is None else [],
    )  # fmt: skip


def command(main: Main) -> Callable[..., int]:
    """A command line that ends with 0 if `main` returns nothing, and with 2 and a one-line message for bad
    input or without a GPU."""

    @functools.wraps(main)
    def run(arguments: Sequence[str] | None = None) -> int:
        try:
            return main(arguments) or 0
        except TunegemmError as error:
            print(error, file=sys.stderr)
            return 2

    return run


def chosen(text: str, known: Sequence[str], option: str) -> list[str]:
    """The names in a text such as ``a,b``. Raises TunegemmError for an unknown name."""
    names = [name for name in text.split(",") if name] or [""]
    if unknown := [name for name in names if name not in known]:
        raise TunegemmError(f"--{option} {unknown[0]!r} is not known; use some of {','.join(known)}")
    return names
