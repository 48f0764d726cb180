"""The rules of kernels for few rows: one function per cause (see `tunegemm.generate.feasibility`)."""

from __future__ import annotations

from tunegemm.describe.device import Device
from tunegemm.describe.problem import DTYPE_BYTES, Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate.feasibility import (
    alignment,
    exceeded_smem,
    exceeded_threads,
    register_budget,
    ring_depth,
    rule,
    vector_width,
)
from tunegemm.generate.generator import config_maker
from tunegemm.generate.skinny.config import MMA_M, KernelConfig
from tunegemm.generate.tiles import tile_count

#: Registers of a thread beside accumulators, the fragments of one chunk and the addresses of its lines. 36
#: are left to 16x64x256 with two CTAs of 8 warps, 42 to 8x16x256 with four, and neither spills; 26 and 28 are
#: left to 8x32x256 with four and 16x32x256 with three, which spill 24 and 60 B (nvidia-cutlass-dsl 4.8.1).
_OVERHEAD_REGISTERS = 36
#: Above this many rows, tiles of 64 rows reread less of B than tiles of 8 to 32 rows do.
_MAX_M = 64
#: Bytes of B that a multiprocessor must have in flight. Little's law: 4.8 TB/s times 0.6 us is 22 KB for each
#: of 132 multiprocessors.
_MIN_BYTES_IN_FLIGHT = 20 * 1024

config_of = config_maker(KernelConfig)


@rule("in_dtype", "device")
def architecture(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """cp.async and mma.sync.m16n8k16 exist from compute capability 8.0 on, fp8 conversions from 8.9 on."""
    least = (8, 9) if problem.in_dtype.startswith("fp8") else (8, 0)
    if device.architecture.capability < least:
        return f"{device.architecture.compile_target} is older than sm_{least[0]}{least[1]}"
    return None


@rule("in_dtype", "out_dtype")
def operands(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """mma.sync multiplies the operands, or they convert exactly to fp16; results take 2 or 4 bytes."""
    if DTYPE_BYTES[problem.in_dtype] > 2:
        return f"skinny has kernels for operands of 1 or 2 bytes, not for {problem.in_dtype}"
    if DTYPE_BYTES[problem.out_dtype] < 2:
        return f"skinny stores results of 2 or 4 bytes, not {problem.out_dtype}"
    return None


@rule("a_major", "b_major")
def majors(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """Vectors lie along k, which mma.sync needs to be contiguous in both operands."""
    if (problem.a_major, problem.b_major) != ("k", "k"):
        return f"layout {problem.layout}: skinny reads lines along k, as in layout tn (vectors of 16 B)"
    return None


@rule("vector_bytes", "k", "in_dtype")
def whole_vectors(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """A vector is read whole or not at all: if k ended within one, the elements behind k would count too."""
    in_bytes = DTYPE_BYTES[problem.in_dtype]
    if problem.k * in_bytes % candidate["vector_bytes"]:
        return f"k={problem.k} of {in_bytes} B ends within a vector of {candidate['vector_bytes']} B"
    return None


@rule("tile_m", "tile_n", "tile_k", "warps_n", "warps_k", "vector_bytes", "in_dtype")
def mma_tile(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """Each warp has whole instructions along n and, in each step of k, whole chunks."""
    return config_of(problem, candidate).objection


@rule("warps_n", "warps_k", "ctas_per_sm", "device")
def threads(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """Blocks and multiprocessors hold a limited number of threads."""
    config = config_of(problem, candidate)
    return exceeded_threads(config.threads, device.architecture, config.ctas_per_sm)


@rule("tile_m", "tile_n", "warps_n", "warps_k", "vector_bytes", "ctas_per_sm", "in_dtype", "device")
def registers(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """Accumulators, a chunk's vectors, its lines' addresses and bookkeeping must fit, or ptxas spills."""
    config = config_of(problem, candidate)
    budget = register_budget(config.threads, device.architecture, config.ctas_per_sm)
    addresses, vectors = 2 * config.lines, config.lines * config.vector_bytes // 4
    if config.in_dtype.startswith("fp8"):
        vectors *= 2
    need = config.accumulators + addresses + vectors + _OVERHEAD_REGISTERS
    if need > budget:
        return (
            f"{config.accumulators} accumulators + {addresses} of addresses + {vectors} of vectors + "
            f"{_OVERHEAD_REGISTERS} > {budget} registers"
        )
    return None


@rule(
    "tile_m", "tile_n", "tile_k", "warps_n", "warps_k", "stages", "vector_bytes", "ctas_per_sm", "in_dtype",
    "device",
)  # fmt: skip
def shared_memory(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """The ring and a tile of every warp's sums must fit a block, and all blocks a multiprocessor."""
    config = config_of(problem, candidate)
    return exceeded_smem(config.smem_bytes, device.architecture, config.ctas_per_sm)


@rule("tile_n", "tile_k", "stages", "ctas_per_sm", "in_dtype", runs=True)
def bytes_in_flight(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """Memory answers after more than half a microsecond, so the bytes in flight bound its speed."""
    config = config_of(problem, candidate)
    step_bytes = config.tile_n * config.tile_k * config.element_bytes
    flight = config.ctas_per_sm * (config.stages - 1) * step_bytes
    if flight < _MIN_BYTES_IN_FLIGHT:
        return f"{flight} B of B in flight < {_MIN_BYTES_IN_FLIGHT} B that a multiprocessor needs"
    return None


@rule("tile_m", "m", runs=True)
def rows_of_tile(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """A tile with more rows than m wastes work, and with many rows of tiles B is read many times."""
    tile_m = candidate["tile_m"]
    if tile_m - MMA_M >= problem.m:
        return f"tile_m {tile_m} for m={problem.m}, for which {tile_m - MMA_M} rows are enough"
    if problem.m > _MAX_M:
        return f"m={problem.m} > {_MAX_M}: each tile of {tile_m} rows reads all of B"
    return None


@rule("m", "n", "out_dtype", "out_major", "epilogue")
def epilogue_lines(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """C and residuals need lines of whole 16 bytes, as in all families (`words_reader`)."""
    matrices = [operand.name for operand in problem.fused.operands if operand.kind == "matrix"]
    line = problem.out_n if problem.out_major == "n" else problem.m
    line_bytes = line * DTYPE_BYTES[problem.out_dtype]
    if matrices and line_bytes % 16:
        return f"{matrices[0]} with lines of {line_bytes} B, not a multiple of 16"
    return None


@rule("split_k", "tile_k", "tile_m", "tile_n", "k", "m", "n", "batch", "device", runs=True)
def split_work(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """Splits of k are for otherwise idle multiprocessors, and each needs enough steps to fill its ring.

    If tiles occupied half of the multiprocessors or more, no split came within 4 % of the fastest kernel
    (benchmarks/results/h200/skinny.json of commit 4ff725a, 30 products).
    """
    splits = int(candidate.params.get("split_k", 1))
    if splits == 1:
        return None
    steps = -(-problem.k // candidate["tile_k"])
    if splits > steps:
        return f"split_k {splits} of {steps} steps of k"
    tiles = tile_count(problem, candidate)
    if 2 * tiles > device.sm_count:
        return f"split_k {splits} with {tiles} tiles for {device.sm_count} multiprocessors"
    return None


#: Cheapest first.
RULES = (
    architecture,
    operands,
    majors,
    alignment,
    vector_width,
    whole_vectors,
    epilogue_lines,
    mma_tile,
    ring_depth,
    threads,
    registers,
    shared_memory,
    bytes_in_flight,
    rows_of_tile,
    split_work,
)
