"""Kernels that tests compile: a spread of them in `.ci/run`, every one in `make test-kernels`."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from typing import TypeVar

from tunegemm.testing.examples import Examples

Value = TypeVar("Value")

IS_WHOLE = os.environ.get("TUNEGEMM_TEST_KERNELS") == "all"


def spread(values: Iterable[Value]) -> list[Value]:
    """Every second value: they are listed by kind, so that a half of them has every kind."""
    return list(values)[:: 1 if IS_WHOLE else 2]


def first_of_each(values: Iterable[Value], *, kind: Callable[[Value], Hashable]) -> list[Value]:
    found = list(values)
    firsts = {kind(value): value for value in reversed(found)}
    return found if IS_WHOLE else [value for value in found if firsts[kind(value)] is value]


def sampled(examples: Examples) -> Examples:
    """Half of a family's problems and of its kernels at borders, and a rejection by each of its rules."""
    return replace(
        examples,
        problems=spread(examples.problems),
        corners=spread(examples.corners),
        rejected=first_of_each(examples.rejected, kind=lambda case: case.rule),
    )
