"""Fused calls by real kernels: each against torch in fp64, captured, compiled, of views, scaled."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.nn import functional

import tunegemm
from tests.support.kernels import tune_ours, watch_launches
from tests.support.numerics import difference
from tests.support.serving import forbid_torch
from tunegemm.describe.device import find_device
from tunegemm.describe.epilogue import Epilogue, Number, PerColumn, tanh
from tunegemm.describe.precision import computing_fp32_in
from tunegemm.describe.problem import Problem
from tunegemm.errors import TunegemmWarning
from tunegemm.report.explain import explain_problem

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("all_tuned")]

M, N, K = 256, 512, 384
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


@Epilogue.custom
def softcapped(acc, bias: PerColumn, cap: Number):  # type: ignore[no-untyped-def]
    return cap * tanh((acc + bias) / cap)


TEXTS = [
    "bias_n", "bias_n+gelu", "bias_n+gelu_tanh+residual", "silu", "residual", "swiglu", "beta_c",
    "alpha+beta_c", "alpha+bias_n", str(softcapped),
]  # fmt: skip
BATCHED = Problem(M, N, K, 3, b_major="n", epilogue="alpha+beta_c")
FP32_OUT = Problem(M, N, K, out_dtype="fp32")
INT8 = Problem(M, N, K, in_dtype="int8", out_dtype="int32")
TF32 = Problem(M, N, K, in_dtype="tf32", out_dtype="fp32")
SCALED = [
    Problem(M, N, K, in_dtype="fp8_e4m3", epilogue=text, accumulation=accumulation)
    for text in ("scale_tensor", "scale_tensor+bias_n", "scale_rowwise", "scale_rowwise+bias_n")
    for accumulation in ("fast", "two_level")
]
NEIGHBOURS = [Problem(m, N, K, epilogue="bias_n+gelu") for m in (1024, 4096)]


@pytest.fixture(scope="module", autouse=True)
def tuned() -> None:
    problems = [Problem(M, N, K, epilogue=text) for text in TEXTS]
    problems += [BATCHED, FP32_OUT, INT8, TF32, *SCALED, *NEIGHBOURS]
    assert tune_ours(problems, trials=3) == set(problems)


@pytest.fixture
def only_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails a test in which torch's operations compute what a kernel is recorded for."""
    forbid_torch(monkeypatch)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The epilogues of the kernels that are launched from now on."""
    seen: list[str] = []
    watch_launches(monkeypatch, lambda problem, *_: seen.append(problem.epilogue))
    return seen


def close(result: torch.Tensor, expected: torch.Tensor, bound: float = 1e-2) -> None:
    assert result.shape == expected.shape
    assert difference(result, expected) <= bound


def layer(*lead: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """x, weight, bias, residual."""
    generator = torch.Generator("cuda").manual_seed(seed)
    lead = lead or (M,)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=generator)

    return (
        (random(*lead, K) / K**0.5).to(BF16), random(N, K).to(BF16), random(N).to(BF16),
        random(*lead, N).to(BF16),
    )  # fmt: skip


def wide(*tensors: torch.Tensor) -> Iterator[torch.Tensor]:
    return (tensor.double() for tensor in tensors)


Call = Callable[..., torch.Tensor]

#: (x, weight, bias, residual) by tunegemm, and the same by torch.
CALLS: dict[str, tuple[Call, Call]] = {
    "linear, bias": (
        lambda x, w, b, r: tunegemm.linear(x, w, b),
        lambda x, w, b, r: functional.linear(x, w, b),
    ),
    "linear, bias, gelu": (
        lambda x, w, b, r: tunegemm.linear(x, w, b, "gelu"),
        lambda x, w, b, r: functional.gelu(functional.linear(x, w, b)),
    ),
    "linear, all": (
        lambda x, w, b, r: tunegemm.linear(x, w, b, "gelu_tanh", r),
        lambda x, w, b, r: functional.gelu(functional.linear(x, w, b), approximate="tanh") + r,
    ),
    "matmul, silu": (
        lambda x, w, b, r: tunegemm.matmul(x, w.t(), activation="silu"),
        lambda x, w, b, r: functional.silu(x @ w.t()),
    ),
    "matmul, residual": (
        lambda x, w, b, r: tunegemm.matmul(x, w.t(), residual=r),
        lambda x, w, b, r: x @ w.t() + r,
    ),
    "gated_linear": (
        lambda x, w, b, r: tunegemm.gated_linear(x, w),
        lambda x, w, b, r: functional.silu(x @ w[0::2].t()) * (x @ w[1::2].t()),
    ),
    "custom": (
        lambda x, w, b, r: tunegemm.matmul(x, w.t(), epilogue=softcapped, operands=(b, 2.5)),
        lambda x, w, b, r: 2.5 * torch.tanh((x @ w.t() + b) / 2.5),
    ),
}
MATRICES: dict[str, tuple[Call, Call]] = {
    "addmm": (
        lambda x, w, b, r: tunegemm.addmm(r, x, w.t(), beta=0.5),
        lambda x, w, b, r: torch.addmm(r, x, w.t(), beta=0.5),
    ),
    "addmm, alpha": (
        lambda x, w, b, r: tunegemm.addmm(r, x, w.t(), alpha=-2, beta=3),
        lambda x, w, b, r: torch.addmm(r, x, w.t(), alpha=-2, beta=3),
    ),
    "addmm, row": (
        lambda x, w, b, r: tunegemm.addmm(b, x, w.t(), alpha=0.5),
        lambda x, w, b, r: torch.addmm(b, x, w.t(), alpha=0.5),
    ),
}


@pytest.mark.parametrize("lead", [(M,), (4, M // 4)])
@pytest.mark.parametrize("name", CALLS)
def test_calls_are_right(only_ours, name, lead):
    ours, torchs = CALLS[name]
    for seed in range(3):
        given = layer(*lead, seed=seed)
        result = ours(*given)
        assert result.dtype == BF16
        close(result, torchs(*wide(*given)))


@pytest.mark.parametrize("name", MATRICES)
def test_adding_calls_are_right(only_ours, name):
    ours, torchs = MATRICES[name]
    for seed in range(3):
        given = layer(seed=seed)
        close(ours(*given), torchs(*wide(*given)))


def test_baddbmm(only_ours):
    x, _, _, r = layer(3, M)
    b = torch.randn(3, K, N, device="cuda").to(BF16)
    close(
        tunegemm.baddbmm(r, x, b, alpha=0.5, beta=2),
        torch.baddbmm(*wide(r, x, b), alpha=0.5, beta=2),
    )


def test_outputs_are_written(only_ours):
    x, w, b, _ = layer()
    room = torch.full((M, N + 8), float("nan"), device="cuda").to(BF16)
    out = room[:, :N]
    assert tunegemm.matmul(x, w.t(), out=out, bias=b) is out
    close(out, functional.linear(*wide(x, w, b)))
    assert room[:, N:].isnan().all()


@pytest.mark.parametrize("name", ["linear, bias", "linear, all", "custom"])
def test_views(only_ours, name):
    """Rows with gaps, offsets, and a bias and a residual inside larger allocations."""
    x, w, b, r = layer()

    def inside(tensor: torch.Tensor, pad: int = 16) -> torch.Tensor:
        rows, columns = tensor.shape
        return torch.zeros(rows + 1, columns + pad, device="cuda", dtype=BF16)[1:, 8 : 8 + columns].copy_(
            tensor
        )

    longer = torch.zeros(N + 2, device="cuda", dtype=BF16)[2:].copy_(b)  # 4 bytes in
    given = (inside(x), inside(w), longer, inside(r))
    ours, torchs = CALLS[name]
    for _ in range(2):
        close(ours(*given), torchs(*wide(*given)))


def test_a_bias_at_an_odd_address_is_torchs(launches):
    x, w, b, _ = layer()
    odd = torch.zeros(N + 1, device="cuda", dtype=BF16)[1:].copy_(b)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TunegemmWarning)
        for each in (b, odd, b, odd):
            close(tunegemm.linear(x, w, each), functional.linear(*wide(x, w, b)))
    assert launches.count("bias_n") >= 2


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("rowwise", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_scaled_mm(only_ours, rowwise, has_bias, fast):
    x, w, b, _ = layer()
    a, weight = (4 * x).to(FP8), w.to(FP8)
    if rowwise:
        scale_a, scale_b = torch.rand(M, 1, device="cuda") + 0.5, torch.rand(1, N, device="cuda") + 0.5
    else:
        scale_a, scale_b = torch.tensor(0.5, device="cuda"), torch.tensor(2.0, device="cuda")
    bias = b if has_bias else None
    given = {"bias": bias, "out_dtype": BF16, "use_fast_accum": fast}
    expected = (a.double() * scale_a.double()) @ (weight.double().t() * scale_b.double())
    expected = expected + b.double() if has_bias else expected
    for _ in range(2):
        result = tunegemm.scaled_mm(a, weight.t(), scale_a, scale_b, **given)
        assert result.dtype == BF16
        close(result, expected)
    close(torch._scaled_mm(a, weight.t(), scale_a, scale_b, **given), result)


def test_output_dtypes_int8_and_tf32(only_ours):
    x, w, _, _ = layer()
    close(tunegemm.matmul(x, w.t(), out_dtype=torch.float32), x.double() @ w.double().t(), 1e-4)
    a = torch.randint(-128, 128, (M, K), device="cuda", dtype=torch.int8)
    b = torch.randint(-128, 128, (N, K), device="cuda", dtype=torch.int8).t()
    exact = (a.double() @ b.double()).int()
    assert torch.equal(tunegemm.matmul(a, b, out_dtype=torch.int32), exact)
    x, w = x.float(), w.float()
    with computing_fp32_in("tf32"):
        close(tunegemm.matmul(x, w.t()), x.double() @ w.double().t(), 2e-3)


def test_fp32_is_torchs_where_tf32_is_not_allowed():
    x, w, _, _ = layer()
    x, w = torch.rand_like(x, dtype=torch.float32), torch.rand_like(w, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TunegemmWarning)
        with computing_fp32_in("ieee"):
            close(tunegemm.matmul(x, w.t()), x.double() @ w.double().t(), 1e-5)


def test_near_hits(only_ours):
    if explain_problem(Problem(2048, N, K, epilogue="bias_n+gelu"), find_device("cuda:0")).outcome != "near":
        pytest.skip("the tuned neighbours gain too little over torch here")
    x, w, b, _ = layer(2048)
    close(tunegemm.linear(x, w, b, "gelu"), functional.gelu(functional.linear(*wide(x, w, b))))


def test_graph_capture(only_ours):
    for ours, torchs in CALLS.values():
        x, w, b, r = layer()
        ours(x, w, b, r)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = ours(x, w, b, r)
        for seed in (1, 2):
            for tensor, new in zip((x, w, b, r), layer(seed=seed), strict=True):
                tensor.copy_(new)
            graph.replay()
            close(result, torchs(*wide(x, w, b, r)))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", CALLS)
def test_compiled(launches, name, mode):
    ours, torchs = CALLS[name]
    given = layer()
    with mode():
        compiled = torch.compile(lambda *given: ours(*given) * 2, fullgraph=True)
        close(compiled(*given), 2 * torchs(*wide(*given)))
    assert len(launches) == 1


def test_compiled_without_a_record_is_torchs_code(launches):
    x, w, b, _ = layer(96)
    compiled = torch.compile(lambda x: tunegemm.linear(x, w, b, "silu"), fullgraph=True)
    with torch.no_grad(), pytest.warns(TunegemmWarning, match=r"--epilogue bias_n\+silu"):
        close(compiled(x), functional.silu(functional.linear(*wide(x, w, b))))
    assert not launches


@pytest.mark.filterwarnings("ignore::tunegemm.errors.TunegemmWarning")
@pytest.mark.parametrize("name", ["linear, bias", "linear, all", "gated_linear"])
def test_gradients(launches, name):
    """Products of the backward pass have no records here."""
    warnings.simplefilter("ignore", TunegemmWarning)
    results = []
    for call, given in zip(CALLS[name], (layer(), tuple(wide(*layer()))), strict=True):
        leaves = [tensor.detach().requires_grad_() for tensor in given]
        result = call(*leaves)
        # Both get the same values, rounded to bf16: a column's add up to little more than their rounding.
        upstream = torch.linspace(-1, 1, result.numel(), device="cuda").view(result.shape).to(BF16)
        upstream = upstream.to(result.dtype)
        results.append(torch.autograd.grad(result, leaves, upstream, allow_unused=True))
    for ours, exact in zip(*results, strict=True):
        assert (ours is None) == (exact is None)
        if ours is not None:
            close(ours, exact, 2e-2)
    assert launches.count("bias_n") == (name != "gated_linear")


def test_enable_and_patch(launches):
    x, w, b, _ = layer()
    module = torch.nn.Linear(K, N, device="cuda", dtype=BF16)
    with torch.no_grad():
        module.weight.copy_(w)
        module.bias.copy_(b)
        expected = functional.linear(*wide(x, w, b))
        with tunegemm.enable():
            close(module(x), expected)
            one = torch.ones((), device="cuda")
            torch._scaled_mm(x.to(FP8), w.to(FP8).t(), one, one, out_dtype=BF16, use_fast_accum=True)
            compiled = torch.compile(module, fullgraph=True)
            close(compiled(x), expected)
        assert launches == ["bias_n", "scale_tensor", "bias_n"]
        tunegemm.patch(module)
        close(module(x), expected)
    assert len(launches) == 4
