"""The numbers of one Hopper kernel."""

from __future__ import annotations

from dataclasses import dataclass

from tunegemm.describe.epilogue import Epilogue, Operand, operand_dtype
from tunegemm.describe.problem import DTYPE_BYTES
from tunegemm.generate.mapped import Mapped

WARPGROUP_THREADS = 128
MMA_ATOM_M = 64
"""Rows of one WGMMA (PTX ISA, wgmma.mma_async: .m64nNk16)."""
SMEM_LIMIT = 232448
"""Shared memory of one block on compute capability 9.0 (227 KiB)."""
REGISTERS = 65536
"""32-bit registers of a multiprocessor."""
SMEM_ALIGNMENT = 1024
"""A 128-byte-swizzled operand tile starts at a multiple of 8 rows x 128 B."""


@dataclass(frozen=True)
class KernelConfig(Mapped):
    """All compile-time choices."""

    schedule: str
    """``cooperative``: all consumer warpgroups share a tile; ``pingpong``: two take turns, a tile each."""
    tile_m: int
    tile_n: int
    tile_k: int
    stages: int
    """Depth of the shared-memory ring of A and B tiles."""
    cluster_m: int
    cluster_n: int
    epi_n: int
    """Columns of one epilogue subtile, whose rows are one WGMMA's 64; 0 stores straight from registers."""
    in_dtype: str
    out_dtype: str
    a_major: str
    b_major: str
    out_major: str
    epilogue: str = ""
    """The problem's, as `tunegemm.describe.epilogue` writes it."""
    transposed: bool = False
    """Whether that epilogue's rows are the kernel's columns: with swap_ab. False without an epilogue."""
    tile_scheduler: str = "static"
    """``static``: whole tiles, or equal k splits of all; ``stream_k``: as many k tiles for every cluster."""
    accumulation: str = "fast"
    """``fast``, or ``two_level``: see `tunegemm.describe.problem.ACCUMULATIONS`."""
    gpc_aware: bool = False
    """Whether clusters that share a GPC take neighbouring tiles: `cluster_order` gpc. An argument of the
    launch that is compiled in: kernels that decide when they run are 19 % larger, and 2 % slower below 20 us.
    """

    @property
    def fused(self) -> Epilogue:
        """The epilogue; false where the product is stored as it is."""
        return Epilogue.parse(self.epilogue)

    @property
    def subtile_n(self) -> int:
        """Columns of the product in one subtile: `epi_n`, but all of a gated tile that 32 does not divide, as
        half of 16 would be stored in lines of 16 bytes.
        """
        return self.tile_n if self.fused.gated and self.epi_n == 16 else self.epi_n

    @property
    def out_epi_n(self) -> int:
        """Columns that one subtile stores: half of `subtile_n` where pairs of columns gate each other."""
        return self.subtile_n // 2 if self.fused.gated else self.subtile_n

    @property
    def converted_columns(self) -> int:
        """Columns of a subtile that are converted at a time: with an epilogue few, as it needs registers."""
        return (8 if self.out_epi_n % 16 else 16) if self.epilogue else self.out_epi_n

    @property
    def gates_halves(self) -> bool:
        """Whether TMA puts the even rows of a B tile before the odd ones: one thread then has both columns
        of neighbouring gates, and stores pairs. Columns that lie side by side TMA cannot tell apart.
        """
        return self.fused.gated and self.b_major == "k"

    @property
    def stages_pairs(self) -> bool:
        """Whether stmatrix puts pairs of 16-bit values into the staging buffers; else each goes by itself."""
        return DTYPE_BYTES[self.out_dtype] == 2 and not (self.fused.gated and not self.gates_halves)

    @property
    def staged_matrix(self) -> Operand | None:
        """The matrix that TMA brings to where its sum will leave from: the epilogue's first one that is as D.

        Others are read from global memory where they are used, as C is that is added before columns gate.
        """
        if self.fused.gated and not self.gates_halves:
            return None
        for operand in self.fused.operands:
            if operand.kind == "matrix" and not (self.fused.gated and operand.name == "c"):
                return operand if operand_dtype(operand, self.out_dtype) == self.out_dtype else None
        return None

    @property
    def subtiles(self) -> int:
        """Subtiles that one warpgroup stores of a tile."""
        return self.atoms_per_warpgroup * self.tile_n // self.subtile_n

    @property
    def edge_units(self) -> tuple[int, int]:
        """What rows and columns at which the last tiles begin are multiples of.

        TMA wants innermost coordinates at multiples of 16 bytes (else: illegal instruction); those of D are
        half the product's columns where pairs gate each other.
        """
        unit = 16 // DTYPE_BYTES[self.out_dtype] * (2 if self.fused.gated else 1)
        innermost, other = max(8, unit), 8  # 8: A and B whose innermost mode it is have 16-bit elements
        return (other, innermost) if self.out_major == "n" else (innermost, other)

    @property
    def cluster_size(self) -> int:
        """CTAs of a cluster."""
        return self.cluster_m * self.cluster_n

    @property
    def consumers(self) -> int:
        """Consumer warpgroups: pingpong 2; cooperative one per 64 rows, but 2 for 256 rows."""
        if self.schedule == "pingpong":
            return 2
        return 2 if self.tile_m == 256 else self.tile_m // MMA_ATOM_M

    @property
    def tile_warpgroups(self) -> int:
        """Warpgroups that share one tile."""
        return 1 if self.schedule == "pingpong" else self.consumers

    @property
    def atoms_per_warpgroup(self) -> int:
        """64-row WGMMA atoms that one warpgroup accumulates."""
        return self.tile_m // (MMA_ATOM_M * self.tile_warpgroups)

    @property
    def accumulator_registers(self) -> int:
        """32-bit accumulators of one consumer thread that hold one tile."""
        return self.tile_m * self.tile_n // (WARPGROUP_THREADS * self.tile_warpgroups)

    @property
    def sum_registers(self) -> int:
        """Registers of one consumer thread for sums: two-level accumulation holds the tile twice."""
        return self.accumulator_registers * (2 if self.accumulation == "two_level" else 1)

    @property
    def held_registers(self) -> int:
        """Registers of one consumer thread for the epilogue's vectors (`kernel.fusion`)."""
        fused = self.fused
        if not fused.is_defined:
            return 0
        kinds = [operand.kind for operand in fused.operands]
        rows, columns = ("n", "m") if self.transposed else ("m", "n")
        atoms, columns32 = self.atoms_per_warpgroup, -(-self.tile_n // 32)
        return -(-atoms // 2) * kinds.count(rows) + columns32 * kinds.count(columns)

    @property
    def threads(self) -> int:
        """Threads of one block: the consumers and one producer warpgroup."""
        return (self.consumers + 1) * WARPGROUP_THREADS

    @property
    def registers(self) -> tuple[int, int]:
        """setmaxnreg budgets (producer, consumer): multiples of 8 whose sum fits the launch allocation."""
        if self.consumers == 3:  # 32 + 3 x 160 = 4 x 128, the allocation of 512 threads
            return 32, 160
        # 2 consumers: 24 + 2 x 240 = 40 + 2 x 232 = 3 x 168, the allocation of 384 threads
        return (24, 240) if self.sum_registers + self.held_registers > 192 else (40, 232)

    @property
    def launch_registers(self) -> int:
        """Registers that a thread is launched with; setmaxnreg shifts them."""
        return REGISTERS // self.threads // 8 * 8

    @property
    def stage_bytes(self) -> int:
        """One stage of the ring: an A tile and a B tile."""
        return (self.tile_m + self.tile_n) * self.tile_k * DTYPE_BYTES[self.in_dtype]

    @property
    def epilogue_buffers(self) -> int:
        """Staging buffers of each consumer warpgroup: 1 to 4, as many as the ring leaves room for; 0 without.

        With one or two, a subtile takes two barriers; with three or more one (see `kernel.epilogue`).
        """
        if self.epi_n == 0:
            return 0
        left = SMEM_LIMIT - SMEM_ALIGNMENT - self.stages * self.stage_bytes
        return min(4, max(1, left // (self.consumers * self.subtile_bytes)))

    @property
    def subtile_bytes(self) -> int:
        return MMA_ATOM_M * self.out_epi_n * DTYPE_BYTES[self.out_dtype]

    @property
    def epilogue_bytes(self) -> int:
        """Staging buffers of all consumer warpgroups."""
        return self.consumers * self.epilogue_buffers * self.subtile_bytes

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a block: barriers in the first KiB, then ring and staging, to the byte."""
        return SMEM_ALIGNMENT + self.stages * self.stage_bytes + self.epilogue_bytes

    @property
    def label(self) -> str:
        """``pp128x192x64 s4 c2x1 e32``: schedule, tile, stages, cluster, epilogue columns; stream-K."""
        kind = "pp" if self.schedule == "pingpong" else "co"
        return (
            f"{kind}{self.tile_m}x{self.tile_n}x{self.tile_k} s{self.stages} "
            f"c{self.cluster_m}x{self.cluster_n} e{self.epi_n}"
            f"{' sk' if self.tile_scheduler == 'stream_k' else ''}"
        )
