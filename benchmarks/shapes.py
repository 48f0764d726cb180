"""The shapes that benchmarks run: a file of named groups, and how to pick from it."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunegemm.describe.problem import Problem
from tunegemm.errors import ProblemError

FILE = Path(__file__).with_name("shapes.toml")
#: What else benchmarks time by default: products, and sizes of models.
LISTED: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("listed.toml").read_text())
_KEYS = {"about", "shapes", "m", "n_k", "dtype", "layout"}


@dataclass(frozen=True)
class Shape:
    """One problem to run, and the groups it belongs to."""

    problem: Problem
    groups: tuple[str, ...]


def load(path: Path = FILE) -> list[Shape]:
    """Every shape of the file, once, in its order. Raises ProblemError for an invalid group of shapes."""
    groups: dict[Problem, list[str]] = {}
    for name, table in tomllib.loads(path.read_text()).items():
        if not isinstance(table, dict) or not table.keys() <= _KEYS:
            raise ProblemError(f"{path}: group {name!r}: its keys are {', '.join(sorted(_KEYS))}")
        texts = list(table.get("shapes", []))
        texts += [f"{m}x{n}x{k}" for n, k in table.get("n_k", []) for m in table.get("m", [])]
        if not texts:
            raise ProblemError(f"{path}: group {name!r} has no shapes; give `shapes`, or `m` and `n_k`")
        for text in texts:
            problem = Problem.parse(text, dtype=table.get("dtype", "bf16"), layout=table.get("layout", "tn"))
            groups.setdefault(problem, []).append(name)
    return [Shape(problem, tuple(names)) for problem, names in groups.items()]


def select(patterns: list[str], shapes: list[Shape] | None = None) -> list[Problem]:
    """The problems that any pattern names, in the file's order; all of them without a pattern.

    A pattern is a group's name, a shape MxNxK (which need not be in the file), or a regular expression
    that must match a whole shape. Raises ProblemError if a pattern matches nothing.
    """
    shapes = load() if shapes is None else shapes
    chosen: list[Problem] = [] if patterns else [shape.problem for shape in shapes]
    for pattern in patterns:
        if any(pattern in shape.groups for shape in shapes):
            results = [shape.problem for shape in shapes if pattern in shape.groups]
        else:
            try:
                results = [shape.problem for shape in shapes if re.fullmatch(pattern, shape.problem.shape)]
            except re.error as error:
                raise ProblemError(f"shapes {pattern!r}: not a regular expression: {error}") from None
            if not results and re.fullmatch(r"\d+(x\d+)+", pattern):
                results = [Problem.parse(pattern)]
        if not results:
            groups = ", ".join(dict.fromkeys(name for shape in shapes for name in shape.groups))
            raise ProblemError(f"shapes {pattern!r} matches nothing; use a group ({groups}) or MxNxK")
        chosen += results
    return list(dict.fromkeys(chosen))
