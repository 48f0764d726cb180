"""Kernels that tests compile: a spread of them, and every one where TUNEGEMM_TEST_KERNELS is ``all``, as in
`make test-kernels`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Container, Hashable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

from tunegemm.testing.suite import Examples

Value = TypeVar("Value")

IS_WHOLE = os.environ.get("TUNEGEMM_TEST_KERNELS") == "all"


def spread(values: Iterable[Value]) -> list[Value]:
    """Every second value: they are listed by kind, so that a half of them has every kind."""
    return list(values)[:: 1 if IS_WHOLE else 2]


def first_of_each(values: Iterable[Value], *, kind: Callable[[Value], Hashable]) -> list[Value]:
    found = list(values)
    firsts = {kind(value): value for value in reversed(found)}
    return found if IS_WHOLE else [value for value in found if firsts[kind(value)] is value]


def covering(
    cases: Iterable[Value],
    parts: Callable[[Any], Iterable[Hashable]] = enumerate,
    given: Container[Value] = (),
) -> list[Value]:
    """Few of the cases, in their order, in which every two parts stand together that do in any case.

    parts: of a case, by default the values of a tuple. given: cases that are among them anyway.
    """
    found = list(cases)
    if IS_WHOLE:
        return found
    pairs = [{*itertools.combinations(parts(case), 2)} for case in found]
    chosen = [case in given for case in found]
    left = {*itertools.chain(*pairs)}.difference(*itertools.compress(pairs, chosen))
    while left:  # the case that brings most, of equals the first
        best = max(range(len(found)), key=lambda number: len(pairs[number] & left))
        chosen[best] = True
        left -= pairs[best]
    return [*itertools.compress(found, chosen)]


def sampled(examples: Examples) -> Examples:
    """Half of a family's problems and of its kernels at borders, and a rejection by each of its rules."""
    return replace(
        examples,
        problems=spread(examples.problems),
        corners=spread(examples.corners),
        rejected=first_of_each(examples.rejected, kind=lambda case: case.rule),
    )
