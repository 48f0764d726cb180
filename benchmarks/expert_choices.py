"""Draws choices of db/grouped.toml from times of its kernels: prints them, or writes them into the table.

    python -m benchmarks.experts --kernels --layers anchor --kinds fp8,n_major  # times each kernel on a GPU
    python -m benchmarks.expert_choices          # draws of results/*/experts_kernels.json and experts.json
    python -m benchmarks.expert_choices --write  # into db/grouped.toml, between its two marks

A cell is a kind of product, a band of rows a group, one of N and one of numbers of groups. Its kernel is the
one that has the best geometric mean to torch over the cell's rows of all GPUs, of those that are nowhere
slower than torch by more than `--worst`; with none it is torch's. From 512 rows a group on torch's is the
best of what it is at uniform divisions: where these were not timed, a kernel has to reach `--untimed`. Rows
that time the served kernel alone rule that one out, if it is slower there by more than the noise, and so do
races of layers that are in no list, each one of many. A cell without rows is as the one of the next larger
groups, if there are smaller ones, too; else the table's other choices hold.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.command import command, parser_of
from benchmarks.experts import LAYERS
from benchmarks.results import geometric_mean
from tunegemm.model.grouped import configs, kinds

TABLE = Path(__file__).parent.parent / "db" / "grouped.toml"
BEGIN = "# Drawn by `python -m benchmarks.expert_choices --write` of rows of each kind's own:\n"
END = "# Of all other:\n"
#: Rows a group, and numbers of groups, up to which a band goes.
ROWS_BANDS = (12, 64, 256, 511, 2047, 2**31 - 1)
GROUPS_BANDS = (16, 2**31 - 1)
#: And N: few tiles leave multiprocessors idle.
N_BANDS = (1024, 2**31 - 1)
#: Rows a group up to which weights bound a product.
_FEW_ROWS = 511
_LISTED = {*LAYERS.values()}
FILES = ("experts_kernels.json", "experts.json")
#: What a row calls a launch, and its word in the table.
_LAUNCHES = {"s": "swizzle_size", "l": "l2_hint"}


class Cell(NamedTuple):
    kind: str
    groups: int
    n: int
    rows: int
    """Where its bands end."""


Choice = tuple[str, str]
"""A kernel's name in the table, and its launch as rows call it, such as s4."""


def kind_of(row: Mapping[str, Any]) -> str:
    """The table's name of a row's kind."""
    if row["dtype"] != "bf16":
        return "fp8" if row["dtype"].startswith("fp8") else str(row["dtype"])
    if row.get("epilogue"):
        return "gated"
    return "n_major" if row.get("layout") == "nn" else "bf16"


def cell_of(row: Mapping[str, Any]) -> Cell:
    """The cell of a row."""
    each = row["rows"] / row["groups"]
    return Cell(
        kind_of(row),
        next(end for end in GROUPS_BANDS if row["groups"] <= end),
        next(end for end in N_BANDS if row["n"] <= end),
        next(end for end in ROWS_BANDS if each <= end),
    )


def _layer(row: Mapping[str, Any]) -> tuple[int, int, int]:
    return row["groups"], row["n"], row["k"]


def times(row: Mapping[str, Any]) -> dict[Choice, float]:
    """Torch's time to that of each choice that a row has; the launch is empty where a row times what is
    served."""
    names = {config.label: name for name, config in configs(kind_of(row)).items()}
    if isinstance(row.get("us"), dict):
        found = {}
        for text, us in row["us"].items():
            label, _, launch = text.rpartition(" ")
            if label in names:
                found[names[label], launch] = row["torch_us"] / us
        return found
    # Of one kernel torch's noise is known, of the best of many it would say little.
    ratio = row["ratio"] * (1 + row.get("noise", 0.0))
    return {(names[row["kernel"]], ""): ratio} if row["kernel"] in names else {}


