"""The rules of Ampere kernels: one function per physical cause (see `tunegemm.generate.feasibility`)."""

from __future__ import annotations

from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate.cute_sm80.config import MMA_K, MMA_M, MMA_N, KernelConfig
from tunegemm.generate.feasibility import (
    alignment,
    exceeded_smem,
    exceeded_threads,
    half_operands,
    register_budget,
    ring_depth,
    rule,
    vector_width,
)
from tunegemm.generate.generator import config_maker
from tunegemm.generate.tiles import split_work

#: Registers that a thread needs beside accumulators and two steps of fragments: addresses of copies and of
#: ldmatrix, extents, the ring's state. With 47 left nothing spilled, with 16 left most kernels did (ptxas for
#: sm_90a, nvidia-cutlass-dsl 4.8.1; tests/generate/test_cute_sm80.py). Shifted lines also need registers for
#: words in flight: 56 in all were enough, except for warps whose share of a tile is not a power of 2, which
#: spilled with 95, and for 64x96x64 in two warps, which spilled with 103 (184 B on sm_120).
_OVERHEAD_REGISTERS = 46
#: More for warps whose share of a tile is not a power of 2: 88 accumulators and 2 x 52 fragments use 250
#: registers; 96 and 2 x 56 spill 48 to 172 B in blocks of one, two and four warps (the same compilers).
_UNEVEN_REGISTERS = 12
_SHIFT_REGISTERS = 10
_UNEVEN_SHIFT_REGISTERS = 58
#: More if shifted lines lie along m or n, as a thread then has several pieces of a line: 128x256x32 in nt
#: spills 24 B with 7 left, and 64x192x64 in nn with 3 left.
_CROSSED_SHIFT_REGISTERS = 12
#: More if sums take half of a thread's registers, unless tile_k is short: 128x128x64 in 2 x 2 warps spills
#: 116 B on sm_90.
_FULL_SHIFT_REGISTERS = 30
_FULL_ACCUMULATORS = 128
_SHORT_TILE_K = 32
_LONE_TILE = 32 * 32
#: The longest k for which fp16 accumulators stay within the tolerance of an fp16 result, 9.8e-4. Rounding
#: sums every 16 elements gives 8.4e-4 at 512, 1.2e-3 at 1024, 2.3e-3 at 4096 (uniform operands, CPU).
_HALF_MAX_K = 512


config_of = config_maker(KernelConfig)


