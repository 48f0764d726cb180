"""The rules of Gluon kernels: one function per physical cause (see `tunegemm.generate.feasibility`).

`accumulators` and `wgmma_operands` replace the tutorial's `find_configs` checks of registers, for one thread
and for all blocks of a multiprocessor, and `shared_memory` its check of shared memory. The tutorial assumes
16 registers and 1 KiB beside the tiles; these rules are exact. `instruction_width` prefers wide
instructions, as the tutorial does.
"""

from __future__ import annotations

from tunegemm.describe.device import Device
from tunegemm.describe.problem import DTYPE_BYTES, Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate.feasibility import (
    architecture,
    exceeded_smem,
    exceeded_wgmma,
    half_operands,
    no_power_of_two,
    ring_depth,
    rule,
    tma_alignment,
)
from tunegemm.generate.generator import config_maker
from tunegemm.generate.gluon_wgmma.config import MMA_ATOM_M, SCHEDULES, WARPGROUP_WARPS, KernelConfig
from tunegemm.generate.tiles import swapped_rows

_OVERHEAD_REGISTERS = 26


config_of = config_maker(KernelConfig)


@rule("tile_m", "tile_n", "tile_k")
def tile_shape(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """Gluon's tensors are powers of two. WGMMA takes at least 64 x 8 x 16, a TMA box at most 256 per mode."""
    least = {"tile_m": MMA_ATOM_M, "tile_n": 8, "tile_k": 16}
    return next(filter(None, (no_power_of_two(candidate, *each, 256) for each in least.items())), None)


@rule("tile_n", "swap_ab", "in_dtype", "a_major", "b_major")
def narrow_lines(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """Lines of 16 bytes have no smem swizzle, and WGMMA reads outside a permuted view of such a tile.

    With tile_n 8 and a B whose n is contiguous, access was illegal (H200, Triton 3.6, 2026-11-21).
    """
    config = config_of(problem, candidate)
    line_bytes = config.tile_n * DTYPE_BYTES[config.in_dtype]
    if config.b_major == "n" and line_bytes < 32:
        return f"tile_n {config.tile_n} makes lines of {line_bytes} B < 32 B for a B whose n is contiguous"
    return None


@rule("schedule", "warps", "tile_m", "tile_n")
def warpgroups(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """Four warps issue a WGMMA together. Pingpong has two such groups, and cooperative gives each at least 64
    rows. In other schedules up to four groups share a tile: first its rows, then its columns.
    """
    schedule, warps, tile_m = candidate["schedule"], candidate["warps"], candidate["tile_m"]
    if warps not in (4, 8, 16) or (warps == 16 and schedule in ("cooperative", "pingpong")):
        return f"warps {warps} is not 4 or 8" + (", or 16 without a producer" if warps != 16 else "")
    if schedule == "pingpong" and warps != 2 * WARPGROUP_WARPS:
        return f"pingpong with {warps} warps: two warpgroups, 8 warps, take turns"
    if schedule == "cooperative" and (rows := tile_m * WARPGROUP_WARPS // warps) < MMA_ATOM_M:
        return (
            f"tile_m {tile_m} leaves each of {warps // WARPGROUP_WARPS} warpgroups {rows} rows < {MMA_ATOM_M}"
        )
    config = config_of(problem, candidate)
    if (columns := config.tile_n // config.warps_per_tile[1]) < 8:
        return f"tile_n {config.tile_n} leaves some of {warps} warps {columns} columns < 8"
    return None


@rule("instr_n")
def instruction(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """One WGMMA has up to 256 columns in steps of 8; Gluon's tiles need a power of two."""
    return no_power_of_two(candidate, "instr_n", 8, 256)


@rule("schedule", "warps", "tile_m", "tile_n", "instr_n", runs=True)
def instruction_width(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """Only the two widest instructions of a tile are useful, as in the tutorial: narrower ones reread A.

    256 stands for all columns of a narrower tile; other values of at least its columns would repeat it.
    """
    config = config_of(problem, candidate)
    columns = config.tile_n // config.warps_per_tile[1]
    if columns <= config.instr_n < 256:
        return f"instr_n {config.instr_n} >= {columns} columns repeats 256"
    if 2 * config.instr_n < columns:
        return f"instr_n {config.instr_n} < half of {columns} columns: more instructions for the same tile"
    return None


@rule("schedule", "warps", "tile_m", "tile_n", "instr_n", "occupancy")
def wgmma_operands(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """One WGMMA must fit the registers that a thread is launched with; see `exceeded_wgmma`."""
    config = config_of(problem, candidate)
    threads = f"{config.occupancy} x {config.threads}"
    return exceeded_wgmma(config.mma_columns, config.launch_registers, threads)


@rule("schedule", "stages")
def ring(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """A schedule has one buffer, which is loaded and multiplied in turn, or two, or a ring."""
    stages, schedule = candidate["stages"], candidate["schedule"]
    if schedule not in SCHEDULES:
        return f"schedule {schedule!r} is not one of {', '.join(SCHEDULES)}"
    exact = {"blocking": 1, "pipelined": 2}.get(schedule)
    if exact is not None and stages != exact:
        return f"{stages} stages: {schedule} has {exact}"
    return ring_depth(problem, candidate, device) if exact is None else None


@rule("schedule", "warps", "tile_m", "tile_n", "tile_k", "lhs_in_registers", "occupancy")
def accumulators(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """Accumulators, registers of A and bookkeeping must fit a multiplying thread, or ptxas spills."""
    config = config_of(problem, candidate)
    need = config.accumulator_registers + config.lhs_registers + _OVERHEAD_REGISTERS
    if need > config.mma_registers:
        lhs = f" + {config.lhs_registers} of A" if config.lhs_in_registers else ""
        return (
            f"{config.accumulator_registers} accumulators{lhs} + {_OVERHEAD_REGISTERS} > "
            f"{config.mma_registers} registers of a thread, {config.occupancy} blocks resident"
        )
    return None


@rule(
    "schedule", "warps", "tile_m", "tile_n", "tile_k", "stages", "occupancy", "in_dtype", "out_dtype",
    "device",
)  # fmt: skip
def shared_memory(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """Ring, staging buffers and barriers must fit one block, and all blocks one multiprocessor."""
    config = config_of(problem, candidate)
    return exceeded_smem(config.smem_bytes, device.architecture, config.occupancy)


@rule(
    "device", "in_dtype", "instr_n", "lhs_in_registers", "occupancy", "out_dtype", "schedule", "stages",
    "tile_k", "tile_m", "tile_n", "warps", runs=True,
)  # fmt: skip
def resident_blocks(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """Occupancy 1 is only for kernels of which one block fits: if two fit, nothing keeps the second away.

    A persistent kernel chooses its number of blocks, so the rule does not apply to it.
    """
    config = config_of(problem, candidate)
    if config.specialized or config.occupancy != 1:
        return None
    compile_params = dict(candidate.compile_params) | {"occupancy": 2}
    twice = Candidate.make(candidate.family, compile_params, dict(candidate.launch_params))
    if all(one(problem, twice, device) is None for one in (wgmma_operands, accumulators, shared_memory)):
        return f"occupancy 1: two blocks of {config.smem_bytes} B smem fit a multiprocessor"
    return None


@rule("schedule", "ctas", runs=True)
def grid_choice(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """Only persistent kernels choose their grid; others have one block per tile."""
    if candidate.params.get("ctas") == "balanced" and not config_of(problem, candidate).specialized:
        return f"ctas balanced: {candidate['schedule']} has one block per tile of {candidate['tile_m']} rows"
    return None


#: Cheapest first.
RULES = (
    architecture,
    half_operands,
    tma_alignment,
    narrow_lines,
    ring,
    swapped_rows,
    tile_shape,
    warpgroups,
    instruction,
    wgmma_operands,
    accumulators,
    shared_memory,
    instruction_width,
    resident_blocks,
    grid_choice,
)
