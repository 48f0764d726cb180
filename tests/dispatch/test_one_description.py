"""What a program is recorded to compute is what it asks for when it runs again.

Each call is recorded while torch computes it, written to a file, read, and tuned: records of the problems
that were read are planted. Then the same call must run their kernel; and what is left out with a reason must
be torch's, whatever is recorded.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

import tunegemm
from tests.support.serving import BF16, serve_with
from tunegemm.describe.precision import computing_fp32_in
from tunegemm.describe.problem import Problem
from tunegemm.describe.workload import read
from tunegemm.dispatch.launchers import Prepared
from tunegemm.errors import WorkloadError
from tunegemm.generate.launching import words_reader

M, N, K, L = 32, 48, 64, 3
FP8 = torch.float8_e4m3fn, torch.float8_e5m2
LAYOUTS = tuple(itertools.product((False, True), repeat=2))


@dataclass(frozen=True)
class Case:
    name: str
    call: Callable[[], Any]
    epilogue: str | None
    """Of the problem; None where the call is torch's."""


def matrix(*shape: int, dtype: torch.dtype = BF16, transposed: bool = False) -> torch.Tensor:
    """Small whole numbers; transposed: the last but one dimension is contiguous."""
    if transposed:
        return matrix(*shape[:-2], shape[-1], shape[-2], dtype=dtype).mT
    return (torch.arange(torch.Size(shape).numel()) % 5 - 2).view(shape).to(dtype)


def plain() -> Iterator[Case]:
    for dtype, (left, right) in itertools.product((BF16, torch.float16, torch.float32), LAYOUTS):
        a, b = matrix(M, K, dtype=dtype, transposed=left), matrix(K, N, dtype=dtype, transposed=right)
        batch = [matrix(L, *each.shape, dtype=dtype, transposed=t) for each, t in ((a, left), (b, right))]
        how = f"{dtype} {left} {right}"
        yield Case(f"mm {how}", partial(torch.mm, a, b), "")
        yield Case(f"mm out {how}", lambda a=a, b=b: torch.mm(a, b, out=matrix(M, N, dtype=a.dtype)), "")
        columns = matrix(M, N, dtype=dtype, transposed=True)
        yield Case(f"mm out by columns {how}", partial(torch.mm, a, b, out=columns), "")
        yield Case(f"bmm {how}", partial(torch.bmm, *batch), "")
        yield Case(f"a batch and a matrix {how}", partial(torch.matmul, batch[0], b), "")
        yield Case(f"a batch of one {how}", partial(torch.einsum, "mk,kn->mn", a, b), "")
    odd = matrix(M, K + 1)[:, 1:]
    yield Case("other alignments", partial(torch.mm, odd, matrix(K, N)), "")
    yield Case("no contiguous mode", partial(torch.mm, matrix(M, 2 * K)[:, ::2], matrix(K, N)), None)
    yield Case("float64", partial(torch.mm, matrix(M, K).double(), matrix(K, N).double()), None)
    int8 = matrix(M, K, dtype=torch.int8), matrix(K, N, dtype=torch.int8, transposed=True)
    yield Case("_int_mm", partial(torch._int_mm, *int8), "")


