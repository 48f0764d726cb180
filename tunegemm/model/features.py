"""Computes the inputs of the fitted trees for a launch: numbers that describe the problem, torch's own
product, the kernel and the model's terms. `fit` fits trees to them; `choose.predictions` and
`choose.invariance` evaluate the trees.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate.cublaslt.choice import LibraryChoice
from tunegemm.model.shortlist import Choices, listed
from tunegemm.model.terms import Columns, Floats, Terms

#: Stands for an unknown value; it lies below every value of the features that may be missing.
UNKNOWN = -100.0
#: Families; the trees read a family's index here.
FAMILIES = ("cute_sm90", "gluon_wgmma", "triton_tma", "skinny", "cute_sm80")

#: `half_sectors`: whether rows of K may start in the middle of a 32 B sector of device memory.
OF_PROBLEM = ("log_m", "log_n", "log_k", "log_bytes", "n_beyond", "k_beyond", "half_sectors")
OF_TORCH = (
    "torch_rows", "torch_columns", "torch_cluster", "torch_cluster_columns", "torch_splits", "torch_waves",
    "torch_fill", "torch_steps", "torch_rows_all", "rows_to_torch",
)  # fmt: skip
OF_LAUNCH = (
    "rows", "columns", "tile_k", "stages", "ring", "cluster", "cluster_rows", "swapped", "pingpong",
    "streams", "splits", "second", "family", "to_floor", "log_us", "waves", "fill", "compute", "l2",
    "epilogue", "steps", "ctas", "rows_all", "columns_all", "empty", "place",
)  # fmt: skip
NAMES = (*OF_PROBLEM, *OF_LAUNCH, *OF_TORCH)
#: Features that rank kernels without a k split, whether the shortlist has them or not.
OF_ORDER = (
    *OF_PROBLEM,
    *(name for name in OF_LAUNCH if name not in ("streams", "splits", "second", "place")),
)

#: Features that predict the gain of such a kernel over torch's operations for an fp8 or fused product.
OF_GAIN = (*OF_ORDER, "behind", "one_byte", "gated", "adds", "after", *OF_TORCH)


def features(
    names: Sequence[str],
    problem: Problem,
    columns: Columns,
    terms: Terms,
    families: Floats,
    device: Device,
    library: LibraryChoice | None = None,
    **known: Any,
) -> Floats:
    """A row of the named features for each launch.

    families: the kernels' families, as `family_numbers` returns them. library: the kernel that torch will
    launch; None if unknown. known: further features by name.
    """
    known |= _of_launches(problem, columns, terms, families, device)
    if OF_TORCH[0] in names:
        rows_all = -(-problem.m // known["rows"]) * known["rows"]
        known |= zip(OF_TORCH, _of_torch(problem, rows_all, device.sm_count, library), strict=True)
    table = np.empty((len(names), len(families)))
    for place, name in enumerate(names):
        table[place] = known[name]
    return table.T


def features_of_choices(
    problem: Problem, choices: Choices, device: Device, library: LibraryChoice | None
) -> Floats:
    """A row of the features `NAMES` for each launch of listed kernels."""
    return features(
        NAMES, problem, choices.columns, choices.terms, _of_listed()[choices.kernels], device, library,
        splits=choices.columns.split_k, second=choices.columns.second, place=choices.kernels,
    )  # fmt: skip


def family_numbers(kernels: Sequence[Candidate]) -> Floats:
    """The index in `FAMILIES` of each kernel's family."""
    return np.array([float(FAMILIES.index(kernel.family)) for kernel in kernels])


@cache
def _of_listed() -> Floats:
    return family_numbers(listed())


def _of_launches(
    problem: Problem, c: Columns, t: Terms, families: Floats, device: Device
) -> dict[str, float | NDArray[Any]]:
    """The features of launches by name; families: indices into `FAMILIES`."""
    m, n, k, sms = problem.m, problem.n, problem.k, device.sm_count
    floor_us = 3.0 + problem.bytes / (device.bandwidth_gbps * 1e3)
    rows = np.where(c.swap_ab, c.tile_n, c.tile_m)
    columns = np.where(c.swap_ab, c.tile_m, c.tile_n)
    rows_all = -(-m // rows) * rows
    return {
        "log_m": math.log2(m),
        "log_n": math.log2(n),
        "log_k": math.log2(k),
        "log_bytes": math.log2(problem.bytes),
        "n_beyond": n % 64,
        "k_beyond": k % 64,
        "half_sectors": k % 16 != 0,
        "rows": rows,
        "columns": columns,
        "tile_k": c.tile_k,
        "stages": c.stages,
        "ring": c.stages * c.tile_k * (c.tile_m + c.tile_n),
        "cluster": c.cluster_m * c.cluster_n,
        "cluster_rows": np.where(c.swap_ab, c.cluster_n, c.cluster_m),
        "swapped": c.swap_ab,
        "pingpong": c.pingpong,
        "streams": c.streams,
        "family": families,
        "to_floor": np.log(t.total_us / floor_us),
        "log_us": np.log(t.total_us),
        "waves": t.tiles / sms,
        "fill": t.wave_efficiency,
        "compute": np.log(t.compute_us / t.dram_us),
        "l2": np.log(t.l2_us / t.dram_us),
        "epilogue": t.epilogue_us / t.total_us,
        "steps": np.log2(-(-k // c.tile_k) / c.split_k),
        "ctas": t.ctas / sms,
        "rows_all": rows_all / m,
        "columns_all": -(-n // columns) * columns / n,
        "empty": (rows_all - m) / rows,
    }


def _of_torch(problem: Problem, rows_all: Any, sms: int, library: LibraryChoice | None) -> tuple[Any, ...]:
    if library is None:
        return (UNKNOWN,) * len(OF_TORCH)
    tiles_m, tiles_n = -(-problem.m // library.tile_m), -(-problem.n // library.tile_n)
    waves = tiles_m * tiles_n * library.split_k / sms
    torch_rows = tiles_m * library.tile_m
    return (
        library.tile_m, library.tile_n, library.cluster_m * library.cluster_n, library.cluster_n,
        library.split_k, waves, waves / math.ceil(waves),
        math.log2(problem.k / 64 / library.split_k), torch_rows / problem.m, rows_all / torch_rows,
    )  # fmt: skip
