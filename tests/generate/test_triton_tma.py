"""Feasibility of the Triton family from both sides, by the compiler's own report. No GPU needed.

`TUNEGEMM_TEST_SAMPLE=N` compiles N accepted candidates instead of the default few dozen.
"""

import math
import os
import random
from collections.abc import Iterator

import pytest

from tunegemm.describe.device import Device, find_device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.errors import ArtifactError
from tunegemm.generate import families
from tunegemm.generate.artifacts import ArtifactStore
from tunegemm.generate.compile import CompilePool, CompileResult
from tunegemm.generate.triton_object import read_object
from tunegemm.generate.triton_tma import FAMILY, grid
from tunegemm.generate.triton_tma.rules import RULES, config_of

SAMPLE = int(os.environ.get("TUNEGEMM_TEST_SAMPLE", "27"))
SHAPE = "4096x4096x4096"
GOOD = {
    "schedule": "pipelined", "tile_m": 128, "tile_n": 128, "tile_k": 64, "stages": 4, "warps": 8, "epi_n": 64,
    "swap_ab": False,
}  # fmt: skip
SPECIALIZED = {"schedule": "warp_specialized", "warps": 4, "epi_n": 128}
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


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CompilePool]:
    with CompilePool(ArtifactStore(tmp_path_factory.mktemp("objects"))) as pool:
        yield pool


@pytest.fixture(scope="module")
def h200() -> Device:
    return find_device("model:h200")


def candidate(**changes: int | str) -> Candidate:
    return Candidate.make("triton_tma", GOOD | changes)


def compile_all(
    pool: CompilePool, h200: Device, pairs: list[tuple[Problem, Candidate]]
) -> list[CompileResult]:
    futures = [pool.submit("triton_tma", FAMILY.kernel_key(problem, c, h200)) for problem, c in pairs]
    return [future.result() for future in futures]


def test_what_is_accepted_compiles_clean_and_to_the_byte(pool: CompilePool, h200: Device) -> None:
    space = families.load_space("triton_tma")
    generator = random.Random(0)
    pairs = []
    for problem in PROBLEMS:
        accepted = [k for k in space.kernels() if FAMILY.check(problem, k, h200)]
        assert len(accepted) > 300
        pairs += [(problem, k) for k in generator.sample(accepted, math.ceil(SAMPLE / len(PROBLEMS)))]
    # The corners: most accumulators, blocks beyond one TMA box, columns that move through the ring.
    corners = [
        candidate(tile_n=256, stages=3),
        candidate(tile_m=256, stages=3, epi_n=32),
        candidate(tile_m=512, tile_n=64, stages=2),
        candidate(tile_m=64, tile_n=256, stages=4, epi_n=64),
        candidate(**FLATTENED, warps=4),
        candidate(**FLATTENED, tile_m=256, tile_n=128, warps=16, stages=3),
        candidate(**SPECIALIZED | {"tile_n": 256, "epi_n": 256}, stages=3),
        candidate(**SPECIALIZED, tile_m=256, stages=3),
        candidate(**SPECIALIZED | {"tile_n": 64, "epi_n": 64}, stages=7),
    ]
    pairs += [(PROBLEMS[0], corner) for corner in corners]
    for (problem, kernel), result in zip(pairs, compile_all(pool, h200, pairs), strict=True):
        assert FAMILY.check(problem, kernel, h200), (problem, kernel)
        assert result.failure == "", (problem, kernel)
        assert result.artifact is not None
        resources = result.artifact.resources
        assert resources.spill_bytes == 0 and resources.warnings == ()
        assert resources.smem_bytes == FAMILY.smem_bytes(problem, kernel), (problem, kernel)
        header, _ = read_object(result.artifact.path.read_bytes())
        assert header.threads == config_of(problem, kernel).threads
        assert (header.scratch_bytes > 0) == (kernel["schedule"] == "warp_specialized")


#: Stands for what the compiler takes, into more or less shared memory than the formula says: it does not
#: pipeline, specialize or subtile as asked. With one version of Triton it may spill as well.
OTHERWISE = "another kernel"

