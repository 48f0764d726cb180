"""How the sums of a tile's parts become one: in pairs, inside the kernel, or by a second kernel after it.

Both read and write a workspace of *pieces*: what one cluster multiplied of one cluster tile. Sums lie there
as the warpgroups hold them: by piece, CTA of the cluster and warpgroup, then four neighbouring accumulators
of a thread, the threads side by side. Every access is 16 bytes of each thread in a row, on both sides. The
second kernel knows rows and columns as the first does, so that it has the same epilogue and the same way out:
through shared memory by TMA, in whole sectors whatever the output's major.

Which meets which and who is added to whom is fixed, so that results are the same in every run.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import cpasync, warp
from cutlass.utils import LayoutEnum, SmemAllocator

from tunegemm.generate.cute_sm90.config import MMA_ATOM_M, SMEM_ALIGNMENT, WARPGROUP_THREADS

#: Shared memory that a block of the second kernel asks for; it uses a few KiB. Then four fit a
#: multiprocessor: started early, they do not crowd on the few multiprocessors that the first kernel leaves
#: idle.
SECOND_SMEM_BYTES = 46 * 1024

#: Columns of the output in a slice of 64 rows, which a block of the second kernel stores: few, for many
#: blocks.
SLICE_COLUMNS = 16

#: Parts whose loads the second kernel has in flight at once, 32 bytes of a thread each: with four blocks of
#: 128 threads on a multiprocessor 64 KiB, more than L2's latency times what it gives one multiprocessor.
PARTS_IN_FLIGHT = 4


class Sums:
    """The part of `kernel.Gemm` that adds up the parts of a tile."""

    @cute.jit
    def sums_of(self, partials, piece, rank, sharer, group_thread):
        """This thread's sums of a piece: (4, chunks), chunks as far apart as a warpgroup's accesses are long.

        sharer: which of the warpgroups that share a tile it is.
        """
        config = self.config
        values = config.accumulator_registers
        warpgroup = (piece * self.cluster_size + rank) * config.tile_warpgroups + sharer
        start = partials + (Int64(warpgroup) * (values * WARPGROUP_THREADS) + group_thread * 4)
        layout = cute.make_layout((4, values // 4), stride=(1, 4 * WARPGROUP_THREADS))
        return cute.make_tensor(start, layout)

    @cute.jit
    def deposit(self, accumulators, partials, piece, rank, sharer, group_thread):
        """Write a piece's sums for the second kernel."""
        chunks = self.config.accumulator_registers // 4
        own = cute.make_tensor(accumulators.iterator, cute.make_layout((4, chunks)))
        place = self.sums_of(partials, piece, rank, sharer, group_thread)
        for chunk in cutlass.range_constexpr(chunks):
            cute.autovec_copy(own[(None, chunk)], place[(None, chunk)])

    @cute.jit
    def reduce(
        self, accumulators, partials, counters, arrived, piece, part, parts, rank, sharer, group,
        group_thread,
    ):  # fmt: skip
        """Add up the parts of a tile along a tree; true for the one that then holds the total.

        Parts 0 and 1 meet, 2 and 3, then 0-1 and 2-3, and so on: the later of two adds the earlier's sums to
        its own, the earlier is done. Nobody waits, and the sums are the same whoever is late: additions
        commute, and who meets whom is fixed. A part that is late each time reads log2(parts) sums.

        Only the same warpgroup of other clusters' CTAs touches these sums, thread by thread at the same
        place. Each meeting has a counter, that of the first part on its right side. `piece` is that of part
        0; the others' follow.
        """
        config = self.config
        chunks = config.accumulator_registers // 4
        own = cute.make_tensor(accumulators.iterator, cute.make_layout((4, chunks)))
        answer = cute.make_tensor(arrived, cute.make_layout(1))
        holds = cutlass.Boolean(True)
        side = Int32(1)  # parts on each side of a meeting
        while holds and side < parts:
            left = part & ~(2 * side - 1)
            right = left + side
            if right < parts:
                meeting = (piece + right) * self.cluster_size + rank
                counter = counters + meeting * config.tile_warpgroups + sharer
                mine = part & ~(side - 1)
                # Sums that nobody will read need not be written: first a look whether the other is there.
                if group_thread == 0:
                    answer[0] = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
                self.epilogue_barrier(group)
                late = answer[0] == 1
                self.epilogue_barrier(group)
                if not late:
                    self.deposit(accumulators, partials, piece + mine, rank, sharer, group_thread)
                    # Each thread's sums are visible before the one thread counts, and counting orders it
                    # before the reader: release and acquire at device scope on both sides of the barrier.
                    cute.arch.fence_acq_rel_gpu()
                    self.epilogue_barrier(group)
                    if group_thread == 0:
                        answer[0] = cute.arch.atomic_add(counter, Int32(1), sem="acq_rel", scope="gpu")
                    self.epilogue_barrier(group)
                    late = answer[0] == 1
                    self.epilogue_barrier(group)
                if late:
                    cute.arch.fence_acq_rel_gpu()
                    if group_thread == 0:
                        cute.make_tensor(counter, cute.make_layout(1))[0] = Int32(0)
                    theirs = self.sums_of(partials, piece + left + right - mine, rank, sharer, group_thread)
                    for chunk in cutlass.range_constexpr(chunks):
                        loaded = cute.make_rmem_tensor(4, self.acc_dtype)
                        cute.autovec_copy(theirs[(None, chunk)], loaded)
                        for value in cutlass.range_constexpr(4):
                            own[value, chunk] = own[value, chunk] + loaded[value]
                holds = late
            side *= 2
        return holds

    # ---- the second kernel --------------------------------------------------------------------------

    @property
    def slice_columns(self):
        """Columns of the product of which a slice is made, `SLICE_COLUMNS` of the output."""
        return 2 * SLICE_COLUMNS if self.epilogue.gated else SLICE_COLUMNS

    @cute.jit
    def launch_sum(self, mD, a_layout, b_layout, k_tiles, walk, last, partials, fused, stream):
        """The second kernel: a block for each slice of each tile that has parts."""
        tiles = walk[0] * walk[1] * walk[2]
        if const_expr(self.streams):
            tiles = walk[3]
        # The first kernel's atom, one slice wide: which thread holds which element.
        mma = self.tiled_mma(a_layout, b_layout, 1, SLICE_COLUMNS)
        d_layout = LayoutEnum.from_tensor(mD)
        sD_layout = self.staging_layout(d_layout, SLICE_COLUMNS, 1)
        tma_d, gD = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(),
            mD,
            self.staging_layout(d_layout, SLICE_COLUMNS),
            (MMA_ATOM_M, SLICE_COLUMNS),
        )
        slices = self.config.tile_m // MMA_ATOM_M * (self.config.tile_n // self.slice_columns)
        self.sum_kernel(tma_d, gD, mma, sD_layout, k_tiles, walk, last, partials, fused).launch(
            grid=(tiles * self.cluster_size * slices, 1, 1),
            block=(WARPGROUP_THREADS, 1, 1),
            smem=SECOND_SMEM_BYTES,
            stream=stream,
            min_blocks_per_mp=4,
            preferred_smem_carveout=100,  # as the first kernel has it
            # Its blocks start as soon as the first kernel leaves room, and wait there for its end.
            use_pdl=True,
        )

    @cute.jit
    def add_parts(self, sums, address, layout, stride_bytes, start, parts):
        """Add the next parts in their order, once the loads of all are under way; none beyond the last."""
        count = cute.size(sums)
        loaded = cute.make_rmem_tensor((count, PARTS_IN_FLIGHT), self.acc_dtype)
        for ahead in cutlass.range_constexpr(PARTS_IN_FLIGHT):
            part = cutlass.min(start + ahead, parts - 1)
            place = cute.make_ptr(
                self.acc_dtype, address + stride_bytes * part, cute.AddressSpace.gmem, assumed_align=16
            )
            theirs = cute.make_tensor(place, layout)
            own = cute.make_tensor(loaded[(None, ahead)].iterator, cute.make_layout((4, count // 4)))
            for chunk in cutlass.range_constexpr(count // 4):
                cute.autovec_copy(theirs[(None, chunk)], own[(None, chunk)])
        for ahead in cutlass.range_constexpr(PARTS_IN_FLIGHT):
            counts = start + ahead < parts
            for value in cutlass.range_constexpr(count):
                added = sums[value] + loaded[value, ahead]
                sums[value] = added if counts else sums[value]

    @cute.jit
    def slice_of_sums(self, partials, piece, rank, sharer, atom, column_slice, thread):
        """This thread's sums of a slice of a piece: (4, chunks); of halves that gate each other chunks of the
        even columns, then of the odd ones.
        """
        config = self.config
        chunk = 4 * WARPGROUP_THREADS
        chunks = self.slice_columns // 8
        layout = cute.make_layout((4, chunks), stride=(1, chunk))
        if const_expr(config.gates_halves):
            chunks //= 2
            layout = cute.make_layout((4, (chunks, 2)), stride=(1, (chunk, config.tile_n // 16 * chunk)))
        tile = self.sums_of(partials, piece, rank, sharer, thread)
        start = atom * (config.tile_n // 8) + column_slice * chunks
        return cute.make_tensor(tile.iterator + start * chunk, layout)

    @cute.jit
    def read_matrix(self, thread, place, mD, words):
        """The values of the `staged_matrix` for a slice, as `fuse` takes them: here from global memory."""
        row, column, entry = place
        m, out_n, _ = mD.shape
        run = 2
        if const_expr(self.epilogue.gated):
            column = column // 2
        return self.fetch(
            self.staged_matrix, self.words_of(self.staged_matrix, words),
            MMA_ATOM_M * SLICE_COLUMNS // WARPGROUP_THREADS, row + thread // 32 * 16 + thread % 32 // 4,
            column + thread % 4 * run, entry, m, out_n, run,
        )  # fmt: skip

    @cute.kernel
    def sum_kernel(
        self,
        tma_d: cute.CopyAtom,
        mD: cute.Tensor,
        mma: cute.TiledMma,
        sD_layout: cute.ComposedLayout,
        k_tiles: Int32,
        walk: tuple[Int32, ...],
        last: tuple[Int32, Int32],
        partials: cute.Pointer,
        fused: tuple,
    ):
        """Add the parts of one slice of a tile in their order, and store it."""
        config = self.config
        columns = self.slice_columns
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        if thread == 0:
            cpasync.prefetch_descriptor(tma_d)

        across = config.tile_n // columns
        slices = config.tile_m // MMA_ATOM_M * across
        tile = Int32(Uint32(block) // Uint32(slices))
        rest = block - tile * slices
        rank = tile % self.cluster_size
        tile = tile // self.cluster_size
        row_atom = rest // across
        column_slice = rest - row_atom * across
        sharer = row_atom % config.tile_warpgroups
        atom = row_atom // config.tile_warpgroups
        cluster_m, cluster_n, entry = self.cluster_tile_of(tile, walk)
        tile_m = cluster_m * config.cluster_m + rank % config.cluster_m
        tile_n = cluster_n * config.cluster_n + rank // config.cluster_m
        row, column = self.begin(tile_m, tile_n, last)
        place = (row + row_atom * MMA_ATOM_M, column + column_slice * columns, entry)

        piece, parts = self.parts_of(tile, k_tiles, walk)
        first = self.slice_of_sums(partials, piece, rank, sharer, atom, column_slice, thread)
        address = first.iterator.toint()
        stride_bytes = Int64(self.cluster_size) * (config.tile_m * config.tile_n * 4)
        count = MMA_ATOM_M * columns // WARPGROUP_THREADS
        sums = cute.make_rmem_tensor(count, self.acc_dtype)
        sums.fill(0)
        cute.arch.griddepcontrol_wait()
        for part in cutlass.range(0, parts, PARTS_IN_FLIGHT, unroll=1):
            self.add_parts(sums, address, first.layout, stride_bytes, part, parts)

        fragment = sums
        if const_expr(config.gates_halves):
            fragment = cute.make_rmem_tensor(count, self.acc_dtype)
            for value in cutlass.range_constexpr(count):
                fragment[value] = sums[value % 2 * (count // 2) + value // 4 * 2 + value // 2 % 2]
        if const_expr(self.epilogue):
            amax = cute.make_rmem_tensor(1, cutlass.Float32)
            amax[0] = cutlass.Float32(0.0)
            loaded = None
            if const_expr(self.staged_matrix is not None):
                loaded = self.read_matrix(thread, place, mD, fused[1:])
            held = self.hold_vectors(fused[1:], thread, place, mD.shape[0], fused[0], 1, 0, columns)
            fragment = self.fuse(
                fragment, columns, thread, place, mD, fused[0], fused[1:], held, 0, 0, loaded, amax
            )
            if const_expr("amax" in self.epilogue.steps):
                self.publish_amax(fused[1:], amax, thread % 32)
        converted = cute.make_rmem_tensor(mma.partition_shape_C((MMA_ATOM_M, SLICE_COLUMNS)), self.out_dtype)
        self.flat(converted).store(fragment.load().to(self.out_dtype))

        sD = SmemAllocator().allocate_tensor(
            self.out_dtype, sD_layout.outer, byte_alignment=SMEM_ALIGNMENT, swizzle=sD_layout.inner
        )
        if const_expr(self.epilogue.gated and not config.gates_halves):
            self.stage_halves(converted, sD, thread, 0, 0)
        else:
            if const_expr(self.out_dtype.width == 16):
                op = warp.StMatrix8x8x16bOp(config.out_major == "m", 4)
            else:
                op = cute.nvgpu.CopyUniversalOp()
            tiled_copy = cute.make_tiled_copy_C(cute.make_copy_atom(op, self.out_dtype), mma)
            tRS_sD = tiled_copy.get_slice(thread).partition_D(sD)
            cute.copy(tiled_copy, tiled_copy.retile(converted), tRS_sD[(None, None, None, 0)])
        cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()
        out_column = place[1] // 2 if const_expr(self.epilogue.gated) else place[1]
        inside = cute.domain_offset((place[0], out_column, 0), mD)
        gD = cute.local_tile(inside, (MMA_ATOM_M, SLICE_COLUMNS), (0, 0, None))
        bSG_sD, bSG_gD = cpasync.tma_partition(
            tma_d, 0, cute.make_layout(1), cute.group_modes(sD, 0, 2), cute.group_modes(gD, 0, 2)
        )
        if thread < 32:
            cute.copy(tma_d, bSG_sD[(None, 0)], bSG_gD[(None, entry)])
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
