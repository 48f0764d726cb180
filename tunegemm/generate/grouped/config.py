"""The numbers of one grouped kernel.

The kernel's m is the weights' N, its n the rows of a group: WGMMA takes few rows as its narrow mode, so that
a group of 3 rows costs a WGMMA of 8 or 16 columns and not one of 64 rows. So D is m-major: a row of the
product is a column of the kernel's D.

With a gate, rows of gate and up lie in a tile in blocks of 8 that alternate: a thread of a WGMMA has sums of
rows 8 apart, so that it has a gate's two values, whatever the tile. TMA puts them so, from halves or from
rows that alternate, as one box of a tensor that has a mode for gate and up.
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
    def step(self) -> int:
        """The narrowest width."""
        return min(self.narrow or self.tile_n, self.tile_n)

    @property
    def widths_double(self) -> bool:
        """Whether each width is twice the one before; else they are all multiples of the first."""
        return (self.tile_n // self.step).bit_count() == 1

    @property
    def widths(self) -> tuple[int, ...]:
        """Rows that a tile may be loaded and multiplied as: from `narrow` to `tile_n`, by doubling if that
        leads there.
        """
        count = self.tile_n // self.step
        if self.widths_double:
            return tuple(self.step << each for each in range(count.bit_length()))
        return tuple(self.step * each for each in range(1, count + 1))

    @property
    def splits_evenly(self) -> bool:
        """Whether the tiles of a group have equally many rows, but for a `step`. Clusters have whole tiles,
        and the rest in the last: their kernel was measured so.
        """
        return not self.widths_double and self.cluster_m == 1

    @property
    def tile_columns(self) -> int:
        """Columns of the product that a tile gives: with a gate half as many as rows of weights."""
        return self.tile_m // 2 if self.fused.gated else self.tile_m

    @property
    def atom_columns(self) -> int:
        """Columns of the product of one WGMMA."""
        return MMA_ATOM_M // 2 if self.fused.gated else MMA_ATOM_M

    @property
    def staged_rows(self) -> int:
        """Rows that a staging buffer holds: of gated ones, which are half as wide, twice as many."""
        return self.epi_n * MMA_ATOM_M // self.atom_columns

    @property
    def subtiles(self) -> int:
        """Subtiles that one warpgroup stores of a tile."""
        return self.atoms_per_warpgroup * self.tile_n // self.staged_rows

    @property
    def stores_all(self) -> bool:
        """Whether the staging buffers cover a tile: else its last rows would not be stored."""
        return self.tile_n % self.staged_rows == 0

    @property
    def epilogue_buffers(self) -> int:
        """Staging buffers of each consumer warpgroup, which take turns."""
        return 2

    @property
    def pitch(self) -> int:
        """Elements from one row of a staging buffer to the next: 16 bytes more, so that none share banks."""
        return self.atom_columns + 16 // DTYPE_BYTES[self.out_dtype]

    @property
    def subtile_bytes(self) -> int:
        return self.pitch * self.staged_rows * DTYPE_BYTES[self.out_dtype]

    @property
    def label(self) -> str:
        """``co128x64x64 s8 e32 w16 swiglu``: schedule, tile (weights' N x rows x K), stages, epilogue,
        narrowest width, with ``+`` where the others are all its multiples; blocks of a cluster, as in ``c2``,
        where there are several; the gate, a dtype that is not bf16, and B's major where it is not k.
        """
        kind = "pp" if self.schedule == "pingpong" else "co"
        tile = f"{kind}{self.tile_m}x{self.tile_n}x{self.tile_k} s{self.stages} e{self.epi_n}"
        cluster = f"c{self.cluster_m}" if self.cluster_m > 1 else ""
        words = (cluster, self.epilogue, self.in_dtype, "" if self.a_major == "k" else "n-major")
        more = "".join(f" {word}" for word in words if word not in ("", "bf16"))
        return f"{tile} w{self.step}{'' if self.widths_double else '+'}{more}"
