"""What the selector reads of a launch: numbers of the problem, of torch's product, of the kernel and of the
model's terms. `benchmarks.selector_fit` fits to them, and `serve.predict` goes by them.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.generate.cublaslt.choice import LibraryChoice
from tunegemm.generate.shortlist import Choices, listed
from tunegemm.generate.terms import Floats

#: Stands for what is not known; each feature that may be missing is above it.
UNKNOWN = -100.0
_FAMILIES = ("cute_sm90", "gluon_wgmma", "triton_tma", "skinny")

OF_PROBLEM = ("log_m", "log_n", "log_k", "log_bytes", "n_beyond", "k_beyond")
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


def features(problem: Problem, found: Choices, device: Device, library: LibraryChoice | None) -> Floats:
    """A row of `NAMES` for each launch. library: None where it is not known what torch will launch."""
    c, t = found.columns, found.terms
    m, n, k, sms = problem.m, problem.n, problem.k, device.sm_count
    table = np.empty((len(NAMES), len(found)))
    floor_us = 3.0 + problem.bytes / (device.bandwidth_gbps * 1e3)
    rows = np.where(c.swap_ab, c.tile_n, c.tile_m)
    columns = np.where(c.swap_ab, c.tile_m, c.tile_n)
    rows_all = -(-m // rows) * rows
    values = (
        math.log2(m), math.log2(n), math.log2(k), math.log2(problem.bytes), n % 64, k % 64,
        rows, columns, c.tile_k, c.stages, c.stages * c.tile_k * (c.tile_m + c.tile_n),
        c.cluster_m * c.cluster_n, np.where(c.swap_ab, c.cluster_n, c.cluster_m), c.swap_ab, c.pingpong,
        c.streams, found.split_k, found.second, _families()[found.kernels], np.log(t.total_us / floor_us),
        np.log(t.total_us), t.tiles / sms, t.wave_efficiency, np.log(t.compute_us / t.dram_us),
        np.log(t.l2_us / t.dram_us), t.epilogue_us / t.total_us, np.log2(-(-k // c.tile_k) / c.split_k),
        t.ctas / sms, rows_all / m, -(-n // columns) * columns / n, (rows_all - m) / rows, found.kernels,
        *_of_torch(problem, rows_all, sms, library),
    )  # fmt: skip
    for place, value in enumerate(values):
        table[place] = value
    return table.T


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


@cache
def _families() -> Floats:
    """Of each listed kernel, the number of its family."""
    return np.array([float(_FAMILIES.index(kernel.family)) for kernel in listed()])
