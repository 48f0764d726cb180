"""What the tables of the documents share: reading a result file, and writing a table."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import geometric_mean

ROOT = Path(__file__).resolve().parent.parent.parent
BASELINE = "torch"
#: A result file's `meta`, `rows`, and other summaries; and one of its rows.
Data = dict[str, Any]
Row = dict[str, Any]
#: Of a table, by name: a format of a row's fields, or a function of the row.
Columns = Mapping[str, str | Callable[[Any], str]]


class DocsError(Exception):
    """A block or a result file that cannot be used; the message names it."""


def load(results: Path, name: str) -> dict[str, Any] | None:
    """A result file, or None if it does not exist yet. Raises DocsError for an invalid file."""
    path = results / name
    if not path.exists():
        return None
    try:
        data = json.loads(path.read_text())
    except ValueError as error:
        raise DocsError(f"{path}: {error}") from None
    if not isinstance(data, dict) or not isinstance(data.get("rows"), list) or not data["rows"]:
        raise DocsError(f"{path}: no object with rows")
    return data


def not_measured(results: Path, name: str) -> str:
    path = results / name
    shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name
    return f"*Nothing measured yet: `{shown}` is not there.*"


def of_file(
    name: str, *, machine: bool = True
) -> Callable[[Callable[[Data], list[str]]], Callable[[Path], str]]:
    """Makes a block's function of a folder of result files from a function of one file's data.

    machine: whether a line on the GPU and its software comes first.
    """

    def block_of(tell: Callable[[Data], list[str]]) -> Callable[[Path], str]:
        @functools.wraps(tell)
        def block(results: Path) -> str:
            data = load(results, name)
            if data is None:
                return not_measured(results, name)
            first = machine_line(data.get("meta", {})) if machine else ""
            return "\n\n".join(part for part in (first, *tell(data)) if part)

        return block

    return block_of


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with its first column left and the others right aligned."""
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def table_of(rows: Iterable[Any], columns: Columns) -> str:
    """A line for each row."""
    cells = ([c.format_map(row) if isinstance(c, str) else c(row) for c in columns.values()] for row in rows)
    return markdown_table([*columns], cells)


def groups_of(rows: Iterable[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    """The rows by their keys, in the order of the first ones."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def mean_of(rows: Iterable[Row], name: str = "ratio") -> str:
    """The geometric mean of a field."""
    return f"{geometric_mean(row[name] for row in rows):.3f}"


def shape_of(row: dict[str, Any]) -> str:
    """``MxNxK``, and its differences from one bf16 tn product without an epilogue."""
    text = f"{row['m']}x{row['n']}x{row['k']}" + (f"x{row['batch']}" if row.get("batch", 1) != 1 else "")
    usual = {"dtype": "bf16", "layout": "tn", "epilogue": "none"}
    return " ".join([text, *(str(row[key]) for key in usual if row.get(key) not in (None, "", usual[key]))])


def extents_of(row: dict[str, Any]) -> str:
    """The shape of a row whose dtype and epilogue have columns of their own."""
    return f"{row['m']}x{row['n']}x{row['k']}"


def ratios(row: dict[str, Any]) -> dict[str, float]:
    """Per provider its speed relative to torch.mm in the same interleave; without those that did not run."""
    timed = {name: each for name, each in row["providers"].items() if each and each.get("median_us")}
    if BASELINE not in timed:
        raise DocsError(f"{shape_of(row)}: no time of {BASELINE!r} to compare with")
    base = timed[BASELINE]["median_us"]
    # Round by round where the row has it; older files have medians only.
    return {name: each.get("ratio", base / each["median_us"]) for name, each in timed.items()}


def clocks_of(row: dict[str, Any]) -> str:
    """How a row was timed: in steady state at separate clocks, below the cap, or interleaved."""
    if "turn_ms" not in row:
        return "shared"
    return "own" if row["turn_ms"] else "below the cap"


#: Packages that a table names; its result file names all.
_NAMED = ("tunegemm", "torch", "cuda", "nvidia-cublas", "vllm", "transformers", "optuna")


def machine_line(meta: dict[str, Any]) -> str:
    """The machine, software and date of a result file's rows, as far as its meta names them."""
    facts = [meta.get("gpu"), meta.get("driver") and f"driver {meta['driver']}", meta.get("date", "")[:10]]
    facts += [f"{name} {version}" for name, version in meta.get("packages", {}).items() if name in _NAMED]
    said = ", ".join(str(fact) for fact in facts if fact)
    return f"Measured on {said}." if said else ""
