"""The interface of a foreign file format, `Format`, and helpers that formats share.

A format is a module beside this one with a `FORMAT`, and an entry in `foreign.FORMATS`. `Problem` decides
which dtypes have kernels; a format only translates other tools' names for them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from tunegemm.describe.epilogue import operand_dtype
from tunegemm.describe.problem import DTYPE_BYTES, MAX_ALIGNMENT, OUTPUT_DTYPES, Problem, normalize_dtype
from tunegemm.errors import ProblemError

#: Entries of a file, each with its place, such as ``line 3``.
Entries = list[tuple[str, Any]]


@dataclass(frozen=True)
class Format:
    """A kind of file that another tool writes."""

    name: str
    """Its name in messages, such as ``CUTLASS's JSON list of problems``."""
    entries: Callable[[str], Entries | None]
    """The entries of a file's text; None for a file of another kind. Raises BadValueError for a damaged
    one."""
    problems: Callable[[Any], Iterable[Problem]]
    """The problems of an entry. Raises ProblemError or BadValueError, which names the entry, if it has no
    kernels."""


#: How JSON of objects begins: a line of a log may begin with a bracket, too, and go on with a date.
_JSON = re.compile(r"\s*(\[\s*[{\]]|\{\s*[\"}]|[\[{]\s*\Z)")


def is_json(text: str) -> bool:
    """Whether a text starts like JSON objects."""
    return _JSON.match(text) is not None


#: Spellings of other tools.
_NAMES = {"f16": "fp16", "f32": "fp32", "s8": "int8", "s32": "int32"}


def dtype_of(name: str) -> str:
    """tunegemm's name of a dtype. Raises ProblemError if there is none."""
    name = name.lower()
    return normalize_dtype(_NAMES.get(name, name), OUTPUT_DTYPES)


def check_addend(problem: Problem, name: str, dtype: str) -> None:
    """Raises ProblemError if an operand of the epilogue has another dtype than kernels add."""
    operand = next(operand for operand in problem.fused.operands if operand.name == name)
    if (wanted := operand_dtype(operand, problem.out_dtype)) != dtype:
        raise ProblemError(
            f"a {name} of {dtype} beside an output of {problem.out_dtype}: kernels add {wanted}"
        )


def aligned(problem: Problem, steps: Iterable[int], most: int) -> Problem:
    """The problem with these leading dimensions, in elements, and addresses of at most this alignment."""
    size = DTYPE_BYTES[problem.in_dtype]
    return replace(problem, alignment=math.gcd(MAX_ALIGNMENT, most, *(step * size for step in steps)))