# Per rule: a change to GOOD that only this rule objects to, and what the compiler says of it. Where it says
# nothing, the object exceeds a limit of the hardware, which is asserted instead.
REJECTED = [
    ("block_shape", {"tile_m": 96}, "power of 2"),
    ("block_shape", {"tile_m": 32}, OTHERWISE),
    ("block_shape", {"tile_n": 96, "epi_n": 96}, "power of 2"),
    ("block_shape", {"tile_n": 8, "epi_n": 8}, OTHERWISE),
    ("block_shape", {"tile_k": 8}, "RuntimeError"),
    ("warps", {"warps": 2}, "spills"),
    ("warps", {"warps": 12}, "power of 2"),
    ("epilogue_tile", {"epi_n": 48}, "power of 2"),
    ("epilogue_tile", {"epi_n": 256}, "RuntimeError"),
    ("epilogue_tile", FLATTENED | {"tile_m": 64}, OTHERWISE),
    ("warp_specialization", SPECIALIZED | {"warps": 8}, OTHERWISE),
    ("warp_specialization", SPECIALIZED | {"tile_m": 64}, OTHERWISE),
    ("warp_specialization", SPECIALIZED | {"tile_m": 64, "tile_n": 256, "epi_n": 256}, "RuntimeError"),
    ("accumulators", {"tile_n": 256, "warps": 4, "stages": 3}, "spills"),
    ("accumulators", {"tile_m": 256, "tile_n": 256, "stages": 2}, "spills"),
    ("accumulators", {"schedule": "warp_specialized", "tile_m": 256, "tile_n": 256, "epi_n": 256,
                      "stages": 2, "warps": 4}, "spills"),
    ("ring_depth", {"stages": 1}, OTHERWISE),
    ("reduction", {"tile_n": 256, "epi_n": 256, "stages": 2, "tile_k": 32}, OTHERWISE),
    ("shared_memory", {"stages": 8}, ""),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "change", "verdict"), REJECTED)
def test_what_is_rejected_fails(
    pool: CompilePool, h200: Device, rule: str, change: dict[str, int | str], verdict: str
) -> None:
    problem, kernel = PROBLEMS[0], candidate(**change)
    assert FAMILY.check(problem, kernel, h200).rule == rule
    (result,) = compile_all(pool, h200, [(problem, kernel)])
    if verdict not in ("", OTHERWISE):
        assert verdict in result.failure
        return
    if verdict == OTHERWISE and result.artifact is None:
        assert "spills" in result.failure
        return
    assert result.artifact is not None
    smem_bytes = result.artifact.resources.smem_bytes
    if verdict == OTHERWISE:
        assert smem_bytes != FAMILY.smem_bytes(problem, kernel)
    else:
        assert smem_bytes > h200.architecture.smem_bytes_per_block


