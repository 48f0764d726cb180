"""Lists the kernels that may serve an untuned product, each with the launches that suit the product.

The list is db/selector.toml, and its kernels ship compiled. A search looks at thousands of kernels, but for
nearly every tuned product of plain 16-bit operands a listed kernel is within some per cent of the best. Other
kinds of products have lists for policy `batch_invariant`, in db/invariant.toml.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from tunegemm.describe.device import Device
from tunegemm.describe.problem import DTYPE_BYTES, MAX_ALIGNMENT, Problem
from tunegemm.describe.space import Candidate, Value
from tunegemm.generate import families
from tunegemm.generate.tiles import ORDERED, stream_clusters, stream_tiles
from tunegemm.model import rank as model
from tunegemm.model.tables import reader_of
from tunegemm.model.terms import Bools, Columns, Ints, Terms, fits_l2, terms

DTYPES = ("bf16", "fp16")
"""The operand dtypes of the list. It was measured with bf16; fp16 has the same bytes and speed."""

_USUAL = "64x4096x4096"
#: Numbers of k splits, as in the search spaces.
_SPLITS = np.array([1, 2, 3, 4, 6, 8, 12, 16])
#: Raster orders to try if L2 does not hold the operands: whether along n, and the swizzle size.
RASTERS = ((False, 1), (True, 1), (False, 8), (True, 8))


@dataclass(frozen=True)
class Choices:
    """Launches of listed kernels for one problem, and the model's terms of each."""

    kernels: Ints
    """Indices into the list."""
    columns: Columns
    terms: Terms

    def __len__(self) -> int:
        return len(self.kernels)

    def take(self, rows: Any) -> Choices:
        """A selection of the launches, by indices or a mask."""
        return Choices(self.kernels[rows], self.columns.take(rows), self.terms.take(rows))

    def candidate(self, problem: Problem, number: int) -> Candidate:
        """A launch as a candidate."""
        kernel, c = listed()[int(self.kernels[number])], self.columns
        launch = (each[number].item() for each in (c.split_k, c.second, c.along_n, c.swizzle))
        return launched(problem, kernel, *launch)


@reader_of("selector.toml")
def listed(table: dict[str, Any]) -> tuple[Candidate, ...]:
    """All kernels of the list. Raises BadValueError if the table is damaged or a family does not know one."""
    return tuple(kernel for part in table["kernels"] for kernel in _kernels(part))


def _kernels(table: Mapping[str, Any]) -> Iterator[Candidate]:
    name, parameters = table["family"], table["parameters"]
    known = families.get(name).parameters["compile"]
    if set(parameters) != set(known):
        raise ValueError(f"{name} has the parameters {', '.join(known)}")
    for values in table["values"]:
        yield Candidate.make(name, dict(zip(parameters, values, strict=True)))


@cache
def ordered_lists() -> Mapping[Problem, tuple[Candidate, ...]]:
    """Shipped kernels of the reduction class `ORDERED`, by a 64x4096x4096 problem that stands for their kind.

    Raises BadValueError as `listed` does.
    """
    result = {}
    for dtype in DTYPES:
        plain = Problem.parse(_USUAL, dtype=dtype)
        launches = ((kernel, launched(plain, kernel)) for kernel in listed())
        result[plain] = tuple(
            kernel for kernel, launch in launches if families.reduction_class(plain, launch) == ORDERED
        )
    return result | _invariant()["kernels"]


@cache
def large_lists() -> Mapping[Problem, tuple[Candidate, ...]]:
    """Shipped kernels for products of many rows, at GPC-aware launches, by problem as in `ordered_lists`."""
    return {
        problem: tuple(launched_by_gpc(problem, kernel) for kernel in kernels)
        for problem, kernels in _invariant()["large"].items()
    }


