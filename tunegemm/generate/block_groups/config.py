"""The numbers of one kernel for groups of rows with block scales: those of `grouped` and of `blocks`."""

from __future__ import annotations

from dataclasses import dataclass

from tunegemm.generate.blocks.config import BlockConfig
from tunegemm.generate.grouped.config import GroupedConfig


@dataclass(frozen=True)
class BlockGroupConfig(GroupedConfig, BlockConfig):
    """All compile-time choices. `tile_k` is a block of scales, and a tile has one width. `tile_m` is a
    multiple of 64, at most 256, so that the rows of a WGMMA have one scale.
    """

    @property
    def label(self) -> str:
        """``128x64x128 s8 e32 p2``: the weights' N x rows x K, stages, epilogue columns, blocks at a time."""
        return f"{self.tile_m}x{self.tile_n}x{self.tile_k} s{self.stages} e{self.epi_n} p{self.parts}"
