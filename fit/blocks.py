"""Fits the times of db/blocks.toml to races of its kernels, and chooses which kernels it lists.

    python -m benchmarks.blocks --every CANDIDATES.toml  # races its kernels on a GPU
    python -m fit.blocks benchmarks/results/h200/blocks-race.json          # prints what it would list
    python -m fit.blocks benchmarks/results/h200/blocks-race.json --write  # into db/blocks.toml

A race holds the table of its kernels, at whose times the fit begins. A kernel's `block_ns`, `tile_ns` and
`split_ns` have the least squares of the logarithm of its estimate (`tunegemm.model.blocks`) to its times;
what no time decides stays near the first value. torch's kernel is fitted likewise. Then kernels leave one by
one: each time the one without which the choices by estimate lose the least to the fastest kernel, in the mean
logarithm over all products, until the next would cost more than `--most-loss`. At last the rows of a kernel
end where the choices gain by it. All rows keep a kernel of each output dtype. Kernels of db/blocks.toml
without a time in the races stay as they are: race all rows that they are for.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from operator import itemgetter
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

import numpy as np

from benchmarks.command import command, parser_of
from tunegemm.errors import TunegemmError
from tunegemm.generate.cute_sm90.config import SMEM_LIMIT
from tunegemm.model.blocks import Listed, splits_of, table
from tunegemm.resources import data_path

DTYPES = ["bf16", "fp32"]
WORDS = ("block_ns", "tile_ns", "split_ns")
#: What a factor of e in a value costs, as an error of a time's logarithm.
PULL = 0.02
#: The least gain, in the mean logarithm, for which a kernel is for fewer rows.
LEAST_GAIN = 2e-4


class Cell(NamedTuple):
    """A product that was raced."""

    gpu: str
    shape: tuple[int, int, int]
    """Rows, N and K."""
    ns: Mapping[str, Mapping[int, float]]
    """Times by kernel, ``torch`` for torch's, and number of k splits."""


def named(path: Path | None = None) -> dict[str, Listed]:
    """A table's kernels for bf16, and torch's."""
    kernels, torchs = table(path)
    return {each.name: each for each in (*kernels, torchs) if each.config.out_dtype == "bf16"}


def read(path: Path) -> tuple[dict[str, Listed], list[Cell], str]:
    """The kernels of a race that have a time, its products, and where and when it ran.

    Raises TunegemmError for a file that is not a race.
    """
    race = json.loads(path.read_text(encoding="utf-8"))
    if "table" not in race:
        raise TunegemmError(f"{path} has no table; use a file of `python -m benchmarks.blocks --every`")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "blocks.toml").write_text(race["table"], encoding="utf-8")
        kernels = named(Path(folder, "blocks.toml"))
    cells, gpu = [], race["meta"]["gpu"]
    for row in race["rows"]:
        ns: dict[str, dict[int, float]] = {}
        for side, us in row["us"].items():
            name, _, split = (side if " k" in side else f"{side} k1").rpartition(" k")
            each = kernels.get(name)
            if each and each.first_row <= row["m"] <= each.last_row and side not in row["wrong"]:
                ns.setdefault(name, {})[int(split)] = us * 1e3
        if ns.keys() - {"torch"}:
            cells.append(Cell(gpu, (row["m"], row["n"], row["k"]), ns))
    timed = {name: each for name, each in kernels.items() if any(name in cell.ns for cell in cells)}
    return timed, cells, f"{gpu.removeprefix('NVIDIA ')}, {race['meta']['date'][:10]}"


