"""The rules of portable Triton kernels: one function per cause (see `tunegemm.generate.feasibility`)."""

from __future__ import annotations

from tunegemm.describe.architectures import Architecture
from tunegemm.describe.device import Device
from tunegemm.describe.problem import DTYPE_BYTES, MAX_ALIGNMENT, Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate.feasibility import exceeded_smem, no_power_of_two, register_budget, ring_depth, rule
from tunegemm.generate.generator import config_maker
from tunegemm.generate.tiles import exceeded_by_two, split_work
from tunegemm.generate.triton.config import EPI_COLUMNS, LEAST_COPY_BYTES, WARPGROUP_ROWS, KernelConfig

#: Registers that a thread needs beside its accumulators.
_OTHER_REGISTERS = 94
#: Registers for an element that passes through them: its value, its address and its place. On sm_80, 32
#: elements beside 32 accumulators do not spill; 40 beside 32 and 48 beside 4 do.
_REGISTERS_OF_ELEMENT = 4
#: Registers for each copy of a thread. With mma.sync and 128 accumulators on sm_80, kernels with 6 and 8
#: copies do not spill; 256x64x32 in 4 warps has 10 and spills 72 to 140 B, and 128x256x64 in 8 warps has 12
#: and spills 120 B (Triton 3.7.1). wgmma and tcgen05.mma keep no fragments in registers: 128 accumulators and
#: 12 copies need 242 registers on sm_90, and 128 and 24 spill 16 B (3.6.0). fp8 with tcgen05.mma is an
#: exception: 256x128x128 in 8 warps, 128 and 12, spills 72 B on sm_100 (3.6.0).
_REGISTERS_OF_COPY, _REGISTERS_OF_COPY_ALONE = 4, 2
#: The most copies of a thread: 256x32x64 in 4 warps has 18 and spills 24 B on sm_86. Without fragments, 64
#: accumulators and 32 copies need 221 to 227 registers on sm_90, and 64 and 48 spill 568 B (3.6.0).
_MOST_COPIES, _MOST_COPIES_ALONE = 16, 32
#: The most copies with more than three stages: 128x128x64 in 8 warps has 32 and spills 472 B with five,
#: nothing with three (sm_90, 3.6.0).
_MOST_COPIES_DEEP = 16
#: With more accumulators than this, a warp of 32 rows must store vectors of at least 8 bytes. Stores of 2 B
#: spill 640 B for 256x128x64 in 8 warps and 1048 B for 128x128x64 in 4; stores of 4 bytes spill 16 B for
#: 256x128x32 (sm_90, 3.6.0). With 16 rows and stores of 2 bytes, 128x256x64 needs 252 registers.
_MOST_WITH_NARROW_STORES, _NARROW_STORE_BYTES = 64, 8
#: ptxas of CUDA 13.1 spills 40 B for 128x128x32 in 4 warps on sm_120; that of 12.8 spills nothing for sm_86.
_REGISTERS_OF_SM120 = 8
#: The most elements from a line to the next, so that offsets within 256 lines of a tile fit in 31 bits.
MAX_LEADING = 2**22
#: Bytes of barriers in Blackwell's shared memory beside the ring.
_BARRIER_BYTES = 1024

config_of = config_maker(KernelConfig)


def multiplies_asynchronously(config: KernelConfig, architecture: Architecture) -> bool:
    """Whether Triton multiplies with wgmma or tcgen05.mma. It then keeps a slot of the ring for the product
    in progress, so it has as many buffers as stages; with mma.sync it has one fewer (Triton 3.6, 3.7).
    """
    has = architecture.wgmma or (architecture.tcgen05 and config.in_dtype != "int8")
    return has and config.tile_m >= WARPGROUP_ROWS and config.warps >= 4