@reader_of("invariant.toml")
def _invariant(table: dict[str, Any]) -> dict[str, dict[Problem, tuple[Candidate, ...]]]:
    """Of few rows and of many: the kernels of each kind of problem."""
    results: dict[str, dict[Problem, tuple[Candidate, ...]]] = {"kernels": {}, "large": {}}
    for name, by_kind in results.items():
        for part in table[name]:
            kernels = tuple(_kernels(part))
            for words in part["kinds"]:
                problem = Problem.parse(_USUAL, **words)
                by_kind[problem] = tuple(_for_operands(kernel, problem) for kernel in kernels)
    return results


def ordered_kernels(problem: Problem) -> tuple[Candidate, ...]:
    """The shipped kernels of the class `ORDERED` for a problem's kind, whatever its extents."""
    return ordered_lists().get(_usual(problem), ())


def large_kernels(problem: Problem) -> tuple[Candidate, ...]:
    """The shipped kernels for many rows of a problem's kind, at GPC-aware launches."""
    return large_lists().get(_usual(problem), ())


def _usual(problem: Problem) -> Problem:
    m, n, k = (int(word) for word in _USUAL.split("x"))
    return replace(problem, m=m, n=n, k=k, batch=1, alignment=MAX_ALIGNMENT)


def _for_operands(kernel: Candidate, problem: Problem) -> Candidate:
    """A kernel of 16-bit operands, adapted to another dtype: its tiles keep their bytes along k."""
    tile_k = kernel["tile_k"] * DTYPE_BYTES["bf16"] // DTYPE_BYTES[problem.in_dtype]
    return Candidate.make(kernel.family, dict(kernel.compile_params) | {"tile_k": tile_k})


def launched(
    problem: Problem,
    kernel: Candidate,
    split_k: int = 1,
    second: bool = False,
    along_n: bool = False,
    swizzle: int = 1,
) -> Candidate:
    """A listed kernel with all launch parameters of its family."""
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


def launched_by_gpc(
    problem: Problem, kernel: Candidate, *, along_n: bool = False, streamed: bool = False
) -> Candidate:
    """A kernel's GPC-aware launch, with swizzle size 8.

    streamed: whether L2 evicts first the operand that a group does not share; else `model.l2_hint` decides.
    """
    launch = launched(problem, kernel, along_n=along_n, swizzle=8)
    values: dict[str, Value] = {**dict(launch.launch_params), "cluster_order": "gpc"}
    return launch.with_launch(**(values | {"l2_hint": "streamed"} if streamed else values))


def covers(problem: Problem) -> bool:
    """Whether the list covers a problem: a plain product whose operands TMA reads without copies."""
    return (
        problem.in_dtype in DTYPES
        and problem.out_dtype == problem.in_dtype
        and problem.layout == "tn"
        and problem.out_major == "n"
        and problem.batch == 1
        and not problem.groups
        and problem.alignment == 16
        and not problem.epilogue
    )


@dataclass(frozen=True)
class _Listed:
    """The listed kernels that a device can compile, as columns."""

    numbers: Ints
    columns: Columns
    resident: Ints
    """Clusters that run at once."""
    splits: Bools
    """Whether a launch may split k."""
    reduces: Bools
    """Whether a second kernel may add the splits."""
    rasters: Bools
    """Whether a launch may choose the raster order."""
    skinny: Bools


@cache
def _on(device: Device, places: tuple[int, ...] | None) -> _Listed:
    usual = Problem.parse(_USUAL)
    kernels = listed()
    numbers = [
        number
        for number in (range(len(kernels)) if places is None else places)
        if families.get(kernels[number].family).check(usual, launched(usual, kernels[number]), device).runs
    ]
    chosen = [kernels[number] for number in numbers]
    launches = [set(families.get(kernel.family).parameters["launch"]) for kernel in chosen]
    columns = Columns.of([launched(usual, kernel) for kernel in chosen])

    def have(name: str) -> Bools:
        return np.array([name in names for names in launches], dtype=np.bool_)

    return _Listed(
        np.array(numbers, dtype=np.int64),
        columns,
        np.array([device.resident_clusters(int(size)) for size in columns.cluster_m * columns.cluster_n]),
        have("split_k") & np.array([_splits(usual, kernel, device) for kernel in chosen], dtype=np.bool_),
        have("reduction"),
        have("raster_order"),
        np.array([kernel.family == "skinny" for kernel in chosen], dtype=np.bool_),
    )


