"""A consumer warpgroup: multiplies what is in the ring, and has its sums added up and stored."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from tunegemm.generate.cute_sm90.config import WARPGROUP_THREADS, KernelConfig
from tunegemm.generate.cute_sm90.kernel.epilogue import Epilogue
from tunegemm.generate.cute_sm90.kernel.layouts import ORDER_BARRIER
from tunegemm.generate.cute_sm90.kernel.ring import Ring
from tunegemm.generate.cute_sm90.kernel.split_k import SplitK


@dataclass(frozen=True)
class Consumer:
    """One warpgroup: the main loop, and what follows it for each work unit."""

    config: KernelConfig
    acc_dtype: Any
    tiled_mma: cute.TiledMma
    sA: cute.Tensor
    """(bM, bK, STAGE)"""
    sB: cute.Tensor
    """(bN, bK, STAGE)"""
    ring: Ring
    epilogue: Epilogue
    split_k: SplitK
    group: Int32
    """Which of the consumer warpgroups this is."""

    @cute.jit
    def run(self, schedule, lane, cta):
        """Multiply, convert, store, work unit after work unit. cta: this one along m and n of its cluster."""
        config, ring, tiled_mma, group = self.config, self.ring, self.tiled_mma, self.group
        pingpong = const_expr(config.schedule == "pingpong")
        two_level = const_expr(config.accumulation == "two_level")

        # WGMMA operands are descriptors; the slice of a warpgroup's first thread stands for all of it.
        first_thread = Int32(0) if const_expr(pingpong) else group * WARPGROUP_THREADS
        slice_mma = tiled_mma.get_slice(first_thread)
        tCrA = tiled_mma.make_fragment_A(slice_mma.partition_A(self.sA))  # (MMA, MMA_M, MMA_K, STAGE)
        tCrB = tiled_mma.make_fragment_B(slice_mma.partition_B(self.sB))  # (MMA, MMA_N, MMA_K, STAGE)
        accumulators = cute.make_rmem_tensor(  # (MMA, MMA_M, MMA_N)
            slice_mma.partition_shape_C((config.tile_m, config.tile_n)), self.acc_dtype
        )
        k_tile_sums = None
        if const_expr(two_level):
            k_tile_sums = cute.make_rmem_tensor(accumulators.layout, self.acc_dtype)
        ring = ring.for_consumer(lane, cta)

        # Phases of the barriers of the matrix's loads, a bit for each staging buffer of this warpgroup.
        phases = Int32(0)
        state = ring.consumer_start()
        unit = schedule.first()
        if const_expr(pingpong):
            if group == 1:
                # The second warpgroup takes the cluster's second work unit, the first one's k tiles deeper in
                # the ring.
                state = ring.consumer_state(unit.k_tiles)
                unit = schedule.next(unit)
                self.end_turn(0)

        while schedule.has(unit):
            if const_expr(pingpong):
                cute.arch.barrier(barrier_id=ORDER_BARRIER + group, number_of_threads=2 * WARPGROUP_THREADS)

            if const_expr(two_level):
                self.load_matrix(schedule, unit)
                state = self.sum_two_level(accumulators, k_tile_sums, tCrA, tCrB, ring, state, unit.k_tiles)
            else:
                # The first k tile overwrites the accumulators, the others add to them. One WGMMA group stays
                # in flight, so that the tensor cores have work while a stage is released and one awaited.
                ring.wait_full(state)
                warpgroup.fence()
                tiled_mma.set(warpgroup.Field.ACCUMULATE, False)
                for block in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
                    self.multiply(tiled_mma, accumulators, tCrA, tCrB, block, state.stage)
                    tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
                warpgroup.commit_group()
                # Nobody else may have this tile to store; with k splits it shows in the end who has.
                self.load_matrix(schedule, unit)
                previous = state.stage
                state = ring.advance(state)
                for _ in cutlass.range(unit.k_tiles - 1, unroll=1):
                    ring.wait_full(state)
                    warpgroup.fence()
                    for block in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
                        self.multiply(tiled_mma, accumulators, tCrA, tCrB, block, state.stage)
                    warpgroup.commit_group()
                    warpgroup.wait_group(1)
                    ring.release(previous)
                    previous = state.stage
                    state = ring.advance(state)
            if const_expr(pingpong):
                self.end_turn(1 - group)
            # The divisions of the tile's coordinates run under the last WGMMAs.
            tile = schedule.tile(unit.index)
            if const_expr(not two_level):
                warpgroup.wait_group(0)
                ring.release(previous)

            holds_sum = cutlass.Boolean(True)
            if schedule.is_split(unit):
                holds_sum = self.split_k.add(accumulators, schedule, unit)
            if holds_sum:
                origin = schedule.origin(tile)
                if const_expr(config.epi_n > 0):
                    if const_expr(config.staged_matrix is not None):
                        if schedule.is_split(unit):
                            self.epilogue.load_matrix(origin)
                    phases = self.epilogue.store(accumulators, origin, phases)
                else:
                    self.epilogue.store_directly(accumulators, origin)

            if const_expr(pingpong):
                # Skip the other warpgroup's work unit.
                unit = schedule.next(unit)
                state = ring.skip(state, unit.k_tiles)
            unit = schedule.next(unit)

        self.epilogue.finish(lane)

    def end_turn(self, group):
        """Pingpong: another warpgroup may issue its main loop."""
        cute.arch.barrier_arrive(barrier_id=ORDER_BARRIER + group, number_of_threads=2 * WARPGROUP_THREADS)

    @cute.jit
    def load_matrix(self, schedule, unit):
        """Start the loads of the epilogue's matrix, if it has one and the tile is this cluster's alone."""
        if const_expr(self.config.staged_matrix is not None):
            if not schedule.is_split(unit):
                self.epilogue.load_matrix(schedule.origin(schedule.tile(unit.index)))

    @cute.jit
    def multiply(self, tiled_mma, accumulators, tCrA, tCrB, block, stage):
        """The WGMMAs of one 32-byte block of k in one stage."""
        index = (None, None, block, stage)
        cute.gemm(tiled_mma, accumulators, tCrA[index], tCrB[index], accumulators)

    @cute.jit
    def sum_two_level(self, sums, k_tile_sums, tCrA, tCrB, ring, state, k_tiles):
        """The main loop where the tensor cores add up one k tile only, and fp32 registers all of them.

        Nothing stays in flight while a warpgroup adds; with two at one tile the other's WGMMAs run then.
        """
        tiled_mma = self.tiled_mma
        sums.fill(0)
        for _ in cutlass.range(k_tiles, unroll=1):
            ring.wait_full(state)
            warpgroup.fence()
            tiled_mma.set(warpgroup.Field.ACCUMULATE, False)
            for block in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
                self.multiply(tiled_mma, k_tile_sums, tCrA, tCrB, block, state.stage)
                tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            ring.release(state.stage)
            for value in cutlass.range_constexpr(self.config.accumulator_registers):
                sums[value] = sums[value] + k_tile_sums[value]
            state = ring.advance(state)
        return state
