"""What cublasLt.h calls the tiles, stages and shapes of its algorithms: names.txt, by their numbers.

A test compares them with those of nvmath-python, which are made of the header.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tunegemm.describe.space import Value


@cache
def tables() -> dict[str, dict[int, str]]:
    """Names by number, of each attribute that has names. Those of names.txt count from 0; - has none."""
    found: dict[str, dict[int, str]] = {}
    for word in Path(__file__).with_name("names.txt").read_text(encoding="utf-8").split():
        if word.endswith(":"):
            table, number = found.setdefault(word[:-1], {}), 0
            continue
        if word != "-":
            table[number] = word
        number += 1
    return found


@cache
def _numbers(attribute: str) -> dict[str, int]:
    return {name: number for number, name in tables()[attribute].items()}


def name_of(attribute: str, number: int) -> Value:
    """The name of an attribute's value; the number itself where there is none, as of a newer library."""
    return tables().get(attribute, {}).get(number, number)


def number_of(attribute: str, value: Value) -> int:
    """The number of an attribute's value. ValueError for a name that is not known."""
    if not isinstance(value, str):
        return int(value)
    if attribute not in tables() or value not in _numbers(attribute):
        raise ValueError(
            f"{attribute}={value!r} is not a name that this tunegemm knows; upgrade it or tune again"
        )
    return _numbers(attribute)[value]


def extents(attribute: str, number: int) -> tuple[int, int] | None:
    """Rows and columns that a tile or a cluster has of the library's D; None where the name has none."""
    rows, *others = tables()[attribute].get(number, "").split("x")
    return (int(rows), int(others[0])) if others else None