def fitted(first: Listed, cells: Sequence[Cell]) -> tuple[Listed, float]:
    """The kernel with the values that its times give, and the standard deviation of the logarithm of its
    estimate. The steps are damped Gauss-Newton's in the values' logarithms, which keeps these positive.
    """
    times = [(cell, k, math.log(ns)) for cell in cells for k, ns in cell.ns.get(first.name, {}).items()]
    words = [word for word in WORDS if getattr(first, word) > 0]  # torch splits no k
    begin, unit = np.log([getattr(first, word) for word in words]), np.eye(len(words))

    def at(logs: Any) -> Listed:
        return replace(first, **dict(zip(words, np.exp(logs).tolist(), strict=True)))

    def errors(logs: Any) -> Any:
        each = at(logs)
        off = [math.log(each.estimate(*cell.shape, k, cell.gpu)) - log for cell, k, log in times]
        return np.array([*off, *PULL * (logs - begin)])

    logs, now, damping = begin, errors(begin), 1e-3
    while damping < 1e6:
        slopes = np.stack([(errors(logs + 1e-3 * each) - now) * 1e3 for each in unit], axis=1)
        step = np.linalg.solve(slopes.T @ slopes + damping * unit, -slopes.T @ now)
        after = errors(logs + step)
        better = after @ after < now @ now - 1e-9
        logs, now, damping = (logs + step, after, damping / 4) if better else (logs, now, damping * 8)
    return at(logs), float(np.std(now[: len(times)]))


class Races:
    """What choices by estimate lose in races."""

    def __init__(self, cells: Sequence[Cell], *beside: str) -> None:
        """beside: names that are none of the fastest."""
        self.cells, self.lines = cells, cache(self._lines)
        times = (
            [(ns, x) for x in cell.ns if x not in beside for ns in cell.ns[x].values()] for cell in cells
        )
        self.best = [min(each) for each in times]

    def _lines(self, each: Listed) -> Any:
        """By cell the least estimate, and the time of its number of k splits: infinite where the kernel is
        not for these rows. Where it was not raced it is the last to be chosen, and its estimate is its time.
        """
        result = np.full((2, len(self.cells)), np.inf)
        for number, (gpu, shape, ns) in enumerate(self.cells):
            if each.first_row <= shape[0] <= each.last_row:
                times = ns.get(each.name, {})
                by = {k: each.estimate(*shape, k, gpu) for k in times or splits_of(each.config, *shape)}
                least = min(by, key=by.__getitem__)
                result[:, number] = by[least] * (1 if times else 1e6), times.get(least, by[least])
        return result

    def losses(self, kernels: Iterable[Listed]) -> Any:
        """By cell, the logarithm of the time of the choice among kernels to the fastest."""
        estimates, times = np.stack([self.lines(each) for each in kernels], axis=1)
        taken = times[estimates.argmin(0), np.arange(len(self.cells))]
        return np.maximum(0, np.log(taken / [ns for ns, _ in self.best]))

    def loss(self, kernels: Iterable[Listed]) -> float:
        return float(self.losses(kernels).mean())


@cache
def dtypes_of(each: Listed) -> list[str]:
    """The output dtypes that shared memory has room for."""
    return [to for to in DTYPES if replace(each.config, out_dtype=to).smem_bytes <= SMEM_LIMIT]


def covers(kernels: Sequence[Listed]) -> bool:
    """Whether there is a kernel of each output dtype for any number of rows: for 1, and where others end."""
    rows = {1, *(each.last_row + 1 for each in kernels)} - {2**31}
    of_rows = [[each for each in kernels if each.first_row <= row <= each.last_row] for row in rows]
    return all(any(to in dtypes_of(each) for each in those) for those in of_rows for to in DTYPES)


def selected(kernels: Sequence[Listed], races: Races, most_loss: float) -> list[Listed]:
    """The kernels that are left, each for the rows between raced ones with which choices lose the least."""
    kept, timed = list(kernels), {name for cell in races.cells for name in cell.ns}
    while True:
        without = {x.name: [other for other in kept if other is not x] for x in kept if x.name in timed}
        costs = [(races.loss(others), name) for name, others in without.items() if covers(others)]
        loss, name = min(costs, default=(math.inf, ""))
        if (cost := loss - races.loss(kept)) > most_loss:
            break
        print(f"without {name}: {cost:+.3%}")
        kept = without[name]
    every = sorted({cell.shape[0] for cell in races.cells})
    for place, (word, by) in itertools.product(range(len(kept)), (("first_row", 1), ("last_row", -1))):
        left = [rows for rows in every if kept[place].first_row <= rows <= kept[place].last_row][::by]
        shorter = [replace(kept[place], **{word: rows + by}) for rows in left[:-1]]  # type: ignore[arg-type]
        tried = [[*kept[:place], each, *kept[place + 1 :]] for each in shorter]
        least = min(filter(covers, tried), key=races.loss, default=kept)
        if races.loss(least) < races.loss(kept) - LEAST_GAIN:
            kept = least
    return kept


