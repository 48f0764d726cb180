"""WGMMA with tf32 operands, which nvidia-cutlass-dsl 4.8 has no operation for: m64 nN k8, fp32 sums.

PTX ISA, wgmma.mma_async, kind `.tf32`: both operands k-major. The compiler knows the instruction; only the
Python class that names it is missing.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean
from cutlass._mlir.dialects import cute_nvgpu
from cutlass.cute.core import _pack_shape
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.nvgpu.warpgroup.mma import MmaOp, MmaTraits


class _Traits(MmaTraits):
    pass


@dataclass(frozen=True)
class _Tf32(MmaOp):
    descriptive_name = "warpgroup TF32 MMA Operation"

    def _make_trait(self, *, loc=None, ip=None, **_):
        shape = _pack_shape(self.shape_mnk, loc=loc, ip=ip)
        atom = cute_nvgpu.MmaAtomSM90Type.get(
            shape.type.attribute,
            self.a_major_mode._to_ir(),
            self.b_major_mode._to_ir(),
            self.a_dtype.mlir_type,
            self.b_dtype.mlir_type,
            self.acc_dtype.mlir_type,
            self.a_src._to_ir(),
        )
        return _Traits(cute.make_atom(atom, [Boolean(False).ir_value(loc=loc, ip=ip)], loc=loc, ip=ip))


def MmaTf32(columns, a_major, b_major):
    """The operation, its operands in shared memory."""
    return _Tf32(
        cutlass.TFloat32, cutlass.TFloat32, cutlass.Float32, (64, columns, 8),
        warpgroup.OperandSource.SMEM, a_major, b_major,
    )  # fmt: skip