def sums() -> Iterator[Case]:
    """Of C, as `addends` names it, and what it is as an epilogue where beta is 1, and else."""
    addends: dict[str, tuple[torch.Tensor, str | None, str | None]] = {
        "row": (matrix(N), "bias_n", None),
        "matrix": (matrix(M, N), "beta_c", "beta_c"),
        "matrix by columns": (matrix(M, N, transposed=True), None, None),
        "expanded row": (matrix(N).expand(M, N), "bias_n", None),
        "row of a matrix": (matrix(1, N), "bias_n", None),
        "column": (matrix(M, 1), None, None),
        "number": (matrix(1), None, None),
    }
    for name, (c, once, scaled) in addends.items():
        for beta, alpha, (left, right) in itertools.product((1, 0.5, 0), (1, 2), LAYOUTS):
            steps = once if beta == 1 else "" if beta == 0 else scaled
            if alpha != 1 and steps is not None:
                steps = "alpha" + ("+" + steps if steps else "")
            a, b = matrix(M, K, transposed=left), matrix(K, N, transposed=right)
            how = f"{name} beta={beta} alpha={alpha} {left} {right}"
            yield Case(f"addmm {how}", partial(torch.addmm, c, a, b, beta=beta, alpha=alpha), steps)
            yield Case(f"ours {how}", partial(tunegemm.addmm, c, a, b, beta=beta, alpha=alpha), steps)
    a, b, batch, batches = matrix(M, K), matrix(K, N), matrix(L, M, K), matrix(L, K, N)
    for c, steps in ((matrix(L, M, N), "beta_c"), (matrix(M, N), None), (matrix(L, 1, N), None)):
        for alpha in (1, 2):
            whole = steps if steps is None or alpha == 1 else "alpha+" + steps
            for function in (torch.baddbmm, tunegemm.baddbmm):
                call = partial(function, c, batch, batches, alpha=alpha)
                yield Case(f"{function.__module__} baddbmm {tuple(c.shape)} {alpha}", call, whole)
    for x in (a, matrix(2, M // 2, K)):
        layer = partial(functional.linear, x, b.t().contiguous(), matrix(N))
        yield Case(f"linear with a bias {x.ndim}", layer, "bias_n")
    out = partial(torch.addmm, matrix(N), a, b, out=matrix(M, N))
    yield Case("addmm out", out, "bias_n")
    yield Case("addmm_", lambda: matrix(M, N).addmm_(a, b), None)
    yield Case("baddbmm_", lambda: matrix(L, M, N).baddbmm_(batch, batches), None)
    for use_gelu in (False, True):
        activated = partial(torch._addmm_activation, matrix(N), a, b, use_gelu=use_gelu)
        yield Case(f"_addmm_activation {use_gelu}", activated, None)


def scaled() -> Iterator[Case]:
    from torch.nn.functional import ScalingType as Scaling

    tensor, rows, columns = torch.tensor(2.0), torch.ones(M, 1), torch.ones(1, N)
    recipes = {
        "scale_tensor": (tensor, Scaling.TensorWise, tensor, Scaling.TensorWise),
        "scale_rowwise": (rows, Scaling.RowWise, columns, Scaling.RowWise),
    }
    dtypes = tuple(itertools.product(FP8, repeat=2))
    for (steps, recipe), bias, fast, pair in itertools.product(
        recipes.items(), (None, matrix(N)), (False, True), dtypes
    ):
        a, b = matrix(M, K, dtype=pair[0]), matrix(K, N, dtype=pair[1], transposed=True)
        text = steps if bias is None else steps + "+bias_n"
        torchs = None if pair == (FP8[1], FP8[1]) else text  # of two e5m2 torch has no product on a GPU
        how = f"{text} {fast} {pair}"
        words = {"bias": bias, "use_fast_accum": fast}
        for function in (torch._scaled_mm, tunegemm.scaled_mm):
            call = partial(function, a, b, recipe[0], recipe[2], out_dtype=BF16, **words)
            is_ours = function is tunegemm.scaled_mm
            yield Case(f"scaled_mm {is_ours} {how}", call, text if is_ours else torchs)
        public = partial(functional.scaled_mm, a, b, *recipe, output_dtype=BF16, **words)
        yield Case(f"functional.scaled_mm {how}", public, torchs)
        own = partial(functional.scaled_mm, a, b, *recipe, output_dtype=None, **words)
        yield Case(f"functional.scaled_mm into fp8 {how}", own, torchs)
    a, b = matrix(M, K, dtype=FP8[0]), matrix(K, N, dtype=FP8[0], transposed=True)
    into = partial(torch._scaled_mm, a, b, tensor, tensor, out_dtype=torch.float32)
    yield Case("into fp32", into, "scale_tensor")
    int8 = matrix(M, K, dtype=torch.int8), matrix(K, N, dtype=torch.int8, transposed=True)
    yield Case("int8", partial(tunegemm.scaled_mm, *int8, rows, columns), "scale_rowwise")


def ours() -> Iterator[Case]:
    """Calls that torch makes of several functions."""
    x, weight, bias, residual = matrix(M, K), matrix(N, K), matrix(N), matrix(M, N)
    yield Case("matmul", partial(tunegemm.matmul, x, weight.t()), "")
    yield Case("a vector", partial(tunegemm.matmul, x, matrix(K)), "")
    turned = matrix(2, 4, M // 4, K).transpose(1, 2)
    yield Case("rows that torch copies", partial(tunegemm.matmul, turned, weight.t()), "")
    yield Case("shared", partial(tunegemm.matmul, x, matrix(L, K, N)), "")
    yield Case("linear", partial(tunegemm.linear, x, weight), "")
    yield Case("bias", partial(tunegemm.linear, x, weight, bias), "bias_n")
    yield Case("all", partial(tunegemm.linear, x, weight, bias, "silu", residual), "bias_n+silu+residual")
    gated = partial(tunegemm.gated_linear, x, weight, bias)
    yield Case("gated", gated, "bias_n+swiglu")
    fp32 = partial(tunegemm.matmul, x, weight.t(), out_dtype=torch.float32)
    yield Case("into fp32", fp32, "")
    epilogue = partial(tunegemm.matmul, x, weight.t(), epilogue="alpha+relu", operands=(0.5,))
    yield Case("an epilogue", epilogue, "alpha+relu")
    rows = partial(tunegemm.linear, matrix(2, M // 2, K), weight, bias, "gelu", matrix(2, M // 2, N))
    yield Case("leading dimensions", rows, "bias_n+gelu+residual")


def demands_of(recording: Any, path: Path) -> tuple[list[Problem], str]:
    """Through the file, as `tune --from` has them; and why there are none."""
    recording.workload().write(path)
    try:
        found, refused = read(path)
    except WorkloadError as error:
        return [], str(error)
    return [demand.problem for demand in found], "; ".join(refused)


@pytest.fixture(autouse=True)
def tf32() -> Iterator[None]:
    with computing_fp32_in("tf32"):
        yield


@pytest.mark.parametrize("group", [plain, sums, scaled, ours])
@pytest.mark.filterwarnings("ignore")
def test_it_is_recorded_as_what_it_asks_for(group, serve, monkeypatch, tmp_path: Path) -> None:
    cases = list(group())
    asked: dict[str, list[Problem]] = {}
    wrong: list[str] = []
    with tunegemm.record() as recording:
        for case in cases:
            recording.clear()
            case.call()
            asked[case.name], why = demands_of(recording, tmp_path / "shapes.json")
            is_left_out = "no product in it can be tuned (1 were left out" in why
            expected = [case.epilogue] if case.epilogue is not None else []
            if [problem.epilogue for problem in asked[case.name]] != expected or bool(
                expected
            ) == is_left_out:
                wrong.append(f"{case.name}: {[*map(str, asked[case.name])]} {why}")
    assert len(asked) == len(cases)
    everything = [problem for problems in asked.values() for problem in problems]
    called: list[Problem] = []

    def prepare(record, device):
        def launch(a, b, out, *operands):
            if record.problem.fused.words:
                words_reader(record.problem)(operands)  # as the families' launchers do
            called.append(record.problem)
            value, fused = (a.double() @ b.double()).float(), record.problem.fused
            named = dict(zip((each.name for each in fused.operands), operands, strict=True))
            out.copy_(fused.reference(value, named) if fused else value)

        return Prepared(launch, tma=False)

    with_all = serve(*dict.fromkeys(everything), prepare=prepare)
    for case in cases:
        problems = asked[case.name]
        called.clear()
        serve_with(monkeypatch, serve(*problems, prepare=prepare) if problems else with_all)
        with tunegemm.enable():
            case.call()
        if called != problems:
            wrong.append(f"{case.name}: recorded {[*map(str, problems)]}, asked for {[*map(str, called)]}")
    assert not wrong, "\n".join(wrong)


class TestPublicScaledMm:
    """`torch.nn.functional.scaled_mm`, beyond what is recorded of it above."""

    @pytest.fixture
    def problem(self) -> Problem:
        return Problem(
            M, N, K, in_dtype="fp8_e4m3", epilogue="scale_rowwise", accumulation="two_level"
        )  # fmt: skip

    def call(
        self, a: torch.Tensor, b: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor
    ) -> torch.Tensor:
        by_rows = functional.ScalingType.RowWise
        result: torch.Tensor = functional.scaled_mm(a, b, rows, by_rows, columns, by_rows)
        return result

    @pytest.fixture
    def given(self) -> tuple[torch.Tensor, ...]:
        a, b = matrix(M, K, dtype=FP8[0]), matrix(K, N, dtype=FP8[0], transposed=True)
        return a, b, torch.linspace(0.5, 2, M)[:, None], torch.linspace(1, 3, N)[None]

    @pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
    def test_compiled(self, serve, kernel, monkeypatch, problem, given, backend: str) -> None:
        torch.compiler.reset()
        expected = self.call(*given)
        prepared = Prepared(kernel.of(problem), tma=True)
        serve_with(monkeypatch, serve(problem, prepared=prepared))
        compiled = torch.compile(self.call, backend=backend, fullgraph=True)
        with tunegemm.enable():
            result = compiled(*given)
        assert kernel.calls, "torch computed it"
        torch.testing.assert_close(result, expected, rtol=2e-2, atol=1e-2)

    def test_other_recipes_are_torchs(self, serve, kernel, monkeypatch, problem, given) -> None:
        serve_with(monkeypatch, serve(problem, prepared=Prepared(kernel.of(problem), tma=True)))
        a, b, *_ = given
        blocks = functional.ScalingType.BlockWise1x128
        outcomes = []
        for context in (contextlib.nullcontext, tunegemm.enable):
            with context():
                try:
                    functional.scaled_mm(a, b, torch.ones(M, 1), blocks, torch.ones(1, N), blocks)
                    outcomes.append("computed")
                except (RuntimeError, ValueError, NotImplementedError) as error:  # torch's own refusals
                    outcomes.append(str(error).splitlines()[0])
        assert outcomes[0] == outcomes[1] and not kernel.calls
