"""The rules of Hopper kernels: one function per physical cause (see `tunegemm.generate.feasibility`)."""

from __future__ import annotations

from tunegemm.describe.device import Device
from tunegemm.describe.problem import DTYPE_BYTES, Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate.cute_sm90.config import (
    MMA_ATOM_M,
    SMEM_ALIGNMENT,
    SMEM_LIMIT,
    KernelConfig,
)
from tunegemm.generate.feasibility import architecture, exceeded_smem, exceeded_wgmma, ring_depth, rule
from tunegemm.generate.generator import config_maker
from tunegemm.generate.tiles import (
    divided,
    seen_by_kernel,
    split_work,
    streams,
    swapped_rows,
    tile_count,
)

#: Registers a consumer thread needs beside its accumulators: descriptors, barriers, addresses, the
#: epilogue's fragment. Of a budget of 240, 208 accumulators leave 32 and compile without spills; 216 leave
#: 24 and spill (both in tests/generate/test_cute_sm90.py, nvidia-cutlass-dsl 4.8.1).
_OVERHEAD_REGISTERS = 32
#: The same beside both sums of two-level accumulation; the epilogue needs only one of them. 224 of 240 and
#: 144 of 160 leave 16 and compile without spills; 240 and 160 spill (same tests).
_MAIN_LOOP_REGISTERS = 16
#: Elements of k that the tensor cores add up before two-level accumulation promotes the sum.
_PROMOTED_K = 128
_SWIZZLE_ROW_BYTES = 128
#: A box's innermost extent in bytes, and the position where it starts, must be multiples of this.
_TMA_UNIT_BYTES = 16

#: Additional registers for an epilogue that reads a matrix or converts int32 sums: 176 accumulators compile
#: without spills; with 192 some kernels spill (tests/describe/test_epilogue.py).
_FUSED_REGISTERS = 24
#: Additional registers for an epilogue that gates and stages by elements: 160 compile, 176 spill (same
#: tests). If it reads a vector and stages its tile whole, 176 are at the limit: one of two states of the
#: kernel spilled.
_ELEMENT_REGISTERS = 40
#: Additional registers beside the values of vectors: 192 accumulators and 10 values compile, 208 and 7 spill
#: up to 44 B in some kernels (same tests); 192 and 13 spilled in one state of the kernel and not in another.
_VECTOR_REGISTERS = 4
#: Additional registers for stream-K's schedule: 192 accumulators compile without spills, 208 spill 72 B in
#: pingpong with operands that are not k-major (tests/generate/test_cute_sm90.py).
_STREAM_REGISTERS = 8
#: More accumulators than this leave pingpong's turns no room for the bookkeeping of clusters: 208 compile
#: without spills if there are no clusters, and spill 80 B in 6 of 10 kernels with clusters, by one of two
#: ptxas versions or both (one is in the same tests). GPC-aware kernels do not spill; the rule considers only
#: what all launches share.
_TAKING_TURNS_IN_CLUSTERS = 192
#: Accumulators beside which a warpgroup of two 64-row atoms has room for a second matrix.
_ROOMY_ACCUMULATORS = 128

config_of = config_maker(KernelConfig)


