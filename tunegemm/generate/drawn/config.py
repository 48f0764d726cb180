"""The numbers of a grouped kernel that draws its tiles."""

from __future__ import annotations

from dataclasses import dataclass

from tunegemm.generate.grouped.config import GroupedConfig


@dataclass(frozen=True)
class DrawnConfig(GroupedConfig):
    """All compile-time choices: those of `GroupedConfig`, without clusters."""

    tile_scheduler: str = "dynamic"

    @property
    def slots(self) -> int:
        """Tiles that may be on their way from the warp that draws them to those that load and multiply: the
        next and the one after it. Of pingpong warpgroups two have a tile at a time.
        """
        return 3 if self.schedule == "pingpong" else 2

    @property
    def extra_bytes(self) -> int:
        """What a block has beside `GroupedConfig.smem_bytes`: the slots and their barriers."""
        return (16 + 16) * self.slots

    @property
    def label(self) -> str:
        """As that of `GroupedConfig`, and ``drawn``."""
        return f"{super().label} drawn"