@rule("device")
def architecture(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """cp.async and mma.sync.m16n8k16 exist from compute capability 8.0 on (PTX ISA)."""
    if device.architecture.capability < (8, 0):
        return f"{device.architecture.compile_target} has no cp.async; cute_sm80 needs sm_80 or later"
    return None


@rule("tile_m", "tile_n", "tile_k", "warps_m", "warps_n", "atoms_n")
def mma_tile(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """A tile has whole permuted MMA tiles and at least two steps of k: one loads while one multiplies."""
    config = config_of(problem, candidate)
    for name, tile, unit, least in (
        ("tile_m", config.tile_m, MMA_M * config.warps_m, 0),
        ("tile_n", config.tile_n, MMA_N * config.atoms_n * config.warps_n, 0),
        ("tile_k", config.tile_k, MMA_K, 2 * MMA_K),
    ):
        if tile % unit or tile < least:
            return f"{name} {tile} is not a multiple of {unit}" + (f" from {least}" if least else "")
    return None


@rule("acc_dtype", "in_dtype")
def accumulation(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """mma.sync accumulates bf16 products in fp32 only (PTX ISA, mma.m16n8k16)."""
    if candidate["acc_dtype"] != "fp32" and problem.in_dtype != candidate["acc_dtype"]:
        return f"{candidate['acc_dtype']} accumulators for {problem.in_dtype} operands"
    return None


@rule("acc_dtype", "out_dtype", "k", runs=True)
def accumulation_error(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """fp16 accumulators lose bits at every step, so a long k makes the result wrong."""
    if candidate["acc_dtype"] != "fp16":
        return None
    if problem.out_dtype != "fp16":
        return f"fp16 accumulators hold less than a {problem.out_dtype} output shows"
    if problem.k > _HALF_MAX_K:
        return f"fp16 accumulators over k={problem.k} > {_HALF_MAX_K} lose more than rounding the output does"
    return None


@rule(
    "tile_m", "tile_n", "tile_k", "warps_m", "warps_n", "smem_swizzle", "vector_bytes", "in_dtype",
    "a_major", "b_major",
)  # fmt: skip
def copies(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """Every warp copies whole lines of its own with all of its lanes; see `config.Copy`."""
    config = config_of(problem, candidate)
    for operand in ("a", "b"):
        if (objection := config.copy(operand).objection(config.smem_swizzle)) is not None:
            return f"{operand.upper()}: {objection}"
    return None


@rule("smem_swizzle", "tile_m", "tile_n", "tile_k", "a_major", "b_major", runs=True)
def bank_conflicts(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """The 8 rows that ldmatrix reads at a time lie in 8 groups of banks only if the swizzle has all bits of a
    chunk's index."""
    config = config_of(problem, candidate)
    widest = min(config.copy(operand).swizzle_bits for operand in ("a", "b"))
    if config.smem_swizzle < widest:
        return f"swizzle of {config.smem_swizzle} bits, where lines have {widest}: rows share banks"
    return None


@rule("atoms_n", "tile_n", "warps_n", runs=True)
def whole_ldmatrix(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """ldmatrix.x4 loads two atoms of B that a warp has side by side; .x2 loads only one."""
    if candidate["atoms_n"] == 1 and candidate["tile_n"] % (2 * MMA_N * candidate["warps_n"]) == 0:
        return "atoms_n 1 loads one atom of B at a time, but a warp's columns are pairs of atoms"
    return None


@rule("warps_m", "warps_n", "ctas_per_sm", "device")
def threads(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """Blocks and multiprocessors hold a limited number of threads."""
    config = config_of(problem, candidate)
    return exceeded_threads(config.threads, device.architecture, config.ctas_per_sm)


@rule(
    "tile_m", "tile_n", "tile_k", "warps_m", "warps_n", "vector_bytes", "ctas_per_sm", "acc_dtype",
    "a_major", "b_major", "device",
)  # fmt: skip
def registers(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """Accumulators, two steps of fragments and bookkeeping must fit a thread's registers, or ptxas spills."""
    config = config_of(problem, candidate)
    budget = register_budget(config.threads, device.architecture, config.ctas_per_sm)
    overhead = _OVERHEAD_REGISTERS
    uneven = config.accumulators & (config.accumulators - 1)
    if config.shifts:
        overhead += _UNEVEN_SHIFT_REGISTERS if uneven else _SHIFT_REGISTERS
        overhead += _CROSSED_SHIFT_REGISTERS if (config.a_major, config.b_major) != ("k", "k") else 0
        if config.accumulator_registers >= _FULL_ACCUMULATORS and config.tile_k > _SHORT_TILE_K:
            overhead += _FULL_SHIFT_REGISTERS
    elif uneven:
        overhead += _UNEVEN_REGISTERS
    need = config.accumulator_registers + 2 * config.fragment_registers + overhead
    if need > budget:
        return (
            f"{config.accumulator_registers} accumulators + 2 x {config.fragment_registers} fragments "
            f"+ {overhead} > {budget} registers"
        )
    return None


@rule("tile_m", "tile_n", "warps_m", "warps_n", "vector_bytes", "device")
def lone_warp(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """A single warp that shifts the lines of more than 32x32 spills 24 to 144 B on sm_120, where ptxas holds
    more of their words at a time than for sm_86 (nvidia-cutlass-dsl 4.8.1)."""
    config = config_of(problem, candidate)
    tile = config.tile_m * config.tile_n
    if config.shifts and config.warps == 1 and tile > _LONE_TILE and device.architecture.number >= 120:
        return f"one warp that shifts lines of {config.tile_m}x{config.tile_n} spills on sm_120"
    return None


@rule(
    "tile_m", "tile_n", "tile_k", "stages", "vector_bytes", "ctas_per_sm", "in_dtype", "out_dtype",
    "a_major", "b_major", "out_major", "device",
)  # fmt: skip
def shared_memory(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """The ring, or the staged output in its place, must fit one block, and all blocks a multiprocessor."""
    config = config_of(problem, candidate)
    return exceeded_smem(config.smem_bytes, device.architecture, config.ctas_per_sm)


#: Cheapest first.
RULES = (
    architecture,
    half_operands,
    alignment,
    vector_width,
    accumulation,
    accumulation_error,
    mma_tile,
    copies,
    ring_depth,
    threads,
    registers,
    lone_warp,
    shared_memory,
    bank_conflicts,
    whole_ldmatrix,
    split_work,
)