@rule("epi_n", "swap_ab", "epilogue")
def fused_store(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """An epilogue works on staged subtiles; columns gate each other only if one thread has both."""
    if not problem.epilogue:
        return None
    if candidate["epi_n"] == 0:
        return f"epilogue {problem.epilogue} with epi_n 0: it works on staged subtiles"
    if problem.fused.gated and candidate["swap_ab"]:
        return f"epilogue {problem.epilogue} with swap_ab: pairs of columns become rows of two threads"
    return None


@rule("schedule", "tile_m", "tile_n", "epilogue")
def fused_registers(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """A warpgroup of two 64-row atoms keeps the values of both; it spills with a second matrix or with amax.

    ptxas follows no simple law for such kernels, and the rule is stricter than the compiler: 11 of the 25
    kernels that it rejects spilled, and none of the 40 that it admits (nvidia-cutlass-dsl 4.8.1; some are in
    tests/describe/test_epilogue.py).
    """
    config = config_of(problem, candidate)
    atoms, sums = config.atoms_per_warpgroup, config.accumulator_registers
    if atoms < 2 or not config.fused.is_defined:
        return None
    if "amax" in config.fused.steps or (_matrices(config) > 1 and sums > _ROOMY_ACCUMULATORS):
        return f"epilogue {problem.epilogue} with {atoms} atoms of 64 rows, {sums} accumulators: it spills"
    return None


def _matrices(config: KernelConfig) -> int:
    """How many matrices the kernel's epilogue reads."""
    fused = config.fused
    return sum(operand.kind == "matrix" for operand in (fused.operands if fused.is_defined else ()))


@rule("tile_m", "tile_n")
def mma_tile(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """A tile consists of whole WGMMA atoms: 64 rows each, and at most the 256 columns of one instruction. The
    columns come in steps of 16, which int8 requires and a subtile's stmatrix stores.
    """
    tile_m, tile_n = candidate["tile_m"], candidate["tile_n"]
    if tile_m % MMA_ATOM_M or not 64 <= tile_m <= 256:
        return f"tile_m {tile_m} is not 64, 128, 192 or 256"
    if tile_n % 16 or not 16 <= tile_n <= 256:
        return f"tile_n {tile_n} is not a multiple of 16 from 16 to 256"
    return None


@rule("in_dtype", "a_major", "b_major")
def operand_majors(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """WGMMA transposes 16-bit operands only (PTX ISA, wgmma.mma_async: imm-trans-a and -b are for them)."""
    if DTYPE_BYTES[problem.in_dtype] != 2 and (problem.a_major, problem.b_major) != ("k", "k"):
        return (
            f"layout {problem.layout} of {problem.in_dtype}: WGMMA reads all but 16-bit operands as tn only"
        )
    return None


@rule("tile_k", "in_dtype")
def ring_rows(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """A stage holds one or two rows of the 128-byte smem swizzle along k. Half a row would halve the work per
    barrier, for any dtype, and more than two rows only reduce the number of stages.
    """
    row_bytes = candidate["tile_k"] * DTYPE_BYTES[problem.in_dtype]
    if row_bytes not in (_SWIZZLE_ROW_BYTES, 2 * _SWIZZLE_ROW_BYTES):
        return f"tile_k {candidate['tile_k']} of {problem.in_dtype} = {row_bytes} B, not 128 or 256 B"
    return None


@rule("tile_k", "accumulation")
def promotion(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """Two-level accumulation is the same in every kernel: the tensor cores add up one k tile at a time."""
    if problem.accumulation == "two_level" and candidate["tile_k"] != _PROMOTED_K:
        return f"tile_k {candidate['tile_k']}: two-level sums take over every {_PROMOTED_K} of k"
    return None


@rule(
    "schedule", "tile_scheduler", "tile_m", "tile_n", "cluster_m", "cluster_n", "epi_n", "swap_ab",
    "in_dtype", "out_dtype", "a_major", "b_major", "accumulation", "epilogue",
)  # fmt: skip
def accumulators(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """Accumulators and bookkeeping must fit the consumer's setmaxnreg budget, or ptxas spills."""
    config = config_of(problem, candidate)
    overhead = _OVERHEAD_REGISTERS
    if streams(candidate):
        overhead += _STREAM_REGISTERS
    staged_whole = config.epi_n < 32 and config.held_registers > 0
    if config.fused.gated and (not config.stages_pairs or staged_whole):
        overhead += _ELEMENT_REGISTERS
    elif config.fused and (_matrices(config) or config.in_dtype == "int8"):
        overhead += _FUSED_REGISTERS
    elif config.held_registers:
        overhead += config.held_registers + _VECTOR_REGISTERS
    budget = config.registers[1]
    in_clusters = config.schedule == "pingpong" and config.cluster_m * config.cluster_n > 1
    if in_clusters and config.accumulator_registers > _TAKING_TURNS_IN_CLUSTERS:
        return (
            f"{config.accumulator_registers} accumulators > {_TAKING_TURNS_IN_CLUSTERS} of pingpong in "
            "clusters: they spill"
        )
    for sums, others in (
        (config.accumulator_registers, overhead),
        (config.sum_registers, _MAIN_LOOP_REGISTERS),
    ):
        if sums + others > budget:
            return f"{sums} accumulators + {others} > setmaxnreg {budget}"
    return None


@rule("schedule", "tile_m", "tile_n")
def wgmma_operands(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """One WGMMA needs 154 registers for 64x256, and 130 for 64x208, which 512 threads with their 128 each do
    not have (nvidia-cutlass-dsl 4.8.1); see `exceeded_wgmma`.
    """
    config = config_of(problem, candidate)
    return exceeded_wgmma(config.tile_n, config.launch_registers, config.threads)


@rule("tile_m", "tile_n", "tile_k", "stages", "in_dtype")
def ring_memory(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """The ring alone must fit a CTA's shared memory; for half of the kernels it does not."""
    rows, limit = candidate["tile_m"] + candidate["tile_n"], SMEM_LIMIT - SMEM_ALIGNMENT
    ring = candidate["stages"] * rows * candidate["tile_k"] * DTYPE_BYTES[problem.in_dtype]
    if ring > limit:
        return f"ring of {candidate['stages']} stages = {ring} B > {limit} B smem"
    return None


@rule(
    "schedule", "tile_m", "tile_n", "tile_k", "stages", "epi_n", "in_dtype", "out_dtype", "epilogue",
    "device",
)  # fmt: skip
def shared_memory(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """Ring, staging buffers and barriers must fit one block's shared memory."""
    return exceeded_smem(config_of(problem, candidate).smem_bytes, device.architecture)


@rule("tile_n", "epi_n")
def epilogue_tile(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """Staged subtiles cover the tile exactly. Subtiles of 16 columns are for tiles that 32 does not divide;
    for others they only double the barriers.
    """
    tile_n, epi_n = candidate["tile_n"], candidate["epi_n"]
    if epi_n == 0:  # nothing is staged
        return None
    if tile_n % epi_n:
        return f"epi_n {epi_n} does not divide tile_n {tile_n}"
    if epi_n < 32 and tile_n % 32 == 0:
        return f"epi_n {epi_n} is for tiles that 32 does not divide, not for tile_n {tile_n}"
    return None


@rule("tile_n", "epi_n", "swap_ab", "out_dtype", "out_major", "epilogue")
def store_box(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """TMA copies boxes whose lines start at, and are, multiples of 16 bytes (else: illegal instruction).

    Subtiles lie side by side, so the width of one decides where the next starts. If columns are contiguous,
    a line is a subtile's columns; if not, it is the 64 rows of a WGMMA, which are enough for every dtype.
    """
    epi_n, element_bytes = candidate["epi_n"], DTYPE_BYTES[problem.out_dtype]
    if epi_n == 0:  # nothing is staged
        return None
    columns = config_of(problem, candidate).out_epi_n if problem.fused.gated else epi_n
    if columns * element_bytes % _TMA_UNIT_BYTES and seen_by_kernel(problem, candidate).out_major == "n":
        return (
            f"epi_n {epi_n} stores lines of {columns} x {element_bytes} B = {columns * element_bytes} B, "
            f"not a multiple of the {_TMA_UNIT_BYTES} B that TMA needs"
        )
    return None


@rule("cluster_m", "cluster_n", "device")
def cluster(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """A cluster must be portable: at most 8 blocks (CUDA programming guide, thread block clusters)."""
    cluster_m, cluster_n = candidate["cluster_m"], candidate["cluster_n"]
    size, limit = cluster_m * cluster_n, device.architecture.max_cluster_size
    if size > limit:
        return f"cluster {cluster_m}x{cluster_n} = {size} CTAs > {limit}"
    return None


@rule("tile_m", "tile_n", "cluster_m", "cluster_n", "swap_ab", "m", "n", runs=True)
def cluster_extent(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """A cluster larger than the problem's tiles only computes some of them twice."""
    seen = seen_by_kernel(problem, candidate)
    for extent, tile, ways, name in (
        (seen.m, candidate["tile_m"], candidate["cluster_m"], "m"),
        (seen.n, candidate["tile_n"], candidate["cluster_n"], "n"),
    ):
        tiles = -(-extent // tile)
        if ways > 1 and tiles < ways:
            return f"cluster_{name} {ways} > {tiles} tiles of {tile} in extent {extent}"
    return None


@rule(
    "reduction", "tile_scheduler", "split_k", "tile_k", "k", "device", "tile_m", "tile_n", "cluster_m",
    "cluster_n", "swap_ab", "m", "n", "batch", runs=True,
)  # fmt: skip
def reduction_splits(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """A second kernel has nothing to add if k is not split.

    For a kernel without a launch, the rule checks the smallest split.
    """
    if candidate.params.get("reduction", "pairs") == "pairs" or streams(candidate):
        return None
    split_k = int(candidate.params.get("split_k", 2))
    if split_k == 1:
        return "reduction second_kernel with split_k 1: there are no k splits to add"
    return split_work(problem, candidate.with_launch(split_k=split_k), device)


@rule("reduction", "tile_n", "epilogue")
def second_slices(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """A second kernel stores slices of 16 columns; if pairs of columns gate each other, made from 32."""
    second = candidate.params.get("reduction", "pairs") == "second_kernel"
    if second and problem.fused.gated and (tile_n := candidate["tile_n"]) % 32:
        return f"epilogue {problem.epilogue} by a second kernel, with tile_n {tile_n} that 32 does not divide"
    return None


@rule("tile_scheduler", "split_k")
def stream_split(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """Stream-K cuts k by itself; only launches of other schedulers set a number of k splits."""
    if streams(candidate) and int(candidate.params.get("split_k", 1)) > 1:
        return f"split_k {candidate['split_k']} with tile_scheduler stream_k, which cuts k by itself"
    return None


@rule(
    "tile_scheduler", "tile_k", "k", "device", "tile_m", "tile_n", "cluster_m", "cluster_n", "swap_ab", "m",
    "n", "batch", runs=True,
)  # fmt: skip
def stream_waves(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """If tiles fill whole waves, stream-K cuts nothing and does the same as the static scheduler."""
    if not streams(candidate):
        return None
    size = candidate["cluster_m"] * candidate["cluster_n"]
    tiles, k_tiles = tile_count(problem, candidate) // size, -(-problem.k // candidate["tile_k"])
    clusters, cut, _ = divided(True, tiles, k_tiles, 1, device.resident_clusters(size))
    if cut == 0:
        return f"tile_scheduler stream_k: {tiles} tiles fill {tiles // clusters} waves of {clusters} clusters"
    return None


#: Cheapest first.
RULES = (
    architecture,
    operand_majors,
    ring_rows,
    promotion,
    stream_split,
    second_slices,
    fused_store,
    epilogue_tile,
    cluster,
    mma_tile,
    store_box,
    accumulators,
    fused_registers,
    wgmma_operands,
    ring_depth,
    ring_memory,
    shared_memory,
    cluster_extent,
    swapped_rows,
    split_work,
    reduction_splits,
    stream_waves,
)