@pytest.mark.parametrize(
    ("rule", "problem", "change"),
    [
        ("tma_alignment", Problem.parse("4096x4096x1001"), {}),
        ("tma_alignment", Problem.parse("4096x1004x4096"), {}),
        ("tma_alignment", Problem.parse("4100x1024x4096", layout="nn"), {}),
        ("epilogue_tile", PROBLEMS[0], {"epi_n": 16}),
        ("warp_specialization", Problem.parse("512x512x512x3"), SPECIALIZED),
        ("warp_specialization", PROBLEMS[0], SPECIALIZED | {"epi_n": 64}),
        ("warp_specialization", PROBLEMS[0], SPECIALIZED | {"tile_k": 32}),
        ("warp_specialization", PROBLEMS[0], SPECIALIZED | {"stages": 9}),
        ("reduction", Problem.parse("256x256x4096"), SPECIALIZED | {"split_k": 2}),
        ("reduction", Problem.parse("256x256x4096"), FLATTENED | {"split_k": 2}),
        ("two_fits", PROBLEMS[0], {"ctas": "two_per_sm"}),
        ("two_fits", Problem.parse("512x512x512"), {"ctas": "two_per_sm", "stages": 2}),
        ("two_fits", PROBLEMS[0], {"ctas": "two_per_sm", "tile_n": 256, "tile_k": 32, "stages": 2}),
        ("swap_fits", PROBLEMS[0], {"swap_ab": True}),
        ("split_fits", PROBLEMS[0], {"split_k": 2}),
        ("split_fits", Problem.parse("64x64x512"), {"split_k": 4}),
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
    """No dead rule: each rejects something in the cases above."""
    seen = {rule for rule, _, _ in REJECTED}
    seen |= {"architecture", "half_operands", "tma_alignment", "two_fits", "swap_fits", "split_fits"}
    assert {rule.__name__ for rule in RULES} <= seen
    assert FAMILY.check(PROBLEMS[0], candidate(), find_device("model:a100-sxm-80gb")).rule == "architecture"


def test_two_blocks_fit_a_multiprocessor(pool: CompilePool, h200: Device) -> None:
    """By the compiler's registers, not only by the rule's estimate."""
    kernels = [
        candidate(tile_m=64, warps=4, tile_n=128, stages=3, epi_n=32),
        candidate(tile_m=128, warps=4, tile_n=128, stages=2, epi_n=64),
        candidate(tile_m=128, warps=8, tile_n=64, stages=4, epi_n=64),
    ]
    for kernel, result in zip(
        kernels, compile_all(pool, h200, [(PROBLEMS[0], k) for k in kernels]), strict=True
    ):
        assert FAMILY.check(PROBLEMS[0], kernel.with_launch(**LAUNCH | {"ctas": "two_per_sm"}), h200)
        assert result.artifact is not None
        threads = config_of(PROBLEMS[0], kernel).threads
        registers = -(-result.artifact.resources.registers // 8) * 8  # allotted in eights
        assert 2 * threads * registers <= h200.architecture.registers_per_sm
        assert 2 * (result.artifact.resources.smem_bytes + 1024) <= h200.architecture.smem_bytes_per_sm


def test_grids(h200: Device) -> None:
    for shape, ctas, split_k, expected in [
        (SHAPE, "all", 1, 132),
        (SHAPE, "two_per_sm", 1, 264),
        (SHAPE, "balanced", 1, 128),
        ("128x128x4096", "two_per_sm", 1, 1),
        ("128x1024x4096", "all", 4, 32),
    ]:
        launch = candidate().with_launch(**LAUNCH | {"ctas": ctas, "split_k": split_k})
        assert grid(Problem.parse(shape), launch, h200) == expected


def test_labels_are_short_and_distinct(h200: Device) -> None:
    kernels = [k for k in families.load_space("triton_tma").kernels() if FAMILY.check(PROBLEMS[7], k, h200)]
    labels = {FAMILY.label(k) for k in kernels}
    assert len(labels) == len(kernels)
    assert max(map(len, labels)) < 32


def test_one_object_serves_every_shape(h200: Device) -> None:
    keys = {
        str(FAMILY.kernel_key(Problem.parse(shape), candidate().with_launch(**LAUNCH | {"split_k": k}), h200))
        for shape, k in (("4096x4096x4096", 1), ("8x16x24", 3), ("128x128x128x7", 16))
    }
    assert len(keys) == 1


def test_a_failing_compile_is_remembered_and_the_pool_goes_on(pool: CompilePool, h200: Device) -> None:
    bad, good = candidate(tile_m=96, warps=4), candidate(tile_n=32, epi_n=32)
    first, second = compile_all(pool, h200, [(PROBLEMS[0], bad), (PROBLEMS[0], good)])
    assert "power of 2" in first.failure and second.artifact is not None
    assert pool.store.failure(FAMILY.kernel_key(PROBLEMS[0], bad, h200)) == first.failure


def test_load_without_an_object_names_the_remedy(h200: Device) -> None:
    with pytest.raises(ArtifactError, match="run tunegemm tune"):
        FAMILY.load(PROBLEMS[0], candidate().with_launch(**LAUNCH), h200, None)
