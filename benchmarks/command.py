"""The command lines of benchmarks and fits: how they begin and how they end."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tunegemm.errors import TunegemmError

#: Given the words after the module's name or, for None, those of this process.
Main = Callable[[Sequence[str] | None], int | None]


def parser_of(name: str, text: str | None, *, gpu: bool = True) -> argparse.ArgumentParser:
    """The parser of the module of that name, such as benchmarks.peers, whose docstring is the text.

    gpu: whether it measures on one: it takes `--device` then, and `--out`, which the module may explain anew.
    """
    description = (text or "").partition("\n")[0]
    parser = argparse.ArgumentParser(
        prog=f"python -m {name}", description=description, conflict_handler="resolve"
    )
    if gpu:
        parser.add_argument("--device", default="cuda:0", help="cuda:N (default: %(default)s)")
        parser.add_argument("--out", type=Path, help="folder of the result file (default: results/GPU)")
    return parser


def command(main: Main) -> Callable[..., int]:
    """A command line that ends with 0 where `main` returns nothing, and for bad input or without a GPU with 2
    and one line that says so."""

    @functools.wraps(main)
    def run(arguments: Sequence[str] | None = None) -> int:
        try:
            return main(arguments) or 0
        except TunegemmError as error:
            print(error, file=sys.stderr)
            return 2

    return run


def chosen(text: str, known: Sequence[str], option: str) -> list[str]:
    """The names of a text such as ``a,b``. Raises TunegemmError for one that is not known."""
    names = [name for name in text.split(",") if name] or [""]
    if unknown := [name for name in names if name not in known]:
        raise TunegemmError(f"--{option} {unknown[0]!r} is not known; use some of {','.join(known)}")
    return names


def choose_names(options: argparse.Namespace, **known: Sequence[str]) -> None:
    """Makes the `chosen` names of the text of each option of these names."""
    for name, those in known.items():
        setattr(options, name, chosen(getattr(options, name), those, name))
