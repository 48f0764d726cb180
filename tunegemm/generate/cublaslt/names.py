"""Translates between numbers and the names that cublasLt.h gives tiles, stages and shapes (names.txt).

A test compares the names with those of nvmath-python, which are generated from the header.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tunegemm.describe.space import Value

#: The epilogues of cublasLtMatmul that save a kernel of torch's, with their numbers in the header: it adds a
#: bias, then computes an activation (GELU by tanh), or adds a matrix C.
ADDED = {"residual": 1, "bias_n+residual": 4, "bias_n+relu": 6, "bias_n+gelu_tanh": 36}


@cache
def tables() -> dict[str, dict[int, str]]:
    """The name of each number, for each attribute with names. names.txt counts from 0; - means no name."""
    names: dict[str, dict[int, str]] = {}
    for word in Path(__file__).with_name("names.txt").read_text(encoding="utf-8").split():
        if word.endswith(":"):
            table, number = names.setdefault(word[:-1], {}), 0
            continue
        if word != "-":
            table[number] = word
        number += 1
    return names


@cache
def _numbers(attribute: str) -> dict[str, int]:
    return {name: number for number, name in tables()[attribute].items()}


def name_of(attribute: str, number: int) -> Value:
    """The name of an attribute's value; the number itself if it has no name, as in a newer library."""
    return tables().get(attribute, {}).get(number, number)


def number_of(attribute: str, value: Value) -> int:
    """The number of an attribute's value. Raises ValueError for an unknown name."""
    if not isinstance(value, str):
        return int(value)
    if attribute not in tables() or value not in _numbers(attribute):
        raise ValueError(
            f"{attribute}={value!r} is not a name that this tunegemm knows; upgrade it or tune again"
        )
    return _numbers(attribute)[value]
