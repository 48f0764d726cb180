"""The kernels that may serve a product which nobody tuned, each at the launches that suit it.

Their list is db/selector.toml. A search looks at thousands of kernels; nearly every tuned product of plain
16-bit operands has one of these within some per cent of its best. They ship compiled.
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate, Value
from tunegemm.errors import SpaceError
from tunegemm.generate import families, model
from tunegemm.generate.terms import Bools, Columns, Ints, Terms, fits_l2, terms
from tunegemm.generate.tiles import stream_clusters, stream_tiles
from tunegemm.resources import data_path

DTYPES = ("bf16",)
"""Of operands, for which the list was measured."""

#: Splits of k, as the search spaces list them.
_SPLITS = np.array([1, 2, 3, 4, 6, 8, 12, 16])
#: Orders of tiles where L2 does not hold the operands: whether along n, and in groups of so many.
_RASTERS = ((False, 1), (True, 1), (False, 8), (True, 8))


@dataclass(frozen=True)
class Choices:
    """Launches of listed kernels for one problem, and the model's terms of each."""

    kernels: Ints
    """Places in the list."""
    split_k: Ints
    second: Bools
    """Whether a second kernel adds the splits."""
    along_n: Bools
    swizzle: Ints
    columns: Columns
    terms: Terms

    def __len__(self) -> int:
        return len(self.kernels)

    def take(self, rows: Any) -> Choices:
        """Some of them, by their numbers or a mask."""
        return Choices(
            self.kernels[rows], self.split_k[rows], self.second[rows], self.along_n[rows], self.swizzle[rows],
            self.columns.take(rows), self.terms.take(rows),
        )  # fmt: skip

    def candidate(self, problem: Problem, number: int) -> Candidate:
        """One of them as it is launched."""
        kernel = listed()[int(self.kernels[number])]
        return launched(
            problem, kernel, int(self.split_k[number]), bool(self.second[number]), bool(self.along_n[number]),
            int(self.swizzle[number]),
        )  # fmt: skip


@cache
def listed(path: Path | None = None) -> tuple[Candidate, ...]:
    """All kernels of the list. Raises SpaceError for one that its family does not know."""
    path = path or data_path("db", "selector.toml")
    found = []
    for table in tomllib.loads(path.read_text(encoding="utf-8"))["kernels"]:
        name, parameters = table["family"], table["parameters"]
        if set(parameters) != set(families.get(name).parameters["compile"]):
            raise SpaceError(
                f"{path}: {name} has the parameters {', '.join(families.get(name).parameters['compile'])}"
            )
        for values in table["values"]:
            found.append(Candidate.make(name, dict(zip(parameters, values, strict=True))))
    return tuple(found)


def launched(
    problem: Problem,
    kernel: Candidate,
    split_k: int = 1,
    second: bool = False,
    along_n: bool = False,
    swizzle: int = 1,
) -> Candidate:
    """A listed kernel with all parameters that its family's launches have."""
    values: Mapping[str, Value] = {
        "raster_order": "along_n" if along_n else "along_m",
        "swizzle_size": swizzle,
        "cluster_order": "index",
        "ctas": "tiles" if kernel.family == "skinny" else "all",
        "split_k": split_k,
        "reduction": "second_kernel" if second else "pairs",
        "l2_hint": model.l2_hint(problem, kernel),
    }
    return kernel.with_launch(
        **{name: values[name] for name in families.get(kernel.family).parameters["launch"]}
    )


def takes(problem: Problem) -> bool:
    """Whether the list is for such products: plain ones that TMA reads as they lie."""
    return (
        problem.in_dtype in DTYPES
        and problem.out_dtype == problem.in_dtype
        and problem.layout == "tn"
        and problem.out_major == "n"
        and problem.batch == 1
        and problem.alignment == 16
        and not problem.epilogue
    )


@dataclass(frozen=True)
class _Listed:
    """Of the kernels those that a device can compile, as columns."""

    numbers: Ints
    columns: Columns
    resident: Ints
    """Clusters that run at once."""
    splits: Bools
    """Whether a launch may split k."""
    reduces: Bools
    """Whether it may have a second kernel add the splits."""
    rasters: Bools
    """Whether it may choose the order of tiles."""
    skinny: Bools


