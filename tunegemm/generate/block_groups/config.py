"""The numbers of one kernel for groups of rows with block scales: those of `grouped` and of `blocks`."""

from __future__ import annotations

from dataclasses import dataclass

from tunegemm.describe.problem import DTYPE_BYTES
from tunegemm.generate.blocks.config import BlockConfig
from tunegemm.generate.cute_sm90.config import MMA_ATOM_M
from tunegemm.generate.grouped.config import GroupedConfig


@dataclass(frozen=True)
class BlockGroupConfig(GroupedConfig, BlockConfig):
    """All compile-time choices. `tile_k` is a block of scales, and a tile has one width. `tile_m` is a
    multiple of 64, at most 256, so that the rows of a WGMMA have one scale.
    """

    many: bool = False
    """Whether the rows are WGMMA's m. Then a thread needs the scales of two rows for a WGMMA, not of all, and
    promotes a sum by one operation. `tile_m` is a multiple of 16, at most 192, then, and `tile_n` one of 64.
    """

    @property
    def few(self) -> bool:
        return not self.many

    @property
    def rows(self) -> int:
        return self.tile_n

    @property
    def columns(self) -> int:
        return self.tile_m

    @property
    def wgmma_rows(self) -> int:
        """What the warpgroups of a tile divide among them."""
        return self.tile_n if self.many else self.tile_m

    @property
    def wgmma_columns(self) -> int:
        """WGMMA's n."""
        return self.tile_m if self.many else self.tile_n

    @property
    def tile_warpgroups(self) -> int:
        return 2 if self.wgmma_rows == 256 else self.wgmma_rows // MMA_ATOM_M

    @property
    def atoms_per_warpgroup(self) -> int:
        return self.wgmma_rows // (MMA_ATOM_M * self.tile_warpgroups)

    @property
    def registers(self) -> tuple[int, int]:
        """As there, but that warps which copy scales into two blocks of columns need more than 24."""
        wide = self.many and self.parts == 1 and self.consumers == 2
        return (40, 232) if wide else super().registers

    @property
    def subtiles(self) -> int:
        """Of many rows 64 rows and `epi_n` columns each."""
        return self.atoms_per_warpgroup * self.tile_m // self.epi_n if self.many else super().subtiles

    @property
    def staged_rows(self) -> int:
        return MMA_ATOM_M if self.many else super().staged_rows

    @property
    def pitch(self) -> int:
        return self.epi_n + 16 // DTYPE_BYTES[self.out_dtype] if self.many else super().pitch

    @property
    def label(self) -> str:
        """``128x64x128 s8 e32 p2``: the weights' N x rows x K, stages, epilogue columns, blocks at a time;
        ``c2`` of clusters, ``many`` where the rows are WGMMA's m.
        """
        words = f"{f' c{self.cluster_m}' if self.cluster_m > 1 else ''}{' many' if self.many else ''}"
        return f"{self.tile_m}x{self.tile_n}x{self.tile_k} s{self.stages} e{self.epi_n} p{self.parts}{words}"
