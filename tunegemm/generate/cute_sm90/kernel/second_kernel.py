"""The second kernel: adds up the sums that the k splits of a tile left in the workspace, and stores them.

It knows rows and columns as the first kernel does, so that it has the same epilogue and the same way out:
through shared memory by TMA, in whole sectors whatever the output's major. A block has one warpgroup and one
slice of a CTA's tile: 64 rows, and a few columns, for many blocks.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import cpasync, warp
from cutlass.utils import SmemAllocator

from tunegemm.generate.cute_sm90.config import MMA_ATOM_M, SMEM_ALIGNMENT, WARPGROUP_THREADS, KernelConfig
from tunegemm.generate.cute_sm90.kernel.epilogue import stage_halves
from tunegemm.generate.cute_sm90.kernel.fusion import Fusion, flat
from tunegemm.generate.cute_sm90.kernel.layouts import Dtypes, Layouts, TmaTensor
from tunegemm.generate.cute_sm90.kernel.schedule import Origin, Schedule, ScheduleParams, TileCoord
from tunegemm.generate.cute_sm90.kernel.split_k import Place, sums_at

#: Shared memory that a block asks for; it uses a few KiB. Then four fit a multiprocessor: started early, they
#: do not crowd on the few multiprocessors that the first kernel leaves idle.
SMEM_BYTES = 46 * 1024

#: Columns of the output in a slice.
SLICE_COLUMNS = 16

#: k splits whose loads are in flight at once, 32 bytes of a thread each: with four blocks of 128 threads on a
#: multiprocessor 64 KiB, more than L2's latency times what it gives one multiprocessor.
SPLITS_IN_FLIGHT = 4


@dataclass(frozen=True)
class SecondKernel:
    """The kernel of one `KernelConfig`."""

    config: KernelConfig
    dtypes: Dtypes

    @property
    def columns(self):
        """Columns of the product of which a slice is made, `SLICE_COLUMNS` of the output."""
        return 2 * SLICE_COLUMNS if self.config.fused.gated else SLICE_COLUMNS

    @cute.jit
    def launch(self, mD, params, partials, words, stream):
        """A block for each slice of each tile that has k splits. mD: (M, N, L)."""
        config = self.config
        schedule = Schedule(config, params)
        tiles = schedule.tiles()
        if const_expr(schedule.streams):
            tiles = params.split_k
        layouts = Layouts(config, self.dtypes)
        # The first kernel's atom, one slice wide: which thread holds which element.
        mma = layouts.tiled_mma(1, SLICE_COLUMNS)
        sD_layout = layouts.staging(mD, SLICE_COLUMNS, 1)  # (epiM, epiN, BUFFER)
        d = layouts.staged_box(cpasync.CopyBulkTensorTileS2GOp(), mD, SLICE_COLUMNS)
        slices = config.tile_m // MMA_ATOM_M * (config.tile_n // self.columns)
        self.kernel(d, mma, sD_layout, params, partials, words).launch(
            grid=(tiles * config.cluster_size * slices, 1, 1),
            block=(WARPGROUP_THREADS, 1, 1),
            smem=SMEM_BYTES,
            stream=stream,
            min_blocks_per_mp=4,
            preferred_smem_carveout=100,  # as the first kernel has it
            # Its blocks start as soon as the first kernel leaves room, and wait there for its end.
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        d: TmaTensor,
        mma: cute.TiledMma,
        sD_layout: cute.ComposedLayout,
        params: ScheduleParams,
        partials: cute.Pointer,
        words: tuple,
    ):
        """Add the k splits of one slice of a tile in their order, and store it."""
        config, dtypes, columns = self.config, self.dtypes, self.columns
        schedule = Schedule(config, params)
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        if thread == 0:
            cpasync.prefetch_descriptor(d.atom)

        across = config.tile_n // columns
        slices = config.tile_m // MMA_ATOM_M * across
        tile = Int32(Uint32(block) // Uint32(slices))
        rest = block - tile * slices
        rank = tile % config.cluster_size
        tile = tile // config.cluster_size
        row_atom = rest // across
        column_slice = rest - row_atom * across
        place = Place(rank, row_atom % config.tile_warpgroups, thread)
        atom = row_atom // config.tile_warpgroups
        cluster_m, cluster_n, batch = schedule.cluster_tile(tile)
        tile_m = cluster_m * config.cluster_m + rank % config.cluster_m
        tile_n = cluster_n * config.cluster_n + rank // config.cluster_m
        begin = schedule.origin(TileCoord(tile_m, tile_n, batch, Int32(0)))
        origin = Origin(begin.row + row_atom * MMA_ATOM_M, begin.column + column_slice * columns, batch)

        number, splits = schedule.splits(tile)
        first = self.slice_at(partials, number, place, atom, column_slice)
        count = MMA_ATOM_M * columns // WARPGROUP_THREADS
        address = first.iterator.toint()
        stride_bytes = Int64(config.cluster_size) * (config.tile_m * config.tile_n * 4)
        sums = cute.make_rmem_tensor(count, dtypes.acc)
        sums.fill(0)
        cute.arch.griddepcontrol_wait()
        for split in cutlass.range(0, splits, SPLITS_IN_FLIGHT, unroll=1):
            self.add_splits(sums, address, first.layout, stride_bytes, split, splits)

        fragment = sums
        if const_expr(config.gates_halves):
            fragment = cute.make_rmem_tensor(count, dtypes.acc)
            for value in cutlass.range_constexpr(count):
                fragment[value] = sums[value % 2 * (count // 2) + value // 4 * 2 + value // 2 % 2]
        if const_expr(config.fused):
            fusion = Fusion.of(config, dtypes, d.tensor, words, thread)
            c = None
            if const_expr(config.staged_matrix is not None):
                c = fusion.fetch_staged_matrix(origin, SLICE_COLUMNS)
            held = fusion.hold_vectors(origin, 1, 0, columns)
            fragment = fusion.apply(fragment, columns, origin, held, 0, 0, c)
            fusion.publish_amax(thread % 32)
        converted = cute.make_rmem_tensor(  # (MMA, MMA_M, MMA_N)
            mma.partition_shape_C((MMA_ATOM_M, SLICE_COLUMNS)), dtypes.out
        )
        flat(converted).store(fragment.load().to(dtypes.out))
        self.store(converted, d, mma, sD_layout, origin)

    @cute.jit
    def slice_at(self, partials, number, place, atom, column_slice):
        """A thread's sums of a slice of a unit: (4, CHUNK); of halves that gate each other chunks of the even
        columns, then of the odd ones, (4, (CHUNK, 2)).
        """
        config = self.config
        chunk = 4 * WARPGROUP_THREADS
        chunks = self.columns // 8
        layout = cute.make_layout((4, chunks), stride=(1, chunk))
        if const_expr(config.gates_halves):
            chunks //= 2
            layout = cute.make_layout((4, (chunks, 2)), stride=(1, (chunk, config.tile_n // 16 * chunk)))
        tile = sums_at(config, partials, number, place)
        start = atom * (config.tile_n // 8) + column_slice * chunks
        return cute.make_tensor(tile.iterator + start * chunk, layout)

    @cute.jit
    def add_splits(self, sums, address, layout, stride_bytes, start, splits):
        """Add the next k splits in their order, once the loads of all are under way; none beyond the last."""
        count = cute.size(sums)
        loaded = cute.make_rmem_tensor((count, SPLITS_IN_FLIGHT), self.dtypes.acc)
        for ahead in cutlass.range_constexpr(SPLITS_IN_FLIGHT):
            split = cutlass.min(start + ahead, splits - 1)
            place = cute.make_ptr(
                self.dtypes.acc, address + stride_bytes * split, cute.AddressSpace.gmem, assumed_align=16
            )
            theirs = cute.make_tensor(place, layout)  # as `slice_at`
            own = cute.make_tensor(loaded[(None, ahead)].iterator, cute.make_layout((4, count // 4)))
            for chunk in cutlass.range_constexpr(count // 4):
                cute.autovec_copy(theirs[(None, chunk)], own[(None, chunk)])
        for ahead in cutlass.range_constexpr(SPLITS_IN_FLIGHT):
            counts = start + ahead < splits
            for value in cutlass.range_constexpr(count):
                added = sums[value] + loaded[value, ahead]
                sums[value] = added if counts else sums[value]

    @cute.jit
    def store(self, converted, d, mma, sD_layout, origin):
        """Stage a slice in shared memory and let TMA store it."""
        config, out = self.config, self.dtypes.out
        thread, _, _ = cute.arch.thread_idx()
        sD = SmemAllocator().allocate_tensor(
            out, sD_layout.outer, byte_alignment=SMEM_ALIGNMENT, swizzle=sD_layout.inner
        )
        if const_expr(config.fused.gated and not config.gates_halves):
            stage_halves(converted, sD, thread, 0, 0)
        else:
            if const_expr(out.width == 16):
                op = warp.StMatrix8x8x16bOp(config.out_major == "m", 4)
            else:
                op = cute.nvgpu.CopyUniversalOp()
            tiled_copy = cute.make_tiled_copy_C(cute.make_copy_atom(op, out), mma)
            tRS_sD = tiled_copy.get_slice(thread).partition_D(sD)  # (R2S, R2S_M, R2S_N, BUFFER)
            cute.copy(tiled_copy, tiled_copy.retile(converted), tRS_sD[(None, None, None, 0)])
        cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()
        out_column = origin.column // 2 if const_expr(config.fused.gated) else origin.column
        inside = cute.domain_offset((origin.row, out_column, 0), d.tensor)
        gD = cute.local_tile(inside, (MMA_ATOM_M, SLICE_COLUMNS), (0, 0, None))  # (epiM, epiN, L)
        bSG_sD, bSG_gD = cpasync.tma_partition(  # ((ATOM_V, REST_V), BUFFER), ((ATOM_V, REST_V), L)
            d.atom, 0, cute.make_layout(1), cute.group_modes(sD, 0, 2), cute.group_modes(gD, 0, 2)
        )
        if thread < 32:
            cute.copy(d.atom, bSG_sD[(None, 0)], bSG_gD[(None, origin.batch)])
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
