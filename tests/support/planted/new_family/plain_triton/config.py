"""The numbers of one kernel."""

from __future__ import annotations

from dataclasses import dataclass

from tunegemm.generate.mapped import Mapped


@dataclass(frozen=True)
class KernelConfig(Mapped):
    """All compile-time choices."""

    tile_m: int
    tile_n: int
    tile_k: int
    stages: int
    warps: int
    in_dtype: str
    out_dtype: str

    @property
    def smem_bytes(self) -> int:
        """The ring of 16-bit tiles of A and B."""
        return self.stages * (self.tile_m + self.tile_n) * self.tile_k * 2

    @property
    def accumulators(self) -> int:
        """fp32 registers of one thread for its share of the tile."""
        return self.tile_m * self.tile_n // (self.warps * 32)

    @property
    def label(self) -> str:
        return f"plain{self.tile_m}x{self.tile_n}x{self.tile_k} s{self.stages} w{self.warps}"
