"""Fits how fast the kernels of db/joined.toml are to a race, and shows which of them the choices need.

    python -m benchmarks.joined --rows 96,128,192,256,320,384,512,640,768,896,1024,1536,2048,4096
    python -m fit.joined benchmarks/results/h200/joined.json

The benchmark times every kernel of the table, so a table with more kernels makes a race of candidates. The
result holds its table. From 65 rows on, a kernel's `relative` (or its `wider`) is the median of its
estimate at `relative` 1 (`tunegemm.model.joined`) over its time, as a part of the best kernel's. Then
kernels leave one by one: each time the one without which the choices by estimate lose the least to the
fastest kernel, in the geometric mean over all products. Prints what the choices lose, and of the `--keep`
last kernels of each kind their `relative` and what the choices gain over torch.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.command import command, parser_of
from tunegemm.errors import TunegemmError
from tunegemm.model.joined import Listed, candidates

LEAST_ROWS = 65
"""The estimate of fewer rows is of memory, and its `relative` of other races."""


class Cell(NamedTuple):
    """A product that was raced."""

    model: str
    rows: int
    weights: tuple[int, ...]
    """N of each weight; of a gate N once."""
    k: int
    us: dict[str, float]
    """Times by kernel."""
    torch_us: float


def read(path: Path) -> tuple[dict[str, dict[str, Listed]], dict[str, list[Cell]]]:
    """The kernels of a race by name, and its products, both by kind: ``qkv`` and ``gate``.

    Kernels of products with biases have the name of those without. Raises TunegemmError for another file.
    """
    race = json.loads(path.read_text(encoding="utf-8"))
    if "table" not in race:
        raise TunegemmError(f"{path} has no table; use a file of `python -m benchmarks.joined`")
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder, "joined.toml")
        table.write_text(race["table"], encoding="utf-8")
        kernels = {
            kind: {each.choice.name: replace(each, wider=None) for each in candidates(gate=gate, path=table)}
            for kind, gate in (("qkv", ""), ("gate", "swiglu"))
        }
    cells: dict[str, list[Cell]] = defaultdict(list)
    for row in race["rows"]:
        model, kind = row["model"].rsplit(" ", 1)
        us = {name: time for name, time in row["us"].items() if name in kernels[kind]}
        us = {name: time for name, time in us.items() if name not in row["wrong"]}
        if row["rows"] >= LEAST_ROWS and us:
            ns = tuple(row["ns"][:1] if kind == "gate" else row["ns"])
            cells[kind].append(Cell(model, row["rows"], ns, row["k"], us, row["us"]["separate"]))
    return kernels, cells


class Race:
    """The products of one kind, and what the choices among some kernels make of them."""

    def __init__(self, kernels: dict[str, Listed], cells: Sequence[Cell]) -> None:
        self.cells = cells
        self.works = {
            name: [replace(each, relative=1.0).estimate(c.rows, c.weights, c.k, "") * c.k for c in cells]
            for name, each in kernels.items()
        }
        speeds = {
            name: statistics.median(work / cell.us[name] for work, cell in known)
            for name, works in self.works.items()
            if (known := [pair for pair in zip(works, cells, strict=True) if name in pair[1].us])
        }
        best = max(speeds.values())
        self.relative = {name: speed / best for name, speed in speeds.items()}

    def choices(self, names: Collection[str]) -> list[str]:
        """The kernel with the least estimate for each product."""
        return [
            min(
                (name for name in names if name in cell.us),
                key=lambda name: self.works[name][number] / self.relative[name],
                default="",
            )
            for number, cell in enumerate(self.cells)
        ]

    def loss(self, names: Collection[str]) -> float:
        """The mean logarithm of the choices' times to those of the fastest kernels; infinite if a product has
        no kernel."""
        chosen = self.choices(names)
        if not all(chosen):
            return math.inf
        pairs = zip(chosen, self.cells, strict=True)
        return statistics.fmean(math.log(cell.us[name] / min(cell.us.values())) for name, cell in pairs)

    def without(self, names: Collection[str]) -> str:
        """The kernel that the choices miss the least."""
        return min(sorted(names), key=lambda name: self.loss({*names} - {name}))


@command
def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("fit.joined", __doc__, gpu=False)
    parser.add_argument("race", type=Path)
    parser.add_argument("--keep", type=int, default=8, help="kernels of each kind (default: %(default)s)")
    options: Any = parser.parse_args(arguments)
    kernels, cells = read(options.race)
    for kind, of_kind in cells.items():
        race = Race(kernels[kind], of_kind)
        names = {*race.relative}
        print(f"{kind}: {len(of_kind)} products, {len(names)} kernels lose {race.loss(names):.2%}")
        while len(names) > options.keep:
            gone = race.without(names)
            names.remove(gone)
            print(f"  without {gone}: {len(names)} lose {race.loss(names):.2%}")
        for name in sorted(names):
            print(f"  {name}: relative = {race.relative[name]:.2f}")
        gains: dict[int, list[tuple[float, str]]] = defaultdict(list)
        for name, cell in zip(race.choices(names), of_kind, strict=True):
            gains[cell.rows].append((cell.torch_us / cell.us[name], f"{cell.model} by {name}"))
        for rows, found in sorted(gains.items()):
            least, where = min(found)
            mean = statistics.geometric_mean(gain for gain, _ in found)
            print(f"  {rows} rows: {mean:.3f} x torch, least {least:.3f} ({where})")


if __name__ == "__main__":
    sys.exit(main())
