"""Code that families with tiles share: the product that a kernel sees, tiles, grids and k splits."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem, default_out_dtype, swapped_dtype
from tunegemm.describe.space import Candidate
from tunegemm.generate.feasibility import exceeded_smem, rule
from tunegemm.generate.workspace import Workspace

_SWAP_MAX_M = 128
_MIN_K_TILES_PER_SPLIT = 4
_MAX_WORK_PER_SM = 2
#: Stream-K gives each cluster at least this many k tiles.
_MIN_K_TILES_OF_SHARE = 4


def seen_by_kernel(problem: Problem, candidate: Candidate) -> Problem:
    """The product that the kernel computes: with swap_ab, D^T = B^T A^T (n x m) from the same memory.

    With swap_ab the result leaves out the epilogue, which is written for D, and D's dtype, which may depend
    on the epilogue. For rows in groups the result is a batch of equal groups.
    """
    if problem.groups:
        return problem.as_modelled
    return _transposed(problem) if candidate.params.get("swap_ab", False) else problem


@functools.lru_cache(maxsize=64)  # rules ask for it several times per candidate
def _transposed(problem: Problem) -> Problem:
    a_major, b_major, out_major = majors(problem, True)
    return replace(
        problem,
        m=problem.n,
        n=problem.m,
        in_dtype=swapped_dtype(problem.in_dtype),
        out_dtype=default_out_dtype(problem.in_dtype),
        a_major=a_major,
        b_major=b_major,
        out_major=out_major,
        epilogue="",
    )


def majors(problem: Problem, swapped: bool) -> tuple[str, str, str]:
    """The majors of A, B and D as the kernel sees them."""
    if not swapped:
        return problem.a_major, problem.b_major, problem.out_major
    return (
        "k" if problem.b_major == "k" else "m",
        "k" if problem.a_major == "k" else "n",
        "m" if problem.out_major == "n" else "n",
    )


def tile_count(problem: Problem, candidate: Candidate) -> int:
    """The number of output tiles of the whole batch, with both modes rounded up to whole clusters."""
    seen = seen_by_kernel(problem, candidate)
    cluster_m, cluster_n = candidate.params.get("cluster_m", 1), candidate.params.get("cluster_n", 1)
    rows = -(-seen.m // (candidate["tile_m"] * cluster_m)) * cluster_m
    columns = -(-seen.n // (candidate["tile_n"] * cluster_n)) * cluster_n
    return int(rows * columns * seen.batch)


def balanced(work: int, resident: int) -> int:
    """The fewest workers that need no more waves than `resident` workers do: same makespan, less power."""
    resident = min(resident, work)
    return math.ceil(work / math.ceil(work / resident))


def stream_clusters(
    tiles: Any,
    k_tiles: Any,
    resident: Any,
    *,
    least: Callable[..., Any] = min,
    most: Callable[..., Any] = max,
) -> Any:
    """The grid of stream-K, in clusters: all that run at once, or fewer, so that each has some k tiles.

    least, most: elementwise minimum and maximum, if the arguments are arrays.
    """
    return most(1, least(resident, tiles * k_tiles // _MIN_K_TILES_OF_SHARE))


def stream_tiles(tiles: Any, k_tiles: Any, clusters: Any) -> Any:
    """The number of cluster tiles that stream-K cuts: those of the last wave, and also of the wave before if
    a cluster would otherwise get only a few k tiles. Takes numbers or arrays.
    """
    last = tiles % clusters
    few = last * k_tiles < _MIN_K_TILES_OF_SHARE * clusters
    return last + clusters * ((last > 0) & few & (tiles > clusters))


def divided(streams: bool, tiles: int, k_tiles: int, split_k: int, resident: int) -> tuple[int, int, int]:
    """How the tiles of a product are divided; all numbers count clusters.

    streams: whether by stream-K, which ignores `split_k`. resident: clusters that run at the same time.
    Returns the grid, the k splits of each tile or the tiles that stream-K cuts, and the work units that store
    partial sums.
    """
    if streams:
        clusters = stream_clusters(tiles, k_tiles, resident)
        cut = stream_tiles(tiles, k_tiles, clusters)
        return clusters, cut, cut + clusters if cut else 0
    work = tiles * split_k
    return min(work, resident), split_k, work if split_k > 1 else 0


def persistent_grid(problem: Problem, candidate: Candidate, device: Device) -> int:
    """The number of blocks of a launch, for the candidate's `ctas`.

    ``tiles`` launches one block for each work unit, and the hardware schedules them. ``all`` fills the device
    with as many blocks per multiprocessor as the kernel is made for, ``two_per_sm`` with two. ``balanced``
    launches the fewest blocks that need no more waves than ``all``.
    """
    params, work = candidate.params, tile_count(problem, candidate)
    work *= int(params.get("split_k", 1))
    per_sm = 2 if params["ctas"] == "two_per_sm" else params.get("ctas_per_sm", params.get("occupancy", 1))
    resident = device.sm_count * int(per_sm)
    if params["ctas"] == "tiles":
        return work
    return balanced(work, resident) if params["ctas"] == "balanced" else min(work, resident)


def streams(candidate: Candidate) -> bool:
    """Whether the candidate's clusters share k tiles evenly, instead of taking tiles."""
    return candidate.params.get("tile_scheduler", "static") == "stream_k"


