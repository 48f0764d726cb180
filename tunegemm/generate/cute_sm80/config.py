"""The numbers of one Ampere kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tunegemm.describe.problem import DTYPE_BYTES
from tunegemm.generate.mapped import Mapped

WARP = 32
MMA_M, MMA_N, MMA_K = 16, 8, 16
"""One tensor-core instruction (PTX ISA, mma.sync.m16n8k16)."""
WORD_BYTES = 4
"""The least that cp.async copies (PTX ISA, cp.async: 4, 8 or 16 bytes)."""
_GROUP = 4


@dataclass(frozen=True)
class Copy:
    """How the warps of a block bring one operand's tile into shared memory.

    A tile is *lines* of contiguous elements: its rows where k is contiguous, else its k. Each warp copies
    lines of its own, a *pass* of `lines_per_pass` at a time, each line in `pieces` of `lanes` vectors.
    """

    lines: int
    """Lines of the tile."""
    extent: int
    """Elements of a line."""
    vector: int
    """Elements of one cp.async."""
    warps: int

    @property
    def lanes(self) -> int:
        """Neighbouring lanes that copy neighbouring vectors of one line."""
        return math.gcd(self.extent // self.vector, WARP)

    @property
    def pieces(self) -> int:
        return self.extent // (self.vector * self.lanes)

    @property
    def lines_per_pass(self) -> int:
        return WARP // self.lanes

    @property
    def lines_per_warp(self) -> int:
        return self.lines // self.warps

    @property
    def passes(self) -> int:
        return self.lines_per_warp // self.lines_per_pass

    @property
    def group(self) -> int:
        """Passes written out; more of them are a loop, since each keeps addresses and sizes in registers.

        There are two turns at least: a single one the compiler mixes with the products, under predicates.
        """
        group = math.gcd(self.passes, _GROUP)
        return group // 2 if group == self.passes and group > 1 else group

    @property
    def block(self) -> int:
        """Elements of a line that lie together in shared memory: 128 or 64 bytes."""
        return 64 if self.extent % 64 == 0 else 32

    @property
    def swizzle_bits(self) -> int:
        """Bits of the index of a 16-byte chunk in a block: more of them have no effect there."""
        return (self.block // 8).bit_length() - 1

    def objection(self, smem_swizzle: int) -> str | None:
        """Why the warps cannot copy such a tile; None when they can."""
        if self.extent % 32:
            return f"lines of {self.extent} elements are not blocks of 32 or 64"
        if self.lines % (self.warps * self.lines_per_pass):
            return (
                f"{self.lines} lines over {self.warps} warps: no whole passes of {self.lines_per_pass} lines"
            )
        # The swizzle's period is 8 lines; a warp's share that is neither would mix their bits.
        share = self.lines_per_warp
        if share % 8 and share & (share - 1):
            return f"{share} lines of a warp are neither a multiple of 8 nor a power of 2"
        if smem_swizzle > self.swizzle_bits:
            return f"swizzle of {smem_swizzle} bits over the {self.block // 8} chunks of a block"
        return None


@dataclass(frozen=True)
class KernelConfig(Mapped):
    """All compile-time choices."""

    tile_m: int
    tile_n: int
    tile_k: int
    stages: int
    """Depth of the shared-memory ring of A and B tiles."""
    warps_m: int
    """Warps along m. Together with `warps_n` the seed's `mma_layout`."""
    warps_n: int
    atoms_n: int
    """8-column atoms of one warp in the permuted MMA tile: 2 fill an ldmatrix.x4 of B, 1 half of it."""
    smem_swizzle: int
    """Bits of the 16-byte chunk's index that are XORed with those of the line's: 0 (none) to 3."""
    vector_bytes: int
    """Widest access to global memory: 16, 8 or 4; 2 for operands whose lines start at odd elements."""
    ctas_per_sm: int
    """Blocks that ptxas must leave room for on a multiprocessor."""
    acc_dtype: str
    """Accumulators: fp32, or fp16 for fp16 operands."""
    in_dtype: str
    out_dtype: str
    a_major: str
    b_major: str
    out_major: str

    @property
    def warps(self) -> int:
        return self.warps_m * self.warps_n

    @property
    def threads(self) -> int:
        return self.warps * WARP

    @property
    def shifts(self) -> bool:
        """Whether lines may start between two words, so that they are shifted after the copy."""
        return self.vector_bytes < WORD_BYTES

    def copy(self, operand: str) -> Copy:
        """How operand ``a`` or ``b`` is copied."""
        tile, major = (self.tile_m, self.a_major) if operand == "a" else (self.tile_n, self.b_major)
        lines, extent = (tile, self.tile_k) if major == "k" else (self.tile_k, tile)
        vector_bytes = max(self.vector_bytes, WORD_BYTES)
        return Copy(lines, extent, vector_bytes // DTYPE_BYTES[self.in_dtype], self.warps)

    @property
    def accumulators(self) -> int:
        """Accumulators of one thread."""
        return self.tile_m * self.tile_n // self.threads

    @property
    def accumulator_registers(self) -> int:
        return self.accumulators * DTYPE_BYTES[self.acc_dtype] // 4

    @property
    def fragment_registers(self) -> int:
        """Registers of one 16-wide step of k: the warp's rows of A and columns of B, two elements each."""
        return (self.tile_m // self.warps_m + self.tile_n // self.warps_n) * MMA_K // (2 * WARP)

    @property
    def stage_bytes(self) -> int:
        """One stage of the ring: an A tile and a B tile."""
        return (self.tile_m + self.tile_n) * self.tile_k * DTYPE_BYTES[self.in_dtype]

    @property
    def spare_bytes(self) -> int:
        """Per stage one word for each line: what a shifted line has beyond its tile."""
        return WORD_BYTES * (self.copy("a").lines + self.copy("b").lines) if self.shifts else 0

    @property
    def staging_pitch(self) -> int:
        """Elements from one line of the staged output to the next: 16 bytes more than a line has."""
        return (self.tile_n if self.out_major == "n" else self.tile_m) + 16 // DTYPE_BYTES[self.out_dtype]

    @property
    def staging_bytes(self) -> int:
        """The output tile, staged for stores along its lines; it takes the ring's place."""
        lines = self.tile_m if self.out_major == "n" else self.tile_n
        return lines * self.staging_pitch * DTYPE_BYTES[self.out_dtype]

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a block, to the byte."""
        return max(self.stages * (self.stage_bytes + self.spare_bytes), self.staging_bytes)

    @property
    def label(self) -> str:
        """``128x128x32 s3 w2x2p2 z2 v16 o2``: tile, stages, warps and permutation, swizzle, vector, CTAs."""
        accumulation = "h" if self.acc_dtype == "fp16" else ""
        return (
            f"{self.tile_m}x{self.tile_n}x{self.tile_k}{accumulation} s{self.stages} "
            f"w{self.warps_m}x{self.warps_n}p{self.atoms_n} z{self.smem_swizzle} "
            f"v{self.vector_bytes} o{self.ctas_per_sm}"
        )
