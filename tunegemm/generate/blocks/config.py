"""The numbers of one kernel of block-scaled products.

A block is 128 of k. A's scales are of 1 x 128, the weights' of 128 x 128, all fp32; or of 32 of k
(`kernel_narrow`). Many rows are the kernel's m. Few rows are its n, WGMMA's narrow mode: then D is m-major,
and the weights are the kernel's A.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tunegemm.generate.cute_sm90.config import SMEM_ALIGNMENT, SMEM_LIMIT, KernelConfig

BLOCK = 128
"""Values of k that share a scale, and rows of the weights."""
NARROW = 32
"""Values of k that share a scale in other kernels: those of one WGMMA."""
GROUPS = BLOCK // NARROW
"""Scales of 32 of k in one block of k."""


@dataclass(frozen=True)
class BlockConfig(KernelConfig):
    """All compile-time choices. `tile_k` is a block, and `schedule` is cooperative: the warpgroups of a tile
    hide each other's additions.
    """

    parts: int = 2
    """Blocks whose sums a warpgroup has at a time: of two it adds one up while it multiplies the other."""
    turns: int = 1
    """1, or 2: two warpgroups take the blocks of k of the same rows in turn, as a warpgroup waits for most
    of the time that a block takes it. The number of stages is even then.
    """
    scale_k: int = BLOCK
    """Values of k that share a scale: 128, or 32. With 32 `parts` counts WGMMAs whose sums a warpgroup has at
    a time.
    """

    @property
    def narrow(self) -> bool:
        """Whether scales are of 32 of k."""
        return self.scale_k == NARROW

    @property
    def lines(self) -> int:
        """Of scales of 32 of k: the tile's rows and those of its weights, each with scales of its own."""
        return self.rows + self.columns

    @property
    def lag(self) -> int:
        """Of scales of 32 of k: stages that a warp copies further scales for before it looks at those of one.
        Half a turn's, so that consumers have the other half.
        """
        return self.stages // self.turns // 2

    @property
    def tile_warpgroups(self) -> int:
        """Warpgroups that share a tile's rows."""
        return super().consumers

    @property
    def consumers(self) -> int:
        """All consumer warpgroups."""
        return self.tile_warpgroups * self.turns

    @property
    def few(self) -> bool:
        """Whether the rows of the product are the kernel's n."""
        return self.out_major == "m"

    @property
    def rows(self) -> int:
        """Rows of the product in one tile."""
        return self.tile_n if self.few else self.tile_m

    @property
    def columns(self) -> int:
        """Columns of the product in one tile."""
        return self.tile_m if self.few else self.tile_n

    @property
    def loads_short(self) -> bool:
        """Whether fewer rows than a tile's are loaded alone. Of tiles of 32 rows it gains nothing."""
        return self.rows > 32 and self.cluster_size == 1

    def lines_loaded(self, rows: int) -> float:
        """Lines that a CTA itself loads for a stage of a product of so many rows."""
        lines = min(rows, self.rows) if self.loads_short else self.rows
        of_rows, of_columns = self.cluster_n, self.cluster_m
        if self.few:
            of_rows, of_columns = of_columns, of_rows
        return lines / of_rows + self.columns / of_columns

    @property
    def spans(self) -> int:
        """Blocks of the weights' rows that a tile's columns may reach into."""
        return 1 + -(-(self.columns - math.gcd(self.columns, BLOCK)) // BLOCK)

    @property
    def atom_registers(self) -> int:
        """Accumulators of one consumer thread in one WGMMA."""
        return self.accumulator_registers // self.atoms_per_warpgroup

    @property
    def sum_registers(self) -> int:
        """Registers of one consumer thread for sums: of the tile, and of one WGMMA in each of the blocks."""
        return self.accumulator_registers + self.parts * self.atom_registers

    @property
    def reads_early(self) -> bool:
        """Of few rows, and of scales of 32 of k: whether registers hold the scales of WGMMA's n beside the
        sums. They are then read before a block's sums are awaited, and its stage is given back before these
        are scaled.
        """
        return self.sum_registers + self.tile_n // 4 < (200 if self.narrow else 160)

    @property
    def multiplies_early(self) -> bool:
        """Of many rows: whether registers hold the products of scales before the sums are there. It costs 2 %
        with two WGMMAs' rows, and registers run out where columns of many blocks of scales meet.
        """
        columns = 1 if self.spans == 1 else self.columns // math.gcd(self.columns, BLOCK)
        return self.atoms_per_warpgroup == 1 and columns <= 5

    @property
    def registers(self) -> tuple[int, int]:
        """As there, but that 192 sums need the larger budget, and copies of scales of 32 of k theirs."""
        if self.narrow and self.consumers < 3:
            return 40, 232
        if self.consumers == 4:  # 24 + 4 x 112 <= 5 x 96, the allocation of 640 threads
            return 24, 112
        return (24, 240) if self.consumers < 3 and self.sum_registers >= 192 else super().registers

    @property
    def stage_scales(self) -> int:
        """Scales of one stage, a multiple of 4: of each row, then of the weights. With scales of 32 of k: of
        all lines for each group, then what each copying warp says of them.
        """
        return (GROUPS * self.lines if self.narrow else self.rows) + 4

    @property
    def scale_warps(self) -> int:
        """Warps that copy the scales of one stage, up to 64 rows each; with turns each stage has one warp."""
        return 1 if self.turns > 1 else min(3, -(-(self.lines if self.narrow else self.rows) // 64))

    @property
    def scale_bytes(self) -> int:
        """Scales of all stages, behind the staging buffers."""
        return self.stages * self.stage_scales * 4

    @property
    def turn_elements(self) -> int:
        """Sums that the second turn leaves to the first, behind the scales."""
        return (self.turns - 1) * self.tile_m * self.tile_n

    @property
    def epilogue_buffers(self) -> int:
        """As there, beside the scales and sums."""
        left = SMEM_LIMIT - SMEM_ALIGNMENT - self.stages * self.stage_bytes - self.scale_bytes
        left -= 4 * self.turn_elements
        return min(4, max(1, left // (self.tile_warpgroups * self.subtile_bytes)))

    @property
    def epilogue_bytes(self) -> int:
        """Staging buffers of the first turn's warpgroups."""
        return self.tile_warpgroups * self.epilogue_buffers * self.subtile_bytes

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a block, in the order of what it counts."""
        ring = SMEM_ALIGNMENT + self.stages * self.stage_bytes
        return ring + self.epilogue_bytes + self.scale_bytes + 4 * self.turn_elements

    @property
    def label(self) -> str:
        """``many128x160x128 s5 c2x1 e32 p2``: for how many rows, tile, stages, cluster, epilogue columns,
        blocks at a time, ``t2`` of two turns, ``n`` of scales of 32 of k.
        """
        kind = "few" if self.few else "many"
        words = f"{f' t{self.turns}' if self.turns > 1 else ''}{' n' if self.narrow else ''}"
        return (
            f"{kind}{self.tile_m}x{self.tile_n}x{self.tile_k} s{self.stages} "
            f"c{self.cluster_m}x{self.cluster_n} e{self.epi_n} p{self.parts}{words}"
        )