@cache
def _on(device: Device) -> _Listed:
    usual = Problem.parse("64x4096x4096")
    kernels = listed()
    numbers = [
        number
        for number, kernel in enumerate(kernels)
        if families.get(kernel.family).check(usual, launched(usual, kernel), device).runs
    ]
    chosen = [kernels[number] for number in numbers]
    launches = [set(families.get(kernel.family).parameters["launch"]) for kernel in chosen]
    columns = Columns.of([launched(usual, kernel) for kernel in chosen])

    def have(name: str) -> Bools:
        return np.array([name in names for names in launches], dtype=np.bool_)

    return _Listed(
        np.array(numbers),
        columns,
        np.array([device.resident_clusters(int(size)) for size in columns.cluster_m * columns.cluster_n]),
        have("split_k") & np.array([_splits(usual, kernel, device) for kernel in chosen], dtype=np.bool_),
        have("reduction"),
        have("raster_order"),
        np.array([kernel.family == "skinny" for kernel in chosen]),
    )


def _splits(problem: Problem, kernel: Candidate, device: Device) -> bool:
    return families.get(kernel.family).check(problem, launched(problem, kernel, split_k=2), device).runs


def choices(problem: Problem, device: Device) -> Choices:
    """The launches that suit a problem, of each kernel two at most: the model's best of those that leave k
    whole, and of those that split it.

    Splits are as many as occupy the device's multiprocessors once, or twice.
    """
    on = _on(device)
    c = on.columns
    m = np.where(c.swap_ab, problem.n, problem.m)
    n = np.where(c.swap_ab, problem.m, problem.n)
    tiles_m, tiles_n = -(-m // c.tile_m), -(-n // c.tile_n)
    size = c.cluster_m * c.cluster_n
    clusters = -(-tiles_m // c.cluster_m) * -(-tiles_n // c.cluster_n)
    k_tiles = -(-problem.k // c.tile_k)
    sharing = stream_clusters(clusters, k_tiles, on.resident, least=np.minimum, most=np.maximum)
    fits = (tiles_m >= c.cluster_m) & (tiles_n >= c.cluster_n)
    fits &= ~c.streams | (stream_tiles(clusters, k_tiles, sharing) > 0)
    fits &= ~on.skinny | ((problem.m <= c.tile_m) & (problem.m > c.tile_m - 8))
    whole = np.flatnonzero(fits)
    parts: list[tuple[Any, ...]] = []
    for along_n, swizzle in _RASTERS[:1] if fits_l2(problem, device) else _RASTERS:
        rows = whole[on.rasters[whole]] if parts else whole
        parts.append((rows, *_filled(rows, 1, False, along_n, swizzle)))
        rows = rows[c.streams[rows]]
        parts.append((rows, *_filled(rows, 1, True, along_n, swizzle)))
    unsplit = _best(problem, device, on, parts)
    # Splits of k keep the order of tiles.
    rows = unsplit.kernels
    room = np.minimum(2 * device.sm_count // (clusters * size), k_tiles // 4)[rows]
    once = (on.resident // clusters)[rows]
    parts = []
    for most, second in itertools.product((once, 2 * once), (False, True)):
        split = _SPLITS[np.searchsorted(_SPLITS, np.maximum(np.minimum(most, room), 1), side="right") - 1]
        at = np.flatnonzero(on.splits[rows] & (split > 1) & (on.reduces[rows] | (not second)))
        _, seconds, _, _ = _filled(at, 1, second, False, 1)
        parts.append((rows[at], split[at], seconds, unsplit.along_n[at], unsplit.swizzle[at]))
    split = (
        _best(problem, device, on, parts)
        if any(len(part[0]) for part in parts)
        else unsplit.take(np.arange(0))
    )
    joined = _joined(unsplit, split)
    return replace(joined, kernels=on.numbers[joined.kernels])


def _filled(rows: Ints, split_k: int, second: bool, along_n: bool, swizzle: int) -> tuple[Any, ...]:
    size = len(rows)
    return np.full(size, split_k), np.full(size, second), np.full(size, along_n), np.full(size, swizzle)


def _best(problem: Problem, device: Device, on: _Listed, parts: Sequence[tuple[Any, ...]]) -> Choices:
    """Of launches of each kernel the one that the model takes for the fastest, the first of equals."""
    rows, split_k, second, along_n, swizzle = (np.concatenate(column) for column in zip(*parts, strict=True))
    columns = on.columns.take(rows).launched(
        split_k=split_k, second=second, along_n=along_n, swizzle=swizzle
    )  # fmt: skip
    found = Choices(
        rows, split_k, second, along_n, swizzle, columns, terms(problem, columns, device)
    )  # fmt: skip
    order = np.lexsort((found.terms.total_us, rows))
    return found.take(order[np.r_[True, np.diff(rows[order]) != 0]])


def _joined(one: Choices, other: Choices) -> Choices:
    def joined(first: Any, second: Any) -> Any:
        pairs = ((getattr(first, field.name), getattr(second, field.name)) for field in fields(first))
        return type(first)(
            *(np.concatenate(pair) if isinstance(pair[0], np.ndarray) else joined(*pair) for pair in pairs)
        )

    found: Choices = joined(one, other)
    return found
