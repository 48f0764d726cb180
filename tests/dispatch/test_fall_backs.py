"""What has no kernel is torch's: its own function where it has one, else rounded once. What it costs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch.backends.cuda import matmul
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import tunegemm
from tests.support.as_torch import StandIn
from tests.support.fusing import serve_recorded
from tests.support.serving import BF16, ByAddress, Kernel, calls_of, dispatcher_of, operands, serve_with
from tunegemm.describe.device import find_device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.dispatch import api
from tunegemm.dispatch.forms import BELOW_AUTOGRAD, LINEAR, MATMUL, form_of
from tunegemm.dispatch.launchers import Prepared
from tunegemm.store.record import Record
from tunegemm.torch.lowering import site_of

FP16, FP8 = torch.float16, torch.float8_e4m3fn
DEVICE = find_device("model:h200")


class Called(TorchDispatchMode):
    """ATen's operators that are called, views aside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not function.is_view:
            self.names.append(function.__name__.partition(".")[0])
        return function(*args, **(kwargs or {}))


def called(call) -> list[str]:
    with Called() as mode:
        call()
    return mode.names


@pytest.fixture(autouse=True)
def nothing_recorded(monkeypatch) -> Iterator[None]:
    serve_with(monkeypatch, dispatcher_of([]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    tunegemm.disable()


def halves(*shape: int, value: float) -> torch.Tensor:
    return torch.full(shape, value, dtype=FP16)


# One call of torch


SCALARS = [(1, 1), (0, 0.5), (0, 1), (2, 0.5), (1, 0.5)]
C_SHAPES = [(), (16,), (1,), (8, 16), (8, 1), (1, 16), (2, 8, 16), (1, 8, 16)]


def of_batches(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = operands(8, 16, 32)
    return (torch.stack((a, a)), torch.stack((b, b))) if name == "baddbmm" else (a, b)


@pytest.mark.parametrize("beta, alpha", SCALARS)
@pytest.mark.parametrize("name", ["addmm", "baddbmm"])
def test_addmm_and_baddbmm_are_one_call_with_any_c(name, beta, alpha):
    a, b = of_batches(name)
    ours, theirs = (partial(getattr(where, name), beta=beta, alpha=alpha) for where in (tunegemm, torch))
    for shape in C_SHAPES[: 8 if name == "baddbmm" else 6]:
        c = torch.ones(shape, dtype=BF16)
        expected = theirs(c, a, b)
        for _ in range(2):
            assert torch.equal(ours(c, a, b), expected), shape
        assert called(partial(ours, c, a, b)) == [name], shape


@pytest.mark.parametrize("beta, alpha", SCALARS)
@pytest.mark.parametrize("name, shape", [("addmm", (16,)), ("addmm", (8, 16)), ("baddbmm", (2, 8, 16))])
def test_compiled_code_holds_that_call(name, shape, beta, alpha):
    torch._dynamo.reset()
    a, b = of_batches(name)
    c = torch.ones(shape, dtype=BF16)
    ours, theirs = (partial(getattr(where, name), beta=beta, alpha=alpha) for where in (tunegemm, torch))
    compiled = torch.compile(lambda c, a, b: ours(c, a, b), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(c, a, b), theirs(c, a, b))


def test_scores_that_alpha_keeps_in_range():
    q, k = halves(2, 16, 128, value=24.0), halves(2, 128, 16, value=24.0)
    room = halves(2, 16, 16, value=float("nan"))
    expected = torch.baddbmm(room, q, k, beta=0, alpha=128**-0.5)
    bias = halves(16, value=0.0)
    for grad in (False, True):
        q.requires_grad_(grad)
        for _ in range(2):
            assert torch.equal(tunegemm.baddbmm(room, q, k, beta=0, alpha=128**-0.5), expected)
            assert torch.equal(
                tunegemm.addmm(bias, q[0], k[0], alpha=0.01), torch.addmm(bias, q[0], k[0], alpha=0.01)
            )


def test_linear_with_a_bias_of_any_shape():
    x, weight = operands(8, 16, 32)[0], operands(8, 16, 32)[1].t().contiguous()
    for grad in (False, True):
        for shape in ((16,), (1,), (8, 16), (1, 16)):
            bias = torch.ones(shape, dtype=BF16).requires_grad_(grad)
            ours, theirs = tunegemm.linear(x, weight, bias), functional.linear(x, weight, bias)
            assert torch.equal(ours, theirs)
            if grad:
                (mine,), (torchs,) = (
                    torch.autograd.grad(each.float().sum(), bias) for each in (ours, theirs)
                )
                assert torch.equal(mine, torchs)
    many = torch.stack((x, x)), torch.stack((weight.t(), weight.t()))
    bias = torch.linspace(-1, 1, 16).to(BF16)
    expected = torch.baddbmm(bias, *many)
    assert torch.equal(tunegemm.matmul(*many, bias=bias), expected)
    out = torch.empty_like(expected)
    assert tunegemm.matmul(*many, bias=bias, out=out) is out and torch.equal(out, expected)
    assert called(lambda: tunegemm.matmul(*many, bias=bias, out=out)) == ["baddbmm"]


# Rounded once


def test_sums_that_leave_fp16_and_come_back():
    """Each is inf where what is between product and result has 16 bits."""
    a, b = halves(8, 128, value=32.0), halves(128, 16, value=32.0)  # 131072
    residual, bias = halves(8, 16, value=-60000.0), halves(16, value=-60000.0)
    cases = [
        ("alpha+silu", (0.25,), 32768.0),
        ("alpha", (0.25,), 32768.0),
        ("alpha+residual", (0.5, residual), 65536.0 - 60000.0),
        ("alpha+bias_n+gelu", (0.5, bias), 65536.0 - 60000.0),
        ("alpha+beta_c+gelu_tanh", (0.5, 1.0, residual), 65536.0 - 60000.0),
    ]
    for text, given, expected in cases:
        result = tunegemm.matmul(a, b, epilogue=text, operands=given)
        torch.testing.assert_close(result, halves(8, 16, value=expected), msg=text)
    folded = tunegemm.matmul(a.view(2, 4, 128), b, epilogue="alpha", operands=(0.25,))
    torch.testing.assert_close(folded, halves(2, 4, 16, value=32768.0))
    near = halves(8, 128, value=23.0), halves(128, 16, value=23.0)  # 67712
    result = tunegemm.matmul(*near, residual=residual)
    torch.testing.assert_close(result, halves(8, 16, value=7712.0))


@pytest.mark.parametrize("out_dtype", [BF16, torch.float32])
@pytest.mark.parametrize("lead", [(8,), (2, 4), ()])
@pytest.mark.parametrize("grad", [False, True])
def test_another_output_dtype_is_of_the_sums(out_dtype, lead, grad):
    a, b = halves(*lead, 128, value=32.0), halves(128, 16, value=32.0)
    a.requires_grad_(grad)
    result = tunegemm.matmul(a, b, out_dtype=out_dtype)
    assert torch.equal(result, torch.full((*lead, 16), 131072.0, dtype=out_dtype))
    assert result.requires_grad is grad
    if grad:
        assert torch.autograd.grad(result.float().sum(), a)[0].dtype == FP16
    with pytest.raises(RuntimeError):
        tunegemm.matmul(a, b.float(), out_dtype=out_dtype)


@pytest.mark.parametrize("out_dtype", [FP8, torch.float8_e5m2, BF16, FP16, torch.float32, None])
@pytest.mark.parametrize("text", [
    "scale_tensor+relu", "scale_tensor+gelu", "scale_rowwise+silu", "scale_tensor+bias_n+swiglu",
    "scale_rowwise+bias_n+gelu", "relu",
])  # fmt: skip
def test_fp8_products_with_any_step_after_them(text, out_dtype):
    for m, n, k in ((32, 48, 64), (5, 6, 7)):  # the second is nothing that torch multiplies
        a, b = operands(m, n, k)
        a, b = a.to(FP8), b.to(FP8)
        problem = Problem(m, n, k, epilogue=text)
        given = []
        for each in problem.fused.operands:
            shape = {"m": (m, 1), "n": (1, n)}[each.kind] if "rowwise" in text and each.fp32 else None
            shape = problem.operand_shape(each) if shape is None else shape
            dtype = FP16 if out_dtype is FP16 else torch.float32 if out_dtype is torch.float32 else BF16
            given.append((torch.rand(shape) + 0.5).to(torch.float32 if each.fp32 else dtype))
        named = {
            each.name: value.flatten() if each.fp32 and value.ndim else value
            for each, value in zip(problem.fused.operands, given, strict=True)
        }
        expected = problem.fused.reference(a.float() @ b.float(), named)
        result = tunegemm.matmul(a, b, epilogue=text, operands=given, out_dtype=out_dtype)
        dtype = out_dtype or FP8
        assert result.dtype == dtype
        bound = {1: 0.13, 2: 1e-2, 4: 1e-5}[dtype.itemsize]
        most = torch.finfo(dtype).max
        torch.testing.assert_close(result.float(), expected.clamp(-most, most), rtol=bound, atol=1e-2)
        if dtype.itemsize > 1:
            amax = torch.zeros(())
            tunegemm.matmul(a, b, epilogue=text + "+amax", operands=(*given, amax), out_dtype=out_dtype)
            torch.testing.assert_close(amax, expected.abs().amax(), rtol=1e-5, atol=1e-5)


# Autocast


def test_int32_sums_are_exact():
    a, b = torch.full((32, 4096), 127, dtype=torch.int8), torch.full((48, 4096), 127, dtype=torch.int8).t()
    a[:, 0] = 126
    assert torch.equal(tunegemm.matmul(a, b, out_dtype=torch.int32), torch._int_mm(a, b))


@pytest.mark.parametrize("served", [False, True])
def test_dtypes_under_autocast(monkeypatch, served):
    if served:
        kernel = StandIn()
        serve_recorded(monkeypatch, kernel)
    a, b, bias = torch.randn(8, 32), torch.randn(32, 16), torch.randn(16)
    exact = a.bfloat16().float() @ b.bfloat16().float()
    c = torch.randn(8, 16)
    with torch.autocast("cpu", BF16):
        for dtype in (torch.float32, BF16, FP16):
            for given in ({}, {"bias": bias}, {"activation": "gelu"}, {"residual": c}):
                for left in (a, a.bfloat16()):
                    assert tunegemm.matmul(left, b, out_dtype=dtype, **given).dtype == dtype, (dtype, given)
        torch.testing.assert_close(tunegemm.matmul(a, b, out_dtype=torch.float32), exact)
        for addend in (bias, c, c[:, :1], bias.bfloat16(), c.bfloat16()):
            for scalars in ({}, {"alpha": 0.5}, {"beta": 2}, {"beta": 0}, {"beta": 0, "alpha": 0.5}):
                ours, theirs = tunegemm.addmm(addend, a, b, **scalars), torch.addmm(addend, a, b, **scalars)
                assert ours.dtype == theirs.dtype, scalars
                torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-1)
    assert not served or len(kernel.calls) > 20
    assert tunegemm.matmul(a, b, out_dtype=torch.float32).dtype == torch.float32


# Torch's settings of reductions


def algorithm(scheme: str) -> Candidate:
    named = {
        "algorithm": "cublaslt", "algo_id": 66, "tile": "128x128", "stages": "64x3",
        "inner_shape": "UNDEFINED", "cluster_shape": "AUTO", "custom_option": 0,
    }  # fmt: skip
    splits = 1 if scheme == "NONE" else 4
    launch = {"split_k": splits, "reduction_scheme": scheme, "cta_swizzling": 0, "workspace_bytes": 0}
    return Candidate.make("cublaslt", named, launch)


@pytest.fixture
def settings() -> Iterator[None]:
    yield
    matmul.allow_bf16_reduced_precision_reduction = True
    matmul.allow_fp16_reduced_precision_reduction = True


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("out_dtype", ["own", "fp32"])
@pytest.mark.parametrize("scheme, narrow", [
    ("NONE", False), ("COMPUTE_TYPE", False), ("OUTPUT_TYPE", True), ("INPLACE", True),
])  # fmt: skip
def test_a_reduction_is_served_where_torch_allows_it(monkeypatch, settings, dtype, out_dtype, scheme, narrow):
    out = dtype if out_dtype == "own" else "fp32"
    problem = Problem(32, 48, 64, in_dtype=dtype, out_dtype=out)
    record = Record(problem, algorithm(scheme), DEVICE.fingerprint, ratio=1.5, layer="")
    kernel = ByAddress(problem) if (dtype, out) == ("bf16", "bf16") else Kernel()
    launch = kernel.launcher if isinstance(kernel, ByAddress) else kernel
    serve_with(monkeypatch, dispatcher_of([record], Prepared(launch, packed=True, record=record)))
    a, b = operands(dtype={"bf16": BF16, "fp16": FP16}[dtype])
    more = {} if out_dtype == "own" else {"out_dtype": torch.float32}
    setting, other = (
        f"allow_{each}_reduced_precision_reduction" for each in (dtype, {"bf16": "fp16"}.get(dtype, "bf16"))
    )
    narrow = narrow and out_dtype == "own"

    def served() -> bool:
        before = len(kernel.calls)
        for _ in range(3):  # with a key, and without one
            tunegemm.matmul(a, b, **more)
        assert len(kernel.calls) in (before, before + 3)
        return len(kernel.calls) > before

    assert served()
    for _ in range(2):
        setattr(matmul, setting, False)
        assert served() is not narrow
        setattr(matmul, setting, True)
        assert served()
    setattr(matmul, other, False)
    assert served()
    if hasattr(matmul, "allow_bf16_reduced_precision_reduction_split_k"):
        setattr(matmul, setting, (False, False))
        assert served() is (scheme == "NONE")


def test_compiled_code_minds_the_settings(monkeypatch, settings):
    kernel = ByAddress(Problem(32, 48, 64))
    record = Record(kernel.problem, algorithm("OUTPUT_TYPE"), DEVICE.fingerprint, ratio=1.5, layer="")
    serve_with(monkeypatch, dispatcher_of([record], Prepared(kernel.launcher, packed=True, record=record)))
    a, b = operands()
    out, form = torch.empty(32, 48, dtype=BF16), form_of(MATMUL, "")
    for allowed in (True, False, True):
        matmul.allow_bf16_reduced_precision_reduction = allowed
        for _ in range(3):
            kernel.calls.clear()
            api.dispatcher.compiled(site_of((a, b)), form, a, b, (), (), out)
            assert len(kernel.calls) == allowed


@pytest.mark.filterwarnings("ignore::tunegemm.TunegemmWarning")
@pytest.mark.parametrize("text", ["", "bias_n"])
@pytest.mark.parametrize("call", [MATMUL, LINEAR, BELOW_AUTOGRAD])
def test_compiled_code_keeps_what_each_kind_of_call_means(monkeypatch, call, text):
    """Torch's functions of two matrices compute no call of a weight, nor one that asks for a kernel alone."""
    serve_with(monkeypatch, dispatcher_of([]))
    (a, b), bias = operands(32, 48, 48), torch.arange(48).to(BF16)
    tensors, out = (bias,) if text else (), torch.empty(32, 48, dtype=BF16)
    right = b.t() if call == LINEAR else b
    expected = functional.linear(a, right.t(), *tensors)
    for _ in range(3):
        out.zero_()
        result = api.dispatcher.compiled("a site", form_of(call, text), a, b, tensors, (), out)
        assert result is (None if call == BELOW_AUTOGRAD else out)
        assert result is None or torch.equal(out, expected)


# What a fall-back costs


@pytest.mark.parametrize(
    "name",
    ["matmul", "matmul, out", "linear, trained", "linear", "linear, bias", "addmm", "patched", "scaled_mm"],
)
def test_a_known_fall_back_is_a_check_and_torchs_call(name):
    """Counts of the Python functions that are entered, but for the caller's own."""
    a, b = operands(32, 48, 64)
    weight, bias = b.t(), torch.ones(48, dtype=BF16)
    layer = torch.nn.Linear(64, 48).to(BF16).requires_grad_(False)
    tunegemm.patch(layer)
    out, trained = torch.empty(32, 48, dtype=BF16), torch.nn.Parameter(weight.clone())
    small, one, other = (a.to(FP8), b.to(FP8)), torch.ones(()), torch.ones(())
    call, most = {
        "matmul": (lambda: tunegemm.matmul(a, b), 4),
        "matmul, out": (lambda: tunegemm.matmul(a, b, out=out), 6),
        "linear, trained": (torch.no_grad()(lambda: tunegemm.linear(a, trained)), 4),
        "linear": (lambda: tunegemm.linear(a, weight), 4),
        "linear, bias": (lambda: tunegemm.linear(a, weight, bias), 4),
        "addmm": (lambda: tunegemm.addmm(bias, a, b), 7),
        "patched": (lambda: layer(a), 4),
        "scaled_mm": (lambda: tunegemm.scaled_mm(*small, one, other, out_dtype=BF16), 7),
    }[name]
    for _ in range(3):
        tunegemm.linear(a, trained)  # with gradients
        call()
    python, _ = calls_of(call)
    ours = [each for each in python if each.startswith("tunegemm.")]
    assert len(ours) <= most, ours
    assert not any("dispatcher.compute" in each for each in ours)
