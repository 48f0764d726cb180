"""From a warpgroup's sums to the rows of a group: converted, staged, and stored row by row.

A subtile is 64 columns of the weights' N and `epi_n` rows. It is staged as it lies in memory, a row after the
other, and leaves in pieces of 16 bytes, those of the group's rows. So a tile that ends inside a group is
stored as one that does not, and neither writes a neighbour's rows. (By TMA each row of a ragged end would be
a copy of its own, which a warp issues one after the other.)
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warp

from tunegemm.generate.cute_sm90.config import MMA_ATOM_M, WARPGROUP_THREADS
from tunegemm.generate.cute_sm90.kernel.epilogue import sync_warpgroup
from tunegemm.generate.cute_sm90.kernel.fusion import first_row_of, flat
from tunegemm.generate.grouped.config import GroupedConfig


@dataclass(frozen=True)
class Epilogue:
    """One consumer warpgroup's way out."""

    config: GroupedConfig
    out: Any
    """The output's type."""
    mma: cute.TiledMma
    """The tiled MMA of a subtile."""
    sD: cute.Tensor
    """(epiM, epiN, BUFFER), buffers of all consumer warpgroups"""
    n: Int32
    """Columns of the weights' N."""
    d: Int64
    """Address of D."""
    ldd: Int64
    bias: Int64
    """Address of the bias; 0 without one."""
    bias_stride: Int64
    group: Int32
    """Which of the consumer warpgroups this is."""
    thread: Int32
    """The thread's index in the warpgroup."""

    def column_of(self, place, atom):
        """Where one of this warpgroup's 64-column parts of a tile begins."""
        warpgroups = self.config.tile_warpgroups
        own = self.group if warpgroups > 1 else Int32(0)
        return place.column + (atom * warpgroups + own) * MMA_ATOM_M

    @cute.jit
    def bias_of(self, place):
        """What is added to this thread's two columns of each part of a tile; zeros without a bias."""
        atoms = self.config.atoms_per_warpgroup
        values = cute.make_rmem_tensor(2 * atoms, Float32)
        values.fill(0.0)
        if self.bias != 0:
            bytes_each = const_expr(self.out.width // 8)
            address = self.bias + Int64(place.group) * self.bias_stride * bytes_each
            pointer = cute.make_ptr(self.out, address, cute.AddressSpace.gmem, assumed_align=bytes_each)
            vector = cute.make_tensor(pointer, cute.make_layout(2**31 - 1))
            for half in cutlass.range_constexpr(2 * atoms):
                column = first_row_of(self.column_of(place, half // 2), self.thread) + half % 2 * 8
                if column < self.n:
                    values[half] = vector[column].to(Float32)
        return values

    @cute.jit
    def store(self, sums, place, bias, turn):
        """Convert and store this warpgroup's part of a tile.

        Two buffers take turns: who stages a subtile has met all others since these read the one before the
        last. turn: the buffer that is next. Returns it.
        """
        config = self.config
        subtiles = config.tile_n // config.epi_n
        values = MMA_ATOM_M * config.epi_n // WARPGROUP_THREADS
        store_op = warp.StMatrix8x8x16bOp(True, min(4, config.epi_n // 4))
        tiled_copy = cute.make_tiled_copy_C(cute.make_copy_atom(store_op, self.out), self.mma)
        tRS_sD = tiled_copy.get_slice(self.thread).partition_D(self.sD)  # (R2S, R2S_M, R2S_N, BUFFER)
        out_shape = self.mma.partition_shape_C((MMA_ATOM_M, config.epi_n))  # (MMA, MMA_M, MMA_N)
        for index in cutlass.range_constexpr(config.subtiles):
            atom, subtile = index // subtiles, index % subtiles
            if place.rows > subtile * config.epi_n:
                converted = cute.make_rmem_tensor(out_shape, self.out)
                fragment = cute.make_rmem_tensor(values, Float32)
                for value in cutlass.range_constexpr(values):
                    fragment[value] = sums[index * values + value] + bias[2 * atom + value // 2 % 2]
                flat(converted).store(fragment.load().to(self.out))
                buffer = self.group * config.epilogue_buffers + turn
                cute.copy(
                    tiled_copy, tiled_copy.retile(converted)[(None, None, 0)], tRS_sD[(None, None, 0, buffer)]
                )
                sync_warpgroup(self.group)
                self.store_rows(place, atom, subtile, buffer)
                turn = 1 - turn
        return turn

    @cute.jit
    def store_rows(self, place, atom: cutlass.Constexpr, subtile: cutlass.Constexpr, buffer):
        """Store what of a staged subtile is the group's."""
        config, out_bytes = self.config, self.out.width // 8
        piece = 16 // out_bytes
        pieces = MMA_ATOM_M // piece
        first_column = self.column_of(place, atom)
        staged = self.sD.iterator.toint() + buffer * config.subtile_bytes
        for step in cutlass.range_constexpr(-(-config.epi_n * pieces // WARPGROUP_THREADS)):
            number = self.thread + step * WARPGROUP_THREADS
            line, across = number // pieces, number % pieces * piece
            row, column = subtile * config.epi_n + line, first_column + across
            if line < config.epi_n and row < place.rows and column < self.n:
                source = staged + (line * config.pitch + across) * out_bytes
                target = self.d + (Int64(place.row + row) * self.ldd + column) * out_bytes
                taken = cute.make_rmem_tensor(piece, self.out)
                cute.autovec_copy(self.pieces(source, piece, cute.AddressSpace.smem), taken)
                cute.autovec_copy(taken, self.pieces(target, piece, cute.AddressSpace.gmem))

    def pieces(self, address, piece, space):
        """The 16 bytes at an address."""
        pointer = cute.make_ptr(self.out, address, space, assumed_align=16)
        return cute.make_tensor(pointer, cute.make_layout(piece))
