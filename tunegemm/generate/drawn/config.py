"""The numbers of a grouped kernel that draws its tiles."""

from __future__ import annotations

from dataclasses import dataclass

from tunegemm.generate.grouped.config import GroupedConfig

MOST_GROUPS = 1024
"""Groups that a block's table has room for."""
SLOTS = 2
"""Tiles that may be on their way from the warp that draws them to the warps that load and multiply them."""


@dataclass(frozen=True)
class DrawnConfig(GroupedConfig):
    """All compile-time choices: those of `GroupedConfig`, without clusters."""

    tile_scheduler: str = "dynamic"

    @property
    def table_bytes(self) -> int:
        """What a block has beside `GroupedConfig.smem_bytes`: the table, slots and their barriers."""
        return 8 * MOST_GROUPS + (16 + 16) * SLOTS

    @property
    def label(self) -> str:
        """As that of `GroupedConfig`, and ``drawn``."""
        return f"{super().label} drawn"
