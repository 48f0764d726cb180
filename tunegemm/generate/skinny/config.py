"""The numbers of one kernel for few rows."""

from __future__ import annotations

from dataclasses import dataclass

from tunegemm.describe.epilogue import Epilogue
from tunegemm.describe.problem import DTYPE_BYTES
from tunegemm.generate.mapped import Mapped

WARP = 32
MMA_N, MMA_M = 16, 8
"""Columns and rows of the product in one tensor-core instruction, whose own M the columns are (PTX ISA,
mma.sync.m16n8k16)."""
LANES_K = 4
"""Lanes side by side along k: each has its own vector of a row of either operand."""
_PAD = 4
"""Elements between lines of sums in shared memory: lanes of a warp then write to 32 different banks."""


@dataclass(frozen=True)
class KernelConfig(Mapped):
    """All compile-time choices."""

    tile_m: int
    """Rows of the product that a CTA has, a multiple of 8. What is beyond m is computed and not stored."""
    tile_n: int
    """Columns of the product that a CTA has: lines of B, which is k-major."""
    tile_k: int
    """k of one step of the whole CTA: of all its warps along k."""
    warps_n: int
    """Warps along n, each with lines of B of its own."""
    warps_k: int
    """Warps along k. Their sums are added in their order."""
    stages: int
    """Steps of the ring in shared memory; one is multiplied while the others are on their way."""
    vector_bytes: int
    """Width of each access to global memory: 16 or 8."""
    ctas_per_sm: int
    """CTAs that ptxas must leave room for on a multiprocessor."""
    in_dtype: str
    out_dtype: str
    out_major: str
    epilogue: str = ""
    """The problem's, as `tunegemm.describe.epilogue` writes it."""

    @property
    def fused(self) -> Epilogue:
        """The epilogue; false where the product is stored as it is."""
        return Epilogue.parse(self.epilogue)

    @property
    def warps(self) -> int:
        return self.warps_n * self.warps_k

    @property
    def threads(self) -> int:
        return self.warps * WARP

    @property
    def element_bytes(self) -> int:
        return DTYPE_BYTES[self.in_dtype]

    @property
    def vector(self) -> int:
        """Elements of one access."""
        return self.vector_bytes // self.element_bytes

    @property
    def chunk(self) -> int:
        """k that a warp reads by one access of each lane."""
        return LANES_K * self.vector

    @property
    def unroll(self) -> int:
        """Chunks of a warp in one step."""
        return self.tile_k // (self.warps_k * self.chunk)

    @property
    def objection(self) -> str | None:
        """Why the tile is not whole instructions of its warps; None where it is."""
        for name, tile, unit in (
            ("tile_m", self.tile_m, MMA_M),
            ("tile_n", self.tile_n, MMA_N * self.warps_n),
            ("tile_k", self.tile_k, self.chunk * self.warps_k),
        ):
            if tile % unit:
                return f"{name} {tile} is not a multiple of {unit}"
        return None

    @property
    def groups(self) -> int:
        """Instructions of a warp side by side along n."""
        return self.tile_n // (MMA_N * self.warps_n)

    @property
    def row_groups(self) -> int:
        """Instructions side by side along m."""
        return self.tile_m // MMA_M

    @property
    def lines(self) -> int:
        """Vectors of a lane in one chunk: two lines of B for each group, then a row of A for each."""
        return 2 * self.groups + self.row_groups

    @property
    def accumulators(self) -> int:
        """Accumulators of one thread: four of each instruction."""
        return 4 * self.groups * self.row_groups

    @property
    def stage_bytes(self) -> int:
        """One step of the ring: every thread has slots of its own, which no other reads or writes."""
        return self.unroll * self.lines * self.threads * self.vector_bytes

    @property
    def pitch(self) -> int:
        """Elements from one row of a tile of sums in shared memory to the next."""
        return self.tile_n + _PAD

    @property
    def sums_bytes(self) -> int:
        """A tile of sums of every warp along k, and one word: which k split arrived."""
        return self.warps_k * self.tile_m * self.pitch * 4 + 16

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a CTA, to the byte."""
        return self.stages * self.stage_bytes + self.sums_bytes

    @property
    def label(self) -> str:
        """``8x32x1024 s4 w1x8 v16 o2``: tile, stages, warps along n and k, vector, CTAs."""
        return (
            f"{self.tile_m}x{self.tile_n}x{self.tile_k} s{self.stages} w{self.warps_n}x{self.warps_k} "
            f"v{self.vector_bytes} o{self.ctas_per_sm}"
        )
