"""Tensors, WGMMAs, layouts in shared memory and TMA's boxes of the Hopper kernel, as the host makes them.

Modes are named as in CUTLASS: M, N, K, L (batch) of a product, bM, bN, bK of a tile, STAGE of the ring,
BUFFER of the staging buffers, epiM and epiN of what one of these holds.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.utils import LayoutEnum

from tunegemm.describe.epilogue import Operand, operand_dtype
from tunegemm.describe.problem import operand_dtypes
from tunegemm.generate.cute_sm90.config import MMA_ATOM_M, SMEM_ALIGNMENT, KernelConfig
from tunegemm.generate.cute_sm90.kernel.tf32 import MmaTf32

DTYPES = {
    "bf16": cutlass.BFloat16, "fp16": cutlass.Float16, "fp32": cutlass.Float32, "tf32": cutlass.TFloat32,
    "fp8_e4m3": cutlass.Float8E4M3FN, "fp8_e5m2": cutlass.Float8E5M2, "int8": cutlass.Int8,
    "int32": cutlass.Int32,
}  # fmt: skip

# Named barriers; 0 is the whole block's.
EPILOGUE_BARRIER = 1  # + consumer warpgroup
ORDER_BARRIER = 4  # + consumer warpgroup
START_BARRIER = 6  # the ring's barriers are there; without a cluster


class TmaTensor(NamedTuple):
    """How TMA copies a box of a tensor; the atom is None where nothing is copied so."""

    atom: cute.CopyAtom | None
    tensor: cute.Tensor
    """Its coordinates, as `make_tiled_tma_atom` gives them; without an atom the tensor itself."""


class Mmas(NamedTuple):
    """The WGMMAs of a tile for all its warpgroups, and of what its epilogue converts at a time."""

    tile: cute.TiledMma
    epilogue: cute.TiledMma | None
    """None where sums are stored directly from registers."""


class SmemLayouts(NamedTuple):
    """The layouts of the rings and of the staging buffers."""

    a: cute.ComposedLayout
    """(bM, bK, STAGE)"""
    b: cute.ComposedLayout
    """(bN, bK, STAGE)"""
    b_loaded: cute.ComposedLayout | None
    """(bN / 2, bK, 2, STAGE): the same ring as TMA fills it where halves gate each other; else None."""
    d: cute.ComposedLayout | None
    """(epiM, epiN, BUFFER)"""


@dataclass(frozen=True)
class Dtypes:
    """The DSL's types of a kernel's tensors."""

    a: Any
    b: Any
    out: Any
    acc: Any
    """Sums: int32 of int8, else fp32."""
    operand: Any
    """Vectors and matrices of an epilogue: the output's, but that of fp8 outputs is too coarse."""

    @classmethod
    def of(cls, config: KernelConfig):
        return cls(
            *(DTYPES[name] for name in operand_dtypes(config.in_dtype)),
            out=DTYPES[config.out_dtype],
            acc=cutlass.Int32 if config.in_dtype == "int8" else cutlass.Float32,
            operand=DTYPES[operand_dtype(Operand("", "matrix"), config.out_dtype)],
        )


@cute.jit
def matrix_at(address, dtype, shape, minor_is_second, leading, batch_stride):
    """A (rows, columns, L) tensor at a raw address, with the 16-byte strides that TMA wants."""
    divisor = 128 // dtype.width
    leading = cute.assume(leading, divby=divisor)
    batch_stride = cute.assume(batch_stride, divby=divisor)
    if const_expr(minor_is_second):
        stride = (leading, 1, batch_stride)
    else:
        stride = (1, leading, batch_stride)
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=16)
    return cute.make_tensor(pointer, cute.make_layout(shape, stride=stride))


def load_box(tensor, stage_layout, box, multicast):
    """TMA loads of one stage; with a cluster each CTA loads its share and multicasts it."""
    op = cpasync.CopyBulkTensorTileG2SOp() if multicast == 1 else cpasync.CopyBulkTensorTileG2SMulticastOp()
    return TmaTensor(*cpasync.make_tiled_tma_atom(op, tensor, stage_layout, box, num_multicast=multicast))


