"""Tensors, WGMMAs, layouts in shared memory and TMA's boxes of the Hopper kernel, made on the host."""

import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup

from tunegemm.generate.cute_sm90.config import MMA_ATOM_M, SMEM_ALIGNMENT
from tunegemm.generate.cute_sm90.kernel_tf32 import MmaTf32

# Named barriers; 0 is the whole block's.
EPILOGUE_BARRIER = 1  # + consumer warpgroup
ORDER_BARRIER = 4  # + consumer warpgroup
START_BARRIER = 6  # the ring's barriers are there; without a cluster


class Layouts:
    """The part of `kernel.Gemm` that says how things lie, in global and in shared memory."""

    @cute.jit
    def operand(self, address, dtype, shape, minor_is_second, leading, batch_stride):
        """A (rows, columns, batch) tensor at a raw address, with the 16-byte strides that TMA wants."""
        divisor = 128 // dtype.width
        leading = cute.assume(leading, divby=divisor)
        batch_stride = cute.assume(batch_stride, divby=divisor)
        if const_expr(minor_is_second):
            stride = (leading, 1, batch_stride)
        else:
            stride = (1, leading, batch_stride)
        pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=16)
        return cute.make_tensor(pointer, cute.make_layout(shape, stride=stride))

    def tiled_mma(self, a_layout, b_layout, warpgroups, columns):
        """WGMMAs of 64 rows and so many columns, one per warpgroup along m."""
        a_major, b_major = a_layout.sm90_mma_major_mode(), b_layout.sm90_mma_major_mode()
        if self.config.in_dtype == "tf32":
            op = MmaTf32(columns, a_major, b_major)
            return cute.make_tiled_mma(cute.make_mma_atom(op), (warpgroups, 1, 1))
        return sm90.make_trivial_tiled_mma(
            self.a_dtype,
            self.b_dtype,
            a_major,
            b_major,
            self.acc_dtype,
            (warpgroups, 1, 1),
            tiler_mn=(MMA_ATOM_M, columns),
        )

    def shared_storage(self, a_elements, b_elements):
        """Barriers, rings and staging buffers: what `KernelConfig.smem_bytes` counts."""
        config = self.config

        class Storage:
            full: cute.struct.MemRange[Int64, config.stages]
            empty: cute.struct.MemRange[Int64, config.stages]
            arrived: cute.struct.MemRange[Int32, 4]
            loaded: cute.struct.MemRange[Int64, max(1, config.consumers * config.epilogue_buffers)]
            a: cute.struct.Align[cute.struct.MemRange[self.a_dtype, a_elements], SMEM_ALIGNMENT]
            b: cute.struct.Align[cute.struct.MemRange[self.b_dtype, b_elements], SMEM_ALIGNMENT]

        if config.epi_n > 0:
            staged = config.epilogue_bytes * 8 // self.out_dtype.width
            Storage.__annotations__["d"] = cute.struct.Align[
                cute.struct.MemRange[self.out_dtype, staged], SMEM_ALIGNMENT
            ]
        return cute.struct(Storage)

    def ring_layout(self, layout, dtype, rows, *stages):
        """Swizzled (rows, tile_k, stages) layout of an operand's ring, or of one stage."""
        shape = (rows, self.config.tile_k, *stages)
        k_major = layout.sm90_mma_major_mode() == warpgroup.OperandMajorMode.K
        atom = warpgroup.make_smem_layout_atom(
            sm90.get_smem_layout_atom(layout, dtype, self.config.tile_k if k_major else rows),
            dtype,
        )
        order = (0, 1, 2) if k_major else (1, 0, 2)
        return cute.tile_to_shape(atom, shape, order=order[: len(shape)])

    @cute.jit
    def halves(self, layout, mB, ldb):
        """B as its even and its odd rows, so that one box of it is the even rows of a tile and then the odd
        ones; the layouts of a stage and of the ring, and the box.
        """
        config = self.config
        n, k, batch = mB.shape
        ldb = cute.assume(ldb, divby=128 // self.b_dtype.width)
        split = cute.make_layout((n // 2, k, 2, batch), stride=(2 * ldb, 1, ldb, mB.stride[2]))
        atom = warpgroup.make_smem_layout_atom(
            sm90.get_smem_layout_atom(layout, self.b_dtype, config.tile_k), self.b_dtype
        )
        box = (config.tile_n // 2, config.tile_k, 2)
        stage = cute.tile_to_shape(atom, box, order=(0, 2, 1))
        ring = cute.tile_to_shape(atom, (*box, config.stages), order=(0, 2, 1, 3))
        return cute.make_tensor(mB.iterator, split), stage, ring, box

    def staging_layout(self, layout, columns, *buffers):
        """Swizzled (64, columns, buffers) layout of the output's staging buffers, or of one."""
        n_major = self.config.out_major == "n"
        shape = (MMA_ATOM_M, columns, *buffers)
        if n_major and columns % 16:
            # Lines of an odd number of 16 bytes lie in different banks without a swizzle.
            stride = (columns, 1, MMA_ATOM_M * columns)
            plain = cute.make_layout(shape, stride=stride[: len(shape)])
            return cute.make_composed_layout(cute.make_swizzle(0, 4, 3), 0, plain)
        atom = warpgroup.make_smem_layout_atom(
            sm90.get_smem_layout_atom(layout, self.out_dtype, columns if n_major else MMA_ATOM_M),
            self.out_dtype,
        )
        order = (0, 1, 2) if n_major else (1, 0, 2)
        return cute.tile_to_shape(atom, shape, order=order[: len(shape)])

    def tma_load(self, tensor, stage_layout, box, multicast):
        """TMA load atom of one stage; with a cluster each CTA loads its share and multicasts it."""
        op = (
            cpasync.CopyBulkTensorTileG2SOp()
            if multicast == 1
            else cpasync.CopyBulkTensorTileG2SMulticastOp()
        )
        return cpasync.make_tiled_tma_atom(op, tensor, stage_layout, box, num_multicast=multicast)
