"""The numbers of one Gluon kernel."""

from __future__ import annotations

from dataclasses import dataclass

from tunegemm.describe.problem import DTYPE_BYTES
from tunegemm.generate.mapped import Mapped

WARPGROUP_WARPS = 4
WARPGROUP_THREADS = 128
MMA_ATOM_M = 64
"""Rows of one WGMMA (PTX ISA, wgmma.mma_async: .m64nNk16), 16 for each of its four warps."""
REGISTERS = 65536
"""32-bit registers of a multiprocessor of compute capability 9.0."""
PRODUCER_REGISTERS = 24
"""The fewest that setmaxnreg takes; the producer needs 20 or so."""

_BARRIER_BYTES = 8
_PASSED_BYTES = {1: 116, 2: 152}
"""Arguments of the partitions and the state of their warps, by consumer warpgroups."""
_PASSED_BUFFER_BYTES = 16
"""One more buffer among the arguments."""

_LINE_BYTES = 128

SCHEDULES = ("blocking", "pipelined", "multistage", "cooperative", "pingpong")


@dataclass(frozen=True)
class KernelConfig(Mapped):
    """All compile-time choices."""

    schedule: str
    """``blocking``: load, wait, multiply, wait; ``pipelined``: the next load is issued while the tensor cores
    work; ``multistage``: a ring of loads runs ahead of them; ``cooperative``, ``pingpong``: the same, but
    persistent, with a warp for the loads, and the other warpgroups sharing a tile or taking turns."""
    tile_m: int
    tile_n: int
    tile_k: int
    stages: int
    """Depth of the shared-memory ring of A and B tiles."""
    warps: int
    """Warps that multiply."""
    instr_n: int
    """Columns of one WGMMA; where a warpgroup has fewer, all of them."""
    lhs_in_registers: bool
    """Whether A goes from shared memory through registers to the tensor cores, or directly."""
    occupancy: int
    """Blocks that are to fit a multiprocessor at once."""
    in_dtype: str
    out_dtype: str
    a_major: str
    b_major: str
    out_major: str

    @property
    def specialized(self) -> bool:
        """Whether a warp of its own issues the loads; such kernels are persistent, too."""
        return self.schedule in ("cooperative", "pingpong")

    @property
    def groups(self) -> int:
        """Partitions of the block that multiply: warpgroups when specialized, else all warps together."""
        return self.warps // WARPGROUP_WARPS if self.specialized else 1

    @property
    def tile_groups(self) -> int:
        """Partitions that share one tile, row by row."""
        return self.groups if self.schedule == "cooperative" else 1

    @property
    def group_rows(self) -> int:
        """Rows of the tile that one partition multiplies and stores."""
        return self.tile_m // self.tile_groups

    @property
    def warps_per_tile(self) -> tuple[int, int]:
        """How the warps of a partition tile its rows and columns.

        Warpgroups of 4 x 1 warps, doubled along the rows as long as there are 16 for each warp, then along
        the columns.
        """
        along_m, along_n = WARPGROUP_WARPS, 1
        while along_m * along_n < self.warps // self.groups:
            if self.group_rows > 16 * along_m:
                along_m *= 2
            else:
                along_n *= 2
        return along_m, along_n

    @property
    def mma_columns(self) -> int:
        """Columns of one WGMMA."""
        return min(self.instr_n, self.tile_n // self.warps_per_tile[1])

    @property
    def accumulator_registers(self) -> int:
        """fp32 accumulators of one multiplying thread."""
        along_m, along_n = self.warps_per_tile
        return -(-self.group_rows // (16 * along_m)) * 16 * (self.tile_n // along_n) // 32

    @property
    def lhs_registers(self) -> int:
        """Registers of one thread for one stage's A, two elements each; 0 when it stays in shared memory."""
        if not self.lhs_in_registers:
            return 0
        along_m, _ = self.warps_per_tile
        return -(-self.group_rows // (16 * along_m)) * 16 * self.tile_k // 32 // 2

    @property
    def groups_in_flight(self) -> int:
        """WGMMA groups under way while the next stage is awaited.

        None with A in registers: ptxas serializes WGMMAs where registers of a further one are loaded before
        the end of the last (warning C7512).
        """
        return 0 if self.lhs_in_registers else 1

    @property
    def threads(self) -> int:
        """Threads of one block. A specialized one has a further warpgroup, of which one warp loads."""
        return 32 * self.warps + (WARPGROUP_THREADS if self.specialized else 0)

    @property
    def launch_registers(self) -> int:
        """Registers per thread that a block may be launched with, for `occupancy` blocks to fit."""
        return min(256, REGISTERS // (self.occupancy * self.threads) // 8 * 8)

    @property
    def mma_registers(self) -> int:
        """Registers per multiplying thread; with setmaxnreg, which moves some of the producer's to them."""
        if not self.specialized:
            return min(255, self.launch_registers)
        left = self.launch_registers * (self.groups + 1) - PRODUCER_REGISTERS
        return min(240, left // self.groups // 8 * 8)

    @property
    def stage_bytes(self) -> int:
        """One stage of the ring: an A tile and a B tile."""
        return (self.tile_m + self.tile_n) * self.tile_k * DTYPE_BYTES[self.in_dtype]

    @property
    def full_barriers(self) -> int:
        """Barriers of arrived loads: one per stage, or one in all where each load is awaited."""
        return 1 if self.schedule in ("blocking", "pipelined") else self.stages

    @property
    def epilogue_rows(self) -> int:
        """Rows that the epilogue stages and stores at once: one WGMMA's; or all of the tile, where the
        staging buffer takes the place of the ring.
        """
        return MMA_ATOM_M if self.specialized else self.tile_m

    @property
    def epilogue_columns(self) -> int:
        """Columns that the epilogue stages and stores at once: one line of the smem swizzle, or all."""
        line = _LINE_BYTES // DTYPE_BYTES[self.out_dtype]
        return min(line, self.tile_n) if self.specialized else self.tile_n

    @property
    def epilogue_buffers(self) -> int:
        """Staging buffers of a partition: two where it stores several subtiles, so that stores overlap."""
        subtile, rows = (self.epilogue_rows, self.epilogue_columns), (self.group_rows, self.tile_n)
        return 1 if subtile == rows else 2

    @property
    def epilogue_bytes(self) -> int:
        """Staging buffers of all partitions."""
        subtile_bytes = self.epilogue_rows * self.epilogue_columns * DTYPE_BYTES[self.out_dtype]
        return self.groups * self.epilogue_buffers * subtile_bytes

    @property
    def barrier_bytes(self) -> int:
        """The ring's barriers, each kind 16-byte aligned; pingpong's turns; and what the compiler passes to
        the partitions through shared memory, the same in Triton 3.6 to 3.9 (docs/internals/kernels).
        """
        full = self.full_barriers * _BARRIER_BYTES
        if not self.specialized:
            return full
        aligned = -(-full // 16) * 16
        if self.schedule == "pingpong":
            return 2 * aligned + 2 * _BARRIER_BYTES + _PASSED_BYTES[self.groups] + _PASSED_BUFFER_BYTES
        return aligned + full + _PASSED_BYTES[self.groups]

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a block, to the byte."""
        ring = self.stages * self.stage_bytes
        if self.specialized:
            return ring + self.epilogue_bytes + self.barrier_bytes
        # The output tile takes the place of ring and barriers, which are done by then.
        return max(ring + self.barrier_bytes, self.epilogue_bytes)

    @property
    def label(self) -> str:
        """``co128x256x64 s4 w8 n256``, with ``R`` for A in registers and ``o2`` for two blocks."""
        kind = {
            "blocking": "bl",
            "pipelined": "pi",
            "multistage": "ms",
            "cooperative": "co",
            "pingpong": "pp",
        }
        return (
            f"{kind[self.schedule]}{self.tile_m}x{self.tile_n}x{self.tile_k} s{self.stages} "
            f"w{self.warps} n{self.instr_n}{'R' if self.lhs_in_registers else ''}"
            + (f" o{self.occupancy}" if self.occupancy > 1 else "")
        )
