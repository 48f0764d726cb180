"""Warnings about products that fall back to torch: one for each weight.

A weight is a product regardless of its number of rows, which can differ with every request.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Hashable

from tunegemm.describe.command import tune_command
from tunegemm.describe.problem import Problem
from tunegemm.errors import TunegemmError, TunegemmWarning, one_line
from tunegemm.generate import families

#: Most warnings in a process. Each concerns another weight or is of another kind; attention's products have
#: a weight for each sequence length.
MOST_WARNINGS = 64


class Notices:
    """The warnings already issued."""

    def __init__(self) -> None:
        self._issued: set[Hashable] = set()

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
