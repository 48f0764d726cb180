"""The numbers of one Triton kernel."""

from __future__ import annotations

from dataclasses import dataclass

from tunegemm.describe.problem import DTYPE_BYTES
from tunegemm.generate.mapped import Mapped

WARP_THREADS = 32
_BARRIER_BYTES = 8


@dataclass(frozen=True)
class KernelConfig(Mapped):
    """All compile-time choices."""

    schedule: str
    """``pipelined``: loads run ahead within a tile; ``flattened``: across tiles too, under the epilogue."""
    tile_m: int
    tile_n: int
    tile_k: int
    stages: int
    """Depth of the shared-memory ring of A and B tiles."""
    warps: int
    epi_n: int
    """Columns that the epilogue stages at a time."""
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
    def accumulator_registers(self) -> int:
        """fp32 accumulators of one thread."""
        return self.tile_m * self.tile_n // self.threads

    @property
    def ring_bytes(self) -> int:
        """All stages of A and B tiles."""
        return self.stages * (self.tile_m + self.tile_n) * self.tile_k * DTYPE_BYTES[self.in_dtype]

    @property
    def staging_bytes(self) -> int:
        """The epilogue's subtile on its way to TMA."""
        return self.tile_m * self.epi_n * DTYPE_BYTES[self.out_dtype]

    @property
    def moves_columns(self) -> bool:
        """Whether subtiles are not the warps' own columns: several warpgroups share 64 rows."""
        return self.epi_n < self.tile_n and self.warps * 16 > self.tile_m

    @property
    def subtile_bytes(self) -> int:
        """What moves through the ring while it is idle: a subtile of split-K's sums, or columns of a tile."""
        return self.tile_m * (self.tile_n if self.moves_columns else self.epi_n) * 4

    @property
    def barrier_bytes(self) -> int:
        """One barrier per stage; a transposed A is waited for on its own, its barriers 16-byte aligned."""
        own = self.stages * _BARRIER_BYTES
        return own if self.a_major == "k" else -(-own // 16) * 16 + own

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a block, to the byte."""
        return self.ring_bytes + self.staging_bytes + self.barrier_bytes

    @property
    def label(self) -> str:
        """``fl128x256x64 s3 w8 e64``: schedule, tile, stages, warps, epilogue columns."""
        kind = {"pipelined": "pl", "flattened": "fl"}[self.schedule]
        return f"{kind}{self.tile_m}x{self.tile_n}x{self.tile_k} s{self.stages} w{self.warps} e{self.epi_n}"
