"""A predicted time for a tile candidate: waves, tensor cores, shared memory, L2, DRAM, epilogue.

It only ever ranks: its microseconds order candidates of one problem and are not a measurement, so nothing
stores or shows them as one. Every term is a closed formula of the problem, the candidate and the
device; what is left out (power, clocks of a moment, bank conflicts) is what measuring is for.

The terms of one product, in order:

1. *waves*: a persistent grid of clusters takes the tiles; the slowest CTA computes ceil(tiles / resident).
2. *compute*: WGMMA cycles of one k-step, or the shared-memory cycles of its operands where they are
   more, or the latency of a load that the ring of stages does not hide.
3. *L2*: operand bytes of all CTAs at once; a cluster multicasts, and so asks for less.
4. *DRAM*: every operand once, and again what a wave's working set pushes out of L2; output once.
5. *epilogue*: exposed for each tile when cooperative, only for the last one when pingpong.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, exp, log2

from tunegemm.describe.device import Device
from tunegemm.describe.problem import DTYPE_BYTES, Problem
from tunegemm.describe.space import Candidate, Value
from tunegemm.errors import SpaceError

# The constants were fitted by coordinate search on the six recorded sweeps of an H200 in db/sweeps
# (2026-11-20), starting from the published figures named below, and may differ from them. That the best
# kernel of each of those shapes is among the model's first 16 is in-sample; no shape was held out.

# Tensor cores: m64 nN k16 of 16-bit elements takes N/2 cycles, 4096 FLOP per cycle and SM. Its operands
# come from shared memory at 128 B per cycle: A (2 KiB) and B (32 N bytes) for every instruction. That
# ratio *is* the published efficiency table: N=32 gives 16/24 = 67 % (63 % seen), N=16 40 % (38 %), N=8
# 22 % (21 %), N >= 64 is bound by the tensor cores (95-96 %); arXiv 2402.13499, table of SS WGMMA on H800.
_FLOP_PER_CYCLE_AND_SM = 4096
_WGMMA_PEAK = 1.0
_SMEM_BYTES_PER_CYCLE = 128
_INSTRUCTION_K_BYTES = 32
# TMA's writes of the next stages share the same banks, but mostly fall into cycles in which the
# tensor cores read nothing: with full weight 128x128 tiles could never reach the 88 % they do.
_SMEM_WRITE_WEIGHT = 0.07
# Dense work runs at the power cap: SM clocks near 1500 of 1830 MHz on an H200 (nvidia-smi, 700 W).
_SUSTAINED_CLOCK = 0.82
# Two warpgroups that share a tile wait for each other at every ring slot and idle the tensor cores
# between tiles: no cooperative tile is among the best four of the large squares in `anchors_h200.toml`.
_COOPERATIVE_EFFICIENCY = 0.94
# Cycles per k-step to pass the ring's barriers when only one warpgroup issues; two hide each other's.
_BARRIER_CYCLES = 12
# Cycles per k-step and further CTA of a cluster: a slot is free again when all its readers say so.
_CLUSTER_CYCLES = 13
# Two-level accumulation adds the tensor cores' sums in registers, 128 a cycle; they wait meanwhile, unless
# the other warpgroup of a cooperative tile has work for them. Not fitted: no sweep has it.
_ADDS_PER_CYCLE = 128
# L2 to SM bytes per cycle and SM, at full clock. DeepGEMM's constants are 64 per SM, at most 6154 (47 per SM)
# on 132 SMs; the sweeps want more, since main loops of large squares lose nothing without a cluster.
_L2_BYTES_PER_CYCLE_AND_SM = 78
# From issuing a TMA load to its first bytes, in cycles: an L2 miss. The slot's bytes follow at L2's rate.
_LOAD_LATENCY_CYCLES = 980
_DRAM_EFFICIENCY = 0.77
# Part of the L2 that holds operands over a wave; the rest turns over with output and the other partition.
_L2_USABLE = 0.6
# Epilogue: cycles per 64-row subtile beside its bytes (stmatrix, fence, TMA store, barrier).
_SUBTILE_CYCLES = 185
# Split-K: the last split of a tile waits for an atomic and reads the others' sums through L2.
_REDUCTION_US = 1.5
# Sums that meet in pairs, or in a second kernel: for each level of the tree, for the kernel, and the bytes a
# microsecond in which sums are written and read. Fitted by hand to splits of five shapes on an H200,
# each timed both ways (splits-log-2026-11-21.json).
_MEETING_US, _PAIRS_BYTES_PER_US = 3.0, 3.5e6
_SECOND_KERNEL_US, _SECOND_BYTES_PER_US = 2.5, 7.0e6
# Where stream-K's whole tiles follow, sums that meet do so under others' main loops; those of a second kernel
# are out of L2 by the time that it reads them (four shapes, same file).
_EARLY_PAIRS_BYTES_PER_US, _EARLY_SECOND_BYTES_PER_US = 7.0e6, 3.0e6
# Clusters of stream-K go through k out of step: that share of what L2 would else have served is read again.
_OUT_OF_STEP = 0.6
_LAUNCH_US = 2.0
_FILL_US = 1.0
# Overlapping limits disturb each other: the sum of powers lies between their maximum and their sum.
_OVERLAP_POWER = 4.9
# A part that is not in `device.PARTS`: cycles and bytes of a mid-range Hopper.
_DEFAULT_CLOCK_MHZ = 1700.0
_DEFAULT_BANDWIDTH_GBPS = 3000.0

# In steady-state timing at the power cap: how a lead in interleaved timing shrinks, what it costs to fetch
# operands from L2, and that two warpgroups work on tiles of their own. Fitted to our kernels that were timed
# both ways on an H200 (benchmarks/results/h200/turns-2026-11-22.json), where m > 256: 2.3 % are left of 8 %.
_STEADY_LEAD = 0.71
_STEADY_FETCH = 9.0
_STEADY_PINGPONG = 0.031

#: Stream-K gives no cluster fewer k tiles than that.
_MIN_K_TILES_OF_SHARE = 4

_REQUIRED = ("tile_m", "tile_n", "tile_k")
_TILE_GRID = ("tile_m", "tile_n", "cluster_m", "cluster_n", "swap_ab")
#: How a kernel goes through the grid.
_RASTERIZATION = ("raster_order", "swizzle_size")
#: What decides on the best launch: the grid of tiles, and for a split of k also the length of the main loop.
_GRID_PARAMETERS = (*_TILE_GRID, "tile_k", "schedule", "tile_scheduler")


@dataclass(frozen=True)
class Prediction:
    """The model's terms for one candidate. `str()` is one line."""

    candidate: Candidate
    tiles: int
    """Output tiles, after rounding each mode up to whole clusters."""
    ctas: int
    """CTAs of the grid that the launch asks for."""
    waves: int
    """Tiles of the busiest CTA."""
    wave_efficiency: float
    """Tiles over waves times the CTAs that the device holds; 1 without a tail."""
    compute_us: float
    """Tensor cores, or shared memory or the ring where they are slower, over all waves."""
    l2_us: float
    """Reads and writes of L2."""
    dram_us: float
    """Reads and writes of device memory."""
    epilogue_us: float
    """The part of the epilogues that no main loop hides."""
    total_us: float
    """Launch, fill, the overlapped terms and the exposed epilogue."""

    @property
    def bound(self) -> str:
        """The term that weighs most: ``compute``, ``l2`` or ``dram``."""
        terms = {"compute": self.compute_us, "l2": self.l2_us, "dram": self.dram_us}
        return max(terms, key=lambda name: terms[name])

    def __str__(self) -> str:
        return (
            f"{self.total_us:.1f} us by model ({self.bound}-bound): {self.tiles} tiles / {self.ctas} CTAs = "
            f"{self.waves} waves at {self.wave_efficiency:.0%}, compute {self.compute_us:.1f}, "
            f"L2 {self.l2_us:.1f}, DRAM {self.dram_us:.1f}, epilogue {self.epilogue_us:.1f}"
        )


