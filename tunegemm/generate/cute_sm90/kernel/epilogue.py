"""From a warpgroup's accumulators to D: fused, converted, staged and stored by TMA, or stored as they are."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warp

from tunegemm.generate.cute_sm90.config import MMA_ATOM_M, WARPGROUP_THREADS, KernelConfig
from tunegemm.generate.cute_sm90.kernel.fusion import Fusion, first_row_of, flat
from tunegemm.generate.cute_sm90.kernel.layouts import EPILOGUE_BARRIER, Dtypes, TmaTensor
from tunegemm.generate.cute_sm90.kernel.schedule import Origin


def sync_warpgroup(group):
    """All threads of one consumer warpgroup meet."""
    cute.arch.barrier(barrier_id=EPILOGUE_BARRIER + group, number_of_threads=WARPGROUP_THREADS)


def staged_boxes(config, operand, sD, origin):
    """TMA's view of the staging buffers, ((ATOM_V, REST_V), BUFFER), and of D or a matrix like it from a
    tile's origin on, ((ATOM_V, REST_V), RestM, RestN, L).
    """
    column = origin.column // 2 if config.fused.gated else origin.column
    inside = cute.domain_offset((origin.row, column, 0), operand.tensor)
    tiled = cute.local_tile(inside, (MMA_ATOM_M, config.out_epi_n), (None, None, None))
    return cpasync.tma_partition(
        operand.atom, 0, cute.make_layout(1), cute.group_modes(sD, 0, 2), cute.group_modes(tiled, 0, 2)
    )


def stage_halves(converted, sD, thread, first_column, buffer):
    """Put a gated fragment, one column of each pair, into its staging buffer, element by element."""
    row = first_row_of(0, thread)
    column = first_column + thread % 4
    for value in range(cute.size(converted)):
        sD[row + value % 2 * 8, column + value // 2 * 4, buffer] = converted[value]


@dataclass(frozen=True)
class Epilogue:
    """One consumer warpgroup's way out: `store`, without the other warpgroups, subtile by subtile."""

    config: KernelConfig
    dtypes: Dtypes
    d: TmaTensor
    """(M, N, L); as of gated epilogues (M, N / 2, L)"""
    c: TmaTensor | None
    """The epilogue's matrix that TMA loads, as D; None without one."""
    mma: cute.TiledMma | None
    """The tiled MMA of what is converted at a time; None where sums are stored directly."""
    sD: cute.Tensor | None
    """(epiM, epiN, BUFFER), buffers of all consumer warpgroups"""
    loaded: Any
    """Barriers of the loads of `c`, one for each buffer."""
    fusion: Fusion
    group: Int32
    """Which of the consumer warpgroups this is."""
    thread: Int32
    """The thread's index in the warpgroup."""

    @cute.jit
    def store(self, accumulators, origin, phases):
        """Convert and store this warpgroup's rows of a tile. Returns `phases` for the next tile.

        A subtile is staged in one of `epilogue_buffers` buffers, from which TMA reads it while the next is
        converted. Buffer reuse needs the earlier read to be done, which only the issuing warp can await:
        with three buffers or more it awaits it one subtile early and the barrier that publishes a subtile
        also hands out the next buffer; with fewer that would serialize, so each subtile takes two barriers.
        Where TMA brought a matrix into the buffers, its arrival says that a buffer is free.

        phases: of these arrivals' barriers, a bit for each buffer.
        """
        config, dtypes, sD, fusion = self.config, self.dtypes, self.sD, self.fusion
        buffers = config.epilogue_buffers
        loads = const_expr(config.staged_matrix is not None)
        pairs = const_expr(config.fused.gated and not config.gates_halves)
        store_op, load_op = cute.nvgpu.CopyUniversalOp(), cute.nvgpu.CopyUniversalOp()
        if const_expr(dtypes.out.width == 16):
            matrices = min(4, config.converted_columns // 4)
            store_op = warp.StMatrix8x8x16bOp(config.out_major == "m", matrices)
            load_op = warp.LdMatrix8x8x16bOp(config.out_major == "m", matrices)
        tiled_copy, tRS_sD, tiled_load, tSR_sC = None, None, None, None
        if const_expr(not pairs):
            tiled_copy = cute.make_tiled_copy_C(cute.make_copy_atom(store_op, dtypes.out), self.mma)
            tRS_sD = tiled_copy.get_slice(self.thread).partition_D(sD)  # (R2S, R2S_M, R2S_N, BUFFER)
        if const_expr(loads):
            tiled_load = cute.make_tiled_copy_C(cute.make_copy_atom(load_op, dtypes.out), self.mma)
            tSR_sC = tiled_load.get_slice(self.thread).partition_S(sD)  # (S2R, S2R_M, S2R_N, BUFFER)
        bSG_sD, bSG_gD = staged_boxes(config, self.d, sD, origin)
        subtiles = config.tile_n // config.subtile_n
        columns = config.converted_columns * config.subtile_n // config.out_epi_n  # of the product
        values = MMA_ATOM_M * columns // WARPGROUP_THREADS
        steps = config.subtile_n // columns
        out_shape = self.mma.partition_shape_C((MMA_ATOM_M, config.converted_columns))  # (MMA, MMA_M, MMA_N)

        held = ()
        if const_expr(config.fused):
            rows_apart = MMA_ATOM_M * config.tile_warpgroups
            own_row = origin.row + self.group % config.tile_warpgroups * MMA_ATOM_M
            held = fusion.hold_vectors(
                Origin(own_row, origin.column, origin.batch), config.atoms_per_warpgroup, rows_apart,
                config.tile_n,
            )  # fmt: skip
        if const_expr(not loads):
            # The previous tile's stores have had a whole mainloop to be read.
            self.await_buffers(0)
            sync_warpgroup(self.group)
        for index in cutlass.range_constexpr(config.subtiles):
            atom, subtile = index // subtiles, index % subtiles
            own_buffer = index % buffers
            buffer = self.group * buffers + own_buffer
            row, column = self.subtile_coord(index)
            if const_expr(loads):
                phase = (phases >> own_buffer) ^ (index // buffers)
                cute.arch.mbarrier_wait(self.loaded + buffer, phase & 1)
            for step in cutlass.range_constexpr(steps):
                fragment = cute.make_rmem_tensor(values, dtypes.acc)
                for value in cutlass.range_constexpr(values):
                    source = (index * steps + step) * values + value
                    if const_expr(config.gates_halves):
                        # Four columns, gate and up in turns, from where the tile has either half.
                        source = (
                            (atom * 2 + value % 2) * (config.tile_n // 4)
                            + (subtile * steps + step) * (values // 2) + value // 4 * 2 + value // 2 % 2
                        )  # fmt: skip
                    fragment[value] = accumulators[source]
                if const_expr(config.fused):
                    c = None
                    if const_expr(loads):
                        given = cute.make_rmem_tensor(out_shape, dtypes.out)
                        cute.copy(
                            tiled_load, tSR_sC[(None, None, step, buffer)],
                            tiled_load.retile(given)[(None, None, 0)],
                        )  # fmt: skip
                        c = flat(given).load().to(cutlass.Float32)
                    tile_column = subtile * config.subtile_n + step * columns
                    first = Origin(origin.row + row * MMA_ATOM_M, origin.column + tile_column, origin.batch)
                    fragment = fusion.apply(fragment, columns, first, held, atom, tile_column, c)
                converted = cute.make_rmem_tensor(out_shape, dtypes.out)
                flat(converted).store(fragment.load().to(dtypes.out))
                if const_expr(step == 0 and buffers <= 2 and index >= buffers and not loads):
                    self.await_buffers(buffers - 1)
                    sync_warpgroup(self.group)
                if const_expr(pairs):
                    stage_halves(converted, sD, self.thread, step * config.converted_columns, buffer)
                else:
                    cute.copy(
                        tiled_copy, tiled_copy.retile(converted)[(None, None, 0)],
                        tRS_sD[(None, None, step, buffer)],
                    )  # fmt: skip
            cute.arch.fence_view_async_shared()
            if const_expr(buffers > 2 and index >= buffers - 1 and not loads):
                self.await_buffers(buffers - 2)
            sync_warpgroup(self.group)
            if self.thread < 32:
                cute.copy(self.d.atom, bSG_sD[(None, buffer)], bSG_gD[(None, row, column, origin.batch)])
                cute.arch.cp_async_bulk_commit_group()
            if const_expr(loads):
                self.load_next(index, origin)
        if const_expr(loads):
            odd = sum(1 << own for own in range(buffers) if len(range(own, config.subtiles, buffers)) % 2)
            phases ^= odd
        return phases

    @cute.jit
    def store_directly(self, accumulators, origin):
        """Convert and store this warpgroup's rows from registers, pair by pair of columns.

        A thread holds two neighbouring columns of rows 8 apart, for each 8 columns of the tile (PTX ISA,
        wgmma, register fragment of D). Extents of the output's major mode are multiples of 16 bytes.
        """
        config, out, mD = self.config, self.dtypes.out, self.d.tensor
        m, n, _ = mD.shape
        row = first_row_of(origin.row, self.thread)
        if const_expr(config.tile_warpgroups > 1):
            row += self.group * MMA_ATOM_M
        column = origin.column + self.thread % 4 * 2
        rows_apart = MMA_ATOM_M * config.tile_warpgroups
        out_bytes = out.width // 8
        for half in cutlass.range_constexpr(2 * config.atoms_per_warpgroup):
            atom = half // 2
            line = row + atom * rows_apart + half % 2 * 8
            start = atom * (config.tile_n // 2) + half % 2 * 2
            if line < m:
                for block in cutlass.range_constexpr(config.tile_n // 8):
                    across = column + block * 8
                    pair = cute.make_rmem_tensor(2, out)
                    for value in cutlass.range_constexpr(2):
                        pair[value] = accumulators[start + block * 4 + value].to(out)
                    if across < n:
                        if const_expr(config.out_major == "n"):
                            address = mD.iterator.toint() + out_bytes * cute.crd2idx(
                                (line, Int64(across), origin.batch), mD.layout
                            )
                            target = cute.make_ptr(
                                out, address, cute.AddressSpace.gmem, assumed_align=2 * out_bytes
                            )
                            cute.autovec_copy(pair, cute.make_tensor(target, cute.make_layout(2)))
                        else:
                            mD[line, across, origin.batch] = pair[0]
                            if across + 1 < n:
                                mD[line, across + 1, origin.batch] = pair[1]

    @cute.jit
    def load_matrix(self, origin):
        """Start the loads of a tile's matrix into all of this warpgroup's staging buffers.

        TMA has read what the previous tile left there by then: it had a k tile's time, with pingpong a main
        loop's.
        """
        config = self.config
        if self.is_first_warp():
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            for index in cutlass.range_constexpr(min(config.epilogue_buffers, config.subtiles)):
                self.load_subtile(index, origin)

    @cute.jit
    def load_next(self, index: cutlass.Constexpr, origin):
        """Start the load of the subtile that comes next into a buffer whose store has been issued.

        With three buffers or more that of the store before: this one's has only begun.
        """
        config = self.config
        behind = 1 if const_expr(config.epilogue_buffers > 2) else 0
        following = index - behind + config.epilogue_buffers
        if const_expr(index >= behind and following < config.subtiles):
            if self.is_first_warp():
                cute.arch.cp_async_bulk_wait_group(behind, read=True)
                self.load_subtile(following, origin)

    def is_first_warp(self):
        """Of its warpgroup; ptxas sees that all of a warp answer alike. After a branch by the thread's number
        it takes the main loop for one in which they part, and keeps no descriptor in uniform registers.
        """
        return cute.arch.make_warp_uniform(self.thread // 32) == 0

    @cute.jit
    def load_subtile(self, index: cutlass.Constexpr, origin):
        """One warp: let TMA bring a subtile of the matrix into the staging buffer that it will leave from."""
        config = self.config
        bGS_sC, bGS_gC = staged_boxes(config, self.c, self.sD, origin)
        buffer = self.group * config.epilogue_buffers + index % config.epilogue_buffers
        row, column = self.subtile_coord(index)
        barrier = self.loaded + buffer
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, config.subtile_bytes)
        cute.copy(
            self.c.atom, bGS_gC[(None, row, column, origin.batch)], bGS_sC[(None, buffer)],
            tma_bar_ptr=barrier,
        )  # fmt: skip

    def subtile_coord(self, index):
        """A subtile's row and column in its tile, counted in subtiles."""
        config = self.config
        subtiles = config.tile_n // config.subtile_n
        row = Int32(index // subtiles * config.tile_warpgroups)
        if config.tile_warpgroups > 1:
            row += self.group
        return row, index % subtiles

    @cute.jit
    def await_buffers(self, pending: cutlass.Constexpr):
        """The issuing warp waits until TMA has read all but the `pending` newest staged subtiles."""
        if self.thread < 32:
            cute.arch.cp_async_bulk_wait_group(pending, read=True)

    @cute.jit
    def finish(self, lane):
        """After the last tile: publish the largest magnitude, and wait until TMA has read the buffers."""
        self.fusion.publish_amax(lane)
        if const_expr(self.config.epi_n > 0):
            self.await_buffers(0)
