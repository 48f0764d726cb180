"""The kernel of block-scaled fp8 for groups of rows: `grouped`'s tiles, walk and way out, `blocks`'
promotion.

D[r, n] = sum over blocks b of sa[r, b] * sb[g, n / 128, b] * (A[r, b] B[g, n, b]^T) for each row r of group g

As in `grouped` the weights' N is WGMMA's m, or of many rows its n: the ring and the walk are the same, and
the operands of a WGMMA change places. Other warps of the producer's warpgroup walk the same tiles and copy
the scales of each block of k into the ring. Groups may begin at any row.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup
from cutlass.utils import SmemAllocator

from tunegemm.generate.block_groups import kernel_rows
from tunegemm.generate.block_groups.config import BlockGroupConfig
from tunegemm.generate.blocks.config import BLOCK
from tunegemm.generate.blocks.kernel import Consumer as BlockConsumer
from tunegemm.generate.blocks.kernel_scales import SCALES_BARRIER, Ring, RowScales, copy_async
from tunegemm.generate.cute_sm90.config import MMA_ATOM_M, WARPGROUP_THREADS
from tunegemm.generate.cute_sm90.kernel.schedule import Origin
from tunegemm.generate.grouped.kernel.epilogue import Epilogue
from tunegemm.generate.grouped.kernel.gemm import Arguments
from tunegemm.generate.grouped.kernel.gemm import Gemm as GroupedGemm
from tunegemm.generate.grouped.kernel.producer import Producer
from tunegemm.generate.grouped.kernel.walk import Walk, WalkParams
from tunegemm.generate.kernel_roles import (
    LayoutsWith,
    begin,
    part_ways,
    place_in_block,
    prefetch,
    tensor_in,
)


class Scales(NamedTuple):
    """Where the scales lie, fp32. Strides count elements."""

    rows_address: Int64
    """(rows, K / 128)"""
    row_stride: Int64
    rows_k_stride: Int64
    weights_address: Int64
    """(E, N / 128, K / 128)"""
    group_stride: Int64
    block_stride: Int64
    weights_k_stride: Int64


WORDS = len(Scales._fields)
"""64-bit arguments of a launch behind those of `grouped`."""


class Scaling(NamedTuple):
    """What reaches this kernel in place of `grouped`'s `l2_hint`."""

    l2_hint: Int32
    scales: Scales
    columns: Int32
    """Blocks of the weights' rows."""


