"""Draws choices of db/grouped.toml from times of its kernels: prints them, or writes them into the table.

    python -m benchmarks.experts --kernels --layers anchor --kinds fp8,n_major  # times each kernel on a GPU
    python -m fit.expert_choices          # draws of results/*/experts_kernels.json and experts.json
    python -m fit.expert_choices --write  # into db/grouped.toml, between its two marks
    python -m fit.expert_choices --held-out  # how well it generalises to unseen layers

A cell is a GPU, a kind of product, a band of rows per group, which bounds the reuse of a tile of weights, and
a band of K: the longer, the less a tile's store costs. Its kernel has the best geometric mean relative to
torch over the races of the GPU's own problems, with equal weights for uniform, typical and hot divisions;
among kernels within 2 % of the best, it is the one that was timed most where it serves; it is torch's if no
kernel gains as much as `--least`. Up to 256 rows per group, where weights bound a product, a GPU without
enough races uses another's; beyond, an H100 lost what an H200 gained. Excluded are kernels that lose any
race, of whatever division, by more than `--worst` and the race's noise allow, and those that lost on that GPU
in the mean of the rows that time the served kernel. Layers of `benchmarks.experts.UNLISTED` do not count. A
cell without races leaves products to the table's other choices; rows that fill a tile of 256 but not one of
192 count with those below. For held-out results, each layer uses choices drawn from the others.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.command import command, parser_of
from benchmarks.experts import UNLISTED
from benchmarks.results import RESULTS, geometric_mean
from tunegemm.generate.grouped.config import GroupedConfig
from tunegemm.model.grouped import configs, kinds

TABLE = Path(__file__).parent.parent / "db" / "grouped.toml"
BEGIN = "# Drawn by `python -m fit.expert_choices --write` of rows of each kind's own:\n"
END = "# Of all other:\n"
_ALL = 2**31 - 1
#: Upper ends of the bands of rows per group, and of K.
ROWS_BANDS = (12, 64, 192, 256, 1023, _ALL)
K_BANDS = (3072, _ALL)
#: What a GPU's name contains, and its folder of results. Those that the table does not name go by the last.
GPUS = {"H200": "h200", "": "h100-80gb-hbm3"}
#: Required mean gain, required result of each race, and the fraction of the best mean that counts as equal.
LEAST, WORST, AS_GOOD = 1.05, 0.98, 0.98
#: Races that a GPU needs to use its own; else another's count, up to so many rows per group.
ENOUGH, SHARED_ROWS = 2, 256
#: The band whose choice also serves up to `SHARED_ROWS`, for kinds that were not raced there.
_BELOW = 192
FILES = ("experts_kernels.json", "experts.json")
#: What a row calls a launch, and its word in the table.
_LAUNCHES = {"s": "swizzle_size", "l": "l2_hint"}

Row = Mapping[str, Any]
Layer = tuple[int, int, int]
"""Groups, N and K."""
Choice = tuple[str, str]
"""A kernel's name in the table, and its launch as rows write it, such as s4."""


class Cell(NamedTuple):
    gpu: str
    kind: str
    k: int
    rows: int
    """Where its bands end."""


def kind_of(row: Row) -> str:
    """The table's name of a row's kind."""
    if row["dtype"] != "bf16":
        return "fp8" if row["dtype"].startswith("fp8") else str(row["dtype"])
    if row.get("epilogue"):
        return "gated"
    return "n_major" if row.get("layout") == "nn" else "bf16"


def cell_of(row: Row, gpu: str) -> Cell:
    """The cell of a row on a GPU."""
    k, rows = row["k"], row["rows"] / row["groups"]
    ends = [next(end for end in bands if at <= end) for bands, at in ((K_BANDS, k), (ROWS_BANDS, rows))]
    return Cell(gpu, kind_of(row), *ends)


def layer_of(row: Row) -> Layer:
    return row["groups"], row["n"], row["k"]


def times(row: Row) -> dict[Choice, float]:
    """Torch's time relative to that of each choice in a row; the launch is empty if a row times the served
    kernel."""
    all_of_kind = configs(kind_of(row)).items()
    # Others have choices of their own, which go by rows in all.
    names = {config.label: name for name, config in all_of_kind if type(config) is GroupedConfig}
    if isinstance(row.get("us"), dict):
        result = {}
        for text, us in row["us"].items():
            label, _, launch = text.rpartition(" ")
            if label in names:
                result[names[label], launch] = row["torch_us"] / us
        return result
    return {(names[row["kernel"]], ""): row["ratio"]} if row["kernel"] in names else {}


