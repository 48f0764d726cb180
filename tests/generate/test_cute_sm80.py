"""Feasibility of the Ampere family from both sides, by the compiler's own report. No GPU needed.

`TUNEGEMM_TEST_SAMPLE=N` compiles N accepted candidates instead of the default few.
"""

import math
import os
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tunegemm.describe.device import ARCHITECTURES, Device, find_device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate import families
from tunegemm.generate.artifacts import ArtifactStore
from tunegemm.generate.compile import CompilePool, CompileResult
from tunegemm.generate.cute_object import load_function
from tunegemm.generate.cute_sm80 import FAMILY, grid_ctas
from tunegemm.generate.cute_sm80.rules import RULES, config_of

SAMPLE = int(os.environ.get("TUNEGEMM_TEST_SAMPLE", "8"))
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


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CompilePool]:
    with CompilePool(ArtifactStore(tmp_path_factory.mktemp("objects"))) as pool:
        yield pool


@pytest.fixture(scope="module")
def h200() -> Device:
    return find_device("model:h200")


def candidate(**changes: int | str) -> Candidate:
    return Candidate.make("cute_sm80", GOOD | changes)


def compile_all(pool: CompilePool, pairs: list[tuple[Problem, Candidate, Device]]) -> list[CompileResult]:
    futures = [pool.submit("cute_sm80", FAMILY.kernel_key(*pair)) for pair in pairs]
    return [future.result() for future in futures]


@pytest.mark.timeout(600)
def test_what_is_accepted_compiles_clean_and_to_the_byte(pool: CompilePool, h200: Device) -> None:
    space = families.load_space("cute_sm80")
    generator = random.Random(0)
    kernels = list(space.kernels())
    pairs = []
    for problem in PROBLEMS:
        chosen = generator.sample(kernels, 2000)
        accepted = [kernel for kernel in chosen if FAMILY.check(problem, kernel, h200)]
        assert len(accepted) > 20
        pairs += [
            (problem, kernel, h200)
            for kernel in generator.sample(accepted, math.ceil(SAMPLE / len(PROBLEMS)))
        ]
    # The corners of the register rule, where a spill would show first.
    pairs += [
        (PROBLEMS[0], candidate(), h200),
        (PROBLEMS[0], candidate(tile_k=64, smem_swizzle=3, stages=4), h200),
        (PROBLEMS[1], candidate(vector_bytes=2, tile_k=64, smem_swizzle=3, stages=4), h200),
        (PROBLEMS[6], candidate(acc_dtype="fp16"), h200),
    ]
    for (problem, kernel, _), result in zip(pairs, compile_all(pool, pairs), strict=True):
        assert FAMILY.check(problem, kernel, h200), (problem, kernel)
        assert result.failure == "", (problem, kernel)
        assert result.artifact is not None
        resources = result.artifact.resources
        assert resources.spill_bytes == 0 and resources.warnings == ()
        assert resources.smem_bytes == FAMILY.smem_bytes(problem, kernel), (problem, kernel)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9)])
def test_compiles_for_ampere_and_ada(pool: CompilePool, h200: Device, capability: tuple[int, int]) -> None:
    """The same kernels, without a GPU, for every architecture with cp.async; their limits are their own."""
    device = replace(h200, architecture=ARCHITECTURES[capability])
    pairs = [
        (PROBLEMS[0], candidate(), device),
        (PROBLEMS[1], candidate(vector_bytes=2, tile_n=64), device),
    ]
    for (problem, kernel, _), result in zip(pairs, compile_all(pool, pairs), strict=True):
        assert FAMILY.check(problem, kernel, device)
        assert result.artifact is not None, result.failure
        assert f"{capability[0]}{capability[1]}" in FAMILY.kernel_key(problem, kernel, device)["target"]  # type: ignore[operator]
        assert result.artifact.resources.smem_bytes <= device.architecture.smem_bytes_per_block
    deep = candidate(tile_k=64, smem_swizzle=3, stages=4)
    assert bool(FAMILY.check(PROBLEMS[0], deep, device)) == (capability == (8, 0))


# Per rule: a change to GOOD that only this rule objects to, and what the compiler says of it. Where it says
# nothing, the object exceeds a limit of the hardware, which is asserted instead.
REJECTED = [
    ("accumulation", {"acc_dtype": "fp16"}, "acc_dtype"),
    ("mma_tile", {"tile_m": 96, "warps_m": 4, "warps_n": 1}, "Error"),
    ("mma_tile", {"tile_k": 16, "smem_swizzle": 0}, "Error"),
    ("copies", {"tile_n": 64, "warps_m": 4, "warps_n": 4, "tile_m": 256}, "no whole passes"),
    ("copies", {"smem_swizzle": 3}, "swizzle of 3 bits"),
    ("registers", {"tile_m": 256}, "spills"),
    ("registers", {"warps_n": 4, "ctas_per_sm": 2, "tile_k": 64, "smem_swizzle": 3}, "spills"),
    ("shared_memory", {"tile_k": 64, "smem_swizzle": 3, "stages": 8}, ""),
]