@dataclass(frozen=True)
class ScaleProducer:
    """One of the warps that copy the scales of each stage into shared memory."""

    config: BlockGroupConfig
    scaling: Scaling
    sScales: cute.Tensor
    """(SCALE, STAGE)"""
    ring: Ring
    lane: Int32
    part: Int32
    """Which of these warps this is: each copies as many rows."""

    @cute.jit
    def run(self, walk, k_tiles):
        """Tile after tile, as the producer of tiles."""
        config, ring, scales = self.config, self.ring, self.scaling.scales
        rows = RowScales(config, self.part, self.lane, scales.row_stride)
        first_target = self.sScales.iterator.toint() + rows.first * 4
        weight_target = self.sScales.iterator.toint() + (config.rows + self.lane) * 4
        offsets = rows.offsets()
        row_step, weight_step = scales.rows_k_stride * 4, scales.weights_k_stride * 4
        state = ring.producer_start()
        unit = walk.first()
        while walk.has(unit):
            place = walk.place(unit)
            # Behind the group's last row that one's: nothing of it is stored.
            rows.set(offsets, place.rows - 1)
            source = scales.rows_address + Int64(place.row) * scales.row_stride * 4
            own = cutlass.min(place.column // BLOCK + self.lane, self.scaling.columns - 1)
            weight = Int64(place.group) * scales.group_stride + Int64(own) * scales.block_stride
            weight = scales.weights_address + weight * 4
            for _ in cutlass.range(k_tiles, unroll=1):
                ring.wait_empty(state)
                behind = state.stage * (config.stage_scales * 4)
                rows.copy(first_target + behind, source, offsets, Int32(4))
                if self.part == 0 and self.lane < config.spans:
                    copy_async(weight_target + behind, weight, Int32(4))
                cute.arch.cp_async_mbarrier_arrive_noinc(ring.full + state.stage)
                source += row_step
                weight += weight_step
                state = ring.advance(state)
            unit = walk.next(unit, 1)


@dataclass(frozen=True)
class Consumer(BlockConsumer):
    """One warpgroup: the main loop, and what follows it for each tile."""

    @cute.jit
    def run(self, walk, k_tiles):
        """Multiply, promote, store, tile after tile."""
        config, tiled_mma = self.config, self.tiled_mma
        tiled_mma.set(warpgroup.Field.ACCUMULATE, False)
        self.adding.set(warpgroup.Field.ACCUMULATE, True)
        slice_mma = tiled_mma.get_slice(self.group * WARPGROUP_THREADS)
        tCrA = tiled_mma.make_fragment_A(slice_mma.partition_A(self.sA))  # (MMA, MMA_M, MMA_K, STAGE)
        tCrB = tiled_mma.make_fragment_B(slice_mma.partition_B(self.sB))  # (MMA, MMA_N, MMA_K, STAGE)
        fragments = tCrA, tCrB
        sums = cute.make_rmem_tensor(config.accumulator_registers, Float32)
        parts = [  # (MMA, 1, 1) each: of one block and one WGMMA's rows
            cute.make_rmem_tensor(((2, 2, config.wgmma_columns // 8), 1, 1), Float32)
            for _ in range(config.parts)
        ]
        ring, turn = self.ring, Int32(0)
        state = ring.consumer_start()
        unit = walk.first()
        while walk.has(unit):
            place = walk.place(unit)
            origin = Origin(place.column, place.row, Int32(0))  # the kernel's: its m is the weights' N
            if const_expr(config.many):
                origin = Origin(place.row, place.column, Int32(0))
            bias = self.epilogue.bias_of(place)
            sums.fill(0.0)
            if const_expr(not config.many):
                state = self.sum(sums, parts, fragments, ring, state, k_tiles, origin)
            else:
                if place.rows > self.first_of(0):
                    state = self.sum(sums, parts, fragments, ring, state, k_tiles, origin)
                else:  # the group ends before this warpgroup's rows
                    state = self.pass_over(ring, state, k_tiles)
            self.put_in_order(sums)
            turn = self.epilogue.store(sums, place, bias, turn)
            unit = walk.next(unit, 1)

    @cute.jit
    def pass_over(self, ring, state, k_tiles):
        """Give back a tile's stages. Returns where the ring then is."""
        for _ in cutlass.range(k_tiles, unroll=1):
            ring.wait_full(state)
            ring.release(state.stage)
            state = ring.advance(state)
        return state


class Gemm(GroupedGemm):
    """The grouped product for one `BlockGroupConfig`."""

    def __init__(self, config: BlockGroupConfig):
        super().__init__(config)
        scales = cute.struct.MemRange[Float32, config.stages * config.stage_scales]
        self.layouts = LayoutsWith(config, self.dtypes, {"scales": cute.struct.Align[scales, 16]})

    @cute.jit
    def __call__(self, *arguments):
        """Encode the TMA descriptors and launch. arguments: those of `grouped`; `Scales`; the stream."""
        count = len(Arguments._fields)
        given = Arguments(*arguments[:count])
        scales = Scales(*arguments[count : count + WORDS])
        scaling = Scaling(given.l2_hint, scales, cute.ceil_div(given.n, BLOCK))
        self.launch(given._replace(l2_hint=scaling), arguments[-1])

    @cute.kernel
    def kernel(
        self,
        weights: tuple,
        rows: tuple,
        mmas: tuple,
        epilogue_mma: cute.TiledMma,
        layouts: tuple,
        params: WalkParams,
        offsets: cute.Pointer,
        out: tuple,
        k_tiles: Int32,
        scaling: Scaling,
    ):
        """As `grouped`'s; other warps of the first warpgroup copy scales."""
        config = self.config
        thread, warp_index, group = place_in_block()
        block, _, _ = cute.arch.block_idx()
        cluster, rank = Int32(block), Int32(0)
        if const_expr(config.cluster_size > 1):
            cluster, rank = block // config.cluster_size, block % config.cluster_size
        walk = Walk(config, params, offsets, thread % 32, cluster, rank)
        prefetch(warp_index, (weights, rows[0]))

        both = SmemAllocator().allocate(self.storage)
        storage = both.rest
        ring = Ring(config, storage.full.data_ptr(), storage.empty.data_ptr())
        begin(thread, config.cluster_size > 1, ring.make_barriers)

        sA = tensor_in(storage.a, layouts[0])  # (bM, bK, STAGE)
        sB = tensor_in(storage.b, layouts[2][0])  # (bN, bK, STAGE)
        sScales = cute.make_tensor(  # (SCALE, STAGE)
            both.scales.data_ptr(), cute.make_layout((config.stage_scales, config.stages))
        )
        copying = 32 + 32 * config.scale_warps

        def load():
            if const_expr(config.cluster_size == 1):
                cute.arch.barrier_arrive(barrier_id=SCALES_BARRIER, number_of_threads=copying)
            producer = Producer(config, weights, rows, sA, (sB,), ring, rank)
            producer.run(walk, k_tiles, scaling.l2_hint)

        def copy_scales():
            if warp_index >= 1 and warp_index <= config.scale_warps:
                if const_expr(config.cluster_size == 1):
                    cute.arch.barrier(barrier_id=SCALES_BARRIER, number_of_threads=copying)
                own = thread % 32, warp_index - 1
                ScaleProducer(config, scaling, sScales, ring, *own).run(walk, k_tiles)

        def multiply(staged):
            buffers, buffer = config.consumers * config.epilogue_buffers, config.pitch * config.staged_rows
            apart = (config.pitch, 1) if const_expr(config.many) else (1, config.pitch)
            sD = cute.make_tensor(  # (epiM, epiN, BUFFER)
                staged, cute.make_layout((MMA_ATOM_M, config.epi_n, buffers), stride=(*apart, buffer))
            )
            consumer, own = group - 1, (thread - WARPGROUP_THREADS) % WARPGROUP_THREADS
            way_out = kernel_rows.Epilogue if const_expr(config.many) else Epilogue
            epilogue = way_out(config, self.dtypes.out, epilogue_mma, sD, *out, consumer, own)
            first, adding = (
                self.layouts.tiled_mma(config.tile_warpgroups, config.wgmma_columns) for _ in range(2)
            )
            operands = (sB, sA) if const_expr(config.many) else (sA, sB)
            Consumer(
                config, self.dtypes.acc, first, *operands, ring, epilogue, None, consumer, sScales, own,
                adding,
            ).run(walk, k_tiles)  # fmt: skip

        part_ways(config, warp_index, group, storage, load, multiply, copy_scales)
