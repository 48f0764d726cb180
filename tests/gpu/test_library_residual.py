"""Residuals that torch's library adds: its algorithms by themselves, and a product that one serves."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

import tunegemm
from tests.support.numerics import Case
from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.dispatch import api
from tunegemm.generate.cublaslt import FAMILY, library
from tunegemm.generate.cublaslt.names import ADDED
from tunegemm.generate.takes import NotTaken
from tunegemm.measure.operands import expected

pytestmark = pytest.mark.gpu

PROBLEMS = [
    Problem(1, 512, 1024), Problem(5, 2056, 776), Problem(300, 1040, 520, in_dtype="fp16", out_dtype="fp16"),
    Problem(1024, 4096, 4096), Problem(264, 144, 1000, a_major="m", b_major="n", out_major="m"),
]  # fmt: skip


@pytest.mark.parametrize("epilogue", ADDED)
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_its_algorithms_add_a_residual(problem: Problem, epilogue: str, device: Device) -> None:
    problem = replace(problem, epilogue=epilogue)
    if epilogue != "residual" and problem.out_major != "n":
        pytest.skip("a bias is along n")
    torch.zeros(1, device="cuda")
    found = library.algorithms(problem, device.index, 8, 32 << 20)
    assert found
    case = Case.of(problem, seed=3)
    for candidate in found:
        assert FAMILY.check(problem, candidate, device)
        case.check(FAMILY.load(problem, candidate, device, None), FAMILY.label(candidate), runs=2)


@pytest.mark.parametrize("epilogue", ADDED)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_infinity_are_as_torch_has_them(epilogue: str, value: float, device: Device) -> None:
    problem = Problem(72, 512, 1024, epilogue=epilogue)
    torch.zeros(1, device="cuda")
    case = Case.of(problem, seed=3)
    for target in (case.operands.a, *case.operands.fused):
        place = (3,) if target.ndim == 1 else (3, 5)
        before, target[place] = target[place].clone(), value
        wanted = expected(problem, case.operands)
        for candidate in library.algorithms(problem, device.index, 4, 1 << 20):
            FAMILY.load(problem, candidate, device, None)(*case.operands.arguments)
            out, label = case.operands.out.float(), FAMILY.label(candidate)
            assert torch.equal(out.isnan(), wanted.isnan()), label
            assert torch.equal(out[out.isinf()], wanted[wanted.isinf()]), label
        target[place] = before


def test_a_residuals_lines_lie_apart(device: Device) -> None:
    problem = Problem(300, 512, 1024, epilogue="residual")
    (candidate,) = library.algorithms(problem, device.index, 1, 32 << 20)
    launch, case = FAMILY.load(problem, candidate, device, None), Case.of(problem, seed=3)
    operands = case.operands
    (residual,) = operands.fused
    for width in (512, 520, 1024, 512):
        apart = torch.full((300, width), torch.nan, device="cuda", dtype=torch.bfloat16)
        apart[:, :512] = residual
        launch(operands.a, operands.b, operands.out, apart[:, :512])
        assert case.objection() is None


def test_a_sum_without_a_record_is_the_librarys() -> None:
    """Eagerly, in a CUDA graph, and for rows that lie apart."""
    x, w = (
        torch.randn(rows, 1000, device="cuda", dtype=torch.bfloat16) / 32 for rows in (20000, 520)
    )  # more rows than predictions are for
    stream = torch.randn(20000, 1040, device="cuda", dtype=torch.bfloat16)
    for residual in (stream[:, :520].contiguous(), stream[:, 520:]):
        exact = x.float() @ w.float().t() + residual.float()
        expected = (torch.nn.functional.linear(x, w) + residual).float() - exact
        graph = torch.cuda.CUDAGraph()
        first = tunegemm.linear(x, w, None, None, residual)
        with torch.cuda.graph(graph):
            second = tunegemm.linear(x, w, None, None, residual)
        graph.replay()
        for result in (first, second):
            assert (result.float() - exact).norm() <= 1.05 * expected.norm()
    served = {problem: record.candidate for problem, record in api.dispatcher.planner.tuned()}
    assert served[Problem.parse("20000x520x1000", epilogue="residual")].family == "cublaslt"


def test_each_launch_adds_its_own_bias(device: Device) -> None:
    """Of threads that share a launcher, of views that are less aligned, and in graphs."""
    problem = Problem(300, 512, 256, epilogue="bias_n+residual")
    torch.zeros(1, device="cuda")
    (candidate,) = library.algorithms(problem, device.index, 1, 32 << 20)
    launch, case = FAMILY.load(problem, candidate, device, None), Case.of(problem, seed=3)
    a, b, residual = case.operands.a, case.operands.b, case.operands.fused[-1]
    product = a.float() @ b.float() + residual.float()

    def run(number: int) -> None:
        bias = torch.full((512,), float(number), device="cuda", dtype=torch.bfloat16)
        with torch.cuda.stream(torch.cuda.Stream()):
            outs = [torch.empty_like(case.operands.out) for _ in range(50)]
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            for out in outs:
                launch(a, b, out, bias, residual)
            torch.cuda.current_stream().synchronize()
        for out in outs:
            assert torch.allclose(out.float(), product + number, rtol=0.02, atol=0.3)

    torch.cuda.synchronize()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(-400, 400, 100)))
    with pytest.raises(NotTaken, match="bias"):
        launch(
            a, b, case.operands.out, torch.zeros(520, device="cuda", dtype=torch.bfloat16)[2:514], residual
        )
    weight, x = b.t().contiguous(), a[:200]
    for bias in (
        torch.randn(520, device="cuda", dtype=torch.bfloat16)[start : start + 512] for start in (0, 2)
    ):
        exact = product[:200] + bias.float()
        result = tunegemm.linear(x, weight, bias, None, residual[:200])
        assert torch.allclose(result.float(), exact, rtol=0.02, atol=0.3)
