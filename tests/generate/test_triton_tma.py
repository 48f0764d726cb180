"""Examples of the Triton family, and what only it has. No GPU needed."""

import pytest

from tunegemm.compile.pool import CompilePool
from tunegemm.compile.triton_object import read_object
from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate.triton_tma import FAMILY
from tunegemm.generate.triton_tma.rules import config_of
from tunegemm.testing import OTHERWISE, TOO_LARGE, Examples, Rejection, compile_all

SHAPE = "4096x4096x4096"
GOOD = {
    "schedule": "pipelined", "tile_m": 128, "tile_n": 128, "tile_k": 64, "stages": 4, "warps": 8, "epi_n": 64,
    "swap_ab": False,
}  # fmt: skip
FLATTENED = {"schedule": "flattened"}
LAUNCH = {"raster_order": "along_m", "swizzle_size": 1, "ctas": "all", "split_k": 1}
PROBLEMS = [
    Problem.parse(SHAPE),
    Problem.parse(SHAPE, layout="tt"),
    Problem.parse(SHAPE, dtype="fp16"),
    Problem.parse(SHAPE, out_dtype="fp32"),
    Problem.parse(SHAPE, dtype="fp16", out_dtype="fp32", layout="tt"),
    Problem.parse(SHAPE, layout="nn"),
    Problem.parse(SHAPE, layout="nt"),
    Problem.parse("16x4096x4096"),
    Problem.parse("16x4096x4096", out_dtype="fp32", layout="tt"),
]


def candidate(**changes: int | str) -> Candidate:
    return Candidate.make("triton_tma", GOOD | changes)


EXAMPLES = Examples(
    "triton_tma",
    GOOD,
    LAUNCH,
    [PROBLEMS[0], *PROBLEMS[4:7], PROBLEMS[8]],  # the others are in them
    # Most accumulators, blocks beyond one TMA box, columns that move through the ring.
    corners=[
        (PROBLEMS[0], corner)
        for corner in (
            {"tile_n": 256, "stages": 3},
            {"tile_m": 256, "stages": 3, "epi_n": 32},
            {"tile_m": 512, "tile_n": 64, "stages": 2},
            {"tile_m": 64, "tile_n": 256, "stages": 4, "epi_n": 64},
            {**FLATTENED, "warps": 4},
            {**FLATTENED, "tile_m": 256, "tile_n": 128, "warps": 16, "stages": 3},
        )
    ],
    rejected=[
        Rejection("block_shape", {"tile_m": 96}, "power of 2"),
        Rejection("block_shape", {"tile_m": 32}, OTHERWISE),
        Rejection("block_shape", {"tile_n": 96, "epi_n": 96}, "power of 2"),
        Rejection("block_shape", {"tile_n": 8, "epi_n": 8}, OTHERWISE),
        Rejection("block_shape", {"tile_k": 8}, "RuntimeError"),
        Rejection("warps", {"warps": 2}, "spills"),
        Rejection("warps", {"warps": 12}, "power of 2"),
        Rejection("epilogue_tile", {"epi_n": 48}, "power of 2"),
        Rejection("epilogue_tile", {"epi_n": 256}, "RuntimeError"),
        Rejection("epilogue_tile", FLATTENED | {"tile_m": 64}, OTHERWISE),
        Rejection("accumulators", {"tile_n": 256, "warps": 4, "stages": 3}, "spills"),
        Rejection("accumulators", {"tile_m": 256, "tile_n": 256, "stages": 2}, "spills"),
        Rejection("ring_depth", {"stages": 1}, OTHERWISE),
        Rejection("reduction", {"tile_n": 256, "epi_n": 256, "stages": 2, "tile_k": 32}, OTHERWISE),
        Rejection("shared_memory", {"stages": 8}, TOO_LARGE),
    ],
    objections=[
        ("half_operands", Problem.parse(SHAPE, dtype="int8"), {}),
        ("tma_alignment", Problem.parse("4096x4096x1001"), {}),
        ("tma_alignment", Problem.parse("4096x1004x4096"), {}),
        ("tma_alignment", Problem.parse("4100x1024x4096", layout="nn"), {}),
        ("epilogue_tile", PROBLEMS[0], {"epi_n": 16}),
        ("reduction", Problem.parse("256x256x4096"), FLATTENED | {"split_k": 2}),
        ("two_blocks", PROBLEMS[0], {"ctas": "two_per_sm"}),
        ("two_blocks", Problem.parse("512x512x512"), {"ctas": "two_per_sm", "stages": 2}),
        ("two_blocks", PROBLEMS[0], {"ctas": "two_per_sm", "tile_n": 256, "tile_k": 32, "stages": 2}),
        ("swapped_rows", PROBLEMS[0], {"swap_ab": True}),
        ("split_work", PROBLEMS[0], {"split_k": 2}),
        ("split_work", Problem.parse("64x64x512"), {"split_k": 4}),
    ],
    elsewhere=frozenset({"architecture"}),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.long
def test_objects_say_what_a_launch_needs(pool: CompilePool, h200: Device) -> None:
    pairs = [(problem, EXAMPLES.candidate(corner)) for problem, corner in EXAMPLES.corners[3:6]]
    for (problem, kernel), result in zip(pairs, compile_all(pool, pairs, h200), strict=True):
        assert result.artifact is not None
        header, _ = read_object(result.artifact.path.read_bytes())
        assert header.threads == config_of(problem, kernel).threads


@pytest.mark.slow
def test_two_blocks_fit_a_multiprocessor(pool: CompilePool, h200: Device) -> None:
    """By the compiler's registers, not only by the rule's estimate."""
    kernels = [
        candidate(tile_m=64, warps=4, tile_n=128, stages=3, epi_n=32),
        candidate(tile_m=128, warps=4, tile_n=128, stages=2, epi_n=64),
        candidate(tile_m=128, warps=8, tile_n=64, stages=4, epi_n=64),
    ]
    for kernel, result in zip(
        kernels, compile_all(pool, [(PROBLEMS[0], k) for k in kernels], h200), strict=True
    ):
        assert FAMILY.check(PROBLEMS[0], kernel.with_launch(**LAUNCH | {"ctas": "two_per_sm"}), h200)
        assert result.artifact is not None
        threads = config_of(PROBLEMS[0], kernel).threads
        registers = -(-result.artifact.resources.registers // 8) * 8  # allotted in eights
        assert 2 * threads * registers <= h200.architecture.registers_per_sm
        assert 2 * (result.artifact.resources.smem_bytes + 1024) <= h200.architecture.smem_bytes_per_sm


def test_a_subtile_of_sums_may_fill_the_ring_and_no_more(h200: Device) -> None:
    exact = candidate(tile_m=128, tile_n=128, tile_k=64, stages=2, epi_n=128)
    assert config_of(PROBLEMS[0], exact).subtile_bytes == config_of(PROBLEMS[0], exact).ring_bytes == 1 << 16
    assert FAMILY.check(PROBLEMS[0], exact.with_launch(**LAUNCH), h200).rule != "reduction"


def test_a_failing_compile_is_remembered_and_the_pool_goes_on(pool: CompilePool, h200: Device) -> None:
    bad, good = candidate(tile_m=96, warps=4), candidate(tile_n=32, epi_n=32)
    first, second = compile_all(pool, [(PROBLEMS[0], bad), (PROBLEMS[0], good)], h200)
    assert "power of 2" in first.failure and second.artifact is not None
    assert pool.store.failure(FAMILY.kernel_key(PROBLEMS[0], bad, h200)) == first.failure