@dataclass(frozen=True)
class Layouts:
    """What a `KernelConfig` says about memory."""

    config: KernelConfig
    dtypes: Dtypes

    def tiled_mma(self, warpgroups, columns):
        """WGMMAs of 64 rows and so many columns, one per warpgroup along m."""
        config, dtypes = self.config, self.dtypes
        majors = [
            warpgroup.OperandMajorMode.K if major == "k" else warpgroup.OperandMajorMode.MN
            for major in (config.a_major, config.b_major)
        ]
        if config.in_dtype == "tf32":
            return cute.make_tiled_mma(cute.make_mma_atom(MmaTf32(columns, *majors)), (warpgroups, 1, 1))
        return sm90.make_trivial_tiled_mma(
            dtypes.a, dtypes.b, *majors, dtypes.acc, (warpgroups, 1, 1), tiler_mn=(MMA_ATOM_M, columns)
        )

    def ring_a(self, tensor, *stages):
        """Swizzled (bM, bK, STAGE) layout of A's ring; without a number of stages that of one."""
        return self._ring(tensor, self.dtypes.a, self.config.tile_m, *stages)

    def ring_b(self, tensor, *stages):
        """(bN, bK, STAGE)"""
        return self._ring(tensor, self.dtypes.b, self.config.tile_n, *stages)

    def _ring(self, tensor, dtype, rows, *stages):
        layout = LayoutEnum.from_tensor(tensor)
        shape = (rows, self.config.tile_k, *stages)
        k_major = layout.sm90_mma_major_mode() == warpgroup.OperandMajorMode.K
        atom = warpgroup.make_smem_layout_atom(
            sm90.get_smem_layout_atom(layout, dtype, self.config.tile_k if k_major else rows), dtype
        )
        order = (0, 1, 2) if k_major else (1, 0, 2)
        return cute.tile_to_shape(atom, shape, order=order[: len(shape)])

    @cute.jit
    def gated_halves(self, mB, ldb):
        """B as its even and its odd rows, so that one box of it is the even rows of a tile and then the odd
        ones: (N / 2, K, 2, L), the layouts (bN / 2, bK, 2) of a stage and with STAGE of the ring, the box.
        """
        config, dtype = self.config, self.dtypes.b
        n, k, batch = mB.shape
        ldb = cute.assume(ldb, divby=128 // dtype.width)
        split = cute.make_layout((n // 2, k, 2, batch), stride=(2 * ldb, 1, ldb, mB.stride[2]))
        atom = warpgroup.make_smem_layout_atom(
            sm90.get_smem_layout_atom(LayoutEnum.from_tensor(mB), dtype, config.tile_k), dtype
        )
        box = (config.tile_n // 2, config.tile_k, 2)
        stage = cute.tile_to_shape(atom, box, order=(0, 2, 1))
        ring = cute.tile_to_shape(atom, (*box, config.stages), order=(0, 2, 1, 3))
        return cute.make_tensor(mB.iterator, split), stage, ring, box

    def staging(self, tensor, columns, *buffers):
        """Swizzled (epiM, epiN, BUFFER) layout of the output's staging buffers, or of one."""
        n_major = self.config.out_major == "n"
        shape = (MMA_ATOM_M, columns, *buffers)
        if n_major and columns % 16:
            # Lines of an odd number of 16 bytes lie in different banks without a swizzle.
            stride = (columns, 1, MMA_ATOM_M * columns)
            plain = cute.make_layout(shape, stride=stride[: len(shape)])
            return cute.make_composed_layout(cute.make_swizzle(0, 4, 3), 0, plain)
        out = self.dtypes.out
        atom = warpgroup.make_smem_layout_atom(
            sm90.get_smem_layout_atom(
                LayoutEnum.from_tensor(tensor), out, columns if n_major else MMA_ATOM_M
            ),
            out,
        )
        order = (0, 1, 2) if n_major else (1, 0, 2)
        return cute.tile_to_shape(atom, shape, order=order[: len(shape)])

    def staged_box(self, op, tensor, columns):
        """TMA copies between the output, or a matrix like it, and one staging buffer."""
        return TmaTensor(
            *cpasync.make_tiled_tma_atom(op, tensor, self.staging(tensor, columns), (MMA_ATOM_M, columns))
        )

    def shared_storage(self, a_elements, b_elements):
        """Barriers, rings and staging buffers: what `KernelConfig.smem_bytes` counts."""
        config, dtypes = self.config, self.dtypes

        class Storage:
            full: cute.struct.MemRange[Int64, config.stages]
            empty: cute.struct.MemRange[Int64, config.stages]
            met: cute.struct.MemRange[Int32, 4]  # of each consumer warpgroup, see `split_k`
            loaded: cute.struct.MemRange[Int64, max(1, config.consumers * config.epilogue_buffers)]
            a: cute.struct.Align[cute.struct.MemRange[dtypes.a, a_elements], SMEM_ALIGNMENT]
            b: cute.struct.Align[cute.struct.MemRange[dtypes.b, b_elements], SMEM_ALIGNMENT]

        if config.epi_n > 0:
            staged = config.epilogue_bytes * 8 // dtypes.out.width
            Storage.__annotations__["d"] = cute.struct.Align[
                cute.struct.MemRange[dtypes.out, staged], SMEM_ALIGNMENT
            ]
        return cute.struct(Storage)
