"""Numerics of the kernels for few rows on the GPU, against fp32: every number of rows, ragged, fused."""

from __future__ import annotations

import pytest
import torch

from tests.support.kernels import Kernels, selected
from tests.support.numerics import Case, Examples, check_bits, check_product, operand, poisoned
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate.skinny import FAMILY

pytestmark = pytest.mark.gpu

NAMES = ("tile_m", "tile_n", "tile_k", "warps_n", "warps_k", "stages", "ctas_per_sm")
KERNELS = [
    (8, 32, 256, 1, 8, 4, 2),
    (8, 16, 512, 1, 16, 3, 1),
    (8, 64, 128, 2, 4, 4, 2),
    (8, 128, 64, 4, 1, 3, 2),
    (16, 32, 512, 1, 4, 2, 1),
    (16, 64, 64, 4, 2, 5, 2),
    (24, 32, 128, 2, 2, 6, 1),
    (32, 64, 128, 2, 4, 4, 1),
    (16, 48, 256, 1, 8, 5, 1),
]
LAUNCHES = [("tiles", 1), ("all", 1), ("balanced", 3), ("tiles", 2), ("all", 8)]
EXAMPLES = Examples(
    "skinny",
    NAMES,
    KERNELS,
    ("ctas", "split_k"),
    LAUNCHES,
    of_each_schedule=(0, 3, 5, 7),
    refusals=frozenset({"majors"}),
    fixed={"vector_bytes": 16},
)
#: n, k and the padding of each row, in elements.
EXTENTS = [(4096, 4096, 0), (1003, 1096, 8), (1, 8, 0), (35, 72, 24), (264, 4104, 0)]
ROWS = [*range(1, 17), 17, 24, 31, 33, 64, 300]
EPILOGUES = [
    ("bf16", "bf16", "bias_n"),
    ("bf16", "bf16", "bias_m+gelu"),
    ("fp16", "fp32", "alpha+beta_c+bias_n+silu"),
    ("bf16", "bf16", "swiglu"),
    ("fp16", "fp16", "bias_n+geglu_tanh+residual"),
    ("bf16", "bf16", "relu+residual+amax"),
    ("fp8_e4m3", "bf16", "scale_tensor"),
    ("fp8_e4m3", "bf16", "scale_rowwise+bias_n+swiglu"),
    ("fp8_e5m2_e4m3", "fp16", "scale_rowwise"),
    ("fp8_e4m3_e5m2", "fp32", ""),
    ("int8", "int32", ""),
    ("int8", "bf16", "scale_rowwise"),
    ("int8", "fp16", "scale_tensor+bias_n+gelu_tanh"),
]


@pytest.fixture(scope="module")
def kernels(kernels: Kernels, request: pytest.FixtureRequest) -> Kernels:
    plain = [("bf16", number) for (number,) in selected(request, "number")]
    plain += selected(request, "dtype", "number")
    wanted = [(Problem.parse("8x512x512", dtype=dtype), EXAMPLES.kernel(number)) for dtype, number in plain]
    for in_dtype, out_dtype, epilogue in selected(request, "in_dtype", "out_dtype", "epilogue"):
        problem = Problem.parse("8x512x512", dtype=in_dtype, out_dtype=out_dtype, epilogue=epilogue)
        wanted += [(problem, of_dtype(number, problem)) for number in (0, 5)]
    kernels.begin_all(wanted)
    return kernels