@pytest.mark.parametrize(("rule", "change", "verdict"), REJECTED)
def test_what_is_rejected_fails(
    pool: CompilePool, h200: Device, rule: str, change: dict[str, int | str], verdict: str
) -> None:
    problem, kernel = PROBLEMS[0], candidate(**change)
    assert FAMILY.check(problem, kernel, h200).rule == rule
    (result,) = compile_all(pool, [(problem, kernel, h200)])
    if verdict:
        assert verdict in result.failure
    else:
        assert result.artifact is not None
        assert result.artifact.resources.smem_bytes > h200.architecture.smem_bytes_per_block


@pytest.mark.parametrize(
    ("rule", "problem", "change"),
    [
        ("alignment", Problem.parse("4096x4096x1001"), {}),
        ("alignment", Problem.parse(SHAPE, alignment=8), {}),
        ("vector_fits", PROBLEMS[0], {"vector_bytes": 8}),
        ("accumulation_fits", Problem.parse(SHAPE, dtype="fp16"), {"acc_dtype": "fp16"}),
        (
            "accumulation_fits",
            Problem.parse("64x64x64", dtype="fp16", out_dtype="fp32"),
            {"acc_dtype": "fp16"},
        ),
        ("threads", PROBLEMS[0], {"tile_m": 512, "tile_n": 512, "warps_m": 8, "warps_n": 8}),
        ("shared_memory", PROBLEMS[0], {"tile_k": 64, "smem_swizzle": 3, "stages": 4, "ctas_per_sm": 2}),
        ("ring_depth", PROBLEMS[0], {"stages": 1}),
        ("split_fits", PROBLEMS[0], {"split_k": 2}),
    ],
)
def test_each_rule_names_its_numbers(
    h200: Device, rule: str, problem: Problem, change: dict[str, int | str]
) -> None:
    launch = {name: value for name, value in change.items() if name in LAUNCH}
    chosen = candidate(**{n: v for n, v in change.items() if n not in LAUNCH}).with_launch(**launch)
    verdict = FAMILY.check(problem, chosen, h200)
    assert verdict.rule == rule
    assert any(character.isdigit() for character in verdict.reason)


def test_every_rule_can_object(h200: Device) -> None:
    """No dead rule: each rejects something in the cases above, or an older GPU."""
    seen = {rule for rule, _, _ in REJECTED}
    seen |= {
        "half_operands",
        "ring_depth",
        "alignment",
        "vector_fits",
        "accumulation_fits",
        "threads",
        "split_fits",
        "architecture",
    }
    assert {rule.__name__ for rule in RULES} <= seen
    turing = replace(h200.architecture, capability=(7, 5), compile_target="sm_75")
    assert FAMILY.check(PROBLEMS[0], candidate(), replace(h200, architecture=turing)).rule == "architecture"


def test_every_alignment_has_kernels_where_tma_has_none(h200: Device) -> None:
    tma = families.get("triton_tma")
    kernel = next(
        k for k in families.load_space("triton_tma").kernels() if tma.check(Problem.parse(SHAPE), k, h200)
    )
    for alignment in (2, 4, 8, 16):
        problem = Problem.parse(SHAPE, alignment=alignment)
        assert FAMILY.check(problem, candidate(vector_bytes=alignment, warps_n=4), h200)
        assert tma.check(problem, kernel, h200).feasible == (alignment == 16)


def test_grids(h200: Device) -> None:
    problem = Problem.parse(SHAPE)
    launch = candidate(ctas_per_sm=2).with_launch(**LAUNCH)
    assert grid_ctas(problem, launch, h200) == 1024
    assert grid_ctas(problem, launch.with_launch(ctas="all"), h200) == 264
    assert grid_ctas(problem, launch.with_launch(ctas="balanced"), h200) == 256
    assert grid_ctas(Problem.parse("64x64x4096"), launch.with_launch(ctas="all", split_k=4), h200) == 4


def test_labels_are_short_and_distinct(h200: Device) -> None:
    kernels = random.Random(0).sample(list(families.load_space("cute_sm80").kernels()), 2000)
    labels = {FAMILY.label(kernel) for kernel in kernels}
    assert len(labels) == len(kernels)
    assert max(map(len, labels)) < 40


def test_one_object_serves_every_shape(h200: Device) -> None:
    keys = {
        str(FAMILY.kernel_key(Problem.parse(shape), candidate(), h200))
        for shape in ("4096x4096x4096", "8x16x24", "128x128x128x7")
    }
    assert len(keys) == 1


def test_an_object_holds_the_launch_function(pool: CompilePool, h200: Device) -> None:
    (result,) = compile_all(pool, [(PROBLEMS[0], candidate(), h200)])
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
    from tunegemm.generate.cute_sm80.kernel import Feed

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
