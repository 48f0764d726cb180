"""The rules of grouped kernels: one function per physical cause (see `tunegemm.generate.feasibility`)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from tunegemm.describe.device import Device
from tunegemm.describe.problem import DTYPE_BYTES, Problem
from tunegemm.describe.space import Candidate, Value
from tunegemm.generate.cute_sm90.config import MMA_ATOM_M, SMEM_LIMIT
from tunegemm.generate.feasibility import architecture, exceeded_smem, exceeded_wgmma, ring_depth, rule
from tunegemm.generate.grouped.config import GroupedConfig

#: Registers that a thread needs beside the accumulators; the same as in `tunegemm.generate.cute_sm90.rules`,
#: which has the same main loop.
_OVERHEAD_REGISTERS = 32
#: The most widths of a kernel, each with its own main loop: if widths double, and if all multiples occur.
_MOST_WIDTHS, _MOST_MULTIPLES = 4, 12
#: The schedule and tile that gain from a cluster (docs/decisions/0027).
_SHARED_TILE = ("pingpong", 128, 192)
#: Defaults for the fields of a config that affect neither its accumulators nor its widths.
_ANY = {"schedule": "cooperative", "tile_m": MMA_ATOM_M, "tile_k": 64, "stages": 2, "epi_n": 32}
#: The fields of a problem that rules with a config read.
_KIND = ("in_dtype", "epilogue", "b_major")


def config_from(
    parameters: Mapping[str, Any], *, dtype: str = "bf16", gate: str = "", major: str = "k"
) -> GroupedConfig:
    """The config of a candidate's parameters for a kind of product.

    The parameters count two-byte elements; an fp8 tile has as many bytes, and so twice as many elements of k.

    gate: a gated step of `tunegemm.describe.epilogue`. major: k or n, the contiguous mode of B.
    """
    of_fp8 = dtype.startswith("fp8")
    fixed: dict[str, Any] = {
        "cluster_m": 1, "cluster_n": 1, "in_dtype": dtype, "out_dtype": "bf16" if of_fp8 else dtype,
        "a_major": "m" if major == "n" else "k", "b_major": "k", "out_major": "m",
        "epilogue": "scale_rowwise" if of_fp8 else gate,
    }  # fmt: skip
    return GroupedConfig(**fixed | dict(parameters) | {"tile_k": parameters["tile_k"] * (1 + of_fp8)})


@functools.lru_cache(maxsize=1 << 12)
def _config(params: tuple[tuple[str, Value], ...], dtype: str, gate: str, major: str) -> GroupedConfig:
    return config_from(dict(params), dtype=dtype, gate=gate, major=major)


def config_of(problem: Problem, candidate: Candidate) -> GroupedConfig:
    """The compile-time choices of a candidate, which are the same for all problems of a kind."""
    return _config(candidate.compile_params, problem.in_dtype, problem.gate, problem.b_major)


@rule("groups")
def rows_in_groups(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """The kernel takes the ends of groups as an operand, and stores rows of D without TMA."""
    if not problem.groups:
        return f"{candidate.family} is for rows in groups (--groups); this product has none"
    return None


@rule("n", "k", *_KIND)
def aligned_lines(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """Lines of A, B and D are accessed in units of 16 bytes; with a gate D's lines are half as long."""
    elements = 16 // DTYPE_BYTES[problem.in_dtype]
    for name, unit in (("n", max(elements, 16 if problem.fused else 8)), ("k", elements)):
        if (extent := getattr(problem, name)) % unit:
            return f"{name} {extent} is not a multiple of the {unit} whose lines have 16 B"
    return None


