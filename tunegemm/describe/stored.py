"""A problem as databases, files and `--json` store it: in twelve fields, as before groups existed.

A product with groups stores their number as `batch`, and `grouped` as the first step of its epilogue. Records
are found by these fields, so the fields stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from tunegemm.describe.problem import Problem

#: Stored fields, in the order of the database's columns.
FIELDS = (
    "m", "n", "k", "batch", "in_dtype", "out_dtype", "a_major", "b_major", "out_major", "alignment",
    "epilogue", "accumulation",
)  # fmt: skip
_GROUPED = "grouped"
_BATCH, _EPILOGUE = FIELDS.index("batch"), FIELDS.index("epilogue")
_read: Callable[[Any], tuple[Any, ...]] = attrgetter(*FIELDS)


def cells_of(problem: Any) -> tuple[Any, ...]:
    """The stored fields of a `Problem`, or of any value with the same fields and `groups`."""
    cells = _read(problem)
    if not problem.groups:
        return cells
    steps = "+".join(filter(None, (_GROUPED, problem.epilogue)))
    return (*cells[:_BATCH], problem.groups, *cells[_BATCH + 1 : _EPILOGUE], steps, *cells[_EPILOGUE + 1 :])


def document_of(problem: Any) -> dict[str, Any]:
    """The stored fields, by name."""
    return dict(zip(FIELDS, cells_of(problem), strict=True))


def fields_from(batch: int, epilogue: str) -> dict[str, Any]:
    """The fields `batch`, `epilogue` and `groups`, from a stored batch and epilogue."""
    word, plus, steps = str(epilogue).partition("+")
    if word != _GROUPED or (plus and not steps):
        return {"batch": batch, "epilogue": epilogue, "groups": 0}
    return {"batch": 1, "epilogue": steps, "groups": batch}


def problem_of(*cells: Any) -> Problem:
    """The problem with these stored fields. Raises ProblemError if they are not a problem."""
    values = dict(zip(FIELDS, cells, strict=True))
    return Problem(**values | fields_from(values["batch"], values["epilogue"]))
