"""Reads files of shapes: tunegemm's own, and those of other tools, each with its `Format`.

No foreign format says how often a product is computed, so each counts once.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tunegemm.describe.problem import Problem
from tunegemm.describe.workload import cutlass, tunable_op
from tunegemm.describe.workload.demand import Demand, demands, total
from tunegemm.describe.workload.formats import Entries, Format, is_json
from tunegemm.describe.workload.products import Workload
from tunegemm.errors import BadValueError, ProblemError, WorkloadError
from tunegemm.files import read_text
from tunegemm.untrusted import decoded, shown

#: In the order in which a file is tried: a log with lines of TunableOp may begin with a bracket.
FORMATS: list[Format] = [tunable_op.FORMAT, cutlass.FORMAT]


def read(*paths: Path) -> tuple[list[Demand], list[str]]:
    """The problems that files list, such as one per rank, and a line with place and reason for each entry
    that cannot be tuned. The calls of equal problems are added up.

    Raises WorkloadError for a file of another kind, or if no entry can be tuned.
    """
    result: list[Demand] = []
    refused: list[str] = []
    for path in paths:
        of_file, lines = _read(path)
        result += of_file
        refused += [f"{path}: {reason}" for reason in lines] if len(paths) > 1 else lines
    if not result:
        why = f"{len(refused)} were left out, the first because: {refused[0]}" if refused else "it lists none"
        raise WorkloadError(f"{', '.join(map(str, paths))}: no product in it can be tuned ({why})")
    return total(result), refused


def _read(path: Path) -> tuple[list[Demand], list[str]]:
    if path.is_dir() and (path / "config.json").is_file():
        raise WorkloadError(_is_config(path))
    text = read_text(path, WorkloadError)
    if not text.strip():
        raise WorkloadError(f"{path}: the file is empty; record again with `tunegemm record`")
    try:
        for format in FORMATS:
            if (entries := format.entries(text)) is not None:
                return _collect(format.problems, entries)
        document = decoded(text) if is_json(text) else None
    except BadValueError as error:
        raise WorkloadError(f"{path}: not JSON ({error}); write the file again") from None
    if document is None:
        *names, last = ("the JSON of `tunegemm record`", *(format.name for format in FORMATS))
        first = shown(next(row.strip() for row in text.splitlines() if row.strip()))
        known = f"supported are {', '.join(names)} and {last}"
        raise WorkloadError(f"{path}: not a list of shapes: it begins with {first}; {known}")
    if isinstance(document, dict) and not {"architectures", "model_type", "hidden_size"}.isdisjoint(document):
        raise WorkloadError(_is_config(path))
    workload, unreadable = Workload.from_document(document, str(path))
    result, refused = demands(workload.products)
    return result, unreadable + refused


def _is_config(path: Path) -> str:
    command = f"tunegemm shapes {shlex.quote(str(path))}"
    return f"{path}: a model's config, not a list of shapes; make the list with: {command}"


def _collect(
    understand: Callable[[Any], Iterable[Problem]], entries: Entries
) -> tuple[list[Demand], list[str]]:
    """Each entry's problems, and the errors of `understand` for the other entries."""
    result: list[Demand] = []
    refused = []
    for place, entry in entries:
        try:
            result += [Demand(problem, 1) for problem in understand(entry)]
        except (BadValueError, ProblemError) as error:
            refused.append(f"{place}: {error}")
    return total(result), refused