#: The reduction class whose kernels add up each element as one sum, in the order of k, on the tensor cores.
#: Measurements showed the same bits for all tiles, schedules and numbers of rows (docs/decisions/0018).
ORDERED = "ordered"


def ordered_sum(problem: Problem, candidate: Candidate) -> str:
    """`ORDERED` if the kernel does not split k, else "": each way to add k splits is a class of its own."""
    is_cut = int(candidate.params.get("split_k", 1)) > 1 or streams(candidate)
    return "" if is_cut else ORDERED


def ordered_bf16_sum(problem: Problem, candidate: Candidate) -> str:
    """`ordered_sum` for families whose kernels were compared with those of cute_sm90 in bf16 only."""
    is_known = problem.in_dtype == "bf16" and candidate.params.get("acc_dtype", "fp32") == "fp32"
    return ordered_sum(problem, candidate) if is_known else ""


@rule("swap_ab", "m", runs=True)
def swapped_rows(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """Swapping puts m on WGMMA's narrow side; an m that fills the 64-row side gains nothing there."""
    if candidate.params.get("swap_ab", False) and problem.m > _SWAP_MAX_M:
        return f"swap_ab with m={problem.m} > {_SWAP_MAX_M}: the transposed tile does the same unswapped"
    return None


@rule(
    "split_k", "tile_k", "k", "device", "tile_m", "tile_n", "cluster_m", "cluster_n", "swap_ab", "m", "n",
    "batch", runs=True,
)  # fmt: skip
def split_work(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """Each split of k needs k tiles of its own, and splits pay off only on otherwise idle multiprocessors."""
    splits = int(candidate.params.get("split_k", 1))
    if splits == 1:
        return None
    k_tiles = -(-problem.k // candidate["tile_k"])
    if splits * _MIN_K_TILES_PER_SPLIT > k_tiles:
        return f"split_k {splits} leaves a split less than {_MIN_K_TILES_PER_SPLIT} of {k_tiles} k tiles"
    tiles = tile_count(problem, candidate)
    if tiles * splits > _MAX_WORK_PER_SM * device.sm_count:
        return f"split_k {splits} x {tiles} tiles > {_MAX_WORK_PER_SM} x {device.sm_count} multiprocessors"
    return None


def exceeded_by_two(
    problem: Problem, candidate: Candidate, device: Device, config: Any, other_registers: int
) -> str | None:
    """Why `ctas` cannot be ``two_per_sm``: a multiprocessor does not hold two blocks, or has no work for
    them. None if it can, or is not.

    other_registers: those of a thread beside its accumulators.
    """
    if candidate.params.get("ctas") != "two_per_sm":
        return None
    work = tile_count(problem, candidate) * int(candidate.params.get("split_k", 1))
    if work <= device.sm_count:
        return f"{work} work units <= {device.sm_count} multiprocessors: one block each does the same"
    limits, registers = device.architecture, config.accumulator_registers + other_registers
    if (reason := exceeded_smem(config.smem_bytes, limits, blocks=2)) is not None:
        return reason
    if 2 * config.threads * registers > limits.registers_per_sm:
        return f"2 x {config.threads} threads x {registers} registers > {limits.registers_per_sm}"
    return None


def split_workspace(problem: Problem, candidate: Candidate, device: Device) -> Workspace | None:
    """Workspace in which a tile's last block adds the k splits: fp32 partial sums, and a counter per tile.

    None without k splits.
    """
    split_k = int(candidate["split_k"])
    if split_k == 1:
        return None
    tiles = tile_count(problem, candidate)
    return Workspace(tiles * split_k * candidate["tile_m"] * candidate["tile_n"] * 4, tiles * 4, device.index)
