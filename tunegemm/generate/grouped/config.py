"""The numbers of one grouped kernel, derived once for feasibility, compilation and launch alike.

The kernel's m is the weights' N, its n the rows of a group: WGMMA takes few rows as its narrow mode, so that
a group of 3 rows costs a WGMMA of 8 or 16 columns and not one of 64 rows. So D is m-major: a row of the
product is a column of the kernel's D.
"""

from __future__ import annotations

from dataclasses import dataclass

from tunegemm.describe.problem import DTYPE_BYTES
from tunegemm.generate.cute_sm90.config import MMA_ATOM_M, KernelConfig


@dataclass(frozen=True)
class GroupedConfig(KernelConfig):
    """All compile-time choices of a grouped kernel."""

    narrow: int = 0
    """Rows of the narrowest WGMMA that a tile of few rows is multiplied by; 0: as wide as the tile."""

    @property
    def widths(self) -> tuple[int, ...]:
        """Rows that a tile may be loaded and multiplied as: `narrow`, twice that, ..., `tile_n`."""
        widths = [self.tile_n]
        while self.narrow and widths[0] > self.narrow:
            widths.insert(0, max(self.narrow, widths[0] // 2 // 8 * 8))
        return tuple(widths)

    @property
    def epilogue_buffers(self) -> int:
        """Staging buffers of each consumer warpgroup, which take turns."""
        return 2

    @property
    def pitch(self) -> int:
        """Elements from one row of a staging buffer to the next: 64 and 16 bytes, that none share banks."""
        return MMA_ATOM_M + 16 // DTYPE_BYTES[self.out_dtype]

    @property
    def subtile_bytes(self) -> int:
        return self.pitch * self.epi_n * DTYPE_BYTES[self.out_dtype]

    @property
    def label(self) -> str:
        """``co128x64x64 s8 e32 w16``: schedule, tile (weights' N x rows x K), stages, epilogue, narrowest."""
        kind = "pp" if self.schedule == "pingpong" else "co"
        tile = f"{kind}{self.tile_m}x{self.tile_n}x{self.tile_k} s{self.stages} e{self.epi_n}"
        return f"{tile} w{self.widths[0]}"
