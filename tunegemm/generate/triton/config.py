"""The numbers of one portable Triton kernel."""

from __future__ import annotations

from dataclasses import dataclass

from tunegemm.describe.problem import DTYPE_BYTES
from tunegemm.generate.mapped import Mapped

WARP_THREADS = 32
WARPGROUP_ROWS = 64
"""Least rows of wgmma and of tcgen05.mma."""
LEAST_COPY_BYTES = 4
"""The least that cp.async copies (PTX ISA)."""
EPI_COLUMNS = 32
"""Columns that the epilogue rearranges at a time: 32 of bf16 are two whole sectors of a line."""


@dataclass(frozen=True)
class KernelConfig(Mapped):
    """All compile-time choices."""

    tile_m: int
    tile_n: int
    tile_k: int
    stages: int
    """Depth of the shared-memory ring of A and B tiles."""
    warps: int
    vector_bytes: int
    """What lines, strides and addresses of A and B are multiples of: 16, or less."""
    store_bytes: int
    """What those of D are multiples of: 16, or less."""
    in_dtype: str
    out_dtype: str
    a_major: str
    b_major: str
    out_major: str

    @property
    def threads(self) -> int:
        """Threads of one block."""
        return self.warps * WARP_THREADS

    @property
    def vector(self) -> int:
        """Elements of A and B that a copy takes at once."""
        return self.vector_bytes // DTYPE_BYTES[self.in_dtype]

    @property
    def out_vector(self) -> int:
        """Elements of D that are stored at once."""
        return self.store_bytes // DTYPE_BYTES[self.out_dtype]

    @property
    def epi_n(self) -> int:
        """Columns of one subtile of the epilogue."""
        return min(self.tile_n, EPI_COLUMNS)

    @property
    def accumulator_registers(self) -> int:
        """Accumulators of one thread."""
        return self.tile_m * self.tile_n // self.threads

    @property
    def copies(self) -> bool:
        """Whether copies are asynchronous: cp.async has 4 bytes at least. Else a tile passes registers."""
        return self.vector_bytes >= LEAST_COPY_BYTES

    @property
    def loaded_elements(self) -> int:
        """Elements of A and B tiles that a thread loads."""
        return (self.tile_m + self.tile_n) * self.tile_k // self.threads

    @property
    def stage_bytes(self) -> int:
        """An A tile and a B tile."""
        return (self.tile_m + self.tile_n) * self.tile_k * DTYPE_BYTES[self.in_dtype]

    @property
    def ring_bytes(self) -> int:
        """All stages; one where nothing is copied ahead."""
        return self.stage_bytes * (self.stages if self.copies else 1)

    @property
    def subtile_bytes(self) -> int:
        """What moves through the ring once it is idle: a subtile of split-K's sums."""
        return self.tile_m * self.epi_n * 4

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a block, but for the few bytes of Blackwell's barriers."""
        return max(self.ring_bytes, self.subtile_bytes)

    @property
    def label(self) -> str:
        """``128x128x32 s3 w8 v16``: tile, stages, warps, vector, and D's vector where that is another."""
        store = "" if self.store_bytes == self.vector_bytes else f"d{self.store_bytes}"
        tile = f"{self.tile_m}x{self.tile_n}x{self.tile_k}"
        return f"{tile} s{self.stages} w{self.warps} v{self.vector_bytes}{store}"
