"""What the author of `plain_triton` tests: `pytest family_tests.py`, where it is installed."""

from tunegemm.describe.problem import Problem
from tunegemm.testing import CompileTests, Examples, GeneratorTests, Rejection

EXAMPLES = Examples(
    "plain_triton",
    {"tile_m": 64, "tile_n": 64, "tile_k": 32, "stages": 2, "warps": 4},
    {"swizzle_size": 1},
    [Problem.parse("4096x4096x4096"), Problem.parse("4096x4096x4096", dtype="fp16")],
    corners=[
        (
            Problem.parse("4096x4096x4096"),
            {"tile_m": 128, "tile_n": 128, "tile_k": 64, "stages": 4, "warps": 8},
        )
    ],
    rejected=[Rejection("registers", {"tile_m": 128, "tile_n": 256}, "spills")],
    objections=[
        ("half_operands", Problem.parse("64x64x64", dtype="int8"), {}),
        ("operands", Problem.parse("64x64x63"), {}),
        ("smem", Problem.parse("4096x4096x4096"), {"tile_n": 512, "tile_k": 64, "stages": 4}),
    ],
)


class TestFamily(GeneratorTests):
    examples = EXAMPLES


class TestKernels(CompileTests):
    examples = EXAMPLES


class TestWithoutExamples(GeneratorTests):
    family = "plain_triton"
