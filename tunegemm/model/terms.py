"""Predicts the times of tile candidates as arrays over candidates: waves, tensor cores, shared memory, L2,
DRAM and epilogue in microseconds; also the bytes that they move, for the energy model.

Every term is a closed formula of the problem, the candidate and the device. `tunegemm.model` explains their
purpose. The terms of one product, in order:

1. *waves*: a persistent grid of clusters takes the tiles; the slowest CTA computes ceil(tiles / resident).
2. *compute*: WGMMA cycles of one k-step, or the shared-memory cycles of its operands if they are
   more, or the latency of a load that the ring of stages does not hide.
3. *L2*: operand bytes of all CTAs at once; a cluster multicasts, and so reads less.
4. *DRAM*: every operand once, plus the bytes that a wave's working set evicts from L2; output once.
5. *epilogue*: exposed for each tile when cooperative, only for the last one when pingpong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from tunegemm.describe.device import Device
from tunegemm.describe.problem import DTYPE_BYTES, Problem
from tunegemm.describe.space import Candidate, Value
from tunegemm.errors import SpaceError
from tunegemm.generate.tiles import stream_clusters, stream_tiles

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

# The constants were fitted by coordinate search on the six recorded sweeps of an H200 in db/sweeps
# (2026-11-20), starting from the published figures named below, and may differ from them. The best kernel of
# each of those shapes is among the model's first 16, but that is in-sample: no shape was held out.

# Tensor cores: m64 nN k16 of 16-bit elements takes N/2 cycles, 4096 FLOP per cycle and SM. Its operands
# come from shared memory at 128 B per cycle: A (2 KiB) and B (32 N bytes) for every instruction. That
# ratio *is* the published efficiency table: N=32 gives 16/24 = 67 % (63 % seen), N=16 40 % (38 %), N=8
# 22 % (21 %), N >= 64 is bound by the tensor cores (95-96 %); arXiv 2402.13499, table of SS WGMMA on H800.
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
# Two-level accumulation adds the tensor cores' sums in registers, 128 per cycle. The tensor cores wait
# meanwhile, unless the other warpgroup of a cooperative tile has work for them. Not fitted: no sweep has it.
_ADDS_PER_CYCLE = 128
# L2 to SM bytes per cycle and SM, at full clock. DeepGEMM's constants are 64 per SM, at most 6154 (47 per SM)
# on 132 SMs; the sweeps want more, since main loops of large squares lose nothing without a cluster.
_L2_BYTES_PER_CYCLE_AND_SM = 78
# From issuing a TMA load to its first bytes, in cycles: an L2 miss. The slot's bytes follow at L2's rate.
_LOAD_LATENCY_CYCLES = 980
_DRAM_EFFICIENCY = 0.77
# Part of the L2 that holds operands over a wave, by the times of sweeps.
_L2_USABLE = 0.6
# Clusters of stream-K go through k out of step: this share of the bytes that L2 would otherwise have served
# is read again.
_OUT_OF_STEP = 0.6
# The following constants were fitted to the bytes that counters saw in 416 launches (H200,
# docs/decisions/0022).
# Clusters are out of step by this many multiplications: with short tiles they still find what others just
# read.
_BEHIND = 1.6e7
# Clusters of stream-K are out of step with those of whole tiles; so are wide groups if L2 is busy.
_STREAM_OUT_OF_STEP = 2.5
_WIDE, _STRAINED, _STRAINED_OUT_OF_STEP = 4, 0.55, 1.7
# Reads of L2 that merge with those of the same GPC: of neighbouring tiles in wide groups, of single CTAs.
_MERGED, _MERGED_SINGLE, _MERGED_ELSE = 0.72, 0.87, 0.95
# If L2 evicts first the operand that a group does not share, and the other operand's part for the group is at
# most the first fraction of L2, a wave reads the second fraction of that part again. If the part is larger,
# or clusters are further out of step than the third number, the last factor scales the bytes that are read
# again, because lines are evicted before all clusters have read them. Fitted to 28 counted launches (H200,
# docs/decisions/0022).
_GROUP_FITS, _GROUP_AGAIN, _GROUP_OUT_OF_STEP, _GROUP_LOST = 0.28, 0.3, 0.2, 1.5
# Epilogue: cycles per 64-row subtile beside its bytes (stmatrix, fence, TMA store, barrier).
_SUBTILE_CYCLES = 185
# Split-K: the last split of a tile waits for an atomic and reads the others' sums through L2.
_REDUCTION_US = 1.5
# Sums are added in pairs or by a second kernel: the time of each level of the tree, the time of the kernel,
# and the bytes per microsecond at which sums are written and read. Fitted by hand to splits of five shapes on
# an H200, each timed both ways (2026-11-21).
_MEETING_US, _PAIRS_BYTES_PER_US = 3.0, 3.5e6
_SECOND_KERNEL_US, _SECOND_BYTES_PER_US = 2.5, 7.0e6
# If stream-K's whole tiles follow, pairs of sums are added while others run main loops; a second kernel's
# sums have left L2 by the time it reads them (four shapes, same file).
_EARLY_PAIRS_BYTES_PER_US, _EARLY_SECOND_BYTES_PER_US = 7.0e6, 3.0e6
_LAUNCH_US = 2.0
_FILL_US = 1.0
# Overlapping limits disturb each other: the sum of powers lies between their maximum and their sum.
_OVERLAP_POWER = 4.9
# For a part that is not in `architectures.PARTS`: clock and bandwidth of a mid-range Hopper.
_DEFAULT_CLOCK_MHZ = 1700.0
_DEFAULT_BANDWIDTH_GBPS = 3000.0

# Other architectures only get a roofline: datasheet rates, four warps that each read their half of A's rows
# and of B's columns, and L2's 5,120 bytes per cycle for an A100's 108 multiprocessors (NVIDIA A100
# architecture whitepaper). These were not measured.
_READERS = 2
_OTHER_L2_BYTES_PER_CYCLE_AND_SM = 47

_REQUIRED = ("tile_m", "tile_n", "tile_k")


@dataclass(frozen=True)
class Columns:
    """The properties of candidates that the formulas read, one entry for each candidate."""

    tile_m: Ints
    tile_n: Ints
    tile_k: Ints
    stages: Ints
    cluster_m: Ints
    cluster_n: Ints
    epi_n: Ints
    swap_ab: Bools
    pingpong: Bools
    streams: Bools
    split_k: Ints
    reduces: Bools
    """Whether the family offers a choice of how to add k splits."""
    second: Bools
    """Whether a second kernel adds the k splits."""
    balanced: Bools
    along_n: Bools
    swizzle: Ints
    gpc_aware: Bools
    """Whether clusters of one GPC take neighbouring tiles."""
    streamed: Bools
    """Whether L2 evicts first the operand that a group of tiles does not share."""

    @classmethod
    def of(cls, candidates: Sequence[Candidate]) -> Self:
        """The columns of candidates.

        Raises SpaceError if a candidate has no tile shape, such as a library's algorithm.
        """
        params = [candidate.params for candidate in candidates]
        for candidate in candidates:
            for name in _REQUIRED:
                if name not in candidate.params:
                    raise SpaceError(f"the model ranks tiles, but {candidate} has no {name}")

        def ints(name: str, default: int = 1) -> Ints:
            return np.array([p.get(name, default) for p in params], dtype=np.int64)

        def bools(name: str, value: Value) -> Bools:
            return np.array([p.get(name) == value for p in params], dtype=np.bool_)

        return cls(
            ints("tile_m"), ints("tile_n"), ints("tile_k"), ints("stages", 4),
            ints("cluster_m"), ints("cluster_n"), ints("epi_n", 32), bools("swap_ab", True),
            bools("schedule", "pingpong"), bools("tile_scheduler", "stream_k"), ints("split_k"),
            np.array(["reduction" in p for p in params], dtype=np.bool_),
            bools("reduction", "second_kernel"), bools("ctas", "balanced"),
            bools("raster_order", "along_n"), ints("swizzle_size"), bools("cluster_order", "gpc"),
            bools("l2_hint", "streamed"),
        )  # fmt: skip

    def take(self, rows: Any) -> Columns:
        """A selection of the candidates, by indices or a mask."""
        return Columns(*(getattr(self, field.name)[rows] for field in fields(self)))

    def launched(self, **columns: NDArray[Any] | np.generic) -> Columns:
        """The same kernels with launch parameters replaced: arrays as long as these, or single values."""
        size = len(self.tile_m)
        return replace(self, **{name: np.broadcast_to(values, size) for name, values in columns.items()})


@dataclass(frozen=True)
class Terms:
    """Predictions, one entry for each candidate."""

    tiles: Ints
    ctas: Ints
    waves: Ints
    wave_efficiency: Floats
    compute_us: Floats
    l2_us: Floats
    dram_us: Floats
    epilogue_us: Floats
    total_us: Floats
    filled_bytes: Floats
    """Bytes that arrive in shared memory, including those by multicast."""
    l2_bytes: Floats
    """Bytes read from L2: a multicast reads once, and some reads of the same GPC merge."""
    crossing_bytes: Floats
    """Bytes that cross between the halves of L2: as many as device memory reads."""
    dram_bytes: Floats
    """Bytes that device memory reads and writes."""

    def take(self, rows: Any) -> Terms:
        """A selection of the candidates, by indices or a mask."""
        return Terms(*(getattr(self, field.name)[rows] for field in fields(self)))


def terms(problem: Problem, columns: Columns, device: Device) -> Terms:
    """The terms of every candidate."""
    c, batch = columns, problem.batch
    # With swap_ab a kernel computes D^T = B^T A^T.
    m = np.where(c.swap_ab, problem.n, problem.m)
    n = np.where(c.swap_ab, problem.m, problem.n)
    in_bytes, out_bytes = DTYPE_BYTES[problem.in_dtype], DTYPE_BYTES[problem.out_dtype]
    clock_mhz = steady_clock_mhz(device)
    full_clock_mhz = _clock_mhz(device)
    size = c.cluster_m * c.cluster_n
    clusters_m, clusters_n = _ceil(m, c.tile_m * c.cluster_m), _ceil(n, c.tile_n * c.cluster_n)
    clusters = clusters_m * clusters_n * batch * c.split_k
    tiles = clusters * size

    # 1. Waves. Splits of k are tiles of their own.
    resident = _resident(size, device)
    waves = _ceil(clusters, resident)
    launched = np.where(c.balanced, _ceil(clusters, waves), np.minimum(resident, clusters))
    filled = clusters / (waves * resident)
    k_tiles = _ceil(problem.k, c.tile_k)
    sharing = stream_clusters(clusters, k_tiles, resident, least=np.minimum, most=np.maximum)
    cut = np.where(c.streams, stream_tiles(clusters, k_tiles, sharing), 0)
    launched = np.where(c.streams, sharing, launched)
    filled = np.where(c.streams, launched / resident, filled)
    active_ctas = np.minimum(resident, clusters) * size

    # 2. Compute: cycles of one k-step of one tile; a CTA's tiles use the SM's tensor cores one after another.
    k_steps = _ceil(k_tiles, c.split_k)
    load_bytes = (c.tile_m + c.tile_n) * c.tile_k * in_bytes
    has_wgmma = device.architecture.wgmma
    if has_wgmma:
        instructions = (c.tile_m // 64) * _ceil(c.tile_k * in_bytes, _INSTRUCTION_K_BYTES)
        mma_cycles = instructions * c.tile_n / 2 / _WGMMA_PEAK
        # A warpgroup that owns only part of the columns (192 rows have 3 groups, 256 columns may be split)
        # reads the same A again; the families here split rows, so B is what every 64 rows read again.
        smem_bytes = instructions * _INSTRUCTION_K_BYTES * (64 + c.tile_n)
    else:
        mma_cycles = c.tile_m * c.tile_n * c.tile_k * in_bytes / device.flops_per_cycle
        smem_bytes = _READERS * load_bytes
    smem_cycles = (smem_bytes + _SMEM_WRITE_WEIGHT * load_bytes) / _SMEM_BYTES_PER_CYCLE
    issuing = np.where(c.pingpong | (c.tile_m == 64), 1, 2)
    barrier_cycles = _BARRIER_CYCLES / issuing**2 + _CLUSTER_CYCLES * (size - 1)
    step_cycles = np.maximum(mma_cycles, smem_cycles) + barrier_cycles
    if problem.accumulation == "two_level":
        step_cycles = step_cycles + c.tile_m * c.tile_n / _ADDS_PER_CYCLE / issuing
    step_cycles = np.where(c.pingpong, step_cycles, step_cycles / _COOPERATIVE_EFFICIENCY)
    # One slot is being computed on; the others are in flight and must cover the latency of a load.
    slot_bytes = c.tile_k * in_bytes * (c.tile_m / c.cluster_n + c.tile_n / c.cluster_m)
    l2_rate = _L2_BYTES_PER_CYCLE_AND_SM if has_wgmma else _OTHER_L2_BYTES_PER_CYCLE_AND_SM
    load_cycles = _LOAD_LATENCY_CYCLES + slot_bytes / l2_rate
    step_cycles = _overlap(step_cycles, load_cycles / np.maximum(c.stages - 1, 1))
    mainloop_us = k_steps * step_cycles / clock_mhz
    compute_us = np.where(c.streams, clusters / launched, waves) * mainloop_us

    # 3. L2: the bytes that all CTAs of a wave request; the tail wave requests fewer but takes as long.
    operand_bytes = problem.k / c.split_k * in_bytes * (c.tile_m / c.cluster_n + c.tile_n / c.cluster_m)
    tile_out_bytes = c.tile_m * c.tile_n * out_bytes
    asked = np.where(c.streams, tiles, active_ctas * waves)
    l2_bytes = asked * (operand_bytes + tile_out_bytes)
    work_units = np.where(
        c.streams, np.where(cut > 0, cut + launched, 0), np.where(c.split_k > 1, clusters, 0)
    )
    sum_bytes = work_units * size * c.tile_m * c.tile_n * 4
    l2_bytes = l2_bytes + 2 * sum_bytes  # partial sums are written once and read once
    l2_us = l2_bytes / (l2_rate * device.sm_count * full_clock_mhz)

    # 4. DRAM.
    k_bytes, usable = problem.k * in_bytes, _L2_USABLE * device.l2_bytes
    grid = _Waves.of(m, n, k_bytes, clusters_m, clusters_n, c, resident)
    written_bytes = problem.m * problem.n * batch * out_bytes
    unshared_bytes = batch * _unshared_bytes([(m, clusters_n), (n, clusters_m)], k_bytes, usable)
    out_of_step = np.where(c.streams, _OUT_OF_STEP * cut / clusters * unshared_bytes, 0)
    waited_bytes = batch * grid.waited_bytes(usable) + out_of_step
    dram_us = (waited_bytes + written_bytes) / _bandwidth(device)
    behind = _BEHIND / (c.tile_m * c.tile_n * problem.k / c.split_k)
    strained = (c.swizzle >= _WIDE) & (l2_us > _STRAINED * compute_us)
    apart = (1 + _STREAM_OUT_OF_STEP * cut / clusters) * np.where(strained, _STRAINED_OUT_OF_STEP, 1.0)
    read_bytes = batch * grid.read_bytes(c, behind, apart, device.l2_bytes)

    # 5. Epilogue of one tile, and the exposed part of all epilogues.
    subtiles = _ceil(c.tile_n, c.epi_n)
    if problem.fused.gated:
        subtiles = np.where(c.epi_n == 16, 1, subtiles)  # staged whole
    rows_in_turn = np.where(c.pingpong, c.tile_m // 64, _ceil(c.tile_m, 128))
    epilogue_cycles = subtiles * rows_in_turn * _SUBTILE_CYCLES + 2 * tile_out_bytes / _SMEM_BYTES_PER_CYCLE
    tile_epilogue_us = epilogue_cycles / clock_mhz
    exposed_us = tile_epilogue_us - np.minimum(tile_epilogue_us, mainloop_us)
    epilogue_us = np.where(
        c.pingpong, tile_epilogue_us + (waves - 1) / 2 * exposed_us, waves * tile_epilogue_us
    )
    meets = (work_units > 0) & c.reduces
    splits = np.where(c.streams, _ceil(launched, np.maximum(cut, 1)) + 1, c.split_k)
    early = c.streams & (clusters > launched)
    in_one_kernel = _REDUCTION_US + c.split_k * c.tile_m * c.tile_n * 4 / _SMEM_BYTES_PER_CYCLE / clock_mhz
    epilogue_us = epilogue_us + np.where(
        meets, _sums_us(sum_bytes, splits, c.second, early), np.where(c.split_k > 1, in_one_kernel, 0.0)
    )

    total_us = _LAUNCH_US + _FILL_US + _overlap(compute_us, l2_us, dram_us) + epilogue_us
    loads = tiles * (problem.k / c.split_k) * in_bytes
    merged = np.where(size == 1, _MERGED_SINGLE, _MERGED_ELSE)
    merged = np.where(c.gpc_aware & (c.swizzle >= _WIDE) & ~c.streams, _MERGED, merged)
    return Terms(
        tiles, launched * size, waves, filled, compute_us, l2_us, dram_us, epilogue_us, total_us,
        loads * (c.tile_m + c.tile_n),
        merged * loads * (c.tile_m / c.cluster_n + c.tile_n / c.cluster_m) + sum_bytes, read_bytes,
        read_bytes + written_bytes,
    )  # fmt: skip


def time_at(terms: Terms, clocks_mhz: Floats, device: Device) -> Floats:
    """Total microseconds at other SM clocks than that of sustained work; device memory's clock stays.

    clocks_mhz: any shape that broadcasts against the candidates.
    """
    scale = steady_clock_mhz(device) / clocks_mhz
    l2_scale = _clock_mhz(device) / clocks_mhz
    busy_us = _overlap(terms.compute_us * scale, terms.l2_us * l2_scale, terms.dram_us)
    return _LAUNCH_US + _FILL_US + busy_us + terms.epilogue_us * scale


def steady_clock_mhz(device: Device) -> float:
    """The SM clock of the terms: that of dense work at the power cap."""
    return _clock_mhz(device) * _SUSTAINED_CLOCK


def elementwise_us(num_bytes: int, device: Device) -> float:
    """Microseconds of a kernel that only reads and writes this many bytes."""
    return _LAUNCH_US + num_bytes / _bandwidth(device)


def fits_l2(problem: Problem, device: Device) -> bool:
    """Whether both operands of a batch entry stay in L2 over a wave; then any rasterization will do."""
    operand_bytes = (problem.m + problem.n) * problem.k * DTYPE_BYTES[problem.in_dtype]
    return operand_bytes <= int(device.l2_bytes * _L2_USABLE)


@dataclass(frozen=True)
class _Waves:
    """The operand bytes of one batch entry that the waves of a grid read."""

    count: Floats
    groups: Floats
    along_bytes: Floats
    """Bytes that one wave reads of the operand that streams past a group."""
    across_bytes: Floats
    """Bytes that one wave reads of the operand that a group shares."""
    once: Ints
    """Bytes that all waves would read if they read nothing twice."""
    again: Floats
    """Further bytes that they would read if no wave found bytes of another in L2."""

    @classmethod
    def of(
        cls, m: Ints, n: Ints, k_bytes: int, clusters_m: Ints, clusters_n: Ints, c: Columns, resident: Ints
    ) -> Self:
        """Tiles go along M (or N) through groups of `swizzle` clusters of the other mode. A wave covers a
        block of the grid, and reads its rows of A and columns of B once. k_bytes: of one row of an operand.
        """
        rows, columns = c.tile_m * c.cluster_m, c.tile_n * c.cluster_n
        m, n = np.where(c.along_n, n, m), np.where(c.along_n, m, n)
        along = np.where(c.along_n, clusters_n, clusters_m)
        across = np.where(c.along_n, clusters_m, clusters_n)
        extent_along, extent_across = np.where(c.along_n, columns, rows), np.where(c.along_n, rows, columns)
        group = np.minimum(c.swizzle, across)
        wave_along = np.minimum(along, _ceil(resident, group))
        wave_across = np.minimum(across, np.maximum(group, _ceil(resident, along)))
        count = np.maximum(1.0, along * across / resident)
        along_bytes = np.minimum(m, wave_along * extent_along) * k_bytes
        across_bytes = np.minimum(n, wave_across * extent_across) * k_bytes
        once = (m + n) * k_bytes
        again = np.maximum(0.0, count * (along_bytes + across_bytes) - once)
        return cls(count, np.minimum(count, across / group), along_bytes, across_bytes, once, again)

    def waited_bytes(self, usable: float) -> Floats:
        """Operand bytes from device memory that the kernel waits for, fitted to the times of sweeps.

        Within a group the columns stay; each group reads the rows again. The next wave finds the bytes that
        L2 still holds, which are all bytes if both operands fit into its `usable` bytes.
        """
        wave_bytes = self.along_bytes + self.across_bytes
        kept = np.minimum(1.0, usable / np.where(wave_bytes < usable, self.once, wave_bytes))
        return np.where(self.once <= usable, self.once, self.once + self.again * (1 - kept))

    def read_bytes(self, c: Columns, behind: Floats, apart: Floats, l2_bytes: int) -> Floats:
        """Operand bytes that device memory reads, fitted to hardware counters; these bytes cost energy.

        The next wave finds the bytes that half of L2 still holds, because each half keeps the reads of its
        own multiprocessors. behind: how far clusters are out of step, as a fraction of a tile's work. apart:
        the factor by which that increases the bytes read again.
        """
        kept = 1 - (self.along_bytes + self.across_bytes) / (l2_bytes / 2)
        kept = np.maximum(np.maximum(0.0, kept), np.minimum(1.0, behind**1.5))
        held = self.count * self.along_bytes - self.once
        held = held + self.across_bytes * (self.groups + _GROUP_AGAIN * (self.count - self.groups))
        holds = (self.across_bytes <= _GROUP_FITS * l2_bytes) & (behind <= _GROUP_OUT_OF_STEP)
        held = np.where(holds & c.gpc_aware & ~c.streams, np.maximum(0.0, held), _GROUP_LOST * self.again)
        again = np.where(c.streamed, held, self.again) * (1 - kept) * apart
        return np.where(self.once <= _L2_USABLE * l2_bytes, self.once, self.once + again)


def _unshared_bytes(extents: Sequence[tuple[Ints, Ints]], k_bytes: int, usable: float) -> Floats:
    """Operand bytes beyond one reading if each cluster read its own, of operands that L2 cannot keep.

    extents: of each operand, and the clusters that read it.
    """
    sizes = ((extent * k_bytes, clusters) for extent, clusters in extents)
    first, second = (np.where(size > usable, size * (count - 1.0), 0.0) for size, count in sizes)
    return first + second


def _sums_us(sum_bytes: Ints, splits: Ints, second: Bools, early: Bools) -> Floats:
    """Microseconds to add the sums of a tile's k splits. early: whether whole tiles follow them."""
    rate = np.where(early, _EARLY_SECOND_BYTES_PER_US, _SECOND_BYTES_PER_US)
    by_second = _SECOND_KERNEL_US + 2 * sum_bytes / rate
    # In each pair only one split writes its sums, and the other reads them.
    splits = np.maximum(splits, 1)
    moved = 2 * sum_bytes * (splits - 1) / splits
    in_pairs = np.where(
        early,
        _MEETING_US + moved / _EARLY_PAIRS_BYTES_PER_US,
        np.ceil(np.log2(splits)) * _MEETING_US + moved / _PAIRS_BYTES_PER_US,
    )
    return np.where(second, by_second, in_pairs)


def _ceil(a: Any, b: Any) -> Any:
    return -(-a // b)


def _overlap(*limits: Floats) -> Floats:
    """The time of work under several simultaneous limits: a little more than the largest."""
    powers = [limit**_OVERLAP_POWER for limit in limits]
    return np.asarray(sum(powers[1:], powers[0]) ** (1 / _OVERLAP_POWER))


def _resident(cluster_size: Ints, device: Device) -> Ints:
    sizes = {int(size): device.resident_clusters(int(size)) for size in set(cluster_size.tolist())}
    if len(sizes) == 1:
        return np.full_like(cluster_size, next(iter(sizes.values())))
    return np.array([sizes[size] for size in cluster_size.tolist()], dtype=np.int64)


def _clock_mhz(device: Device) -> float:
    if not device.peak_tflops:
        return _DEFAULT_CLOCK_MHZ
    return device.peak_tflops * 1e6 / (device.sm_count * device.flops_per_cycle)


def _bandwidth(device: Device) -> float:
    """Bytes per microsecond of device memory."""
    return (device.bandwidth_gbps or _DEFAULT_BANDWIDTH_GBPS) * 1e3 * _DRAM_EFFICIENCY