def _splits(problem: Problem, kernel: Candidate, device: Device) -> bool:
    return families.get(kernel.family).check(problem, launched(problem, kernel, split_k=2), device).runs


def choices(problem: Problem, device: Device, places: tuple[int, ...] | None = None) -> Choices:
    """The launches that suit a problem, at most two per kernel: the model's best without and with k splits.

    The numbers of splits occupy the device's multiprocessors once or twice. With so few tiles, their order
    matters little. places: indices of the kernels to choose from; all by default.
    """
    on = _on(device, places)
    c = on.columns
    m = np.where(c.swap_ab, problem.n, problem.m)
    n = np.where(c.swap_ab, problem.m, problem.n)
    tiles_m, tiles_n = -(-m // c.tile_m), -(-n // c.tile_n)
    clusters = -(-tiles_m // c.cluster_m) * -(-tiles_n // c.cluster_n)
    k_tiles = -(-problem.k // c.tile_k)
    fits = (tiles_m >= c.cluster_m) & (tiles_n >= c.cluster_n)
    if c.streams.any():
        sharing = stream_clusters(clusters, k_tiles, on.resident, least=np.minimum, most=np.maximum)
        fits &= ~c.streams | (stream_tiles(clusters, k_tiles, sharing) > 0)
    fits &= ~on.skinny | ((problem.m <= c.tile_m) & (problem.m > c.tile_m - 8))
    whole = np.flatnonzero(fits)
    parts: list[tuple[Any, ...]] = []
    for along_n, swizzle in RASTERS[:1] if fits_l2(problem, device) else RASTERS:
        rows = whole[on.rasters[whole]] if parts else whole
        parts.append((rows, *_unsplit(rows, False, along_n, swizzle)))
        if len(rows := rows[c.streams[rows]]):
            parts.append((rows, *_unsplit(rows, True, along_n, swizzle)))
    rows = whole[on.splits[whole]]
    if len(rows):
        size = (c.cluster_m * c.cluster_n)[rows]
        room = np.minimum(2 * device.sm_count // (clusters[rows] * size), k_tiles[rows] // 4)
        once = on.resident[rows] // clusters[rows]
        for most, second in itertools.product((once, 2 * once), (False, True)):
            split = _SPLITS[np.searchsorted(_SPLITS, np.maximum(np.minimum(most, room), 1), side="right") - 1]
            at = np.flatnonzero((split > 1) & (on.reduces[rows] | (not second)))
            if len(at):
                _, seconds, along, swizzles = _unsplit(at, second, False, 1)
                parts.append((rows[at], split[at], seconds, along, swizzles))
    rows, split_k, seconds, along, swizzles = (np.concatenate(column) for column in zip(*parts, strict=True))
    columns = c.take(rows).launched(split_k=split_k, second=seconds, along_n=along, swizzle=swizzles)
    result = terms(problem, columns, device)
    # The predicted fastest launch of each kernel, without and with k splits.
    groups = 2 * rows + (split_k > 1)
    order = np.lexsort((result.total_us, groups))
    order = order[np.r_[True, np.diff(groups[order]) != 0]]
    order = order[np.argsort(split_k[order] > 1, kind="stable")]
    return Choices(on.numbers[rows], columns, result).take(order)


def _unsplit(rows: Ints, second: bool, along_n: bool, swizzle: int) -> tuple[Any, ...]:
    size = len(rows)
    return np.ones(size, np.int64), np.full(size, second), np.full(size, along_n), np.full(size, swizzle)
