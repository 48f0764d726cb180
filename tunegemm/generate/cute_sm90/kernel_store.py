"""From a warpgroup's accumulators to D: converted, staged and stored by TMA, or stored as they are."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warp

from tunegemm.generate.cute_sm90.config import MMA_ATOM_M, WARPGROUP_THREADS
from tunegemm.generate.cute_sm90.kernel_layouts import EPILOGUE_BARRIER


class Stores:
    """The part of `kernel.Gemm` that ends a tile."""

    @cute.jit
    def store(
        self, tma_d, mD, matrix, epilogue_mma, accumulators, sD, group, group_thread, tile, fused, amax,
        phases,
    ):  # fmt: skip
        """Convert and store one warpgroup's rows, subtile by subtile, without the other warpgroups.

        A subtile is staged in one of `epilogue_buffers` buffers, from which TMA reads it while the next is
        converted. Buffer reuse needs the earlier read to be done, which only the issuing warp can await:
        with three buffers or more it awaits it one subtile early and the barrier that publishes a subtile
        also hands out the next buffer; with fewer that would serialize, so each subtile takes two barriers.
        Where TMA brought a matrix into the buffers, its arrival says that a buffer is free.

        `tile`: its first row and column in the product, and its entry of the batch. Returns the new `phases`
        of these arrivals.
        """
        config = self.config
        first_row, first_column, entry = tile
        buffers = config.epilogue_buffers
        loads = const_expr(self.staged_matrix is not None)
        pairs = const_expr(config.fused.gated and not config.gates_halves)
        store_op, load_op = cute.nvgpu.CopyUniversalOp(), cute.nvgpu.CopyUniversalOp()
        if const_expr(self.out_dtype.width == 16):
            matrices = min(4, config.converted_columns // 4)
            store_op = warp.StMatrix8x8x16bOp(config.out_major == "m", matrices)
            load_op = warp.LdMatrix8x8x16bOp(config.out_major == "m", matrices)
        tiled_copy, tRS_sD, tiled_load, tSR_sC = None, None, None, None
        if const_expr(not pairs):
            tiled_copy = cute.make_tiled_copy_C(cute.make_copy_atom(store_op, self.out_dtype), epilogue_mma)
            tRS_sD = tiled_copy.get_slice(group_thread).partition_D(sD)
        if const_expr(loads):
            tiled_load = cute.make_tiled_copy_C(cute.make_copy_atom(load_op, self.out_dtype), epilogue_mma)
            tSR_sC = tiled_load.get_slice(group_thread).partition_S(sD)
        bSG_sD, bSG_gD = self.staged_boxes(tma_d, mD, sD, tile)
        subtiles = config.tile_n // config.subtile_n
        columns = config.converted_columns * config.subtile_n // config.out_epi_n  # of the product
        values = MMA_ATOM_M * columns // WARPGROUP_THREADS
        pieces = config.subtile_n // columns
        out_shape = epilogue_mma.partition_shape_C((MMA_ATOM_M, config.converted_columns))
        issues = group_thread < 32

        held = ()
        if const_expr(self.epilogue):
            rows_apart = MMA_ATOM_M * config.tile_warpgroups
            own_row = first_row + group % config.tile_warpgroups * MMA_ATOM_M
            held = self.hold_vectors(
                fused[1:], group_thread, (own_row, first_column, entry), mD.shape[0], fused[0],
                config.atoms_per_warpgroup, rows_apart, config.tile_n,
            )  # fmt: skip
        if const_expr(not loads):
            # The previous tile's stores have had a whole mainloop to be read.
            self.await_buffers(issues, 0)
            self.epilogue_barrier(group)
        for index in cutlass.range_constexpr(config.subtiles):
            atom, subtile = index // subtiles, index % subtiles
            own_buffer = index % buffers
            buffer = group * buffers + own_buffer
            row, column = self.subtile_place(index, group)
            if const_expr(loads):
                phase = (phases >> own_buffer) ^ (index // buffers)
                cute.arch.mbarrier_wait(matrix[2] + buffer, phase & 1)
            for piece in cutlass.range_constexpr(pieces):
                fragment = cute.make_rmem_tensor(values, self.acc_dtype)
                for value in cutlass.range_constexpr(values):
                    source = (index * pieces + piece) * values + value
                    if const_expr(config.gates_halves):
                        # Four columns, gate and up in turns, from where the tile has either half.
                        source = (
                            (atom * 2 + value % 2) * (config.tile_n // 4)
                            + (subtile * pieces + piece) * (values // 2) + value // 4 * 2 + value // 2 % 2
                        )  # fmt: skip
                    fragment[value] = accumulators[source]
                if const_expr(self.epilogue):
                    loaded = None
                    if const_expr(loads):
                        given = cute.make_rmem_tensor(out_shape, self.out_dtype)
                        cute.copy(
                            tiled_load, tSR_sC[(None, None, piece, buffer)],
                            tiled_load.retile(given)[(None, None, 0)],
                        )  # fmt: skip
                        loaded = self.flat(given).load().to(cutlass.Float32)
                    tile_column = subtile * config.subtile_n + piece * columns
                    place = (first_row + row * MMA_ATOM_M, first_column + tile_column, entry)
                    fragment = self.fuse(
                        fragment, columns, group_thread, place, mD, fused[0], fused[1:], held, atom,
                        tile_column, loaded, amax,
                    )  # fmt: skip
                converted = cute.make_rmem_tensor(out_shape, self.out_dtype)
                self.flat(converted).store(fragment.load().to(self.out_dtype))
                if const_expr(piece == 0 and buffers <= 2 and index >= buffers and not loads):
                    self.await_buffers(issues, buffers - 1)
                    self.epilogue_barrier(group)
                if const_expr(pairs):
                    self.stage_halves(converted, sD, group_thread, piece, buffer)
                else:
                    cute.copy(
                        tiled_copy, tiled_copy.retile(converted)[(None, None, 0)],
                        tRS_sD[(None, None, piece, buffer)],
                    )  # fmt: skip
            cute.arch.fence_view_async_shared()
            if const_expr(buffers > 2 and index >= buffers - 1 and not loads):
                self.await_buffers(issues, buffers - 2)
            self.epilogue_barrier(group)
            if issues:
                cute.copy(tma_d, bSG_sD[(None, buffer)], bSG_gD[(None, row, column, entry)])
                cute.arch.cp_async_bulk_commit_group()
            if const_expr(loads):
                self.load_next(index, matrix, sD, group, group_thread, tile)
        if const_expr(loads):
            odd = sum(1 << own for own in range(buffers) if len(range(own, config.subtiles, buffers)) % 2)
            phases ^= odd
        return phases

    @cute.jit
    def subtile_place(self, index: cutlass.Constexpr, group):
        """A subtile's coordinates in its tile, counted in subtiles."""
        config = self.config
        subtiles = config.tile_n // config.subtile_n
        row = Int32(index // subtiles * config.tile_warpgroups)
        if const_expr(config.tile_warpgroups > 1):
            row += group
        return row, index % subtiles

    @cute.jit
    def staged_boxes(self, tma, tensor, sD, tile):
        """The staging buffers and a tensor's subtiles from a tile on, as TMA copies between them."""
        row, column, _ = tile
        if const_expr(self.epilogue.gated):
            column = column // 2
        inside = cute.domain_offset((row, column, 0), tensor)
        tiled = cute.local_tile(inside, (MMA_ATOM_M, self.config.out_epi_n), (None, None, None))
        return cpasync.tma_partition(
            tma, 0, cute.make_layout(1), cute.group_modes(sD, 0, 2), cute.group_modes(tiled, 0, 2)
        )

    @cute.jit
    def store_directly(self, mD, accumulators, group, group_thread, tile):
        """Convert and store one warpgroup's rows from registers, pair by pair of columns.

        A thread holds two neighbouring columns of rows 8 apart, for each 8 columns of the tile (PTX ISA,
        wgmma, register fragment of D). Extents of the output's major mode are multiples of 16 bytes.
        """
        config = self.config
        m, n, _ = mD.shape
        first_row, first_column, entry = tile
        row = first_row + group_thread // 32 * 16 + group_thread % 32 // 4
        if const_expr(config.tile_warpgroups > 1):
            row += group * MMA_ATOM_M
        column = first_column + group_thread % 4 * 2
        rows_apart = MMA_ATOM_M * config.tile_warpgroups
        out_bytes = self.out_dtype.width // 8
        for half in cutlass.range_constexpr(2 * config.atoms_per_warpgroup):
            atom = half // 2
            line = row + atom * rows_apart + half % 2 * 8
            start = atom * (config.tile_n // 2) + half % 2 * 2
            if line < m:
                for block in cutlass.range_constexpr(config.tile_n // 8):
                    place = column + block * 8
                    pair = cute.make_rmem_tensor(2, self.out_dtype)
                    for value in cutlass.range_constexpr(2):
                        pair[value] = accumulators[start + block * 4 + value].to(self.out_dtype)
                    if place < n:
                        if const_expr(config.out_major == "n"):
                            address = mD.iterator.toint() + out_bytes * cute.crd2idx(
                                (line, Int64(place), entry), mD.layout
                            )
                            target = cute.make_ptr(
                                self.out_dtype, address, cute.AddressSpace.gmem, assumed_align=2 * out_bytes
                            )
                            cute.autovec_copy(pair, cute.make_tensor(target, cute.make_layout(2)))
                        else:
                            mD[line, place, entry] = pair[0]
                            if place + 1 < n:
                                mD[line, place + 1, entry] = pair[1]

    @cute.jit
    def await_buffers(self, issues, pending: cutlass.Constexpr):
        """The issuing warp waits until TMA has read all but the `pending` newest staged subtiles."""
        if issues:
            cute.arch.cp_async_bulk_wait_group(pending, read=True)

    @cute.jit
    def epilogue_barrier(self, group):
        """All threads of one consumer warpgroup."""
        cute.arch.barrier(barrier_id=EPILOGUE_BARRIER + group, number_of_threads=WARPGROUP_THREADS)
