"""A consumer warpgroup of the Hopper kernel: multiplies what is in the ring, has its sums stored."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from tunegemm.generate.cute_sm90.config import WARPGROUP_THREADS
from tunegemm.generate.cute_sm90.kernel_layouts import ORDER_BARRIER


class Multiplies:
    """The part of `kernel.Gemm` that consumer warpgroups run."""

    @cute.jit
    def consume(
        self, tma_d, mD, matrix, tiled_mma, epilogue_mma, sA, sB, sD, full, empty, arrived, thread, group,
        k_tiles, walk, last, total_work, partials, counters, fused,
    ):  # fmt: skip
        """One consumer warpgroup: multiply, convert, store."""
        config = self.config
        pingpong = const_expr(config.schedule == "pingpong")
        two_level = const_expr(config.accumulation == "two_level")
        cta_m, cta_n, _ = cute.arch.block_idx()
        group_thread = thread % WARPGROUP_THREADS
        lane = thread % 32

        # WGMMA operands are descriptors; the slice of a warpgroup's first thread stands for all of it.
        first_thread = Int32(0) if const_expr(pingpong) else group * WARPGROUP_THREADS
        slice_mma = tiled_mma.get_slice(first_thread)
        tCrA = tiled_mma.make_fragment_A(slice_mma.partition_A(sA))
        tCrB = tiled_mma.make_fragment_B(slice_mma.partition_B(sB))
        accumulators = cute.make_rmem_tensor(
            slice_mma.partition_shape_C((config.tile_m, config.tile_n)), self.acc_dtype
        )

        partial = None
        if const_expr(two_level):
            partial = cute.make_rmem_tensor(accumulators.layout, self.acc_dtype)

        # Which CTAs wait for this CTA's release of a stage: those that multicast into it.
        signal = lane == 0
        peer = None
        if const_expr(self.cluster_size > 1):
            peer = lane % self.cluster_size
            peer_m = peer % config.cluster_m
            peer_n = peer // config.cluster_m
            signal = lane < self.cluster_size and (peer_m == cta_m or peer_n == cta_n)

        # The largest magnitude of what this thread stores, over all of its tiles.
        amax = cute.make_rmem_tensor(1, cutlass.Float32)
        amax[0] = cutlass.Float32(0.0)
        # Phases of the barriers of the matrix's loads, a bit for each staging buffer of this warpgroup.
        phases = Int32(0)

        stage = Int32(0)
        phase = Int32(0)
        work, _, count, left = self.first_piece(k_tiles, walk)
        if const_expr(pingpong):
            if group == 1:
                # The second warpgroup takes the cluster's second piece, the first one's k tiles deeper in the
                # ring.
                stage = count % config.stages
                phase = (count // config.stages) & 1
                work, _, count, left = self.next_piece(work, count, left, k_tiles, walk)
                cute.arch.barrier_arrive(barrier_id=ORDER_BARRIER, number_of_threads=2 * WARPGROUP_THREADS)

        while work < total_work:
            if const_expr(pingpong):
                cute.arch.barrier(barrier_id=ORDER_BARRIER + group, number_of_threads=2 * WARPGROUP_THREADS)

            if const_expr(two_level):
                if const_expr(self.staged_matrix is not None):
                    if not self.has_parts(work, walk):
                        self.load_matrix(matrix, sD, group, group_thread, self.place_of(work, walk, last))
                stage, phase = self.sum_two_level(
                    tiled_mma, accumulators, partial, tCrA, tCrB, full, empty, stage, phase, count, signal,
                    peer,
                )  # fmt: skip
            else:
                # The first k tile overwrites the accumulators, the others add to them. One WGMMA group stays
                # in flight, so that the tensor cores have work while a stage is released and one awaited; or
                # none, and a stage is free sooner.
                cute.arch.mbarrier_wait(full + stage, phase)
                warpgroup.fence()
                tiled_mma.set(warpgroup.Field.ACCUMULATE, False)
                for block in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
                    self.multiply(tiled_mma, accumulators, tCrA, tCrB, block, stage)
                    tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
                warpgroup.commit_group()
                if const_expr(self.staged_matrix is not None):
                    # Nobody else may have this tile to store; with parts of k it shows in the end who has.
                    if not self.has_parts(work, walk):
                        self.load_matrix(matrix, sD, group, group_thread, self.place_of(work, walk, last))
                if const_expr(config.wgmma_in_flight == 0):
                    warpgroup.wait_group(0)
                    if signal:
                        cute.arch.mbarrier_arrive(empty + stage, peer)
                previous = stage
                stage += 1
                if stage == config.stages:
                    stage = Int32(0)
                    phase ^= 1
                for _ in cutlass.range(count - 1, unroll=1):
                    cute.arch.mbarrier_wait(full + stage, phase)
                    warpgroup.fence()
                    for block in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
                        self.multiply(tiled_mma, accumulators, tCrA, tCrB, block, stage)
                    warpgroup.commit_group()
                    warpgroup.wait_group(config.wgmma_in_flight)
                    if signal:
                        cute.arch.mbarrier_arrive(
                            empty + (previous if const_expr(config.wgmma_in_flight == 1) else stage), peer
                        )
                    previous = stage
                    stage += 1
                    if stage == config.stages:
                        stage = Int32(0)
                        phase ^= 1
            if const_expr(pingpong):
                cute.arch.barrier_arrive(
                    barrier_id=ORDER_BARRIER + 1 - group, number_of_threads=2 * WARPGROUP_THREADS
                )
            # The divisions of the tile's coordinates run under the last WGMMAs.
            tile_m, tile_n, entry, _ = self.tile_of(work, walk)
            if const_expr(not two_level and config.wgmma_in_flight == 1):
                warpgroup.wait_group(0)
                if signal:
                    cute.arch.mbarrier_arrive(empty + previous, peer)

            holds_sum = cutlass.Boolean(True)
            if self.has_parts(work, walk):
                rank = cta_n * config.cluster_m + cta_m
                sharer = 0 if const_expr(pingpong) else group
                piece = self.piece_of(work, walk)
                if walk[6] != 0:
                    self.deposit(accumulators, partials, piece, rank, sharer, group_thread)
                    holds_sum = cutlass.Boolean(False)
                else:
                    first, parts = self.parts_of(self.split_work(work, walk)[0], k_tiles, walk)
                    holds_sum = self.reduce(
                        accumulators, partials, counters, arrived + group, first, piece - first, parts, rank,
                        sharer, group, group_thread,
                    )  # fmt: skip
            if holds_sum:
                place = (*self.begin(tile_m, tile_n, last), entry)
                if const_expr(config.epi_n > 0):
                    if const_expr(self.staged_matrix is not None):
                        if self.has_parts(work, walk):
                            self.load_matrix(matrix, sD, group, group_thread, place)
                    phases = self.store(
                        tma_d, mD, matrix, epilogue_mma, accumulators, sD, group, group_thread, place,
                        fused, amax, phases,
                    )  # fmt: skip
                else:
                    self.store_directly(mD, accumulators, group, group_thread, place)

            if const_expr(pingpong):
                # Skip the other warpgroup's piece.
                work, _, count, left = self.next_piece(work, count, left, k_tiles, walk)
                skipped = stage + count
                phase ^= (skipped // config.stages) & 1
                stage = skipped % config.stages
            work, _, count, left = self.next_piece(work, count, left, k_tiles, walk)

        if const_expr("amax" in self.epilogue.steps):
            self.publish_amax(fused[1:], amax, lane)
        # The staging buffers must stay until TMA has read them.
        if const_expr(config.epi_n > 0):
            if group_thread < 32:
                cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def multiply(self, tiled_mma, accumulators, tCrA, tCrB, block, stage):
        """The WGMMAs of one 32-byte block of k in one stage."""
        index = (None, None, block, stage)
        cute.gemm(tiled_mma, accumulators, tCrA[index], tCrB[index], accumulators)

    @cute.jit
    def sum_two_level(
        self, tiled_mma, sums, partial, tCrA, tCrB, full, empty, stage, phase, k_tiles, signal, peer
    ):  # fmt: skip
        """The main loop where the tensor cores add up one k tile only, and fp32 registers all of them.

        Nothing stays in flight while a warpgroup adds; with two at one tile the other's WGMMAs run then.
        """
        config = self.config
        sums.fill(0)
        for _ in cutlass.range(k_tiles, unroll=1):
            cute.arch.mbarrier_wait(full + stage, phase)
            warpgroup.fence()
            tiled_mma.set(warpgroup.Field.ACCUMULATE, False)
            for block in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
                self.multiply(tiled_mma, partial, tCrA, tCrB, block, stage)
                tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            if signal:
                cute.arch.mbarrier_arrive(empty + stage, peer)
            for value in cutlass.range_constexpr(config.accumulator_registers):
                sums[value] = sums[value] + partial[value]
            stage += 1
            if stage == config.stages:
                stage = Int32(0)
                phase ^= 1
        return stage, phase
