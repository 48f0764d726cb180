"""From a warpgroup's sums to the rows of a group: converted, staged, and stored row by row.

A subtile is 64 columns of the weights' N and `epi_n` rows; of a gated product 32 columns and twice the rows,
which stmatrix takes as 64 columns whose second 8 of 16 belong to the later rows. It is staged as it lies in
memory, a row after the other, and leaves in pieces of 16 bytes, those of the group's rows. So a tile that
ends inside a group is stored as one that does not, and neither writes a neighbour's rows. (By TMA each row of
a ragged end would be a copy of its own, which a warp issues one after the other.)
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
    """Columns of the product."""
    d: Int64
    """Address of D."""
    ldd: Int64
    bias: Int64
    """Address of the bias, or of scales in its place, fp32, a value for each column of a group; 0 without."""
    bias_stride: Int64
    alternates: Int32
    """1 where rows of gate and up alternate in the weights, and so in the bias."""
    scales: Int64
    """Address of the rows' scales, fp32."""
    group: Int32
    """Which of the consumer warpgroups this is."""
    thread: Int32
    """The thread's index in the warpgroup."""

    def column_of(self, place, atom):
        """Where one of this warpgroup's parts of a tile begins, a WGMMA's columns."""
        warpgroups = self.config.tile_warpgroups
        own = self.group if warpgroups > 1 else Int32(0)
        return place.column + (atom * warpgroups + own) * self.config.atom_columns

    @cute.jit
    def bias_of(self, place):
        """What is added to this thread's two columns of each part of a tile, or to its column's gate and up;
        or what scales them. Zeros without a bias.
        """
        atoms, gated = self.config.atoms_per_warpgroup, const_expr(self.config.fused.gated)
        values = cute.make_rmem_tensor(2 * atoms, Float32)
        values.fill(0.0)
        dtype = Float32 if self.config.fused.scales else self.out
        bytes_each = dtype.width // 8
        if self.bias != 0:
            address = self.bias + Int64(place.group) * self.bias_stride * bytes_each
            pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=bytes_each)
            vector = cute.make_tensor(pointer, cute.make_layout(2**31 - 1))
            for half in cutlass.range_constexpr(2 * atoms):
                first = self.column_of(place, half // 2)
                if const_expr(gated):
                    column = first + self.thread // 32 * 8 + self.thread % 32 // 4
                    index = column + half % 2 * self.n
                    if self.alternates == 1:
                        index = 2 * column + half % 2
                else:
                    column = first_row_of(first, self.thread) + half % 2 * 8
                    index = column
                if column < self.n:
                    values[half] = vector[index].to(Float32)
        return values

    @cute.jit
    def store(self, sums, place, bias, turn):
        """Convert and store this warpgroup's part of a tile.

        Two buffers take turns: who stages a subtile has met all others since these read the one before the
        last. turn: the buffer that is next. Returns it.
        """
        config = self.config
        subtiles = config.tile_n // config.staged_rows
        values = MMA_ATOM_M * config.epi_n // WARPGROUP_THREADS
        store_op = warp.StMatrix8x8x16bOp(True, min(4, config.epi_n // 4))
        tiled_copy = cute.make_tiled_copy_C(cute.make_copy_atom(store_op, self.out), self.mma)
        tRS_sD = tiled_copy.get_slice(self.thread).partition_D(self.sD)  # (R2S, R2S_M, R2S_N, BUFFER)
        out_shape = self.mma.partition_shape_C((MMA_ATOM_M, config.epi_n))  # (MMA, MMA_M, MMA_N)
        for index in cutlass.range_constexpr(config.subtiles):
            atom, subtile = index // subtiles, index % subtiles
            if place.rows > subtile * config.staged_rows:
                converted = cute.make_rmem_tensor(out_shape, self.out)
                fragment = cute.make_rmem_tensor(values, Float32)
                if const_expr(config.fused.gated):
                    up = cute.make_rmem_tensor(values, Float32)
                    for value in cutlass.range_constexpr(values):
                        # 8 rows each: those of the subtile's first half, and behind them their counterparts.
                        block, half, pair = value // 4, value // 2 % 2, value % 2
                        source = (2 * index + half) * values + 4 * block + pair
                        fragment[value] = sums[source] + bias[2 * atom]
                        up[value] = sums[source + 2] + bias[2 * atom + 1]
                    fragment.store(config.fused.gate(fragment.load(), up.load()))
                elif const_expr(config.fused.scales):
                    scales = self.scales_of(place, subtile)
                    for value in cutlass.range_constexpr(values):
                        scale = bias[2 * atom + value // 2 % 2] * scales[value // 4 * 2 + value % 2]
                        fragment[value] = sums[index * values + value] * scale
                else:
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
    def scales_of(self, place, subtile: cutlass.Constexpr):
        """The scales of this thread's rows of a subtile, two of each 8; behind the last row that one's."""
        pointer = cute.make_ptr(Float32, self.scales, cute.AddressSpace.gmem, assumed_align=4)
        vector = cute.make_tensor(pointer, cute.make_layout(2**31 - 1))
        values = cute.make_rmem_tensor(self.config.epi_n // 4, Float32)
        for value in cutlass.range_constexpr(self.config.epi_n // 4):
            row = subtile * self.config.epi_n + value // 2 * 8 + self.thread % 4 * 2 + value % 2
            values[value] = vector[place.row + cutlass.min(row, place.rows - 1)]
        return values

    @cute.jit
    def store_rows(self, place, atom: cutlass.Constexpr, subtile: cutlass.Constexpr, buffer):
        """Store what of a staged subtile is the group's."""
        config, out_bytes = self.config, self.out.width // 8
        piece = 16 // out_bytes
        pieces = config.atom_columns // piece
        first_column = self.column_of(place, atom)
        staged = self.sD.iterator.toint() + buffer * config.subtile_bytes
        for step in cutlass.range_constexpr(-(-config.staged_rows * pieces // WARPGROUP_THREADS)):
            number = self.thread + step * WARPGROUP_THREADS
            line, across = number // pieces, number % pieces * piece
            row, column = subtile * config.staged_rows + line, first_column + across
            if line < config.staged_rows and row < place.rows and column < self.n:
                source = staged + (line * config.pitch + across) * out_bytes
                target = self.d + (Int64(place.row + row) * self.ldd + column) * out_bytes
                taken = cute.make_rmem_tensor(piece, self.out)
                cute.autovec_copy(self.pieces(source, piece, cute.AddressSpace.smem), taken)
                cute.autovec_copy(taken, self.pieces(target, piece, cute.AddressSpace.gmem))

    def pieces(self, address, piece, space):
        """The 16 bytes at an address."""
        pointer = cute.make_ptr(self.out, address, space, assumed_align=16)
        return cute.make_tensor(pointer, cute.make_layout(piece))