def of_dtype(number: int, problem: Problem, launch: int = 0) -> Candidate:
    """The kernel with a step that is whole chunks of 1-byte elements, too."""
    wider = 2 if problem.in_dtype in ("bf16", "fp16") else 4
    return EXAMPLES.launch(number, launch, tile_k=KERNELS[number][2] * wider // 2)


@pytest.mark.parametrize("number", range(len(KERNELS)), ids=lambda n: FAMILY.label(EXAMPLES.kernel(n)))
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_right_for_every_number_of_rows(kernels: Kernels, number: int, dtype: str) -> None:
    for m in ROWS:
        for place, (n, k, pad) in enumerate(EXTENTS):
            problem = Problem.parse(f"{m}x{n}x{k}", dtype=dtype)
            for launch in (place, place + 2):
                candidate = EXAMPLES.launch(number, launch)
                assert (verdict := FAMILY.check(problem, candidate, kernels.device)).runs, verdict
                check_product(
                    kernels.load(problem, candidate), problem, FAMILY.label(candidate), pad=pad, runs=2
                )


@pytest.mark.parametrize(("in_dtype", "out_dtype", "epilogue"), EPILOGUES)
def test_right_with_every_epilogue_and_dtype(
    kernels: Kernels, in_dtype: str, out_dtype: str, epilogue: str
) -> None:
    for number in (0, 5):
        for launch, shape in enumerate(
            ("1x512x512", "7x1008x1104", "16x4096x4096", "33x80x4112", "8x144x96x3")
        ):
            problem = Problem.parse(shape, dtype=in_dtype, out_dtype=out_dtype, epilogue=epilogue)
            candidate = of_dtype(number, problem, launch)
            assert (verdict := FAMILY.check(problem, candidate, kernels.device)).runs, verdict
            Case.of(problem).check(kernels.load(problem, candidate), FAMILY.label(candidate), runs=2)


def test_right_where_vectors_are_of_8_bytes(kernels: Kernels) -> None:
    for m, n, k, pad in ((3, 1000, 1100, 0), (16, 264, 4100, 4), (9, 33, 12, 8)):
        problem = Problem.parse(f"{m}x{n}x{k}", alignment=8)
        candidate = EXAMPLES.launch(0, 1, vector_bytes=8)
        assert (verdict := FAMILY.check(problem, candidate, kernels.device)).runs, verdict
        check_product(kernels.load(problem, candidate), problem, FAMILY.label(candidate), pad=pad, runs=2)


@pytest.mark.parametrize("number", range(len(KERNELS)), ids=lambda n: FAMILY.label(EXAMPLES.kernel(n)))
def test_back_to_back_runs_agree_bitwise(kernels: Kernels, number: int) -> None:
    a = torch.randn(16, 4096, device="cuda").bfloat16()
    b = torch.randn(4096, 4096, device="cuda").bfloat16().t()
    for launch in range(len(LAUNCHES)):
        candidate = EXAMPLES.launch(number, launch)
        check_bits(kernels.load(Problem.parse("16x4096x4096"), candidate), a, b, FAMILY.label(candidate))


def test_a_rows_bits_depend_on_neither_the_other_rows_nor_the_tile(kernels: Kernels) -> None:
    """But on what says how k is cut: the number of warps along it, their step and the k splits."""
    rows, n, k = 40, 520, 4096
    a, b = (operand(True, extent, k, 1, 0, "bf16")[0] for extent in (rows, n))
    changes = [
        {}, {"tile_m": 16}, {"tile_m": 32, "stages": 3}, {"tile_n": 64, "stages": 3}, {"tile_n": 16},
        {"tile_n": 64, "warps_n": 2, "stages": 2, "ctas_per_sm": 1}, {"stages": 2}, {"ctas_per_sm": 1},
    ]  # fmt: skip
    expected = None
    for change in changes:
        for m in (*range(1, 18), 24, 33, rows):
            problem, out = Problem.parse(f"{m}x{n}x{k}"), poisoned(m, n)
            kernels.load(problem, EXAMPLES.launch(0, 1, **change))(a[:m], b.t(), out)
            expected = out if expected is None else expected
            if out.shape[0] > expected.shape[0]:
                assert torch.equal(out[: expected.shape[0]], expected), (change, m)
                expected = out
            assert torch.equal(out, expected[:m]), (change, m)
    assert expected is not None
    other = poisoned(rows, n)
    kernels.load(Problem.parse(f"{rows}x{n}x{k}"), EXAMPLES.launch(0, 3))(a, b.t(), other)
    assert not torch.equal(other, expected), "two k splits sum in another order"
