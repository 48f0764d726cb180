"""The rules of Triton kernels: one function per physical cause (see `tunegemm.generate.feasibility`)."""

from __future__ import annotations

from tunegemm.describe.device import Device, is_older, package_version
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate.feasibility import (
    exceeded_smem,
    half_operands,
    no_power_of_two,
    ring_depth,
    rule,
    tma_alignment,
)
from tunegemm.generate.generator import config_maker
from tunegemm.generate.tiles import exceeded_by_two, split_work, swapped_rows
from tunegemm.generate.triton_tma.config import KernelConfig

#: Registers that a thread needs beside its accumulators: compiled kernels have 27 to 62, including split-K's
#: reduction (Triton 3.6 and 3.7).
_OTHER_REGISTERS = 64


#: Bytes of additional barriers in Blackwell's shared memory.
_BARRIER_BYTES = 1024

config_of = config_maker(KernelConfig)


@rule("device")
def architecture(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """The Tensor Memory Accelerator exists in compute capability 9.0, and from 10.0 on (PTX ISA).

    For 12.0 and 12.1, Triton 3.6's ptxas keeps 8 bytes of stack in local memory for every tile; 3.7's keeps
    none (24 kernels each, 2026-11-28).
    """
    if not device.architecture.tma:
        return f"{device.architecture.compile_target} has no TMA; triton has kernels without it"
    if device.architecture.capability >= (12, 0) and is_older(package_version("triton"), (3, 7)):
        return f"Triton before 3.7 uses local memory on {device.architecture.compile_target}; upgrade triton"
    return None


@rule("tile_m", "tile_n", "tile_k")
def block_shape(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """Triton's blocks are powers of two. WGMMA takes at least 64 rows; Triton uses it from 16 columns on."""
    least = {"tile_m": 64, "tile_n": 16, "tile_k": 16}
    return next(filter(None, (no_power_of_two(candidate, *each) for each in least.items())), None)


@rule("warps")
def warps(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """Groups of four warps issue WGMMA, and Triton needs a power of two of warps."""
    return no_power_of_two(candidate, "warps", 4)


@rule("schedule", "tile_m", "tile_n", "warps", "epi_n")
def epilogue_tile(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """The tile is halved down to subtiles of epi_n columns; under 32 that would only double the barriers.

    If warpgroups share the same 64 rows, halving moves columns through shared memory. It uses the ring, which
    is idle then, unless the next tile's loads already run.
    """
    tile_n, epi_n = candidate["tile_n"], candidate["epi_n"]
    if epi_n & (epi_n - 1) or not min(32, tile_n) <= epi_n <= tile_n:
        return f"epi_n {epi_n} is not a power of two from {min(32, tile_n)} to tile_n {tile_n}"
    if candidate["schedule"] == "flattened" and config_of(problem, candidate).moves_columns:
        return f"epi_n {epi_n} < tile_n {tile_n}: {candidate['warps']} warps share {candidate['tile_m']} rows"
    return None


@rule("tile_m", "tile_n", "warps", "device")
def accumulators(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """Accumulators and bookkeeping must fit a thread's registers, or ptxas spills and serializes WGMMA."""
    config, limits = config_of(problem, candidate), device.architecture
    need = config.accumulator_registers + _OTHER_REGISTERS
    budget = min(limits.registers_per_sm // config.threads, limits.registers_per_thread)
    if need > budget:
        return f"{config.accumulator_registers} accumulators + {_OTHER_REGISTERS} > {budget} registers"
    return None


@rule("schedule", "split_k", "tile_m", "tile_n", "tile_k", "stages", "warps", "epi_n", "in_dtype")
def reduction(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """Only the `pipelined` kernel has a reduction for split-K; a subtile of its sums must fit the ring.

    Triton does not flatten a loop over tiles that contains a branch (Triton 3.6, 3.7).
    """
    config = config_of(problem, candidate)
    if config.schedule == "pipelined":
        if config.subtile_bytes > config.ring_bytes:
            return f"a subtile of sums of {config.subtile_bytes} B > {config.ring_bytes} B of the ring"
    elif int(candidate.params.get("split_k", 1)) > 1:
        return f"split_k {candidate['split_k']} needs schedule pipelined, not {config.schedule}"
    return None


@rule(
    "tile_m", "tile_n", "tile_k", "stages", "epi_n", "swap_ab", "in_dtype", "out_dtype", "a_major",
    "b_major", "device",
)  # fmt: skip
def shared_memory(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """Ring, staging buffer and barriers must fit one block's shared memory."""
    more = _BARRIER_BYTES if device.architecture.tcgen05 else 0
    return exceeded_smem(config_of(problem, candidate).smem_bytes + more, device.architecture)


@rule(
    "ctas", "split_k", "warps", "tile_m", "tile_n", "tile_k", "stages", "epi_n", "swap_ab", "in_dtype",
    "out_dtype", "a_major", "b_major", "device", "m", "n", "batch", runs=True,
)  # fmt: skip
def two_blocks(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """Two blocks share a multiprocessor only when its registers and shared memory hold both."""
    return exceeded_by_two(problem, candidate, device, config_of(problem, candidate), _OTHER_REGISTERS)


#: Cheapest first.
RULES = (
    architecture,
    half_operands,
    tma_alignment,
    block_shape,
    warps,
    epilogue_tile,
    accumulators,
    ring_depth,
    reduction,
    shared_memory,
    two_blocks,
    swapped_rows,
    split_work,
)
