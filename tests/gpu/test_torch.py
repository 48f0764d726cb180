"""torch's own machinery around tuned kernels on a real GPU: gradients, graphs, `enable` and `patch`."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import warnings
from collections.abc import Callable

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from torch.nn.functional import linear as torch_linear

import tunegemm
from tests.support.host_time import best_us
from tests.support.kernels import tune_ours, watch_launches
from tests.support.numerics import difference
from tunegemm.describe.problem import Problem
from tunegemm.errors import TunegemmWarning

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("all_tuned")]

TOKENS, WIDTH, HIDDEN = 512, 256, 768
#: The products of `Block` below, which are those of its backward pass too.
FORWARD = (Problem(TOKENS, WIDTH, WIDTH), Problem(TOKENS, HIDDEN, WIDTH), Problem(TOKENS, WIDTH, HIDDEN))
BATCHED = Problem(128, 128, 64, 8, b_major="n")


@pytest.fixture(scope="module", autouse=True)
def tuned() -> None:
    problems = {each for forward in (*FORWARD, BATCHED) for each in (forward, *forward.backward())}
    assert tune_ours(sorted(problems), trials=4) == problems


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The extents (m, n, k) of every product that a tuned kernel computes from now on."""
    seen: list[tuple[int, ...]] = []
    watch_launches(monkeypatch, lambda _, a, b, out: seen.append((a.shape[-2], b.shape[-1], a.shape[-1])))
    return seen


