"""Calls that do more than multiply: bias, activations, gates, scales, users' functions, on the CPU.

The kernels are torch's arithmetic; test_gpu_fused.py has the real ones.
"""

from __future__ import annotations

import itertools
import math
import warnings
from contextlib import suppress
from functools import partial

import pytest
import torch
from torch.nn import functional

import tunegemm
from tests.support.fusing import ACTIVATIONS, FP8, bent, close, layer
from tests.support.serving import BF16, operands, quietly
from tunegemm.describe.command import tune_command
from tunegemm.describe.precision import computing_fp32_in
from tunegemm.describe.problem import Problem
from tunegemm.errors import ProblemError, TunegemmWarning

# Each call means what torch's functions do


@pytest.mark.parametrize("lead", [(32,), (2, 16), (2, 2, 4)])
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("has_bias, has_residual", list(itertools.product((False, True), repeat=2)))
def test_linear(serve, kernel, lead, activation, has_bias, has_residual):
    snapshot = serve()
    x, weight, bias, residual = layer(*lead)
    bias, residual = bias if has_bias else None, residual if has_residual else None
    expected = functional.linear(x.float(), weight.float(), bias.float() if has_bias else None)
    expected = ACTIVATIONS[activation](expected) if activation else expected
    expected = expected + residual.float() if has_residual else expected
    for _ in range(2):
        close(tunegemm.linear(x, weight, bias, activation, residual), expected.to(BF16))
    extras = {"bias": bias, "activation": activation, "residual": residual}
    close(tunegemm.matmul(x, weight.t(), **extras), expected.to(BF16))
    assert len(kernel.calls) == 3
    steps = ("bias_n" * has_bias, activation, "residual" * has_residual)
    assert {problem.epilogue for problem in snapshot.asked} == {"+".join(filter(None, steps))}
    assert {problem.m for problem in snapshot.asked} == {x.numel() // 64}


def test_torch_adds_a_bias_where_batches_are_broadcast(serve):
    serve()
    a, b, bias = torch.randn(1, 4, 8), torch.randn(3, 8, 6), torch.randn(6)
    with pytest.warns(TunegemmWarning, match="falls back to torch"):
        assert torch.equal(tunegemm.matmul(a, b, bias=bias), torch.matmul(a, b) + bias)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_linear(serve, kernel, activation, has_bias):
    serve()
    x, gate, _, _ = layer()
    up = gate.flip(0).contiguous()
    biases = (
        (torch.linspace(-1, 1, 48).to(BF16), torch.linspace(1, 0, 48).to(BF16)) if has_bias else (None,) * 2
    )
    weight = tunegemm.interleave(gate, up)
    assert torch.equal(weight[0::2], gate) and torch.equal(weight[1::2], up)
    bias = tunegemm.interleave(*biases) if has_bias else None
    result = tunegemm.gated_linear(x, weight, bias, activation)
    halves = [
        functional.linear(x.float(), half.float(), None if added is None else added.float())
        for half, added in zip((gate, up), biases, strict=True)
    ]
    close(result, (ACTIVATIONS[activation](halves[0]) * halves[1]).to(BF16))
    assert kernel.calls == [((32, 64), (64, 96), (32, 48))]


@pytest.mark.parametrize("shape", ["row", "expanded row", "one row", "matrix", "column"])
@pytest.mark.parametrize("beta, alpha", [(1, 1), (0.5, 1), (1, -2), (0.5, 3), (0, 2), (0, 1)])
def test_addmm_and_baddbmm(serve, kernel, shape, beta, alpha):
    serve()
    a, b = operands()
    c = {"one row": (1, 48), "matrix": (32, 48), "column": (32, 1)}.get(shape, (48,))
    c = torch.linspace(-4, 4, torch.Size(c).numel()).to(BF16).view(c)
    c = c.expand(32, 48) if shape == "expanded row" else c
    expected = torch.addmm(c.float(), a.float(), b.float(), beta=beta, alpha=alpha).to(BF16)
    close(tunegemm.addmm(c, a, b, beta=beta, alpha=alpha), expected)
    served = beta == 0 or shape == "matrix" or (beta == 1 and "row" in shape)
    assert len(kernel.calls) == served
    if shape == "matrix":
        many = (torch.stack((c, -c)), torch.stack((a, -a)), torch.stack((b, b)))
        wide = (tensor.float() for tensor in many)
        expected = torch.baddbmm(*wide, beta=beta, alpha=alpha).to(BF16)
        close(tunegemm.baddbmm(*many, beta=beta, alpha=alpha), expected)
        assert len(kernel.calls) == 2


def test_what_beta_0_leaves_out_is_not_read(serve, kernel):
    serve()
    a, b = operands()
    c = torch.full((32, 48), float("nan"), dtype=BF16)
    assert torch.equal(tunegemm.addmm(c, a, b, beta=0, alpha=2), (2 * (a.float() @ b.float())).to(BF16))
    assert len(kernel.calls) == 1


def test_a_function_of_the_users_own(serve, kernel):
    snapshot = serve()
    x, weight, bias, skip = layer()
    wide = x.float() @ weight.t().float()
    expected = 3 * torch.tanh((wide + bias.float()) / 3) + torch.relu(skip.float())
    given = {"epilogue": bent, "operands": (bias, skip, 3)}
    close(tunegemm.matmul(x, weight.t(), **given), expected.to(BF16))
    assert len(kernel.calls) == 1 and snapshot.asked[0].epilogue == str(bent)
    monkey = Problem(32, 48, 64, epilogue=str(bent))
    assert tune_command(monkey) == f"tunegemm.tune(tunegemm.{monkey!r})"


def test_amax_is_the_largest_so_far(serve, kernel):
    serve()
    a, b = operands()
    largest = float((a.float() @ b.float()).abs().max())
    for before, after in ((0.0, largest), (1e6, 1e6)):
        amax = torch.tensor(before)
        version = amax._version
        for _ in range(2):
            tunegemm.matmul(a, b, epilogue="amax", operands=(amax,))
        assert float(amax) == after and amax._version > version
    assert len(kernel.calls) == 4


def test_wrong_epilogues_name_the_remedy(serve):
    serve()
    a, b = operands()
    bias = torch.ones(48, dtype=BF16)
    for keywords, said in (
        ({"activation": "gelo"}, "'gelo' is not known"),
        ({"epilogue": "bias_n", "operands": ()}, r"takes 1 operands \(bias\), not 0"),
        ({"epilogue": "bias_n", "operands": (3,)}, "operand bias of epilogue bias_n is a tensor"),
        ({"epilogue": "alpha", "operands": (bias,)}, "operand alpha of epilogue alpha is a number"),
        ({"epilogue": "relu", "bias": bias}, "make them steps of the epilogue"),
        ({"operands": (bias,)}, "operands without an epilogue"),
    ):
        with pytest.raises(ProblemError, match=said):
            tunegemm.matmul(a, b, **keywords)
    with pytest.raises(ProblemError, match="has no gated form; use one of"):
        tunegemm.gated_linear(a, b.t(), activation="tanh")
    with pytest.raises(
        ProblemError, match=r"gate \(3, 8\) .* and up \(2, 8\) .*; give both with the same shape"
    ):
        tunegemm.interleave(torch.ones(3, 8), torch.ones(2, 8))
    said = r"\(4, 8\) and \(5, 8\): gates need an even number of columns, not 5"
    with pytest.warns(TunegemmWarning), pytest.raises(ProblemError, match=said):
        tunegemm.gated_linear(torch.ones(4, 8), torch.ones(5, 8))
    with pytest.raises(ProblemError, match=r"model 5 is not a torch.nn.Module"):
        tunegemm.patch(5)


@pytest.mark.parametrize("lead", [(32,), (2, 16), ()])
def test_a_weight_of_one_line_is_as_torchs_linear_takes_it(lead):
    x, weight = operands()[0][: math.prod(lead)].reshape(*lead, 64), torch.linspace(-1, 1, 64).to(BF16)
    expected = torch.relu(functional.linear(x, weight))
    close(tunegemm.linear(x, weight, activation="relu", residual=expected), 2 * expected)


@pytest.mark.parametrize("call", [tunegemm.gated_linear, partial(tunegemm.matmul, epilogue="swiglu")])
def test_a_vector_has_no_gate_and_up(call):
    a, b = operands()
    for left in (a, b[:, 0]):
        said = r"and \(64,\): gates need an even number of columns, not 1;"
        with warnings.catch_warnings(), pytest.raises(ProblemError, match=said):
            warnings.simplefilter("ignore")
            call(left, b[:, 0])


# Scales, and other dtypes


def test_warnings_name_the_function_that_was_called(serve):
    serve(Problem(8, 8, 8))
    (a, b), c = operands(), torch.ones(32, 48, dtype=BF16)
    one, fp8 = torch.ones(()), (a.to(FP8), b.to(FP8))
    for name, call in {
        "gated_linear": lambda: tunegemm.gated_linear(a, b.t()),
        "addmm": lambda: tunegemm.addmm(c, a, b),
        "baddbmm": lambda: tunegemm.baddbmm(*(each.repeat(2, 1, 1) for each in (c, a, b))),
        "scaled_mm": lambda: tunegemm.scaled_mm(*fp8, one, one, out_dtype=BF16),
        "addmm ": lambda: tunegemm.addmm(c[0], a, b),
        "addmm  ": lambda: tunegemm.addmm(c[:16], a[:16], b, beta=0),
        "bmm": lambda: tunegemm.bmm(*(each.repeat(3, 1, 1) for each in (a, b))),
        "linear": lambda: tunegemm.linear(a, b.t(), activation="relu"),
        "matmul": lambda: tunegemm.matmul(a, b, activation="gelu"),
    }.items():
        with pytest.warns(TunegemmWarning) as caught:
            call()
        assert f"tunegemm.{name.strip()} falls back to torch" in str(caught[0].message)


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("out_dtype", [BF16, torch.float32, None])
@pytest.mark.parametrize("rowwise, bias", list(itertools.product((False, True), repeat=2)))
def test_scaled_mm(serve, kernel, rowwise, bias, out_dtype, fast):
    snapshot = serve()
    a, b = (operand.to(FP8) for operand in operands())
    scale_a = torch.linspace(0.5, 1, 32)[:, None] if rowwise else torch.tensor(0.5)
    scale_b = torch.linspace(1, 2, 48)[None, :] if rowwise else torch.tensor([2.0])
    dtype = BF16 if out_dtype is None else out_dtype
    added = torch.linspace(-1, 1, 48).to(dtype) if bias else None
    wide = (a.float() * scale_a) @ (b.float() * scale_b)
    wide = wide + added.float() if bias else wide
    for _ in range(2):
        result = tunegemm.scaled_mm(
            a, b, scale_a, scale_b, bias=added, out_dtype=out_dtype, use_fast_accum=fast
        )
        assert result.dtype == (out_dtype or FP8)
        close(result.float(), wide, 5e-2 if out_dtype is None else 1e-2)
    (problem,) = set(snapshot.asked)
    assert problem.epilogue == ("scale_rowwise" if rowwise else "scale_tensor") + "+bias_n" * bias
    assert (problem.in_dtype, problem.accumulation) == ("fp8_e4m3", "fast" if fast else "two_level")
    assert len(kernel.calls) == 2


@pytest.mark.parametrize("out_dtype", [None, torch.float16, torch.float32])
@pytest.mark.parametrize("rowwise, bias", list(itertools.product((False, True), repeat=2)))
def test_scaled_mm_of_int8(serve, kernel, rowwise, bias, out_dtype):
    """Torch has the exact product only: what follows is its own kernels, or one of ours."""
    snapshot = serve()
    a, b = operands()
    a, b = (a * 8).to(torch.int8), (b.t().contiguous() * 8).to(torch.int8).t()
    scale_a = torch.linspace(0.5, 1, 32)[:, None] if rowwise else torch.tensor(0.5)
    scale_b = torch.linspace(1, 2, 48)[None, :] if rowwise else torch.tensor([2.0])
    dtype = out_dtype or BF16
    added = torch.linspace(-1, 1, 48).to(dtype) if bias else None
    wide = (a.float() * scale_a) @ (b.float() * scale_b)
    wide = wide + added.float() if bias else wide
    for _ in range(2):
        result = tunegemm.scaled_mm(a, b, scale_a, scale_b, bias=added, out_dtype=out_dtype)
        assert result.dtype == dtype
        close(result.float(), wide, 1e-2)
    (problem,) = set(snapshot.asked)
    assert (problem.in_dtype, problem.accumulation) == ("int8", "fast")
    assert len(kernel.calls) == 2
    serve(Problem(8, 8, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TunegemmWarning)
        result = tunegemm.scaled_mm(a, b, scale_a, scale_b, bias=added, out_dtype=out_dtype)
    assert result.dtype == dtype and len(kernel.calls) == 2
    close(result.float(), wide, 1e-2)


def test_scales_that_only_torch_has(serve, kernel):
    serve()
    a, b = (operand.to(FP8) for operand in operands())
    for scales, wrong in (
        ((torch.ones(32), torch.ones(48)), "scale_a"),
        ((torch.ones(2, 1), torch.ones(1, 1)), "scale_a"),
        ((torch.ones(32, 2),) * 2, "scale_b"),  # that of a is of 32 of k
    ):
        with pytest.raises((RuntimeError, ValueError)) as expected:
            torch._scaled_mm(a, b, *scales, out_dtype=BF16)
        with pytest.raises(type(expected.value)) as raised:
            tunegemm.scaled_mm(a, b, *scales, out_dtype=BF16)
        # Scales that fit no product are named; others are in torch's words.
        said = str(raised.value)
        assert said == str(expected.value) or said.startswith(f"{wrong} is (")
    assert not kernel.calls


def test_fp32_is_served_where_and_while_tf32_is_allowed(serve, kernel):
    snapshot = serve()
    a, b = (operand.float() for operand in operands())
    bias = torch.ones(48)
    calls = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TunegemmWarning)  # of fp32 where it is not allowed
        for precision in ("ieee", "tf32", "ieee", "tf32", "tf32"):
            with computing_fp32_in(precision):
                calls += 2 * (precision == "tf32")
                assert torch.equal(tunegemm.matmul(a, b), torch.matmul(a, b))
                tunegemm.linear(a, b.t(), bias)
                assert len(kernel.calls) == calls
    assert {problem.in_dtype for problem in snapshot.asked} == {"tf32"}


# Where no kernel is recorded


@pytest.mark.parametrize("extras", [{"bias"}, {"activation"}, {"bias", "activation"}, {"residual"}])
def test_a_miss_is_torchs_and_names_the_command(serve, kernel, extras):
    serve(Problem(1024, 48, 64))
    x, weight, bias, residual = layer()
    given = {"bias": bias, "activation": "silu", "residual": residual}
    given = {name: value for name, value in given.items() if name in extras}
    with pytest.warns(TunegemmWarning, match="tunegemm tune --shape 32x48x64 .*--epilogue ") as caught:
        result = tunegemm.linear(x, weight, **given)
    assert len(caught) == 1
    quietly(tunegemm.linear, x, weight, **given)
    expected = functional.linear(x, weight, given.get("bias"))
    expected = functional.silu(expected) if "activation" in extras else expected
    expected = expected + residual if "residual" in extras else expected
    assert torch.equal(result, expected) and not kernel.calls


def test_a_miss_multiplies_by_a_tuned_kernel_where_the_library_takes_nothing_along(serve, kernel):
    serve(Problem(32, 48, 64))
    x, weight, bias, _ = layer()
    with pytest.warns(TunegemmWarning, match="--epilogue silu"):
        result = tunegemm.linear(x, weight, activation="silu")
    assert torch.equal(result, functional.silu(functional.linear(x, weight)))
    assert torch.equal(quietly(tunegemm.linear, x, weight, None, "silu"), result)
    assert len(kernel.calls) == 2
    with pytest.warns(TunegemmWarning, match=r"--epilogue bias_n\+silu"):
        tunegemm.linear(x, weight, bias, "silu")
    assert len(kernel.calls) == 2  # torch adds the bias in its own kernel


def test_what_is_no_product_is_refused_by_torch_itself(serve):
    serve()
    x, weight, bias, _ = layer()
    for bad in (
        (x, weight.t(), bias),
        (x, weight[0], bias[:1]),
        (x, weight, bias[:5]),
        (x, weight, "b"),
        ("x", weight, bias),
        (x, None, bias),
    ):
        with pytest.raises((RuntimeError, TypeError)) as expected:
            functional.linear(*bad)
        with pytest.raises(type(expected.value)) as raised:
            tunegemm.linear(*bad)
        assert str(raised.value) == str(expected.value)
    for bad in ((bias, x[:5], weight.t()), (bias, x[0], weight.t()), (bias[:5], x, weight.t())):
        with suppress(RuntimeError):
            torch.addmm(*bad)
            continue
        with pytest.raises(RuntimeError):
            tunegemm.addmm(*bad)


def test_outputs(serve, kernel):
    serve()
    x, weight, bias, residual = layer()
    expected = torch.addmm(bias, x, weight.t())
    out = torch.zeros_like(expected)
    version = out._version
    assert tunegemm.matmul(x, weight.t(), out=out, bias=bias) is out
    assert torch.equal(out, expected) and out._version > version and len(kernel.calls) == 1
    out.copy_(residual)
    tunegemm.matmul(x, weight.t(), out=out, residual=out)  # the output is an operand: torch's
    close(out, x @ weight.t() + residual)
    assert len(kernel.calls) == 1
    with pytest.raises(RuntimeError, match="out is"):
        tunegemm.matmul(x, weight.t(), out=out[:5], activation="relu")
    with pytest.raises(RuntimeError, match=r"out is .* on meta, but the result is .* on cpu"):
        tunegemm.matmul(x, weight.t(), out=out.to("meta"), activation="relu")


def test_output_dtypes(serve, kernel):
    snapshot = serve()
    a, b = operands()
    wide = a.float() @ b.float()
    assert torch.equal(tunegemm.matmul(a, b, out_dtype=torch.float32), wide)
    close(tunegemm.matmul(a, b, out_dtype=torch.float32, bias=torch.ones(48)), wide + 1)
    small, other = a.to(torch.int8), b.t().contiguous().to(torch.int8).t()
    assert torch.equal(tunegemm.matmul(small, other, out_dtype=torch.int32), wide.int())
    assert [problem.out_dtype for problem in snapshot.asked] == ["fp32", "fp32", "int32"]
    assert len(kernel.calls) == 3
    assert tunegemm.matmul(a, b, out_dtype=BF16).dtype == BF16
