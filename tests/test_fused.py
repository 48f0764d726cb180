"""Calls that do more than multiply: bias, activations, gates, scales, users' functions, on the CPU.

The kernels are torch's arithmetic; test_gpu_fused.py has the real ones.
"""

from __future__ import annotations

import itertools
import os
import struct
import warnings
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch
from torch._functorch import config as functorch_config
from torch.nn import functional

import tunegemm
from tests.serving import BF16, Kernel, Row, at, calls_of, operands, quietly
from tunegemm.device import find_device
from tunegemm.dispatch import api, ops, takeover
from tunegemm.dispatch.dispatcher import Dispatcher
from tunegemm.dispatch.launchers import TORCH, Prepared
from tunegemm.dispatch.planning import tune_command
from tunegemm.dispatch.snapshot import Snapshot
from tunegemm.dispatch.worth import kernels_after, least_ratio
from tunegemm.epilogue import MAX_WORDS, Epilogue, Matrix, Number, PerColumn, maximum, tanh
from tunegemm.errors import ProblemError, TunegemmWarning
from tunegemm.families.launching import AddressLaunch, AddressLauncher, operand_reader, words_reader
from tunegemm.problem import Problem

FP8 = torch.float8_e4m3fn


@Epilogue.custom
def bent(acc, shift: PerColumn, skip: Matrix, cap: Number):  # type: ignore[no-untyped-def]
    return cap * tanh((acc + shift) / cap) + maximum(skip, 0.0)


class Recorded(Snapshot):
    """Records of the problems that are given; of all where none are. They are worth it in compiled code."""

    def __init__(self, *problems: Problem) -> None:
        fingerprint = find_device("model:h200").fingerprint
        super().__init__([Row(problem, fingerprint, ratio=9.0) for problem in problems])
        self.asked: list[Problem] = []
        self.digest = os.urandom(8).hex()  # what other runs left on torch's disk is not to be taken

    def find(self, problem, fingerprint):
        self.asked.append(problem)
        return super().find(problem, fingerprint) if self._records else Row(problem, fingerprint, ratio=9.0)


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


@pytest.fixture
def serve(kernel, monkeypatch):
    """tunegemm's functions serve CPU tensors from records of the given problems, or of every problem."""

    def make(*problems: Problem) -> Recorded:
        snapshot = Recorded(*problems)
        dispatcher = Dispatcher(
            device_type="cpu",
            read=lambda: snapshot,
            find=lambda _: find_device("model:h200"),
            prepare=lambda record, _: Prepared(kernel.of(record.problem)),
        )
        monkeypatch.setattr(api, "_dispatcher", dispatcher)
        monkeypatch.setattr(api, "_product", dispatcher.product)
        monkeypatch.setattr(ops, "_DEVICE_TYPE", "cpu")
        monkeypatch.setattr(takeover, "_KEYS", ("CPU",))
        return snapshot

    return make


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    # Else the first call of compiled code is made under a mode, where products are torch's.
    with warnings.catch_warnings(), functorch_config.patch(check_custom_op_aliasing=False):
        warnings.simplefilter("error", TunegemmWarning)
        yield
    tunegemm.disable()
    torch._dynamo.reset()


def close(result: torch.Tensor, expected: torch.Tensor, bound: float = 2e-2) -> None:
    assert result.shape == expected.shape and result.dtype == expected.dtype
    error = (result.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-9)
    assert error <= bound, float(error)


ACTIVATIONS = {
    "relu": torch.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
}