class Block(torch.nn.Module):
    """Attention's projections and a feed-forward network, as a decoder has them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up = torch.nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = torch.nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(x).view(*x.shape[:-1], 4, -1).transpose(-3, -2) for layer in (self.q, self.k, self.v)
        )
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(-3, -2).flatten(-2))
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


@pytest.fixture
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(Block(), Block()).to("cuda", torch.bfloat16)


def tokens(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(2, TOKENS // 2, WIDTH, device="cuda", generator=generator).bfloat16()


def close(result: torch.Tensor, expected: torch.Tensor, bound: float = 1e-2) -> None:
    assert result.shape == expected.shape and result.dtype == expected.dtype
    assert difference(result, expected) <= bound


def operands(problem: Problem = FORWARD[1]) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(1)
    a = torch.randn(problem.m, problem.k, device="cuda", generator=generator).bfloat16()
    return a, torch.randn(problem.n, problem.k, device="cuda", generator=generator).bfloat16()


def gradients(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> list[torch.Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    result = function(*leaves)
    upstream = torch.randn(result.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(2)).to(
        result.dtype
    )
    return [result, *torch.autograd.grad(result, leaves, upstream)]


# Gradients and operators


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_linear(launches, compiled):
    function = torch.compile(tunegemm.linear, fullgraph=True) if compiled else tunegemm.linear
    a, weight = operands()
    ours, theirs = gradients(function, a, weight), gradients(torch_linear, a, weight)
    for mine, torchs in zip(ours, theirs, strict=True):
        close(mine, torchs)
        assert mine.stride() == torchs.stride()
    forward = FORWARD[1]
    assert sorted(launches) == sorted((p.m, p.n, p.k) for p in (forward, *forward.backward()))


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_bmm(launches, compiled):
    function = torch.compile(tunegemm.bmm, fullgraph=True) if compiled else tunegemm.bmm
    a = torch.randn(8, 128, 64, device="cuda").bfloat16()
    b = torch.randn(8, 64, 128, device="cuda").bfloat16()
    for mine, torchs in zip(gradients(function, a, b), gradients(torch.bmm, a, b), strict=True):
        close(mine, torchs)
    assert len(launches) == 3


def test_second_derivatives(launches):
    a, weight = operands()

    def curvature(multiply):
        x, w = a.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
        (first,) = torch.autograd.grad(multiply(x, w).float().pow(2).mean(), x, create_graph=True)
        return torch.autograd.grad(first.float().pow(2).mean(), (x, w))

    for mine, torchs in zip(curvature(tunegemm.linear), curvature(torch_linear), strict=True):
        close(mine, torchs, 3e-2)
    assert len(launches) > 3


@pytest.mark.parametrize("name", ["mm", "bmm", "matmul_out"])
def test_operators_pass_torchs_own_check(name):
    a, weight = operands()
    b = weight.t().contiguous()
    if name == "bmm":
        a = torch.randn(8, 128, 64, device="cuda").bfloat16()
        b = torch.randn(8, 64, 128, device="cuda").bfloat16()
    arguments = [a, b, torch.empty(a.shape[-2], b.shape[-1], device="cuda", dtype=a.dtype)]
    if name != "matmul_out":
        arguments = [tensor.requires_grad_() for tensor in arguments[:2]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TunegemmWarning)  # other layouts than those tuned
        torch.library.opcheck(getattr(torch.ops.tunegemm, name).default, tuple(arguments))


def test_vmap_is_torchs(launches):
    a, weight = operands()
    many = a.view(4, TOKENS // 4, WIDTH)
    result = torch.vmap(tunegemm.linear, (0, None))(many, weight)
    close(result.flatten(0, 1), torch_linear(a, weight))
    assert not launches


# Graphs


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_compiled_model(launches, model, mode):
    expected = model(tokens())
    tunegemm.patch(model)
    compiled = torch.compile(model, fullgraph=True, mode=mode)
    with torch.no_grad():
        for seed in (0, 1, 0):  # recorded and replayed, with reduce-overhead
            result = compiled(tokens(seed)).clone()
    close(result, expected)
    assert len(launches) >= 12


def test_inductors_code_calls_us_and_not_torchs_dispatcher(launches):
    a, weight = operands()
    compiled = torch.compile(lambda a: tunegemm.linear(a, weight) + 1, fullgraph=True)
    with torch.no_grad():
        _, (code,) = run_and_get_code(compiled, a)
    assert "extern_kernels.tunegemm_product(" in code and "torch.ops.tunegemm" not in code


def test_compiled_training_step(launches, model):
    def step(model):
        model.zero_grad()
        loss = model(tokens()).float().pow(2).mean()
        loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected = step(model)
    tunegemm.patch(model)
    ours = step(torch.compile(model, fullgraph=True))
    for mine, torchs in zip(ours, expected, strict=True):
        close(mine, torchs, 3e-2)
    assert len(launches) >= 12 * 3 - 3  # the first block's input needs no gradient


@pytest.mark.parametrize("strict", [False, True])
def test_exported_model(launches, model, strict):
    expected = model(tokens())
    tunegemm.patch(model)
    with torch.no_grad():
        program = torch.export.export(model, (tokens(),), strict=strict)
        assert sum(node.target is torch.ops.tunegemm.mm.default for node in program.graph.nodes) == 12
        launches.clear()
        close(program.module()(tokens()), expected)
    assert len(launches) == 12


def test_captured_model(launches, model):
    expected = [model(tokens(seed)) for seed in (1, 2)]
    tunegemm.patch(model)
    x = tokens()
    with torch.no_grad():
        model(x)
        launches.clear()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = model(x)
        assert len(launches) == 12
        for seed, right in zip((1, 2), expected, strict=True):
            x.copy_(tokens(seed))
            graph.replay()
            close(result, right)


def test_a_captured_training_step(launches, model):
    """Forward and backward in one CUDA graph, as Megatron and others capture them."""
    x = tokens()

    def step():
        for parameter in model.parameters():
            parameter.grad = None
        model(x).float().pow(2).mean().backward()

    step()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    side = torch.cuda.Stream()
    with tunegemm.enable():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        for parameter in model.parameters():
            parameter.grad = None
        graph = torch.cuda.CUDAGraph()
        launches.clear()
        with torch.cuda.graph(graph):
            step()
        assert len(launches) >= 33
    graph.replay()
    for parameter, right in zip(model.parameters(), expected, strict=True):
        close(parameter.grad, right, 3e-2)


# enable and patch


def test_enable_serves_a_model_in_every_form(launches, model):
    x = tokens()
    expected = model(x)
    with tunegemm.enable():
        close(model(x), expected)
        assert len(launches) == 12
        compiled = torch.compile(model, fullgraph=True)
        close(compiled(x), expected)
        with torch.no_grad():
            model(x)
            launches.clear()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                result = model(x)
        assert len(launches) == 12
    x.copy_(tokens(1))
    graph.replay()  # what was captured stays
    close(result, model(tokens(1)))
    launches.clear()
    model(x)
    assert not launches


@pytest.mark.parametrize("autocast", [False, True])
def test_enable_serves_training(launches, model, autocast):
    def step():
        for parameter in model.parameters():
            parameter.grad = None
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = model(tokens().to(next(model.parameters()).dtype)).float().pow(2).mean()
        loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    if autocast:
        model.float()
    expected = step()
    with tunegemm.enable():
        ours = step()
    for mine, torchs in zip(ours, expected, strict=True):
        close(mine, torchs, 3e-2)
    assert len(launches) >= 33


def test_enable_leaves_other_products_to_torch(launches):
    with tunegemm.enable():
        a = torch.randn(64, 64, device="cuda")
        close(a @ a, a.double().mm(a.double()).float())
        bias = torch.randn(HIDDEN, device="cuda").bfloat16()
        x, weight = operands()
        with pytest.warns(TunegemmWarning, match="--epilogue bias_n"):  # tuned: test_gpu_fused.py
            result = torch_linear(x, weight, bias)
        close(result, x @ weight.t() + bias)
    assert launches == [(TOKENS, HIDDEN, WIDTH)]  # that of the last line


@torch.no_grad()
def test_patched_and_copied_models_agree(launches, model):
    expected = model(tokens())
    assert tunegemm.patch(model) == 12
    close(copy.deepcopy(model)(tokens()), expected)
    assert len(launches) == 12
    assert tunegemm.unpatch(model) == 12
    launches.clear()
    assert torch.equal(model(tokens()), expected) and not launches


def test_enable_after_import_in_a_forked_child():
    """A fork before CUDA is used, as data loaders and servers do it."""
    code = (
        "import os, torch, tunegemm\n"
        "tunegemm.enable()\n"
        "child = os.fork()\n"
        "a = torch.ones(64, 64, device='cuda', dtype=torch.bfloat16)\n"
        "assert (a @ a).eq(64).all()\n"
        "if child:\n"
        "    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=os.environ, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def test_a_served_product_costs_the_host_no_more_under_enable_than_torchs():
    """Half again as much is allowed, for a host that does other things; `benchmarks.dispatch` measures."""
    x, weight = operands(FORWARD[0])

    plain = enabled = float("inf")
    for _ in range(4):
        plain = min(plain, best_us({"torch": lambda: torch.mm(x, weight.t())}, rounds=10)["torch"])
        with tunegemm.enable():
            enabled = min(
                enabled, best_us({"enabled": lambda: torch.mm(x, weight.t())}, rounds=10)["enabled"]
            )
    assert enabled < 1.5 * plain + 5
