from __future__ import annotations

import math

import pytest
import torch

from tunegemm.describe.problem import LAYOUTS, Problem
from tunegemm.measure import operands as data

CPU = torch.device("cpu")
L2 = 60 << 20


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("out_major", ["n", "m"])
def test_operands_have_the_problems_shape_and_majors(layout: str, batch: int, out_major: str) -> None:
    a_major, b_major = LAYOUTS[layout]
    problem = Problem(40, 24, 56, batch, "fp16", "fp32", a_major, b_major, out_major)
    operands = data.make_operands(problem, CPU, seed=1)
    assert Problem.from_tensors(operands.a, operands.b, out_dtype=torch.float32) == Problem(
        40, 24, 56, batch, "fp16", "fp32", a_major, b_major
    )
    assert operands.out.shape == (*operands.a.shape[:-1], 24)
    assert operands.out.stride()[-1 if out_major == "n" else -2] == 1
    assert operands.out.isnan().all()
    expected = data.reference(operands.a, operands.b)
    torch.testing.assert_close(
        expected.double(), operands.a.double() @ operands.b.double(), rtol=1e-5, atol=1e-4
    )
    operands.out.copy_(expected)
    assert data.check(operands, expected) == data.Check(0.0, 0.0, True)


@pytest.mark.parametrize("alignment", [2, 4, 8, 16])
@pytest.mark.parametrize(
    "extents", [(40, 24, 56), (40, 24, 33), (1, 24, 56), (1, 1, 56), (1, 1, 33), (7, 5, 1)]
)
@pytest.mark.parametrize("batch", [1, 3])
def test_operands_have_the_problems_alignment(
    extents: tuple[int, int, int], batch: int, alignment: int
) -> None:
    problem = Problem(*extents, batch, alignment=alignment)
    operands = data.make_operands(problem, CPU, seed=1)
    assert Problem.from_tensors(operands.a, operands.b) == problem
    assert operands.a.shape[-2:] == extents[::2]


def test_both_guards_are_watched_and_mended() -> None:
    problem = Problem(16, 16, 16)
    operands = data.make_operands(problem, CPU, 0)
    expected = data.reference(operands.a, operands.b)
    for region, index in ((operands.guards[0], -1), (operands.guards[1], 0)):
        operands.out.copy_(expected)
        region[index] = 0
        assert data.check(operands, expected).objection(1e-2) == "wrote outside its output"
        data.restore(operands)
        operands.out.copy_(expected)
        assert data.check(operands, expected).objection(1e-2) is None


def test_rounding_passes_and_worse_does_not() -> None:
    for in_dtype, out_dtype in (("bf16", "bf16"), ("fp16", "fp16"), ("bf16", "fp32"), ("fp16", "bf16")):
        problem = Problem(256, 256, 512, in_dtype=in_dtype, out_dtype=out_dtype)
        operands = data.make_operands(problem, CPU, 0)
        expected = data.reference(operands.a, operands.b)
        limit = data.tolerance(problem)
        operands.out.copy_(operands.a.double() @ operands.b.double())
        checked = data.check(operands, expected)
        assert checked.objection(limit) is None
        assert checked.relative_error < limit / 2, "rounding stays well under the tolerance"
        operands.out[100:164, 64:128] = operands.out[0:64, 0:64].clone()
        assert "relative error" in str(data.check(operands, expected).objection(limit)), "one wrong tile"


def test_nan_never_passes() -> None:
    problem = Problem(64, 64, 64)
    operands = data.make_operands(problem, CPU, 0)
    expected = data.reference(operands.a, operands.b)
    operands.out.copy_(expected)
    operands.out[63, 63] = math.nan
    assert "NaN" in str(data.check(operands, expected).objection(1e9))


def test_sets_pass_the_l2_within_a_quarter_of_the_memory() -> None:
    free = 130 << 30
    small, large = Problem(1024, 1024, 1024), Problem(8192, 8192, 8192)
    assert data.count_sets(small, L2, free) * small.bytes >= 3 * L2
    assert (data.count_sets(small, L2, free) - 1) * small.bytes < 3 * L2
    assert data.count_sets(large, L2, free) == 1
    assert data.count_sets(small, L2, 100 * small.bytes) == 25
    assert data.count_sets(large, L2, large.bytes) == 1, "too large for a quarter: still measured"
    assert data.count_sets(Problem(16, 16, 16), L2, free) == data.MAX_SETS


def test_int8_is_compared_to_the_bit() -> None:
    problem = Problem.parse("32x48x4096", dtype="int8")
    operands = data.make_operands(problem, CPU, 0)
    assert (operands.a.min(), operands.a.max()) == (-128, 127)
    wanted = data.expected(problem, operands)
    assert wanted.dtype == torch.int32
    limit = data.tolerance(problem)
    assert data.check(operands, wanted).objection(limit), "an output that nobody wrote"
    operands.out.copy_(wanted)
    assert data.check(operands, wanted).objection(limit) is None
    operands.out[3, 5] += 1
    assert "relative error" in str(data.check(operands, wanted).objection(limit))


@pytest.mark.parametrize("in_dtype", ["fp8_e4m3", "fp8_e5m2_e4m3"])
def test_fp8_sums_of_a_long_k_may_be_less_exact(in_dtype: str) -> None:
    short, long = (Problem.parse(f"64x64x{k}", dtype=in_dtype, out_dtype="fp32") for k in (128, 16384))
    assert data.tolerance(short) < data.tolerance(long) < 0.05
    promoted = Problem.parse("64x64x16384", dtype=in_dtype, out_dtype="fp32", accumulation="two_level")
    assert data.tolerance(promoted) == data.tolerance(short)


def test_fp32_output_that_went_through_bf16_is_wrong() -> None:
    problem = Problem(64, 64, 64, out_dtype="fp32")
    operands = data.make_operands(problem, CPU, 0)
    expected = data.reference(operands.a, operands.b)
    operands.out.copy_(expected.bfloat16())
    assert "relative error" in str(data.check(operands, expected).objection(data.tolerance(problem)))
