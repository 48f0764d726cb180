"""Examples of the Ampere family, and what only it has. No GPU needed."""

from dataclasses import replace

import pytest

from tunegemm.compile.pool import CompilePool
from tunegemm.describe.architectures import ARCHITECTURES
from tunegemm.describe.device import Device, find_device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate.cute_launch import load_function
from tunegemm.generate.cute_sm80 import FAMILY
from tunegemm.generate.cute_sm80.rules import config_of
from tunegemm.testing import TOO_LARGE, Examples, Rejection, compile_all

SHAPE = "4096x4096x4096"
#: The seed's kernel: 128x128x32 in 3 stages, 2x2 warps, permuted tile of two atoms along n.
GOOD = {
    "tile_m": 128, "tile_n": 128, "tile_k": 32, "stages": 3, "warps_m": 2, "warps_n": 2, "atoms_n": 2,
    "smem_swizzle": 2, "vector_bytes": 16, "ctas_per_sm": 1, "acc_dtype": "fp32",
}  # fmt: skip
LAUNCH = {"raster_order": "along_m", "swizzle_size": 1, "ctas": "tiles", "split_k": 1}
PROBLEMS = [
    Problem.parse(SHAPE),
    Problem.parse("4097x4095x1001"),
    Problem.parse(SHAPE, layout="nt", alignment=2, dtype="fp16"),
    Problem.parse(SHAPE, layout="tt", alignment=2, out_dtype="fp32"),
    Problem.parse(SHAPE, layout="nn", alignment=4),
    Problem.parse(SHAPE, layout="nt", alignment=8),
    Problem.parse("4096x4096x512", dtype="fp16", layout="tt"),
]


def candidate(**changes: int | str) -> Candidate:
    return Candidate.make("cute_sm80", GOOD | changes)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9)])
def test_limits_are_of_each_architecture(h200: Device, capability: tuple[int, int]) -> None:
    """The same kernels for every one with cp.async; test_every_architecture.py compiles them."""
    device = replace(h200, architecture=ARCHITECTURES[capability])
    for problem, kernel in (
        (PROBLEMS[0], candidate()), (PROBLEMS[1], candidate(vector_bytes=2, tile_n=64)),
    ):  # fmt: skip
        assert FAMILY.check(problem, kernel, device)
        assert f"{capability[0]}{capability[1]}" in FAMILY.kernel_key(problem, kernel, device)["target"]  # type: ignore[operator]
    deep = candidate(tile_k=64, smem_swizzle=3, stages=4)
    assert bool(FAMILY.check(PROBLEMS[0], deep, device)) == (capability == (8, 0))


EXAMPLES = Examples(
    "cute_sm80",
    GOOD,
    LAUNCH,
    [*PROBLEMS[:2], *PROBLEMS[3:5], PROBLEMS[6]],  # the others are in them
    corners=[
        (PROBLEMS[0], {"tile_k": 64, "smem_swizzle": 3, "stages": 4}),
        (PROBLEMS[1], {"vector_bytes": 2, "tile_n": 64, "tile_k": 64, "smem_swizzle": 3, "stages": 4}),
        (PROBLEMS[6], {"acc_dtype": "fp16"}),
    ],
    rejected=[
        Rejection("shared_memory", {"tile_k": 64, "smem_swizzle": 3, "stages": 8}, TOO_LARGE),
        Rejection("accumulation", {"acc_dtype": "fp16"}, "acc_dtype"),
        Rejection("mma_tile", {"tile_m": 96, "warps_m": 4, "warps_n": 1}, "Error"),
        Rejection("mma_tile", {"tile_k": 16, "smem_swizzle": 0}, "Error"),
        Rejection("copies", {"tile_n": 64, "warps_m": 4, "warps_n": 4, "tile_m": 256}, "no whole passes"),
        Rejection("copies", {"smem_swizzle": 3}, "swizzle of 3 bits"),
        Rejection("registers", {"tile_m": 256}, "spills"),
        Rejection("registers", {"warps_n": 4, "ctas_per_sm": 2, "tile_k": 64, "smem_swizzle": 3}, "spills"),
    ],
    objections=[
        ("half_operands", Problem.parse(SHAPE, dtype="int8"), {}),
        ("alignment", Problem.parse("4096x4096x1001"), {}),
        ("alignment", Problem.parse(SHAPE, alignment=8), {}),
        ("vector_width", PROBLEMS[0], {"vector_bytes": 8}),
        ("accumulation_error", Problem.parse(SHAPE, dtype="fp16"), {"acc_dtype": "fp16"}),
        (
            "accumulation_error",
            Problem.parse("64x64x64", dtype="fp16", out_dtype="fp32"),
            {"acc_dtype": "fp16"},
        ),
        ("threads", PROBLEMS[0], {"tile_m": 512, "tile_n": 512, "warps_m": 8, "warps_n": 8}),
        ("shared_memory", PROBLEMS[0], {"tile_k": 64, "smem_swizzle": 3, "stages": 4, "ctas_per_sm": 2}),
        ("ring_depth", PROBLEMS[0], {"stages": 1}),
        ("bank_conflicts", PROBLEMS[0], {"smem_swizzle": 0}),
        ("bank_conflicts", PROBLEMS[0], {"tile_k": 64, "smem_swizzle": 2}),
        ("whole_ldmatrix", PROBLEMS[0], {"atoms_n": 1}),
        ("split_work", PROBLEMS[0], {"split_k": 2}),
    ],
    elsewhere=frozenset({"architecture", "lone_warp"}),
)


