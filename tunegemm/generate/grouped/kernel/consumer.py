"""A consumer warpgroup: multiplies what is in the ring, and has its sums stored."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from tunegemm.generate.cute_sm90.config import WARPGROUP_THREADS
from tunegemm.generate.cute_sm90.kernel.layouts import ORDER_BARRIER
from tunegemm.generate.cute_sm90.kernel.ring import Ring
from tunegemm.generate.grouped.config import GroupedConfig
from tunegemm.generate.grouped.kernel.epilogue import Epilogue
from tunegemm.generate.grouped.kernel.producer import takes_width


@dataclass(frozen=True)
class Consumer:
    """One warpgroup: the main loop, and what follows it for each tile."""

    config: GroupedConfig
    mmas: tuple
    """The tiled MMA of each of the config's widths."""
    sA: cute.Tensor
    """(bM, bK, STAGE)"""
    sB: tuple
    """(width, bK, STAGE) for each of the widths"""
    ring: Ring
    epilogue: Epilogue
    group: Int32
    """Which of the consumer warpgroups this is."""

    @cute.jit
    def run(self, walk, k_tiles):
        """Multiply, convert, store, tile after tile."""
        config, ring, group = self.config, self.ring, self.group
        widths = config.widths
        pingpong = const_expr(config.schedule == "pingpong")

        sums = cute.make_rmem_tensor(config.accumulator_registers, Float32)
        turn = Int32(0)
        state = ring.consumer_start()
        unit = walk.first()
        if const_expr(pingpong):
            if group == 1:
                # The second warpgroup takes the block's second tile, k tiles deeper in the ring.
                state = ring.consumer_state(k_tiles)
                unit = walk.next(unit, 1)
                self.end_turn(0)

        while walk.has(unit):
            place = walk.place(unit)
            bias = self.epilogue.bias_of(place)
            if const_expr(pingpong):
                cute.arch.barrier(barrier_id=ORDER_BARRIER + group, number_of_threads=2 * WARPGROUP_THREADS)
            if const_expr(len(widths) == 1):
                state = self.sum(sums, 0, state, k_tiles)
            else:
                for index in cutlass.range_constexpr(len(widths)):
                    if takes_width(widths, index, place.rows):
                        state = self.sum(sums, index, state, k_tiles)
            turn = self.epilogue.store(sums, place, bias, turn)
            if const_expr(pingpong):
                state = ring.skip(state, k_tiles)
                unit = walk.next(unit, 2)
            else:
                unit = walk.next(unit, 1)

    def end_turn(self, group):
        """Pingpong: another warpgroup may issue its main loop."""
        cute.arch.barrier_arrive(barrier_id=ORDER_BARRIER + group, number_of_threads=2 * WARPGROUP_THREADS)

    @cute.jit
    def sum(self, sums, index: cutlass.Constexpr, state, k_tiles):
        """The main loop of a tile of one width. Returns where the ring then is.

        The first k tile overwrites the sums, the others add to them. One WGMMA group stays in flight, so that
        the tensor cores have work while a stage is released and one awaited.
        """
        config, ring, mma = self.config, self.ring, self.mmas[index]
        # WGMMA operands are descriptors; the slice of a warpgroup's first thread stands for all of it.
        first_thread = Int32(0)
        if const_expr(config.schedule != "pingpong"):
            first_thread = self.group * WARPGROUP_THREADS
        slice_mma = mma.get_slice(first_thread)
        tCrA = mma.make_fragment_A(slice_mma.partition_A(self.sA))  # (MMA, MMA_M, MMA_K, STAGE)
        tCrB = mma.make_fragment_B(slice_mma.partition_B(self.sB[index]))  # (MMA, MMA_N, MMA_K, STAGE)
        width, atoms = config.widths[index], config.atoms_per_warpgroup
        tCrC = cute.make_tensor(  # (MMA, MMA_M, MMA_N): the first columns of a tile's sums
            sums.iterator,
            cute.make_layout(((2, 2, width // 8), atoms, 1), stride=((1, 2, 4), config.tile_n // 2, 0)),
        )

        ring.wait_full(state)
        warpgroup.fence()
        mma.set(warpgroup.Field.ACCUMULATE, False)
        for block in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
            self.multiply(mma, tCrC, tCrA, tCrB, block, state.stage)
            mma.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()
        previous = state.stage
        state = ring.advance(state)
        for _ in cutlass.range(k_tiles - 1, unroll=1):
            ring.wait_full(state)
            warpgroup.fence()
            for block in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
                self.multiply(mma, tCrC, tCrA, tCrB, block, state.stage)
            warpgroup.commit_group()
            warpgroup.wait_group(1)
            ring.release(previous)
            previous = state.stage
            state = ring.advance(state)
        if const_expr(config.schedule == "pingpong"):
            self.end_turn(1 - self.group)
        warpgroup.wait_group(0)
        ring.release(previous)
        return state

    @cute.jit
    def multiply(self, mma, tCrC, tCrA, tCrB, block, stage):
        """The WGMMAs of one 32-byte block of k in one stage."""
        index = (None, None, block, stage)
        cute.gemm(mma, tCrC, tCrA[index], tCrB[index], tCrC)