def written(text: str, kernels: Iterable[Listed], torchs: Listed, note: str) -> str:
    """A table's text with these kernels, torch's times, and the note in place of the one before."""
    names, lines = tomllib.loads(text)["parameters"], []
    for each in kernels:
        own = {"form": "few" if each.config.few else "many"}
        values = json.dumps([own.get(name, getattr(each.config, name, None)) for name in names])
        times = ", ".join(f"{word} = {getattr(each, word):.0f}" for word in WORDS)
        last = "" if (dtypes := dtypes_of(each)) == DTYPES else f", dtypes = {json.dumps(dtypes)}"
        rows = [each.first_row, each.last_row]
        lines.append(f"{each.name} = {{ values = {values}, rows = {rows}, {times}{last} }}")
    note = fill(note, 120, initial_indent="# ", subsequent_indent="# ")
    for begin, new in ((r"(?=# Fitted )", note), (r"(?<=\[kernels]\n)", "\n".join(lines))):
        text = re.sub(rf"{begin}.*?(?=\n\n)", new, text, count=1, flags=re.DOTALL)
    for word in WORDS:
        text = re.sub(rf"(?m)^{word} = .*", f"{word} = {getattr(torchs, word):.0f}", text)
    return text


@command
def main(arguments: Sequence[str] | None = None) -> None:
    parser, table = parser_of("fit.blocks", __doc__, gpu=False), data_path("db", "blocks.toml")
    parser.add_argument("races", nargs="+", type=Path, help="files of `benchmarks.blocks --every`")
    parser.add_argument(
        "--most-loss", type=float, default=0.0003, help="by a kernel less; default: %(default)s"
    )
    parser.add_argument("--write", nargs="?", type=Path, const=table, help="a table anew; default: %(const)s")
    options = parser.parse_args(arguments)
    kernels, cells, errors = named(), list[Cell](), {"torch": math.nan}
    for path in options.races:
        raced, more, where = read(path)
        kernels, cells = kernels | raced, cells + more
        errors |= dict.fromkeys(raced, math.nan)
    for name in errors:
        kernels[name], errors[name] = fitted(kernels[name], cells)
        times = ", ".join(f"{word} {getattr(kernels[name], word):.0f}" for word in WORDS)
        print(f"{name}: {times}, standard deviation {errors[name]:.1%}")
    torchs, races = kernels.pop("torch"), Races(cells, "torch")
    kept = selected(list(kernels.values()), races, options.most_loss)
    lost = zip(races.losses(kept), cells, races.best, strict=True)
    for loss, cell, (_, name) in sorted(lost, key=itemgetter(0))[:-13:-1]:
        print(f"{'x'.join(map(str, cell.shape))}: {loss:.1%} behind {name}")
    rows, off = sorted(cell.shape[0] for cell in cells), errors["torch"]
    loses = math.expm1(races.loss(kept))
    note = (
        f"Fitted by fit.blocks to {len(errors) - 1} kernels and {len(cells)} products of {rows[0]} to "
        f"{rows[-1]} rows ({where}); these {len(kept)} lose {loses:.2%} to the fastest kernel in the "
        f"geometric mean. torch's has a standard deviation of {off:.1%}."
    )
    print(note)
    if options.write:
        text = written(options.write.read_text(encoding="utf-8"), kept, torchs, note)
        options.write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