@rule("in_dtype", "device")
def tensor_cores(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """mma.sync takes fp8 operands from compute capability 8.9 on (PTX ISA)."""
    if problem.in_dtype.startswith("fp8") and not device.architecture.fp8:
        return f"{device.architecture.compile_target} has no {problem.in_dtype}; it is there from sm_89 on"
    return None


@rule("in_dtype", "out_dtype", "accumulation")
def operands(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """Triton's dot takes operands of one type and sums in fp32 or int32; the kernel stores 2 or 4 bytes."""
    if problem.in_dtype.count("_") > 1:
        return f"A and B are of one type in Triton's dot, not {problem.in_dtype}"
    if DTYPE_BYTES[problem.out_dtype] < 2:
        return f"triton stores results of 2 or 4 bytes, not {problem.out_dtype}"
    if problem.accumulation != "fast":
        return f"triton has no {problem.accumulation} accumulation"
    return None


@rule("in_dtype", "a_major", "b_major")
def majors(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """ldmatrix transposes only 16-bit elements (PTX ISA), so other operands must be contiguous along k."""
    if DTYPE_BYTES[problem.in_dtype] != 2 and (problem.a_major, problem.b_major) != ("k", "k"):
        return f"layout {problem.layout} of {problem.in_dtype}: lines along k are wanted, as of layout tn"
    return None


def _reach(num_bytes: int, most: int) -> int:
    """The largest power of two, up to `most`, that divides a number of bytes."""
    return min(num_bytes & -num_bytes, most)


@rule("vector_bytes", "m", "n", "k", "in_dtype", "a_major", "b_major", "alignment")
def whole_vectors(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """A mask has one bit for each vector, and an access faults unless its address is a multiple of the
    vector's size. Vectors narrower than the lines allow copy the same bytes with more instructions."""
    in_bytes = DTYPE_BYTES[problem.in_dtype]
    lines = [
        {"m": problem.m, "n": problem.n, "k": problem.k}[one] for one in (problem.a_major, problem.b_major)
    ]
    widest = min(_reach(line * in_bytes, problem.alignment) for line in lines)
    if candidate["vector_bytes"] != widest:
        return f"vectors of {candidate['vector_bytes']} B, where lines and addresses have {widest} B"
    return None


@rule("store_bytes", "m", "n", "out_dtype", "out_major")
def whole_stores(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """D's lines consist of whole vectors, of the widest size that divides them, like the operands' lines."""
    line = problem.n if problem.out_major == "n" else problem.m
    widest = _reach(line * DTYPE_BYTES[problem.out_dtype], MAX_ALIGNMENT)
    if candidate["store_bytes"] != widest:
        return f"stores of {candidate['store_bytes']} B, where D's lines have {widest} B"
    return None


@rule("m", "n", "k")
def near_lines(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """Offsets within a tile are 32-bit numbers."""
    longest = max(problem.m, problem.n, problem.k)
    return f"lines of {longest} elements > {MAX_LEADING}" if longest > MAX_LEADING else None


@rule("tile_m", "tile_n", "tile_k", "in_dtype")
def block_shape(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """Triton's blocks are powers of two and hold whole instructions: m16n8, and 32 bytes along k."""
    least = {"tile_m": 16, "tile_n": 16, "tile_k": 32 // DTYPE_BYTES[problem.in_dtype]}
    return next(filter(None, (no_power_of_two(candidate, *each) for each in least.items())), None)


@rule("warps", "tile_m", "tile_n")
def warps(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """Triton needs a power of two of warps, and each needs its own part of the tile. Warpgroups that share 64
    rows do not hold the columns that the epilogue stores together, so all would go through shared memory."""
    if (reason := no_power_of_two(candidate, "warps", 1, 16)) is not None:
        return reason
    tile_m, tile_n, count = (candidate[name] for name in ("tile_m", "tile_n", "warps"))
    if 2 * count > (most := tile_m // 16 * (tile_n // 8)):
        return f"2 x {count} warps > {most} instructions of a tile"
    if tile_m >= WARPGROUP_ROWS and count * 16 > tile_m and tile_n > EPI_COLUMNS:
        return f"{count} warps share {tile_m} rows of {tile_n} > {EPI_COLUMNS} columns"
    return None


@rule("tile_m", "tile_n", "tile_k", "stages", "warps", "vector_bytes", "store_bytes", "in_dtype", "device")
def registers(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """Accumulators, fragments and addresses must fit a thread's registers, or ptxas spills. So must elements
    that pass through registers on their way to shared memory."""
    config, limits = config_of(problem, candidate), device.architecture
    need, words = config.accumulator_registers + _OTHER_REGISTERS, f"+ {_OTHER_REGISTERS}"
    if not config.copies:
        need += (passing := config.loaded_elements * _REGISTERS_OF_ELEMENT)
        words += f" + {passing} of elements"
    else:
        alone = multiplies_asynchronously(config, limits)
        most = _MOST_COPIES_ALONE if alone else _MOST_COPIES
        most = min(most, _MOST_COPIES_DEEP) if config.stages > 3 else most
        if (copies := config.loaded_elements // config.vector) > most:
            return f"{copies} copies of a thread > {most}: addresses spill on {limits.compile_target}"
        need += (more := _REGISTERS_OF_SM120 if limits.capability >= (12, 0) else 0)
        words += f" + {more}" if more else ""
        light = alone and not (limits.tcgen05 and config.in_dtype.startswith("fp8"))
        need += (copying := copies * (_REGISTERS_OF_COPY_ALONE if light else _REGISTERS_OF_COPY))
        words += f" + {copying} of copies"
    if (
        config.tile_m >= 32 * config.warps
        and config.accumulator_registers > _MOST_WITH_NARROW_STORES
        and config.store_bytes < _NARROW_STORE_BYTES
    ):
        return (
            f"stores of {config.store_bytes} B of {config.tile_m // config.warps} rows a warp beside "
            f"{config.accumulator_registers} accumulators: addresses spill"
        )
    budget = register_budget(config.threads, limits, 1)
    if need > budget:
        return f"{config.accumulator_registers} accumulators {words} > {budget} registers"
    return None


@rule("stages", "vector_bytes", runs=True)
def copied_ahead(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """cp.async copies at least 4 bytes, so narrower vectors are never copied ahead, whatever the stages."""
    if candidate["vector_bytes"] < LEAST_COPY_BYTES and candidate["stages"] > 2:
        return f"stages {candidate['stages']} of vectors of {candidate['vector_bytes']} B do what 2 do"
    return None


@rule("tile_m", "tile_n", "tile_k", "stages", "vector_bytes", "in_dtype", "device")
def shared_memory(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """The ring, and on Blackwell its barriers, must fit one block's shared memory."""
    config, more = config_of(problem, candidate), 0
    if device.architecture.tcgen05:
        more = _BARRIER_BYTES + (0 if config.copies else config.stage_bytes)
    return exceeded_smem(config.smem_bytes + more, device.architecture)


@rule(
    "ctas", "split_k", "warps", "tile_m", "tile_n", "tile_k", "stages", "vector_bytes", "in_dtype", "device",
    "m", "n", "batch", runs=True,
)  # fmt: skip
def two_blocks(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """Two persistent blocks share a multiprocessor only when its registers and shared memory hold both."""
    return exceeded_by_two(problem, candidate, device, config_of(problem, candidate), _OTHER_REGISTERS)


#: Cheapest first.
RULES = (
    tensor_cores,
    operands,
    majors,
    near_lines,
    whole_vectors,
    whole_stores,
    block_shape,
    warps,
    registers,
    ring_depth,
    copied_ahead,
    shared_memory,
    two_blocks,
    split_work,
)