def test_gpus_without_cp_async_are_refused(h200: Device) -> None:
    turing = replace(h200.architecture, capability=(7, 5), compile_target="sm_75")
    assert FAMILY.check(PROBLEMS[0], candidate(), replace(h200, architecture=turing)).rule == "architecture"


@pytest.mark.parametrize("tile", [(32, 32), (64, 32)])
def test_one_warp_shifts_few_lines_on_sm_120(tile: tuple[int, int]) -> None:
    """On sm_120 64x32x32 spills 144 B and 32x32x32 uses 254 registers; on sm_86 both fit."""
    tile_m, tile_n = tile
    lone = candidate(tile_m=tile_m, tile_n=tile_n, warps_m=1, warps_n=1, vector_bytes=2)
    refused = {
        name: FAMILY.check(PROBLEMS[1], lone, find_device(f"model:{name}")).rule
        for name in ("rtx3060", "rtx4090", "h100", "rtx5090")
    }
    assert refused == dict.fromkeys(refused) | {"rtx5090": "lone_warp" if tile_m > 32 else None}


@pytest.mark.slow
def test_an_object_holds_the_launch_function(pool: CompilePool, h200: Device) -> None:
    (result,) = compile_all(pool, [(PROBLEMS[0], candidate())], h200)
    assert result.artifact is not None
    assert callable(load_function(result.artifact.path))


def test_shared_memory_is_the_seeds_formula_where_the_ring_is_larger(h200: Device) -> None:
    """stages x (bM bK + bK bN) x 2 bytes; lines that are shifted add a word each."""
    deep = candidate(stages=5)
    assert config_of(PROBLEMS[0], deep).smem_bytes == 5 * (128 * 32 + 32 * 128) * 2
    odd = candidate(stages=5, vector_bytes=2)
    assert config_of(PROBLEMS[1], odd).smem_bytes == 5 * ((128 * 32 + 32 * 128) * 2 + 256 * 4)


@pytest.mark.parametrize(
    "change",
    [
        {"vector_bytes": 2},
        {"tile_k": 64, "smem_swizzle": 3, "vector_bytes": 2, "warps_n": 4, "tile_n": 192},
        {"tile_k": 64, "smem_swizzle": 3, "vector_bytes": 8, "a_major": "m", "b_major": "n"},
        {"tile_k": 64, "vector_bytes": 2, "tile_n": 96, "a_major": "m", "b_major": "n"},
        {"smem_swizzle": 0, "vector_bytes": 4, "tile_m": 32, "warps_m": 1, "warps_n": 4, "a_major": "m"},
        {},
    ],
    ids=str,
)
def test_every_element_is_copied_once_to_where_ldmatrix_reads_it(change: dict[str, int | str]) -> None:
    """All lanes' copies of a stage, enumerated: each element once, at the address of the ring's layout."""
    from tunegemm.generate.cute_sm80.config import KernelConfig
    from tunegemm.generate.cute_sm80.kernel_feed import Feed

    majors = {"a_major": "k", "b_major": "k", "out_major": "n", "in_dtype": "bf16", "out_dtype": "bf16"}
    config = KernelConfig.from_mapping(GOOD | majors | change)
    for operand in ("a", "b"):
        copy = config.copy(operand)
        lines = copy.group * copy.lines_per_pass
        placed: dict[tuple[int, int], int] = {}
        for thread in range(config.threads):
            feed = Feed(config, operand, 2, 0, 0, thread)
            for group in range(copy.passes // copy.group):
                target = feed.base + group * lines * copy.block * 2
                chunk = feed.chunk ^ (feed._swizzle(group * lines) * 2)
                for index in range(copy.group):
                    line = feed.first + group * lines + index * copy.lines_per_pass
                    for piece in range(copy.pieces):
                        element = feed.element + piece * copy.lanes * copy.vector
                        address = feed._address(target, chunk, index, piece)
                        for offset in range(copy.vector):
                            assert (line, element + offset) not in placed
                            placed[line, element + offset] = address // 2 + offset
        assert len(placed) == copy.lines * copy.extent
        for (line, element), place in placed.items():
            # The layout of `Gemm.ring_layout`: blocks of lines, chunks XORed with the bits above them.
            plain = element // copy.block * copy.lines * copy.block + line * copy.block + element % copy.block
            assert place == plain ^ (((plain >> 6) & ((1 << config.smem_swizzle) - 1)) << 3)