def predict_us(problem: Problem, candidate: Candidate, device: Device) -> float:
    """The predicted time in microseconds. Good for ranking candidates of one problem, for nothing else."""
    return predict(problem, candidate, device).total_us


def predict(problem: Problem, candidate: Candidate, device: Device) -> Prediction:
    """The terms of the prediction for a tile candidate.

    Raises SpaceError for a candidate without a tile shape, such as a library's algorithm.
    """
    params = candidate.params
    for name in _REQUIRED:
        if name not in params:
            raise SpaceError(f"the model ranks tiles, and {candidate} has no {name}")
    problem, grid = _cut(problem, candidate)
    tile_m, tile_n, tile_k = grid.tile_m, grid.tile_n, int(params["tile_k"])
    cluster_m, cluster_n, split_k = grid.cluster_m, grid.cluster_n, grid.split_k
    stages = int(params.get("stages", 4))
    pingpong = params.get("schedule") == "pingpong"
    in_bytes, out_bytes = DTYPE_BYTES[problem.in_dtype], DTYPE_BYTES[problem.out_dtype]
    clock_mhz = _clock_mhz(device) * _SUSTAINED_CLOCK
    streams = params.get("tile_scheduler") == "stream_k"

    # 1. Waves. Splits of k are tiles of their own.
    resident = device.resident_clusters(grid.cluster_size)
    waves = ceil(grid.clusters / resident)
    balanced = ceil(grid.clusters / waves)
    launched = balanced if params.get("ctas") == "balanced" else min(resident, grid.clusters)
    filled = grid.clusters / (waves * resident)
    cut = 0
    if streams:
        launched = stream_clusters(grid.clusters, ceil(problem.k / tile_k), resident)
        cut = stream_tiles(grid.clusters, ceil(problem.k / tile_k), launched)
        filled = launched / resident
    active_ctas = min(resident, grid.clusters) * grid.cluster_size

    # 2. Compute: cycles of one k-step of one tile; a CTA's tiles share the SM's tensor cores one by one.
    k_steps = ceil(ceil(problem.k / tile_k) / split_k)
    instructions = (tile_m // 64) * ceil(tile_k * in_bytes / _INSTRUCTION_K_BYTES)
    mma_cycles = instructions * tile_n / 2 / _WGMMA_PEAK
    # A warpgroup that owns only part of the columns (192 rows have 3 groups, 256 columns may be split)
    # reads the same A again; the families here split rows, so B is what every 64 rows read again.
    smem_bytes = instructions * _INSTRUCTION_K_BYTES * (64 + tile_n)
    load_bytes = (tile_m + tile_n) * tile_k * in_bytes
    smem_cycles = (smem_bytes + _SMEM_WRITE_WEIGHT * load_bytes) / _SMEM_BYTES_PER_CYCLE
    issuing_warpgroups = 1 if pingpong or tile_m == 64 else 2
    barrier_cycles = _BARRIER_CYCLES / issuing_warpgroups**2 + _CLUSTER_CYCLES * (grid.cluster_size - 1)
    step_cycles = max(mma_cycles, smem_cycles) + barrier_cycles
    if problem.accumulation == "two_level":
        step_cycles += tile_m * tile_n / _ADDS_PER_CYCLE / issuing_warpgroups
    if not pingpong:
        step_cycles /= _COOPERATIVE_EFFICIENCY
    # One slot is being computed on; the others are in flight and must cover the latency of a load.
    slot_bytes = tile_k * in_bytes * (tile_m / cluster_n + tile_n / cluster_m)
    load_cycles = _LOAD_LATENCY_CYCLES + slot_bytes / _L2_BYTES_PER_CYCLE_AND_SM
    step_cycles = _overlap(step_cycles, load_cycles / max(stages - 1, 1))
    mainloop_us = k_steps * step_cycles / clock_mhz
    work_waves = grid.clusters / launched if streams else waves
    compute_us = work_waves * mainloop_us

    # 3. L2: what all CTAs of a wave ask for together; the tail wave asks for less but takes as long.
    operand_bytes = problem.k / split_k * in_bytes * (tile_m / cluster_n + tile_n / cluster_m)
    l2_bytes = active_ctas * waves * (operand_bytes + tile_m * tile_n * out_bytes)
    if streams:
        l2_bytes = grid.tiles * (operand_bytes + tile_m * tile_n * out_bytes)
    work_units = (cut + launched if cut else 0) if streams else (grid.clusters if split_k > 1 else 0)
    sum_bytes = work_units * grid.cluster_size * tile_m * tile_n * 4
    l2_bytes += 2 * sum_bytes  # partial sums are written once and read once
    l2_us = l2_bytes / (_L2_BYTES_PER_CYCLE_AND_SM * device.sm_count * _clock_mhz(device))

    # 4. DRAM.
    read_bytes = operand_bytes_from_dram(problem, grid, resident, _usable_l2(device), *_rasterization(params))
    if streams:
        read_bytes += _OUT_OF_STEP * cut / grid.clusters * _unshared_bytes(problem, grid, _usable_l2(device))
    bandwidth = (device.bandwidth_gbps or _DEFAULT_BANDWIDTH_GBPS) * 1e3 * _DRAM_EFFICIENCY
    dram_us = (read_bytes + problem.m * problem.n * problem.batch * out_bytes) / bandwidth

    # 5. Epilogue of one tile, and how much of all of them stays exposed.
    epi_n = int(params.get("epi_n", 32))
    subtiles = 1 if epi_n == 16 and problem.fused.gated else ceil(tile_n / epi_n)  # 16: staged whole
    rows_in_turn = tile_m // 64 if pingpong else ceil(tile_m / 128)
    epilogue_cycles = (
        subtiles * rows_in_turn * _SUBTILE_CYCLES + 2 * tile_m * tile_n * out_bytes / _SMEM_BYTES_PER_CYCLE
    )
    tile_epilogue_us = epilogue_cycles / clock_mhz
    if pingpong:
        hidden_us = min(tile_epilogue_us, mainloop_us)
        epilogue_us = tile_epilogue_us + (waves - 1) / 2 * (tile_epilogue_us - hidden_us)
    else:
        epilogue_us = waves * tile_epilogue_us

    if work_units and "reduction" in params:
        splits = ceil(launched / cut) + 1 if streams else split_k
        early = streams and grid.clusters > launched
        epilogue_us += _sums_us(sum_bytes, splits, params["reduction"] == "second_kernel", early)
    elif split_k > 1:
        epilogue_us += _REDUCTION_US + split_k * tile_m * tile_n * 4 / _SMEM_BYTES_PER_CYCLE / clock_mhz

    busy_us = _overlap(compute_us, l2_us, dram_us)
    return Prediction(
        candidate, grid.tiles, launched * grid.cluster_size, waves, filled,
        compute_us, l2_us, dram_us, epilogue_us, _LAUNCH_US + _FILL_US + busy_us + epilogue_us,
    )  # fmt: skip


def _cut(problem: Problem, candidate: Candidate) -> tuple[Problem, TileGrid]:
    """The product as the kernel sees it, which with swap_ab computes D^T = B^T A^T, and its tiles."""
    params = candidate.params
    if params.get("swap_ab", False):
        problem = _transposed(problem)
    cluster_m, cluster_n = int(params.get("cluster_m", 1)), int(params.get("cluster_n", 1))
    tile_m, tile_n = int(params["tile_m"]), int(params["tile_n"])
    split_k = int(params.get("split_k", 1))
    return problem, TileGrid.of(problem, tile_m, tile_n, cluster_m, cluster_n, split_k)


@functools.lru_cache(maxsize=64)  # a search asks for it of every other launch of 100,000
def _transposed(problem: Problem) -> Problem:
    odd = problem.m % 2 if problem.fused.gated else 0  # what the library does unfused: no pairs are meant
    return replace(problem, m=problem.n, n=problem.m + odd)


def _sums_us(sum_bytes: float, splits: int, second_kernel: bool, early: bool) -> float:
    """What it costs to add the sums of a tile's k splits. early: whole tiles follow them."""
    if second_kernel:
        rate = _EARLY_SECOND_BYTES_PER_US if early else _SECOND_BYTES_PER_US
        return _SECOND_KERNEL_US + 2 * sum_bytes / rate
    # Of two that meet only one writes its sums, and the other reads them.
    moved = 2 * sum_bytes * (splits - 1) / splits
    if early:
        return _MEETING_US + moved / _EARLY_PAIRS_BYTES_PER_US
    return ceil(log2(splits)) * _MEETING_US + moved / _PAIRS_BYTES_PER_US


def _unshared_bytes(problem: Problem, grid: TileGrid, l2_bytes: int) -> float:
    """Operand bytes beyond one reading, if each cluster read its own; of operands that L2 cannot keep."""
    k_bytes = problem.k * DTYPE_BYTES[problem.in_dtype]
    readers = ((problem.m * k_bytes, grid.clusters_n), (problem.n * k_bytes, grid.clusters_m))
    return problem.batch * sum(size * (count - 1) for size, count in readers if size > l2_bytes)


def stream_clusters(tiles: int, k_tiles: int, resident: int) -> int:
    """The grid of stream-K, in clusters: all that run at once, as long as each has some k tiles."""
    return max(1, min(resident, tiles * k_tiles // _MIN_K_TILES_OF_SHARE))


def stream_tiles(tiles: int, k_tiles: int, clusters: int) -> int:
    """Of so many cluster tiles those that stream-K cuts: what the last wave has; the wave before too, where
    that leaves a cluster but a few k tiles.
    """
    last = tiles % clusters
    few = last * k_tiles < _MIN_K_TILES_OF_SHARE * clusters
    return last + clusters if last > 0 and few and tiles > clusters else last


@dataclass(frozen=True)
class TileGrid:
    """The output cut into tiles, and the tiles into clusters."""

    tile_m: int
    tile_n: int
    clusters_m: int
    """Clusters along M, the last one perhaps partly outside."""
    clusters_n: int
    cluster_m: int
    cluster_n: int
    batch: int
    split_k: int = 1

    @classmethod
    def of(
        cls, problem: Problem, tile_m: int, tile_n: int, cluster_m: int, cluster_n: int, split_k: int = 1
    ) -> TileGrid:
        return cls(
            tile_m, tile_n, ceil(problem.m / (tile_m * cluster_m)), ceil(problem.n / (tile_n * cluster_n)),
            cluster_m, cluster_n, problem.batch, split_k,
        )  # fmt: skip

    @property
    def cluster_size(self) -> int:
        return self.cluster_m * self.cluster_n

    @property
    def clusters(self) -> int:
        return self.clusters_m * self.clusters_n * self.batch * self.split_k

    @property
    def tiles(self) -> int:
        return self.clusters * self.cluster_size


def elementwise_us(num_bytes: int, device: Device) -> float:
    """Of a kernel that does nothing but read and write so many bytes."""
    bandwidth = (device.bandwidth_gbps or _DEFAULT_BANDWIDTH_GBPS) * 1e3 * _DRAM_EFFICIENCY
    return _LAUNCH_US + num_bytes / bandwidth


def operand_bytes_from_dram(
    problem: Problem, grid: TileGrid, resident: int, l2_bytes: int, raster: str, swizzle: int
) -> float:
    """Operand bytes read from device memory, given the rasterization of the grid.

    It goes along M (or N) through groups of `swizzle` clusters of the other mode. A wave covers a
    block of the grid; its rows of A and columns of B are read once, and a next wave finds again what
    L2 still holds. Where both operands fit, that is everything.
    """
    m, n, batch = problem.m, problem.n, problem.batch
    k_bytes = problem.k * DTYPE_BYTES[problem.in_dtype]
    if raster == "along_n":
        m, n = n, m
        along, across = grid.clusters_n, grid.clusters_m
        extent_along, extent_across = grid.tile_n * grid.cluster_n, grid.tile_m * grid.cluster_m
    else:
        along, across = grid.clusters_m, grid.clusters_n
        extent_along, extent_across = grid.tile_m * grid.cluster_m, grid.tile_n * grid.cluster_n
    once = (m + n) * k_bytes
    if once <= l2_bytes:
        return batch * once
    group = min(swizzle, across)
    steps = resident / group
    wave_along = min(along, ceil(steps))
    wave_across = min(across, max(group, ceil(resident / along)))
    wave_bytes = min(m, wave_along * extent_along) * k_bytes + min(n, wave_across * extent_across) * k_bytes
    waves = max(1.0, along * across / resident)
    # Within a group the columns stay; from one group to the next, the rows come round again.
    again = max(0.0, waves * wave_bytes - once)
    kept = min(1.0, l2_bytes / (once if wave_bytes < l2_bytes else wave_bytes))
    return batch * (once + again * (1 - kept))


def _usable_l2(device: Device) -> int:
    return int(device.l2_bytes * _L2_USABLE)


def _fits_l2(problem: Problem, device: Device) -> bool:
    """Whether both operands of an entry stay in L2: the rasterization is free then."""
    return (problem.m + problem.n) * problem.k * DTYPE_BYTES[problem.in_dtype] <= _usable_l2(device)


def _overlap(*limits: float) -> float:
    """The time of work that runs at once under several limits: a little over the largest."""
    return sum(limit**_OVERLAP_POWER for limit in limits) ** (1 / _OVERLAP_POWER)


def _clock_mhz(device: Device) -> float:
    if not device.peak_tflops:
        return _DEFAULT_CLOCK_MHZ
    return device.peak_tflops * 1e6 / (device.sm_count * _FLOP_PER_CYCLE_AND_SM)


def rank(problem: Problem, candidates: Iterable[Candidate], device: Device) -> list[Prediction]:
    """Predictions, fastest first; equal ones in the order given."""
    return sorted((predict(problem, c, device) for c in candidates), key=lambda p: p.total_us)


def steady_ratio(candidate: Candidate, ratio: float) -> float:
    """What a kernel's ratio to the baseline in interleaved timing says of that in steady-state timing, at the
    power cap: what draws more power runs at lower clocks. Good for ranking, for nothing else.

    Raises SpaceError for a candidate without a tile shape.
    """
    params = candidate.params
    if not {"tile_m", "tile_n"} <= params.keys():
        raise SpaceError(f"the model ranks tiles, and {candidate} has none")
    tile_m, tile_n = int(params["tile_m"]), int(params["tile_n"])
    # Elements fetched from L2 for a multiply-add: CTAs of a cluster share what they read alike.
    fetched = 1 / (tile_m * int(params.get("cluster_m", 1))) + 1 / (tile_n * int(params.get("cluster_n", 1)))
    pingpong = params.get("schedule") == "pingpong"
    return ratio**_STEADY_LEAD * exp(-_STEADY_FETCH * fetched - _STEADY_PINGPONG * pingpong)


def low_power(ranked: Sequence[Prediction], count: int) -> list[Candidate]:
    """Of a ranking those that may be fastest in steady state, two of each tile.

    None where the first in rank waits for device memory: such work does not reach the power cap.
    """
    if not ranked or ranked[0].bound == "dram":
        return []
    fastest_us = ranked[0].total_us
    of_tile: Counter[tuple[Value | None, ...]] = Counter()
    chosen: list[Candidate] = []
    for prediction in sorted(ranked, key=lambda p: -steady_ratio(p.candidate, fastest_us / p.total_us)):
        tile = tuple(prediction.candidate.params.get(name) for name in ("schedule", "tile_m", "tile_n"))
        of_tile[tile] += 1
        if of_tile[tile] <= 2 and len(chosen) < count:
            chosen.append(prediction.candidate)
    return chosen


def best_launch(
    problem: Problem,
    kernel: Candidate,
    launch_values: Mapping[str, Sequence[Value]],
    device: Device,
    feasible: Callable[[Candidate], bool] = lambda launch: True,
) -> Prediction:
    """The kernel at the launch that the model likes best; the first of equals in the lists' order.

    Parameters that the prediction does not depend on stand at their first values; those that it does are
    left out where they are infeasible with the others' first values.
    """
    first = kernel.with_launch(**{name: values[0] for name, values in launch_values.items()})
    lists = {name: [values[0]] for name, values in launch_values.items()}
    seen = [] if _fits_l2(problem, device) else ["raster_order", "swizzle_size"]
    for name in {*seen, "split_k"} & lists.keys():
        lists[name] += [v for v in launch_values[name][1:] if feasible(first.with_launch(**{name: v}))]
    for reduction in launch_values.get("reduction", ())[1:]:  # a second kernel, where there are splits to add
        splits = lists["split_k"][-1]
        if feasible(first.with_launch(split_k=splits, reduction=reduction)):
            lists["reduction"].append(reduction)
    if (hint := l2_hint(problem, kernel)) in launch_values.get("l2_hint", ()):
        lists["l2_hint"] = [hint]
    names = [name for name in _RASTERIZATION if len(lists.get(name, ())) > 1]
    orders = [dict(zip(names, values, strict=True)) for values in itertools.product(*map(lists.pop, names))]
    launches: Iterable[Candidate] = _launches(first, lists)
    if names:
        launches = (launch.with_launch(**_best_order(problem, launch, orders, device)) for launch in launches)
    return min((predict(problem, launch, device) for launch in launches), key=lambda p: p.total_us)


def _best_order(
    problem: Problem, launch: Candidate, orders: Iterable[Mapping[str, Value]], device: Device
) -> Mapping[str, Value]:
    """The rasterization that reads least from device memory: nothing else depends on it."""
    seen, grid = _cut(problem, launch)
    resident, l2_bytes = device.resident_clusters(grid.cluster_size), _usable_l2(device)

    def read_bytes(order: Mapping[str, Value]) -> float:
        rasterization = _rasterization({**launch.params, **order})
        return operand_bytes_from_dram(seen, grid, resident, l2_bytes, *rasterization)

    return min(orders, key=read_bytes)


def _rasterization(params: Mapping[str, Value]) -> tuple[str, int]:
    return str(params.get("raster_order", "along_m")), int(params.get("swizzle_size", 1))


def l2_hint(problem: Problem, kernel: Candidate) -> str:
    """Which operand to let go from L2 first: the one that no second cluster reads, if any.

    With one row of clusters all of B is read by one cluster only, and lines kept for no other push out
    those of A. On an H200 (one interleave per shape, kernel-log-2026-11-21.json) the hint took 128x6144x4096
    from 0.97 to 1.03 of torch.mm, 128x7168x16384 from 1.13 to 1.17 and 256x4096x4096 from 0.98 to 1.01; on
    operands that are read again it changed nothing or cost up to 1 %.
    """
    rows = kernel["tile_m"] * kernel.params.get("cluster_m", 1)
    columns = kernel["tile_n"] * kernel.params.get("cluster_n", 1)
    if kernel.params.get("swap_ab", False):
        rows, columns = columns, rows
    if problem.m <= rows:
        return "b_first"
    return "a_first" if problem.n <= columns else "none"


def rank_kernels(
    problem: Problem,
    kernels: Iterable[Candidate],
    launch_values: Mapping[str, Sequence[Value]],
    device: Device,
    feasible: Callable[[Candidate], bool] = lambda launch: True,
) -> list[Prediction]:
    """One prediction per kernel, each at its model-best feasible launch, fastest first.

    The launch enters the DRAM term and the split of k alone, so that kernels of one grid share their best.
    """
    best: dict[tuple[Value | None, ...], Mapping[str, Value]] = {}
    predictions = []
    splits = len(launch_values.get("split_k", ())) > 1 or len(launch_values.get("reduction", ())) > 1
    for kernel in kernels:
        shape = grid_shape(kernel) if splits else grid_shape(kernel)[: len(_TILE_GRID)]
        if shape in best:
            predictions.append(predict(problem, kernel.with_launch(**best[shape]), device))
        else:
            predictions.append(best_launch(problem, kernel, launch_values, device, feasible))
            best[shape] = dict(predictions[-1].candidate.launch_params)
    return sorted(predictions, key=lambda p: p.total_us)


def grid_shape(kernel: Candidate) -> tuple[Value | None, ...]:
    """What decides on a kernel's launches: kernels of one grid shape share their best."""
    return tuple(kernel.params.get(name) for name in _GRID_PARAMETERS)


def is_redundant_launch(problem: Problem, candidate: Candidate, device: Device) -> bool:
    """Whether another launch of the same kernel does exactly this: ``balanced`` where it means all CTAs."""
    if candidate.params.get("ctas") != "balanced":
        return False
    everything = candidate.with_launch(ctas="all")
    return predict(problem, candidate, device).ctas == predict(problem, everything, device).ctas


def _launches(kernel: Candidate, launch_values: Mapping[str, Sequence[Value]]) -> Iterator[Candidate]:
    for values in itertools.product(*launch_values.values()):
        yield kernel.with_launch(**dict(zip(launch_values, values, strict=True)))