def drawn(
    rows: Sequence[Mapping[str, Any]], least: float = 1.02, worst: float = 0.97, untimed: float = 1.08
) -> dict[Cell, Choice | None]:
    """The choice of each cell that has rows of all kernels; None: torch's, also where rows rule out one."""
    uniform = {
        cell_of(row)
        for row in rows
        if row["skew"] == "uniform" and isinstance(row.get("us"), dict) and _layer(row) in _LISTED
    }
    cells: dict[Cell, list[tuple[bool, dict[Choice, float]]]] = {}
    for row in rows:
        if row.get("right", True):
            is_race = isinstance(row.get("us"), dict) and _layer(row) in _LISTED
            cells.setdefault(cell_of(row), []).append((is_race, times(row)))
    found: dict[Cell, Choice | None] = {}
    for cell, those in cells.items():
        races = [each for is_race, each in those if is_race]
        slower = {choice for _, each in those for choice, ratio in each.items() if ratio < worst}
        out = {name for name, launch in slower if not launch}
        if races:
            common = sorted(set.intersection(*map(set, races)) - slower)
            means = {
                choice: geometric_mean([each[choice] for each in races])
                for choice in common
                if choice[0] not in out
            }
            best = max(means, key=means.__getitem__, default=None)
            bound = untimed if cell.rows > _FEW_ROWS and cell not in uniform else least
            found[cell] = best if best is not None and means[best] >= bound else None
        elif out:
            found[cell] = None
    for cell in [*found]:
        number = ROWS_BANDS.index(cell.rows)
        below, between = (Cell(*cell[:3], ROWS_BANDS[number - less]) for less in (2, 1))
        if number > 1 and between not in found and below in found:
            found[between] = found[cell]
    return found


def text_of(found: Mapping[Cell, Choice | None]) -> Iterator[str]:
    """Tables of TOML: neighbours with the same choice are one."""
    for kind in kinds():
        bands = (zip((1, ends[0] + 1), ends, strict=True) for ends in (GROUPS_BANDS, N_BANDS))
        for (groups_low, groups), (n_low, n) in itertools.product(*bands):
            low = 0
            for number, end in enumerate(ROWS_BANDS):
                cell = Cell(kind, groups, n, end)
                following = Cell(*cell[:3], ROWS_BANDS[min(number + 1, len(ROWS_BANDS) - 1)])
                same = following != cell and following in found and cell in found
                if same and found[following] == found[cell]:
                    continue
                if cell in found:
                    choice = found[cell]
                    yield "\n[[choices]]\n"
                    yield f'kinds = ["{kind}"]\n'
                    yield f"groups = [{groups_low}, {groups}]\nn = [{n_low}, {n}]\n"
                    yield f"rows_per_group = [{low}, {end}]\n"
                    yield f'kernel = "{choice[0] if choice else ""}"\n'
                    if choice:
                        yield f"{_LAUNCHES[choice[1][0]]} = {choice[1][1:]}\n"
                low = end


def rows_of(results: Path) -> list[dict[str, Any]]:
    """The rows of all GPUs' files."""
    return [
        row
        for name in FILES
        for path in sorted(results.glob(f"*/{name}"))
        for row in json.loads(path.read_text())["rows"]
    ]


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """0; 2 for a table without marks."""
    parser = parser_of("expert_choices", __doc__, gpu=False)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--least", type=float, default=1.02, help="mean to torch that a kernel has to reach")
    parser.add_argument("--worst", type=float, default=0.97, help="and each row: torch's own differ by 3 %%")
    parser.add_argument("--untimed", type=float, default=1.08, help="mean where no uniform rows were timed")
    parser.add_argument("--write", action="store_true", help="write db/grouped.toml")
    options: argparse.Namespace = parser.parse_args(arguments)
    text = "".join(text_of(drawn(rows_of(options.results), options.least, options.worst, options.untimed)))
    print(text)
    if options.write:
        table = TABLE.read_text()
        between = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", re.DOTALL)
        if not between.search(table):
            parser.error(f"{TABLE} lacks its marks")
        TABLE.write_text(between.sub(lambda _: f"{BEGIN}{text}\n{END}", table))
    return 0


if __name__ == "__main__":
    sys.exit(main())
