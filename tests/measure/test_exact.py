"""Planted kernels that leave something out are refused at every length of k; right ones pass in any order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tunegemm.describe.problem import Problem
from tunegemm.measure import operands as data

CPU = torch.device("cpu")
DTYPES = ["bf16", "fp16", "tf32", "int8", "fp8_e4m3", "fp8_e5m2"]


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """In fp32: all sums are exact."""
    return a.float() @ b.float()


#: What a kernel leaves out of a right result: some of k, or some of the output.
LEFT_OUT: dict[str, slice | tuple[slice | int, ...]] = {
    "last 1": slice(-1, None), "last 4": slice(-4, None), "last 8": slice(-8, None),
    "last 64": slice(-64, None), "first": slice(0, 1), "31st": slice(31, 32), "32nd": slice(32, 33),
    "a tile": slice(32, 64), "a row": (5,), "a column": (slice(None), 7),
    "a corner": (slice(-8, None), slice(-8, None)),
}  # fmt: skip


def wrong(
    operands: data.Operands, right: torch.Tensor, left_out: slice | tuple[slice | int, ...]
) -> torch.Tensor:
    if isinstance(left_out, slice):
        return right - product(operands.a[:, left_out], operands.b[left_out])
    found = right.clone()
    found[left_out] = 0
    return found


def judged(
    problem: Problem, operands: data.Operands, result: torch.Tensor, wanted: torch.Tensor | None = None
) -> str | None:
    wanted = data.expected(problem, operands) if wanted is None else wanted
    operands.out.copy_(result)
    return data.exact_objection(problem, operands, wanted)


def refuse_all(
    problem: Problem, finished: Callable[[torch.Tensor], torch.Tensor] = lambda sums: sums
) -> None:
    operands = data.make_exact(problem, CPU, seed=1)
    right, wanted = product(operands.a, operands.b), data.expected(problem, operands)
    assert judged(problem, operands, finished(right), wanted) is None
    quarter = slice(-(problem.k // 4), None)
    for name, left_out in {**LEFT_OUT, "a quarter of k": quarter}.items():
        assert judged(problem, operands, finished(wrong(operands, right, left_out)), wanted), name
    data.restore(operands)
    assert data.exact_objection(problem, operands, wanted), "nothing was written"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ["48x40x64", "48x40x16384", "16x64x65536", "48x40x131072"])
def test_what_leaves_something_out_is_refused(shape: str, dtype: str) -> None:
    refuse_all(Problem.parse(shape, dtype=dtype))


@pytest.mark.parametrize("out_dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_outputs_of_few_bits(out_dtype: str) -> None:
    refuse_all(Problem.parse("48x40x131072", dtype="fp8_e4m3", out_dtype=out_dtype))


def truncated(sums: torch.Tensor, bits: int) -> torch.Tensor:
    """To so many significant bits, towards zero."""
    mantissa, exponent = torch.frexp(sums)
    return torch.ldexp(torch.trunc(mantissa * 2.0**bits) / 2.0**bits, exponent)


@pytest.mark.parametrize("how", ["14 bits", "fp16", "bf16 splits", "backwards"])
@pytest.mark.parametrize(("m", "n"), [(48, 40), (1, 64), (1, 8)])
@pytest.mark.parametrize("k", [2048, 65536])
def test_a_right_kernel_passes_however_it_adds(how: str, m: int, n: int, k: int) -> None:
    """As Hopper's tensor cores add fp8 products, 32 of k at a time and without what 14 bits do not hold; in
    fp16; by splits of k that are added up in the output's dtype.
    """
    problem = Problem.parse(f"{m}x{n}x{k}", dtype="fp8_e4m3" if how == "14 bits" else "bf16")
    operands = data.make_exact(problem, CPU, seed=2)
    a, b = operands.a.float(), operands.b.float()
    step = k // 16 if how == "bf16 splits" else 32
    starts = range(0, k, step)
    total = torch.zeros(m, n)
    for start in reversed(starts) if how == "backwards" else starts:
        total += a[:, start : start + step] @ b[start : start + step]
        if how == "14 bits":
            total = truncated(total, 14)
        elif how != "backwards":
            total = total.to(torch.float16 if how == "fp16" else torch.bfloat16).float()
    assert judged(problem, operands, total) is None


@pytest.mark.parametrize(
    ("k", "epilogue"),
    [
        (64, "relu"), (64, "bias_n+gelu_tanh"), (64, "swiglu"), (131072, "bias_n+gelu_tanh"),
        *(pytest.param(131072, one, marks=pytest.mark.slow) for one in ("relu", "swiglu")),
    ],
)  # fmt: skip
def test_with_an_epilogue_each_k_is_seen_too(k: int, epilogue: str) -> None:
    problem = Problem.parse(f"64x64x{k}", dtype="bf16", epilogue=epilogue)
    operands = data.make_exact(problem, CPU, seed=1)
    named = dict(zip((one.name for one in problem.fused.operands), operands.fused, strict=True))
    refuse_all(problem, lambda sums: problem.fused.reference(sums, named))


def test_batches_and_majors() -> None:
    problem = Problem(24, 16, 4096, 3, "fp16", "fp32", "m", "n", "m")
    operands = data.make_exact(problem, CPU, seed=4)
    assert Problem.from_tensors(operands.a, operands.b, out_dtype=torch.float32).a_major == "m"
    right = product(operands.a, operands.b)
    assert judged(problem, operands, right) is None
    right[2, 3, 4] += 1
    assert "1 of 1152 elements differ" in str(judged(problem, operands, right))
    assert set(operands.a.unique().tolist()) == {-1.0, 0.0, 1.0}
    for matrix in (operands.a, operands.b.mT):
        assert (matrix != 0).any(-2).all(), "no k is left out"


def test_of_a_long_k_both_ends_and_both_sides_of_each_multiple_of_32_are_used() -> None:
    k = 65536 + 8
    operands = data.make_exact(Problem.parse(f"8x8x{k}"), CPU, seed=1)
    wanted = {*range(128), *range(k - 128, k), *range(0, k, 32), *range(31, k, 32)}
    assert {*(operands.a != 0).any(0).nonzero().ravel().tolist()} == wanted
    assert {*(operands.b != 0).any(1).nonzero().ravel().tolist()} == wanted
