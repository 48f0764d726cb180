"""From a warpgroup's sums to the rows of a group, where the rows are WGMMA's m."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warp

from tunegemm.generate.cute_sm90.config import MMA_ATOM_M, WARPGROUP_THREADS
from tunegemm.generate.cute_sm90.kernel.epilogue import sync_warpgroup
from tunegemm.generate.cute_sm90.kernel.fusion import flat
from tunegemm.generate.grouped.kernel import epilogue


@dataclass(frozen=True)
class Epilogue(epilogue.Epilogue):
    """As `grouped`'s, but that a subtile is 64 rows and `epi_n` columns. There is no bias."""

    def bias_of(self, place):
        return None

    @cute.jit
    def store(self, sums, place, bias, turn):
        """See there."""
        config = self.config
        across = config.tile_m // config.epi_n
        values = MMA_ATOM_M * config.epi_n // WARPGROUP_THREADS
        store_op = warp.StMatrix8x8x16bOp(False, min(4, config.epi_n // 4))
        tiled_copy = cute.make_tiled_copy_C(cute.make_copy_atom(store_op, self.out), self.mma)
        tRS_sD = tiled_copy.get_slice(self.thread).partition_D(self.sD)  # (R2S, R2S_M, R2S_N, BUFFER)
        out_shape = self.mma.partition_shape_C((MMA_ATOM_M, config.epi_n))  # (MMA, MMA_M, MMA_N)
        own = self.group if const_expr(config.tile_warpgroups > 1) else Int32(0)
        for index in cutlass.range_constexpr(config.subtiles):
            first_row = (index // across * config.tile_warpgroups + own) * MMA_ATOM_M
            if place.rows > first_row:
                converted = cute.make_rmem_tensor(out_shape, self.out)
                fragment = cute.make_rmem_tensor(values, Float32)
                for value in cutlass.range_constexpr(values):
                    fragment[value] = sums[index * values + value]
                flat(converted).store(fragment.load().to(self.out))
                buffer = self.group * config.epilogue_buffers + turn
                cute.copy(
                    tiled_copy, tiled_copy.retile(converted)[(None, None, 0)], tRS_sD[(None, None, 0, buffer)]
                )
                sync_warpgroup(self.group)
                self.store_lines(place, first_row, index % across, buffer)
                turn = 1 - turn
        return turn

    @cute.jit
    def store_lines(self, place, first_row, subtile: cutlass.Constexpr, buffer):
        """Store the lines of a staged subtile that are the group's."""
        config, out_bytes = self.config, self.out.width // 8
        piece = 16 // out_bytes
        pieces = config.epi_n // piece
        step = WARPGROUP_THREADS // pieces
        line, across = self.thread // pieces, self.thread % pieces * piece
        row, column = first_row + line, place.column + subtile * config.epi_n + across
        source = self.sD.iterator.toint() + buffer * config.subtile_bytes
        source += (line * config.pitch + across) * out_bytes
        target = self.d + (Int64(place.row + row) * self.ldd + column) * out_bytes
        for number in cutlass.range_constexpr(MMA_ATOM_M // step):
            if row + number * step < place.rows and column < self.n:
                taken = cute.make_rmem_tensor(piece, self.out)
                own = source + number * (step * config.pitch * out_bytes)
                cute.autovec_copy(self.pieces(own, piece, cute.AddressSpace.smem), taken)
                cute.autovec_copy(taken, self.pieces(target, piece, cute.AddressSpace.gmem))
            target += step * self.ldd * out_bytes
