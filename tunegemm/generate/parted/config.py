"""The numbers of a grouped kernel for few rows, whose blocks share a tile by parts of k."""

from __future__ import annotations

from dataclasses import dataclass

from tunegemm.generate.cute_sm90.config import WARPGROUP_THREADS
from tunegemm.generate.grouped.config import GroupedConfig


@dataclass(frozen=True)
class PartedConfig(GroupedConfig):
    """All compile-time choices: those of a cooperative `GroupedConfig` of 64 lines of weights."""

    parts: int = 2
    """Blocks of a cluster, each of which multiplies as much of k."""

    @property
    def extra_bytes(self) -> int:
        """What a block has beside `GroupedConfig.smem_bytes`: the other parts' sums of a tile, a barrier."""
        return 16 + (self.parts - 1) * self.accumulator_registers * WARPGROUP_THREADS * 4

    @property
    def label(self) -> str:
        """As that of `GroupedConfig`, and the number of parts, as in ``k4``."""
        return f"{super().label} k{self.parts}"