class Races:
    """What was timed in a cell on one GPU."""

    def __init__(self) -> None:
        self.problems: dict[tuple[Layer, int], dict[str, dict[Choice, float]]] = {}
        """The races of each problem, by their skews."""
        self.lost: dict[Choice, float] = {}
        """The least that each choice made of a race, the race's noise added."""
        self.served: dict[str, list[float]] = {}
        """The results of rows that time only a served kernel."""

    def add(self, row: Row) -> None:
        result = times(row)
        if isinstance(row.get("us"), dict):
            self.problems.setdefault((layer_of(row), row["rows"]), {})[row["skew"]] = result
            for choice, ratio in result.items():
                made = ratio + row.get("noise", 0.0)
                self.lost[choice] = min(made, self.lost.get(choice, made))
        else:
            for (name, _), ratio in result.items():
                self.served.setdefault(name, []).append(ratio)

    def means(self, out: Collection[str], worst: float) -> dict[Choice, float]:
        """The geometric mean of each choice that loses no race and whose kernel is not in `out`; skews have
        equal weights.

        Races that a choice lacks, at most half of them, such as those of a newer kernel, count as the best of
        the choices that have all races.
        """
        problems = list(self.problems.values())
        having: dict[Choice, list[dict[str, dict[Choice, float]]]] = {}
        for problem in problems:
            for choice in sorted(set.intersection(*map(set, problem.values()))):
                if choice[0] not in out and self.lost[choice] >= worst:
                    having.setdefault(choice, []).append(problem)
        means: dict[Choice, float] = {}
        best: Choice | None = None
        for choice, of in sorted(having.items(), key=lambda item: (-len(item[1]), item[0])):
            if len(of) == len(problems):
                means[choice] = _mean(of, choice)
                best = max(means, key=means.__getitem__)
            elif best is not None and len(of) >= max(ENOUGH, len(problems) / 2):
                means[choice] = means[best] * _mean(of, choice, best) ** (len(of) / len(problems))
        return means

    def slower(self) -> set[str]:
        """Kernels that are slower than torch for products that they serve."""
        return {name for name, ratios in self.served.items() if geometric_mean(ratios) < 1}


def _mean(
    problems: Sequence[Mapping[str, Mapping[Choice, float]]], choice: Choice, to: Choice | None = None
) -> float:
    """A choice's result on problems, or its gain over another; skews have equal weights."""
    of_skews: dict[str, list[float]] = {}
    for problem in problems:
        for skew, result in problem.items():
            of_skews.setdefault(skew, []).append(result[choice] / (1.0 if to is None else result[to]))
    return geometric_mean([geometric_mean(ratios) for ratios in of_skews.values()])


def drawn(
    rows: Mapping[str, Sequence[Row]], least: float = LEAST, worst: float = WORST
) -> dict[Cell, Choice | None]:
    """The choice of each cell with races, from rows by GPU; None: torch's."""
    timed: dict[Cell, Races] = {}
    for gpu, of_gpu in rows.items():
        for row in of_gpu:
            if row.get("right", True):
                timed.setdefault(cell_of(row, gpu), Races()).add(row)
    result: dict[Cell, Choice | None] = {}
    for cell in itertools.starmap(Cell, itertools.product(GPUS, kinds(), K_BANDS, ROWS_BANDS)):
        if cell.rows == SHARED_ROWS and not any(Cell(gpu, *cell[1:]) in timed for gpu in GPUS):
            if (below := Cell(*cell[:3], _BELOW)) in result:
                result[cell] = result[below]
            continue
        own = timed.get(cell, Races())
        others = [timed.get(Cell(gpu, *cell[1:]), Races()) for gpu in GPUS if cell.rows <= SHARED_ROWS]
        raced = next((races for races in (own, *others) if len(races.problems) >= ENOUGH), own)
        if not raced.problems:
            continue
        means = raced.means(own.slower(), worst)
        best = max(means.values(), default=0.0)
        good = {choice: mean for choice, mean in means.items() if mean >= max(least, AS_GOOD * best)}
        known = {name: len(ratios) for name, ratios in own.served.items()}
        result[cell] = max(good, key=lambda choice: (known.get(choice[0], 0), good[choice]), default=None)
    return result


