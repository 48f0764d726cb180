"""Examples of the family for few rows, and what only it has. No GPU needed."""

from dataclasses import replace

import pytest

from tunegemm.compile.pool import CompilePool
from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate.skinny import FAMILY
from tunegemm.generate.skinny.rules import config_of, rows_of_tile, split_work
from tunegemm.testing import TOO_LARGE, Examples, Rejection, compile_all

SHAPE = "8x4096x4096"
GOOD = {
    "tile_m": 8, "tile_n": 32, "tile_k": 256, "warps_n": 1, "warps_k": 8, "stages": 4, "vector_bytes": 16,
    "ctas_per_sm": 2,
}  # fmt: skip
LAUNCH = {"ctas": "tiles", "split_k": 1}
PROBLEMS = [
    Problem.parse(SHAPE),
    Problem.parse("16x4096x4096", dtype="fp16", out_dtype="fp32"),
    Problem.parse(SHAPE, alignment=8),
    Problem.parse(SHAPE, dtype="fp8_e4m3", epilogue="scale_rowwise+bias_n"),
    Problem.parse(SHAPE, dtype="fp8_e5m2_e4m3", out_dtype="fp16", epilogue="scale_tensor"),
    Problem.parse(SHAPE, dtype="int8"),
    Problem.parse(SHAPE, dtype="int8", out_dtype="bf16", epilogue="scale_rowwise"),
    Problem.parse(SHAPE, epilogue="swiglu+residual+amax"),
    Problem.parse(SHAPE, epilogue="alpha+beta_c+bias_m+gelu"),
]


def candidate(**changes: int | str) -> Candidate:
    return Candidate.make("skinny", GOOD | changes)


EXAMPLES = Examples(
    "skinny",
    GOOD,
    LAUNCH,
    PROBLEMS,
    corners=[
        # Most accumulators and lines for the registers that there are.
        (PROBLEMS[0], {"tile_n": 128, "stages": 2, "ctas_per_sm": 1}),
        (PROBLEMS[1], {"tile_m": 16, "tile_n": 64, "tile_k": 128, "warps_k": 4, "stages": 3}),
        (PROBLEMS[3], {"tile_n": 64, "tile_k": 512, "warps_k": 4, "ctas_per_sm": 1}),
        (PROBLEMS[0], {"tile_n": 16, "stages": 3, "ctas_per_sm": 4}),
        (PROBLEMS[7], {"tile_n": 16, "stages": 3, "ctas_per_sm": 4}),
        (replace(PROBLEMS[3], m=16), {"tile_m": 16, "tile_k": 512, "stages": 2}),
        (PROBLEMS[7], {"tile_n": 64, "tile_k": 128, "warps_k": 4, "stages": 3, "ctas_per_sm": 3}),
    ],
    rejected=[
        Rejection("mma_tile", {"tile_n": 24}, "tile_n 24 is not a multiple of 16"),
        Rejection("mma_tile", {"tile_k": 128}, "tile_k 128 is not a multiple of 256"),
        Rejection("shared_memory", {"stages": 12}, TOO_LARGE),
        Rejection("registers", {"tile_m": 16, "tile_n": 64, "ctas_per_sm": 4}, "spills"),
    ],
    objections=[
        ("operands", Problem.parse(SHAPE, dtype="tf32"), {}),
        ("operands", Problem.parse(SHAPE, dtype="fp8_e4m3", out_dtype="fp8_e4m3"), {}),
        ("majors", Problem.parse(SHAPE, layout="tt"), {}),
        ("majors", Problem.parse(SHAPE, layout="nn"), {}),
        ("alignment", Problem.parse(SHAPE, alignment=8), {}),
        ("vector_width", PROBLEMS[0], {"vector_bytes": 8}),
        ("whole_vectors", Problem.parse("8x4096x1001", alignment=16), {}),
        ("epilogue_lines", Problem.parse("8x70x4096", out_dtype="fp32", epilogue="beta_c"), {}),
        ("epilogue_lines", Problem.parse("8x136x4096", epilogue="swiglu+residual"), {}),
        ("ring_depth", PROBLEMS[0], {"stages": 1}),
        ("threads", PROBLEMS[0], {"tile_n": 64, "tile_k": 512, "warps_n": 4, "warps_k": 16}),
        ("bytes_in_flight", PROBLEMS[0], {"tile_n": 16, "stages": 2}),
        ("rows_of_tile", PROBLEMS[0], {"tile_m": 16, "ctas_per_sm": 1}),
        ("rows_of_tile", Problem.parse("4096x4096x4096"), {}),
        ("split_work", Problem.parse("8x1024x4096"), {"split_k": 32}),
        ("split_work", PROBLEMS[0], {"split_k": 2}),
    ],
    elsewhere=frozenset({"architecture"}),
)


def test_gpus_without_cp_async_or_fp8_are_refused(h200: Device) -> None:
    turing = replace(h200.architecture, capability=(7, 5), compile_target="sm_75")
    ampere = replace(h200.architecture, capability=(8, 0), compile_target="sm_80")
    assert FAMILY.check(PROBLEMS[0], candidate(), replace(h200, architecture=turing)).rule == "architecture"
    on_ampere = FAMILY.check(PROBLEMS[3], candidate(), replace(h200, architecture=ampere))
    assert on_ampere.rule == "architecture" and "sm_89" in on_ampere.reason


def test_the_bits_of_a_kernel_are_decided_by_its_k_alone() -> None:
    """What `kernel` says of the order of sums: all parameters that change it are of k, and few."""
    config = config_of(PROBLEMS[0], candidate())
    assert config.chunk == 32 and config.unroll == 1
    assert config.tile_k == config.warps_k * config.unroll * config.chunk


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.long
def test_every_number_of_rows_compiles(pool: CompilePool, h200: Device) -> None:
    pairs = [
        (Problem.parse(f"{m}x4096x4096"), candidate(tile_m=tile_m, stages=3, ctas_per_sm=1))
        for m, tile_m in ((1, 8), (8, 8), (9, 16), (24, 24), (32, 32))
    ]
    for (problem, kernel), result in zip(pairs, compile_all(pool, pairs, h200), strict=True):
        assert FAMILY.check(problem, kernel, h200), FAMILY.check(problem, kernel, h200)
        assert result.artifact is not None, result.failure


def test_splits_have_a_step_each_and_an_idle_half(h200: Device) -> None:
    def allows(problem: Problem, split_k: int) -> bool:
        return split_work(problem, candidate().with_launch(ctas="tiles", split_k=split_k), h200) is None

    assert [allows(Problem(8, 64, k), 4) for k in (1024, 1023, 769, 768)] == [True, True, True, False]
    assert [allows(Problem(8, 32 * tiles, 4096), 2) for tiles in (66, 67)] == [True, False]
    assert allows(Problem(8, 32 * 999, 64), 1)
    rows = {m: rows_of_tile(Problem(m, 64, 64), candidate(tile_m=16), h200) is None for m in (8, 9, 64, 65)}
    assert rows == {8: False, 9: True, 64: True, 65: False}
