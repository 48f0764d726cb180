"""Warnings about products that fall back to torch: one for each weight, and a summary at exit.

A weight is a product regardless of its number of rows, which can differ with every request.
"""

from __future__ import annotations

import atexit
import os
import sys
import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from tunegemm.describe.command import tune_command
from tunegemm.describe.problem import Problem
from tunegemm.errors import TunegemmError, TunegemmWarning, one_line
from tunegemm.generate import families

#: Most warnings in a process. Each concerns another weight or is of another kind; attention's products have
#: a weight for each sequence length.
MOST_WARNINGS = 64
#: Most weights that a summary names.
MOST_WEIGHTS = 1024


class Notices:
    """The warnings already issued, and the weights that had no kernel."""

    def __init__(self) -> None:
        self._issued: set[Hashable] = set()
        self._untuned: dict[Hashable, _Rows] | None = None

    def warn(self, message: str | Callable[[], str], about: Hashable = None) -> None:
        """Issue a warning, unless one with the same subject was issued before.

        message: the text, or a function that is called only if the warning is issued. about: the subject;
        None uses the message itself.
        """
        about = message if about is None else about
        if about in self._issued or len(self._issued) > MOST_WARNINGS:
            return
        self._issued.add(about)
        text = message if isinstance(message, str) else message()
        if len(self._issued) > MOST_WARNINGS:
            text += f". This is warning {MOST_WARNINGS + 1}, the last one"
        warnings.warn(text, TunegemmWarning, stacklevel=_callers_level())

    def forget(self) -> None:
        """Allow warnings that were already issued."""
        self._issued.clear()

    def sum_up(self) -> None:
        """Collect the problems passed to `untuned` from now on, and print them when the process ends."""
        if self._untuned is None:
            self._untuned = {}
            atexit.register(self._print, os.getpid())

    @property
    def sums_up(self) -> bool:
        """Whether every problem without a kernel must be passed to `untuned`."""
        return self._untuned is not None

    def untuned(self, problem: Problem) -> None:
        """Add a problem without a kernel to the summary, if there is to be one."""
        if self._untuned is None:
            return
        key = weight_of(problem)
        if (rows := self._untuned.get(key)) is not None:
            rows.add(problem)
        elif len(self._untuned) < MOST_WEIGHTS:
            self._untuned[key] = _Rows(problem, problem.m)

    def _print(self, owner: int) -> None:
        if os.getpid() != owner:  # in a forked child, which did not fall back itself
            return
        for line in self.summary():
            print(f"tunegemm: {line}", file=sys.stderr)

    def summary(self) -> list[str]:
        """A line for each weight that fell back because it has no record, with the command that tunes it.

        A last line counts weights beyond the limit.
        """
        untuned = self._untuned or {}
        lines = [str(rows) for rows in list(untuned.values())]
        if len(untuned) == MOST_WEIGHTS:
            lines.append(f"further products than these {MOST_WEIGHTS} also ran in torch")
        return lines


@dataclass
class _Rows:
    """The numbers of rows by which a weight was multiplied."""

    most: Problem
    """The product with the most rows."""
    least: int
    numbers: int = 1

    def add(self, problem: Problem) -> None:
        self.numbers += 1
        self.least = min(self.least, problem.m)
        if problem.m > self.most.m:
            self.most = problem

    def __str__(self) -> str:
        more = f" and other numbers of rows from {self.least} up" if self.numbers > 1 else ""
        return f"torch computed {self.most}{more}, without a record: {tune_command(self.most)}"


def who(name: str) -> str:
    """The function that was called, as warnings name it."""
    return f"tunegemm.{name}" if name else "tunegemm"


def advice(problem: Problem, words: str) -> str:
    """How to get a kernel for the problem, or why tuning cannot produce one."""
    if reason := families.refusal_by_all(problem):
        return f"It can have no tuned kernel: {reason}"
    return f"{words}: {tune_command(problem)}"


def named_error(error: BaseException) -> str:
    """An error in one line. Includes the type's name for unfamiliar types: a KeyError's text says little."""
    line = one_line(error)
    is_known = isinstance(error, TunegemmError | ValueError | RuntimeError) or line == type(error).__name__
    return line if is_known else f"{type(error).__name__}: {line}"


def weight_of(problem: Problem) -> tuple[Hashable, ...]:
    """The parts of a problem that do not depend on its number of rows or batch size."""
    return (
        problem.n, problem.k, problem.alignment, problem.in_dtype, problem.out_dtype, problem.accumulation,
        problem.a_major, problem.b_major, problem.out_major, problem.epilogue,
        problem.groups,
    )  # fmt: skip


def _callers_level() -> int:
    """The `stacklevel` at which warnings.warn, called by our caller, names the user's line."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("tunegemm."):
        level, frame = level + 1, frame.f_back
    return level