def layer(*lead: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Input, weight, bias and residual of a layer with 64 inputs and 48 outputs."""
    a, b = operands()
    rows = torch.Size(lead or (32,)).numel()
    x = (a[:rows] / 8).view(*(lead or (32,)), 64)
    bias = torch.linspace(-2, 2, 48).to(BF16)
    residual = torch.linspace(-1, 1, rows * 48).to(BF16).view(*x.shape[:-1], 48)
    return x, b.t().contiguous(), bias, residual


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
    served = beta == 0 or shape == "matrix" or (beta == 1 and "row" in shape and shape != "one row")
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


@pytest.mark.parametrize(
    "text", ["alpha+beta_c+bias_m+relu", "bias_m", "silu+residual", "alpha+bias_n+swiglu"]
)
def test_epilogues_by_their_text(serve, kernel, text):
    serve()
    a, b = operands()
    problem = Problem(32, 48, 64, epilogue=text)
    given = [
        0.5 if each.kind == "number" else torch.ones(problem.operand_shape(each), dtype=BF16)
        for each in problem.fused.operands
    ]
    named = {each.name: value for each, value in zip(problem.fused.operands, given, strict=True)}
    expected = problem.fused.reference(a.float() @ b.float(), named).to(BF16)
    close(tunegemm.matmul(a, b, epilogue=text, operands=given), expected)
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
    assert tune_command(monkey) == (
        f"tunegemm.tune(Problem.parse('32x48x64', dtype='bf16', layout='tn', epilogue='{bent}'))"
    )


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
    with pytest.raises(ProblemError, match="gates nothing; use one of"):
        tunegemm.gated_linear(a, b.t(), activation="tanh")


# Scales, and other dtypes


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
    for scales in (
        (torch.ones(32), torch.ones(48)),
        (torch.ones(2, 1), torch.ones(1, 1)),
        (torch.ones(32, 2),) * 2,
    ):
        with pytest.raises((RuntimeError, ValueError)) as expected:
            torch._scaled_mm(a, b, *scales, out_dtype=BF16)
        with pytest.raises(type(expected.value)) as raised:
            tunegemm.scaled_mm(a, b, *scales, out_dtype=BF16)
        assert str(raised.value) == str(expected.value)
    assert not kernel.calls


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


def test_fp32_is_served_where_and_while_tf32_is_allowed(serve, kernel):
    snapshot = serve()
    a, b = (operand.float() for operand in operands())
    bias = torch.ones(48)
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    calls = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TunegemmWarning)  # of fp32 where it is not allowed
        try:
            for precision in ("ieee", "tf32", "ieee", "tf32", "tf32"):
                matmul.fp32_precision = precision
                calls += 2 * (precision == "tf32")
                assert torch.equal(tunegemm.matmul(a, b), torch.matmul(a, b))
                tunegemm.linear(a, b.t(), bias)
                assert len(kernel.calls) == calls
        finally:
            matmul.fp32_precision = before
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


def test_where_torch_won_torch_computes_all(serve, kernel, monkeypatch):
    serve()
    monkeypatch.setattr(api._dispatcher, "_prepare", lambda record, _: TORCH)
    x, weight, bias, _ = layer()
    for activation in (None, "silu"):
        for _ in range(2):
            tunegemm.linear(x, weight, bias, activation)
            tunegemm.linear(x, weight, None, activation)
    assert not kernel.calls


def test_the_command_names_all_that_tells_problems_apart():
    problem = Problem(
        32,
        48,
        64,
        in_dtype="fp8_e4m3",
        out_dtype="fp16",
        epilogue="scale_tensor+bias_n",
        accumulation="two_level",
    )
    assert tune_command(problem) == (
        "tunegemm tune --shape 32x48x64 --dtype fp8_e4m3 --out-dtype fp16 --layout tn "
        "--epilogue scale_tensor+bias_n --accumulation two_level"
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda bias: bias.float(),
        lambda bias: bias.double(),
        lambda bias: torch.ones(1, 48, dtype=BF16),
        lambda bias: torch.ones(96, dtype=BF16)[::2],
    ],
)
def test_operands_that_no_kernel_takes_are_torchs(serve, kernel, change):
    serve()
    x, weight, bias, _ = layer()
    bias = change(bias)
    try:
        expected = functional.linear(x, weight, bias)
    except RuntimeError as error:
        with pytest.raises(RuntimeError) as raised:
            tunegemm.linear(x, weight, bias)
        assert str(raised.value) == str(error)
    else:
        close(tunegemm.linear(x, weight, bias), expected)


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
    with pytest.raises(RuntimeError, match="out of"):
        tunegemm.matmul(x, weight.t(), out=out[:5], activation="relu")


# The short way


class FusedByAddress:
    """A kernel of addresses and words on the CPU, behind the families' own launcher."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.words: list[tuple[int, ...]] = []
        self.launcher = AddressLauncher(operand_reader(problem, 16, 16), self.make, words_reader(problem))

    def make(self, lda: int, ldb: int, ldd: int, *steps: int) -> AddressLaunch:
        m, n, k = self.problem.m, self.problem.n, self.problem.k

        def launch(a: int, b: int, d: int, *words: int) -> None:
            self.words.append(words)
            left, right = at(a, (m, k), (lda, 1)), at(b, (k, n), (1, ldb))
            named, place = {}, 0
            for operand in self.problem.fused.operands:
                if operand.kind == "number":
                    named[operand.name] = struct.unpack("f", struct.pack("I", words[place]))[0]
                elif operand.kind == "matrix":
                    named[operand.name] = at(words[place], (m, n), (words[place + 1], 1))
                else:
                    named[operand.name] = at(words[place], (n,), (1,))
                place += operand.words
            at(d, (m, n), (ldd, 1)).copy_(self.problem.fused.reference(left.float() @ right.float(), named))

        return launch


@pytest.fixture
def by_address(monkeypatch):
    def make(text: str) -> FusedByAddress:
        kernel = FusedByAddress(Problem(32, 48, 64, epilogue=text))
        dispatcher = Dispatcher(
            device_type="cpu",
            read=lambda: Recorded(kernel.problem),
            find=lambda _: find_device("model:h200"),
            prepare=lambda *_: Prepared(kernel.launcher, tma=True),
        )
        monkeypatch.setattr(api, "_dispatcher", dispatcher)
        monkeypatch.setattr(api, "_product", dispatcher.product)
        return kernel

    return make


def test_a_known_call_is_one_check_one_allocation_and_one_launch(by_address):
    kernel = by_address("bias_n")
    x, weight, bias, _ = layer()
    expected = functional.linear(x, weight, bias)
    for call in (lambda: tunegemm.linear(x, weight, bias), lambda: tunegemm.linear(x, weight, bias)):
        assert torch.equal(call(), expected)
        dispatcher = api._dispatcher
        lock, dispatcher._lock = dispatcher._lock, None
        python, c = calls_of(call)
        dispatcher._lock = lock
        python = python[1 : python.index("launch")]
        assert python == ["linear", "is_compiling", "is_scripting", "fused", "bind_one"]
        before = c[: c.index("append")]
        assert len(before) <= 11 and "check" in before
        assert not {"stride", "acquire", "execute", "open", "format"} & set(before)
    assert {len(words) for words in kernel.words} == {MAX_WORDS}
    assert all(words[0] == bias.data_ptr() and not any(words[1:]) for words in kernel.words)


@pytest.mark.parametrize(
    "text", ["bias_n+gelu", "residual", "bias_n+relu+residual", "alpha+beta_c+bias_n", "silu"]
)
def test_words_are_those_of_the_call(by_address, text):
    """Other tensors and numbers than those that the plan was made with."""
    kernel = by_address(text)
    x, weight, _, _ = layer()
    problem = kernel.problem
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        given = [
            seed + 0.5
            if each.kind == "number"
            else torch.randint(-3, 4, problem.operand_shape(each), generator=generator).to(BF16)
            for each in problem.fused.operands
        ]
        named = {each.name: value for each, value in zip(problem.fused.operands, given, strict=True)}
        expected = problem.fused.reference(x.float() @ weight.t().float(), named).to(BF16)
        assert torch.equal(tunegemm.matmul(x, weight.t(), epilogue=text, operands=given), expected)
    assert len(kernel.words) == 3


def test_a_bias_at_an_odd_address_is_torchs(by_address):
    kernel = by_address("bias_n")
    x, weight, bias, _ = layer()
    odd = torch.cat((bias[:1], bias))[1:]
    assert odd.data_ptr() % 4 == 2
    expected = functional.linear(x, weight, bias)
    with pytest.warns(TunegemmWarning, match="no packed, aligned vector"):
        assert torch.equal(tunegemm.linear(x, weight, odd), expected)
    assert not kernel.words
    for each, launches in ((bias, 1), (odd, 1), (bias, 2), (odd, 2)):
        assert torch.equal(tunegemm.linear(x, weight, each), expected)
        assert len(kernel.words) == launches


def test_what_a_known_call_minds(by_address):
    kernel = by_address("bias_n")
    x, weight, bias, _ = layer()
    tunegemm.linear(x, weight, bias)
    for other in (bias.clone(), torch.nn.Parameter(bias, requires_grad=False)):
        assert torch.equal(tunegemm.linear(x, weight, other), functional.linear(x, weight, bias))
    assert len(kernel.words) == 3
    torch.use_deterministic_algorithms(True)
    try:
        tunegemm.linear(x, weight, bias)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(kernel.words) == 3
    learned = bias.clone().requires_grad_()
    assert tunegemm.linear(x, weight, learned).requires_grad
    with torch.no_grad():
        assert not tunegemm.linear(x, weight, learned).requires_grad


# torch's own machinery


def gradients(call, *inputs: torch.Tensor) -> list[torch.Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    result = call(*leaves)
    upstream = torch.linspace(-1, 1, result.numel()).view(result.shape).to(result.dtype)
    return [result.detach(), *torch.autograd.grad(result, leaves, upstream)]


CALLS = {
    "bias": (
        lambda x, w, bias, _: tunegemm.linear(x, w, bias) + 0 * _.sum(),
        lambda x, w, bias, _: functional.linear(x, w, bias) + 0 * _.sum(),
    ),
    "bias, gelu, residual": (
        lambda x, w, bias, residual: tunegemm.linear(x, w, bias, "gelu", residual),
        lambda x, w, bias, residual: functional.gelu(functional.linear(x, w, bias)) + residual,
    ),
    "gated": (
        lambda x, w, bias, _: tunegemm.gated_linear(x, w, bias) + 0 * _.sum(),
        lambda x, w, bias, _: functional.silu(functional.linear(x, w[0::2], bias[0::2]))
        * functional.linear(x, w[1::2], bias[1::2]) + 0 * _.sum(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("lead", [(32,), (2, 16)])
@pytest.mark.parametrize("name", CALLS)
def test_gradients(serve, kernel, name, lead):
    serve()
    ours, theirs = (gradients(call, *layer(*lead)) for call in CALLS[name])
    for mine, torchs in zip(ours, theirs, strict=True):
        close(mine, torchs)
    assert len(kernel.calls) == 3  # forward, and two products backward


def test_gradients_in_double_precision():
    """Of what torch computes where there is no kernel; the products of the backward pass: test_torch.py."""
    x, w = torch.randn(3, 4, dtype=torch.double), torch.randn(6, 4, dtype=torch.double)
    bias, residual = torch.randn(6, dtype=torch.double), torch.randn(3, 6, dtype=torch.double)
    everything = [tensor.requires_grad_() for tensor in (x, w, bias, residual)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TunegemmWarning)
        assert torch.autograd.gradcheck(
            lambda *given: tunegemm.linear(*given[:3], "silu", given[3]), everything
        )
        assert torch.autograd.gradcheck(lambda *given: tunegemm.gated_linear(*given), everything[:3])


def test_gradients_of_a_bias_twice(serve, kernel):
    from tunegemm.dispatch.autograd import add_differentiably

    def compute(a, b, bias):
        return torch.matmul(a, b) + bias

    given = [torch.randn(shape, dtype=torch.double, requires_grad=True) for shape in ((3, 4), (4, 5), (5,))]

    def call(a, b, bias):
        return add_differentiably(compute, torch.matmul, a, b, bias)

    assert torch.autograd.gradcheck(call, given)
    assert torch.autograd.gradgradcheck(call, given)


def test_transforms_are_torchs(serve, kernel):
    serve()
    x, weight, bias, _ = layer()
    many = torch.stack((x, -x))

    def ours(x):
        return tunegemm.linear(x, weight, bias, "silu")

    def theirs(x):
        return functional.silu(functional.linear(x, weight, bias))

    close(torch.vmap(ours)(many), torch.vmap(theirs)(many))
    close(torch.func.jvp(ours, (x,), (x,))[1], torch.func.jvp(theirs, (x,), (x,))[1])
    close(torch.func.grad(lambda x: ours(x).sum())(x), torch.func.grad(lambda x: theirs(x).sum())(x))


def test_autocast(serve, kernel):
    serve()
    module = torch.nn.Linear(64, 48)
    x, weight, bias = torch.randn(32, 64), module.weight.detach(), module.bias.detach()
    with torch.autocast("cpu", dtype=BF16), torch.no_grad():
        for _ in range(2):
            close(tunegemm.linear(x, weight, bias, "relu"), torch.relu(module(x)))
            close(tunegemm.linear(x, weight.to(BF16), bias), module(x))
        assert len(kernel.calls) == 4
        close(tunegemm.linear(x, module.weight, module.bias), module(x))
    assert len(kernel.calls) == 5


@pytest.mark.parametrize("dtypes", ["wide", "weights", "skip", "cast"])
@pytest.mark.parametrize("grad", [False, True])
def test_autocast_means_what_it_means_for_torchs_calls(serve, kernel, dtypes, grad):
    """dtypes: what is fp32: all, all but the input, the residual and bias, or nothing."""
    serve()
    x, weight, bias, skip = layer()
    if dtypes == "wide":
        x = x.float()
    if dtypes in ("wide", "weights"):
        weight = weight.float()
    if dtypes != "cast":
        bias, skip = bias.float(), skip.float()
    gated = functional.silu
    calls = {
        "relu": (lambda: tunegemm.linear(x, weight, bias, "relu"),
                 lambda: torch.relu(functional.linear(x, weight, bias))),
        "no bias": (lambda: tunegemm.linear(x, weight, None, "silu"),
                    lambda: functional.silu(functional.linear(x, weight))),
        "residual": (lambda: tunegemm.linear(x, weight, bias, "gelu", skip),
                     lambda: functional.gelu(functional.linear(x, weight, bias)) + skip),
        "residual alone": (lambda: tunegemm.linear(x, weight, residual=skip),
                           lambda: functional.linear(x, weight) + skip),
        "gated": (lambda: tunegemm.gated_linear(x, weight, bias),
                  lambda: gated(functional.linear(x, weight[0::2], bias[0::2]))
                  * functional.linear(x, weight[1::2], bias[1::2])),
        "addmm": (lambda: tunegemm.addmm(skip, x, weight.t(), alpha=2, beta=3),
                  lambda: torch.addmm(skip, x, weight.t(), alpha=2, beta=3)),
        "row": (lambda: tunegemm.addmm(bias, x, weight.t()), lambda: torch.addmm(bias, x, weight.t())),
        "baddbmm": (lambda: tunegemm.baddbmm(skip[None], x[None], weight.t()[None]),
                    lambda: torch.baddbmm(skip[None], x[None], weight.t()[None])),
    }  # fmt: skip
    for tensor in (x, weight, bias, skip):
        tensor.requires_grad_(grad)
    wanted = [x, weight, bias, skip]
    for name, (ours, theirs) in calls.items():
        with torch.autocast("cpu", dtype=BF16):
            mine, torchs = ours(), theirs()
            kernel.calls.clear()
            ours()
            assert kernel.calls or (grad and "add" in name), name
        close(mine, torchs)
        if grad:
            pairs = [
                torch.autograd.grad(result.float().sum(), wanted, allow_unused=True)
                for result in (mine, torchs)
            ]
            for one, other in zip(*pairs, strict=True):
                assert (one is None) == (other is None), name
                if one is not None:
                    close(one, other)


def test_autocast_leaves_scaled_products_and_other_devices_alone(serve, kernel):
    serve()
    x, weight, bias, _ = layer()
    a, b, one = x.to(FP8), weight.to(FP8).t(), torch.ones(())
    plain = tunegemm.scaled_mm(a, b, one, one, bias=bias, out_dtype=BF16)
    expected = tunegemm.linear(x, weight, bias, "relu")
    with torch.autocast("cpu", dtype=torch.float16):
        assert torch.equal(tunegemm.scaled_mm(a, b, one, one, bias=bias, out_dtype=BF16), plain)
    with torch.autocast("cuda", dtype=torch.float16):
        assert torch.equal(tunegemm.linear(x, weight, bias, "relu"), expected)
    assert len(kernel.calls) == 4


def test_autocast_of_operands_that_have_its_dtype_is_as_short_as_none(by_address):
    kernel = by_address("bias_n")
    x, weight, bias, _ = layer()
    with torch.autocast("cpu", dtype=BF16):
        tunegemm.linear(x, weight, bias)
        python, _ = calls_of(lambda: tunegemm.linear(x, weight, bias))
        assert "_generally_fused" not in python and len(kernel.words) == 2
    with torch.autocast("cpu", dtype=torch.float16), warnings.catch_warnings():
        warnings.simplefilter("ignore", TunegemmWarning)
        assert tunegemm.linear(x, weight, bias).dtype == torch.float16
    assert len(kernel.words) == 2


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_compiled_code_launches_the_kernel(serve, kernel, backend, mode):
    serve()
    x, weight, bias, residual = layer(2, 16)

    def function(x, weight, bias, residual):
        hidden = tunegemm.linear(x, weight, bias, "gelu_tanh", residual)
        return tunegemm.gated_linear(hidden, weight.t().contiguous()) + 1

    with mode():
        compiled = torch.compile(function, backend=backend, fullgraph=True)
        close(compiled(x, weight, bias, residual), function(x, weight, bias, residual))
    assert len(kernel.calls) == 4


def test_inductors_code_calls_us_and_not_torchs_dispatcher(serve, kernel):
    serve()
    x, weight, bias, skip = layer()
    compiled = torch.compile(
        lambda x: tunegemm.linear(tunegemm.gated_linear(x, weight), weight[:, :24].contiguous(), bias) + skip,
        fullgraph=True,
    )
    with torch.no_grad():
        expected, (code,) = torch._inductor.utils.run_and_get_code(compiled, x)
        kernel.calls.clear()  # that ran under a mode, where products are torch's
        close(expected, compiled(x))
    assert code.count("extern_kernels.tunegemm_product_and_more(") == 2
    assert "torch.ops.tunegemm.fused.default(" not in code and len(kernel.calls) == 2


@pytest.mark.parametrize(
    ("shape", "epilogue", "least"),
    [
        ("16x4096x4096", "", (1.01, 1.01)),
        ("4096x4096x4096", "bias_n", (1.01, 1.01)),  # the library's call takes the bias
        ("4096x4096x4096", "alpha+beta_c", (1.01, 1.01)),
        ("512x4096x4096", "residual", (1.05, 1.3)),  # measured: 1.038 by us, and slower than the bare product
        ("4096x14336x4096", "bias_n+gelu_tanh", (1.05, 1.15)),
        ("4096x28672x4096", "swiglu", (1.1, 1.3)),
    ],
)
def test_what_a_kernel_must_gain_in_compiled_code(shape, epilogue, least):
    """A compiler does what follows a product in its neighbours' kernels: no more than that may be gained."""
    ratio = least_ratio(Problem.parse(shape, epilogue=epilogue), find_device("model:h200"))
    assert least[0] <= ratio <= least[1]


def test_every_operation_of_a_users_function_is_a_kernel_of_eager_torch():
    assert kernels_after(Problem(32, 48, 64, epilogue=str(bent))) == 6
    assert kernels_after(Problem(32, 48, 64, epilogue="bias_n+gelu+residual")) == 2
    scaled = Problem.parse("4096x4096x4096", dtype="int8", out_dtype="bf16", epilogue="scale_rowwise+bias_n")
    assert kernels_after(scaled) == 2 and least_ratio(scaled, find_device("model:h200")) > 1.1


def test_code_in_cpp_is_torchs(serve, kernel):
    """It would call us through torch's dispatcher, and may run where there is no Python."""
    from torch._dynamo.backends.common import aot_autograd

    serve()
    x, weight, _, _ = layer()
    graphs = []

    def compiler(graph, _):
        graphs.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    backend = aot_autograd(fw_compiler=compiler)
    with torch.no_grad(), torch._inductor.config.patch(cpp_wrapper=True):
        compiled = torch.compile(
            lambda x: tunegemm.linear(tunegemm.linear(x, weight), weight.t(), None, "relu"),
            backend=backend,
            fullgraph=True,
        )
        compiled(x)
    assert "aten.mm.default" in graphs and not any("tunegemm" in target for target in graphs)


@pytest.mark.filterwarnings("error:(?s).*lru_cache")
def test_compiled_calls_of_every_kind(serve, kernel):
    serve()
    x, weight, bias, skip = layer()
    a, b, one = x.to(FP8), weight.to(FP8).t(), torch.ones(())
    rows, columns = torch.ones(32, 1), torch.ones(1, 48)
    out = torch.zeros_like(skip)

    def function(x, weight, bias, skip, amax, out):
        tunegemm.matmul(x, weight.t(), bias=bias, out=out)
        return (
            tunegemm.matmul(x, weight.t(), epilogue=bent, operands=(bias, skip, 3)),
            tunegemm.matmul(x, weight.t(), epilogue="bias_n+amax", operands=(bias, amax)),
            tunegemm.addmm(skip, x, weight.t(), alpha=2),
            tunegemm.addmm(bias, x, weight.t()),
            tunegemm.scaled_mm(a, b, one, one, out_dtype=BF16),
            tunegemm.scaled_mm(a, b, rows, columns, out_dtype=BF16),
            tunegemm.matmul(x, weight.t(), out_dtype=torch.float32),
            amax + 1,
            out + 1,
        )

    given = [x, weight, bias, skip]
    expected = function(*given, torch.zeros(()), torch.zeros_like(out))
    calls = len(kernel.calls)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for result, wanted in zip(compiled(*given, torch.zeros(()), out), expected, strict=True):
        close(result, wanted)
    close(out + 1, expected[-1])
    assert len(kernel.calls) == 2 * calls


def test_a_recording_sees_torchs_products(serve, kernel):
    serve()
    x, weight, bias, skip = layer()
    with tunegemm.record() as recording:
        tunegemm.linear(x, weight, bias, "gelu", skip)
        tunegemm.addmm(skip, x, weight.t())
        torch.compile(lambda x: tunegemm.linear(x, weight, bias), backend="aot_eager", fullgraph=True)(x)
    assert sorted((each.kind.op, each.kind.bias, each.calls) for each in recording.products) == [
        ("addmm", "matrix", 1), ("addmm", "vector", 2)
    ]  # fmt: skip
    assert not kernel.calls


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("dynamic", [False, True])
def test_graphs_without_records_are_torchs_operators(serve, kernel, mode, dynamic):
    serve(Problem(4096, 4096, 4096))
    targets = []

    def compiler(graph, _):
        targets.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    x, weight, bias, _ = layer()
    backend = torch._dynamo.backends.common.aot_autograd(fw_compiler=compiler)
    function = torch.compile(
        lambda x, w, bias: tunegemm.linear(x, w, bias, "relu"),
        backend=backend,
        fullgraph=True,
        dynamic=dynamic,
    )
    with mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore", TunegemmWarning)
        close(function(x, weight, bias), torch.relu(functional.linear(x, weight, bias)))
    assert "aten.addmm.default" in targets and not any("tunegemm" in target for target in targets)


def test_a_graph_of_symbolic_rows_keeps_the_operator_where_any_rows_are_recorded(serve, kernel):
    serve(*(Problem(m, 48, 64, epilogue="bias_n") for m in (7, 32)))
    _, weight, bias, _ = layer()
    compiled = torch.compile(
        lambda x: tunegemm.linear(x, weight, bias), backend="aot_eager", fullgraph=True, dynamic=True
    )
    for m in (7, 32):
        x = operands(m)[0]
        close(compiled(x), functional.linear(x, weight, bias))
    assert [call[0] for call in kernel.calls] == [(7, 64), (32, 64)]


def test_compiled_training(serve, kernel):
    serve()
    for ours, theirs in CALLS.values():
        compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
        for mine, torchs in zip(gradients(compiled, *layer()), gradients(theirs, *layer()), strict=True):
            close(mine, torchs)


def test_exported_programs_hold_the_operator(serve, kernel):
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            _, weight, bias, _ = layer()
            self.weight, self.bias = torch.nn.Parameter(weight, False), torch.nn.Parameter(bias, False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return tunegemm.linear(x, self.weight, self.bias, "silu")

    serve()
    module, x = Layer(), layer()[0]
    program = torch.export.export(module, (x,))
    assert "tunegemm.fused" in program.graph_module.code
    close(program.module()(x), module(x))
    assert len(kernel.calls) == 2


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("text", ["bias_n+gelu", "swiglu", "alpha+beta_c"])
def test_the_operator_passes_torchs_own_check(serve, kernel, text, grad):
    serve()
    x, weight, bias, c = layer()
    tensors = {"bias_n+gelu": [bias], "swiglu": [], "alpha+beta_c": [c]}[text]
    numbers = [2.0, 0.5] if text.startswith("alpha") else []
    given = [tensor.detach().clone().requires_grad_(grad) for tensor in (x, weight.t(), *tensors)]
    torch.library.opcheck(torch.ops.tunegemm.fused.default, (*given[:2], given[2:], numbers, text))


def test_enable_serves_what_adds_and_scales(serve, kernel):
    serve()
    x, weight, bias, c = layer()
    many = torch.stack((x, x)), torch.stack((weight.t(), weight.t())), torch.stack((c, c))
    a, b, one = x.to(FP8), weight.to(FP8).t(), torch.ones(())
    rows, columns = torch.ones(32, 1), torch.ones(1, 48)
    small = (x * 8).to(torch.int8)
    out = torch.empty_like(c)
    ways = (
        lambda: functional.linear(x, weight, bias),
        lambda: torch.addmm(c, x, weight.t(), beta=2),
        lambda: torch.addmm(bias, x, weight.t(), out=out),
        lambda: torch.baddbmm(many[2], *many[:2], alpha=0.5),
        lambda: torch._scaled_mm(a, b, one, one, out_dtype=BF16),
        lambda: torch._scaled_mm(a, b, rows, columns, bias=bias, out_dtype=BF16, use_fast_accum=True),
        lambda: torch._int_mm(small, weight.to(torch.int8).t()),
    )  # fmt: skip
    for way in ways:
        expected = way().clone()
        kernel.calls.clear()
        with tunegemm.enable():
            close(way(), expected)
        assert len(kernel.calls) == 1
        way()
        assert len(kernel.calls) == 1


def test_patched_layers_with_a_bias(serve, kernel):
    serve()
    module = torch.nn.Linear(64, 48).to(BF16)
    x = layer()[0]
    expected = module(x)
    assert tunegemm.patch(module) == 1
    close(module(x), expected)
    with torch.no_grad():
        close(module(x), expected)
    assert len(kernel.calls) == 2
    module(x).sum().backward()
    assert module.bias.grad is not None and module.weight.grad is not None
    tunegemm.unpatch(module)


def test_near_hits_are_of_the_same_epilogue():
    device = find_device("model:h200")
    snapshot = Recorded(Problem(64, 48, 64), Problem(128, 48, 64, epilogue="bias_n"))
    problem = Problem(96, 48, 64, epilogue="bias_n")
    assert snapshot.extents(problem) == {128}
    assert [each.m for each in snapshot.around(problem, 4)] == [128]
    assert device