@rule("schedule", "tile_m", "tile_n")
def mma_tile(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """A tile consists of whole WGMMAs: 64 rows of the weights each, and 8 to 256 rows of A in steps of 8."""
    tile_m, tile_n = candidate["tile_m"], candidate["tile_n"]
    if tile_m not in (MMA_ATOM_M, 2 * MMA_ATOM_M, 4 * MMA_ATOM_M):
        return f"tile_m {tile_m} is not 64, 128 or 256"
    if tile_n % 8 or not 8 <= tile_n <= 256:
        return f"tile_n {tile_n} is not a multiple of 8 from 8 to 256"
    return None


@rule("tile_k")
def ring_rows(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """A stage holds one row of the 128-byte smem swizzle along k."""
    if candidate["tile_k"] != 64:
        return f"tile_k {candidate['tile_k']} is not 64, a row of 128 B"
    return None


@rule("tile_n", "epi_n", "epilogue")
def epilogue_tile(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """Subtiles of 16 or 32 rows, which stmatrix stores, cover the tile; with a gate, of twice the rows."""
    tile_n, epi_n = candidate["tile_n"], candidate["epi_n"]
    rows = epi_n * (1 + problem.fused.gated)
    if epi_n not in (16, 32) or tile_n % rows:
        return f"epi_n {epi_n} is not 16 or 32, or its {rows} rows do not divide tile_n {tile_n}"
    return None


@rule("tile_n", "narrow")
def narrow_widths(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """Each width, from `narrow` to the tile's, has its own main loop, and the code must stay cached."""
    tile_n, narrow = candidate["tile_n"], candidate["narrow"]
    if narrow < 8 or narrow % 8 or tile_n % narrow:
        return f"narrow {narrow} is not a multiple of 8 that divides tile_n {tile_n}"
    config = config_from(_ANY | {"tile_n": tile_n, "narrow": narrow})
    most = _MOST_WIDTHS if config.widths_double else _MOST_MULTIPLES
    if (count := len(config.widths)) > most:
        return f"narrow {narrow} of tile_n {tile_n} makes {count} widths, more than {most}"
    return None


@rule("tile_n", "narrow", runs=True)
def narrow_enough(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """A group's few remaining rows cost as much as the narrowest width."""
    tile_n, narrow = candidate["tile_n"], candidate["narrow"]
    if narrow > max(8, tile_n // 4):
        return f"narrow {narrow} is more than a quarter of tile_n {tile_n}"
    return None


@rule("narrow", "cluster_m")
def cluster(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """Two blocks share rows, and each loads half: for every width, whole swizzle atoms of 8 rows."""
    blocks = int(candidate.params.get("cluster_m", 1))
    if blocks not in (1, 2):
        return f"cluster_m {blocks} is not 1 or 2"
    if (narrow := candidate["narrow"]) % (8 * blocks):  # all widths are multiples of it
        return f"narrow {narrow} has no share of whole 8 rows for each of {blocks} blocks"
    return None


@rule("tile_m", "cluster_m", "n", runs=True)
def cluster_extent(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """A cluster takes a tile along N for each of its blocks; with fewer tiles, blocks have nothing to do."""
    blocks, tiles = int(candidate.params.get("cluster_m", 1)), -(-problem.n // candidate["tile_m"])
    if tiles < blocks:
        return f"cluster_m {blocks} > {tiles} tile of {candidate['tile_m']} in n {problem.n}"
    return None


@rule("schedule", "tile_m", "tile_n", "cluster_m", runs=True)
def cluster_tile(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """Of the tiles raced in clusters only one gained."""
    blocks = int(candidate.params.get("cluster_m", 1))
    schedule, *tile = (candidate[name] for name in ("schedule", "tile_m", "tile_n"))
    if blocks > 1 and (schedule, *tile) != _SHARED_TILE:
        return f"cluster_m {blocks}, {schedule} {tile[0]}x{tile[1]}: clusters gain for one tile alone"
    return None


@rule("schedule", "tile_m", "tile_n")
def accumulators(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """Accumulators and bookkeeping must fit the consumer's setmaxnreg budget, and one WGMMA must fit the
    registers that a thread is launched with, or ptxas spills.
    """
    config = config_from(_ANY | {name: candidate[name] for name in ("schedule", "tile_m", "tile_n")})
    sums, budget = config.accumulator_registers, config.registers[1]
    if sums + _OVERHEAD_REGISTERS > budget:
        return f"{sums} accumulators + {_OVERHEAD_REGISTERS} > setmaxnreg {budget}"
    return exceeded_wgmma(config.tile_n, config.launch_registers, config.threads)


@rule("schedule", "tile_m", "tile_n", "tile_k", "stages", "epi_n", "narrow", *_KIND, "device")
def shared_memory(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """Ring, staging buffers and barriers must fit one block's shared memory."""
    return exceeded_smem(config_of(problem, candidate).smem_bytes, device.architecture)


@rule("schedule", "tile_m", "tile_n", "tile_k", "stages", "epi_n", "narrow", *_KIND, runs=True)
def ring_filled(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """A block has a multiprocessor to itself: a ring that leaves room for half as many stages again only
    hides less of the loads' latency.
    """
    config, stages = config_of(problem, candidate), candidate["stages"]
    deeper = config.smem_bytes + stages // 2 * config.stage_bytes
    if deeper <= SMEM_LIMIT:
        return f"stages {stages}: {stages + stages // 2} fit, in {deeper} B <= {SMEM_LIMIT} B smem"
    return None


#: Cheapest first.
RULES = (
    rows_in_groups, architecture, aligned_lines, ring_rows, ring_depth, mma_tile, epilogue_tile,
    narrow_widths, narrow_enough, cluster, cluster_extent, cluster_tile, accumulators, shared_memory,
    ring_filled,
)  # fmt: skip