def held_out(
    rows: Mapping[str, Sequence[Row]], draw: Callable[[Any], Mapping[Cell, Choice | None]] = drawn
) -> Iterator[tuple[Cell, float, float]]:
    """The cell of each raced problem, and the mean and least result over its skews of choices drawn without
    its layer, relative to torch."""
    layers = {layer_of(row) for row in itertools.chain.from_iterable(rows.values())}
    for layer in sorted(layers):
        result = draw({gpu: [row for row in those if layer_of(row) != layer] for gpu, those in rows.items()})
        for gpu, those in rows.items():
            problems: dict[tuple[Cell, int], list[float]] = {}
            for row in those:
                if layer_of(row) == layer and isinstance(row.get("us"), dict) and row.get("right", True):
                    cell = cell_of(row, gpu)
                    ratio = times(row).get(result.get(cell) or ("", ""), 1.0)
                    problems.setdefault((cell, row["rows"]), []).append(ratio)
            for (cell, _), ratios in problems.items():
                yield cell, geometric_mean(ratios), min(ratios)


def text_of(choices: Mapping[Cell, Choice | None]) -> Iterator[str]:
    """Tables of TOML; neighbours with the same choice are merged. A GPU's tables omit choices of all GPUs."""
    bands_of_k = [*zip((1, *(end + 1 for end in K_BANDS)), K_BANDS, strict=False)]
    for gpu, kind, (low_k, k) in itertools.product(GPUS, kinds(), bands_of_k):
        own = {
            end: choices[cell]
            for end in ROWS_BANDS
            if (cell := Cell(gpu, kind, k, end)) in choices
            and (not gpu or choices[cell] != choices.get(Cell("", *cell[1:]), ""))
        }
        low = 0
        for end, following in itertools.zip_longest(ROWS_BANDS, ROWS_BANDS[1:]):
            if end in own and following in own and own[end] == own[following]:
                continue
            if end in own:
                choice = own[end]
                yield "\n[[choices]]\n"
                yield f'gpu = "{gpu}"\n' if gpu else ""
                yield f'kinds = ["{kind}"]\n'
                yield f"k = [{low_k}, {k}]\nrows_per_group = [{low}, {end}]\n"
                yield f'kernel = "{choice[0] if choice else ""}"\n'
                if choice:
                    yield f"{_LAUNCHES[choice[1][0]]} = {choice[1][1:]}\n"
            low = end


def rows_of(results: Path) -> dict[str, list[Row]]:
    """The rows of each GPU's files."""
    return {
        gpu: [
            row
            for name in FILES
            if (path := results / folder / name).exists()
            for row in json.loads(path.read_text())["rows"]
            if layer_of(row) not in UNLISTED.values()
        ]
        for gpu, folder in GPUS.items()
    }


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """0; 2 for a table without marks."""
    parser = parser_of("fit.expert_choices", __doc__, gpu=False)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--least", type=float, default=LEAST, help="mean to torch that a kernel has to reach")
    parser.add_argument("--worst", type=float, default=WORST, help="and each problem at least")
    parser.add_argument("--held-out", action="store_true", help="say what each layer has from the others")
    parser.add_argument("--write", action="store_true", help="write db/grouped.toml")
    options: argparse.Namespace = parser.parse_args(arguments)
    rows = rows_of(options.results)
    draw = partial(drawn, least=options.least, worst=options.worst)
    if options.held_out:
        print(*_summary([*held_out(rows, draw)]), sep="\n")
        return 0
    text = "".join(text_of(draw(rows)))
    print(text)
    if options.write:
        table = TABLE.read_text()
        between = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", re.DOTALL)
        if not between.search(table):
            parser.error(f"{TABLE} lacks its marks")
        TABLE.write_text(between.sub(lambda _: f"{BEGIN}{text}\n{END}", table))
    return 0


def _summary(shares: Sequence[tuple[Cell, float, float]]) -> Iterator[str]:
    for gpu, kind in itertools.product(GPUS, kinds()):
        own = [(mean, least) for cell, mean, least in shares if cell[:2] == (gpu, kind)]
        if own:
            means, least = zip(*own, strict=True)
            yield (
                f"{GPUS[gpu]} {kind}: {geometric_mean(means):.3f} x torch over {len(own)} problems of layers "
                f"held out, least {min(means):.3f}, at one skew {min(least):.3f}"
            )


if __name__ == "__main__":
    sys.exit(main())
