"""Kernels around products of groups on a GPU: each beside torch, and layers that ask torch for no more."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tunegemm
from tests.gpu.test_grouped import POISON, error, expected, operands
from tunegemm.dispatch import api
from tunegemm.generate import routing as kernels
from tunegemm.groups import routing
from tunegemm.groups.routing import SILU, Gate, Routing
from tunegemm.store.provided import provide_grouped

pytestmark = pytest.mark.gpu


@pytest.fixture
def around(monkeypatch: pytest.MonkeyPatch) -> Iterator[Routing]:
    """All kernels; none is compiled meanwhile."""
    assert not provide_grouped("routing").failures
    assert not provide_grouped("n_major").failures and not provide_grouped("").failures
    found = Routing()
    monkeypatch.setattr(routing, "routing", found)
    before = api.dispatcher.planner.notices
    yield found
    assert api.dispatcher.planner.notices is before and not found.has_failed


def drawn(tokens: int, chosen: int, count: int, dtype: torch.dtype, beyond: int) -> torch.Tensor:
    index = torch.rand(tokens, count + beyond, device="cuda").topk(chosen).indices
    return index.to(dtype).contiguous()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("tokens", "chosen", "count"),
    [
        (1, 8, 128),
        (1, 1, 1),
        (2, 4, 32),
        (64, 8, 128),
        (64, 8, 256),
        (513, 1, 300),
        (1024, 8, 257),
        (2000, 4, 8),
        (2049, 4, 8),
        (4096, 8, 128),
        (8191, 8, 500),
    ],
)
def test_rows_lie_as_a_stable_sort_has_them(
    around: Routing, tokens: int, chosen: int, count: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    for beyond, hidden in ((0, 2048), (8, 72)):
        index = drawn(tokens, chosen, count, dtype, beyond)
        wide = torch.randn(tokens, hidden + 64, device="cuda").bfloat16()
        x = wide[:, :hidden]
        found = around.route(x, index, count)
        assert found is not None
        ids, order = index.reshape(-1).long().clamp(max=count).sort(stable=True)
        numbers = torch.arange(count, device="cuda")
        assert torch.equal(found.ends, torch.searchsorted(ids, numbers, right=True).int())
        assert torch.equal(found.place[order].long(), torch.arange(len(order), device="cuda"))
        assert torch.equal(found.rows, x[order // chosen])


@pytest.mark.parametrize("place_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("weights_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("tokens", "chosen", "hidden"), [(1, 8, 2048), (64, 4, 2880), (700, 2, 4096), (9, 10, 72)]
)
def test_rows_are_weighted_and_added(
    around: Routing, tokens: int, chosen: int, hidden: int, weights_dtype: Any, place_dtype: Any
) -> None:
    torch.manual_seed(0)
    total = tokens * chosen
    used = total - total // 3
    rows = torch.randn(total, hidden, device="cuda").bfloat16()
    rows[used:] = float("nan")
    place = torch.randperm(total, device="cuda").to(place_dtype)
    weights = torch.rand(tokens, chosen, device="cuda").to(weights_dtype)
    ends = torch.full((5,), used, device="cuda", dtype=torch.int32)
    found = around.combine(rows, place, ends, weights)
    assert found is not None
    each = rows[place.long()].float().view(tokens, chosen, hidden)
    each = torch.where((place < used).view(tokens, chosen, 1), each, 0.0)
    assert error(found, (each * weights.float()[..., None]).sum(1)) < 4e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gate", [Gate(), Gate(1.0, float("inf"), 0.0, False), Gate(interleaved=False)])
def test_gates_are_as_torchs(around: Routing, gate: Gate, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for rows, inner in ((4, 2880), (300, 768), (1, 8)):
        both = (torch.randn(rows, 2 * inner, device="cuda") * 6).to(dtype)
        found = around.gate(both, gate)
        assert found is not None and error(found, gate(both.float())) < 4e-3


@pytest.mark.parametrize(
    ("name", "gate"),
    [("few bf16 False", ""), ("few bf16 True", "halves"), ("few bf16 True", "turns"), ("few fp16 False", "")],
)
@pytest.mark.parametrize(
    ("sizes", "n", "k"),
    [([0, 1, 0], 1536, 2048), ([1, 0, 3, 0], 200, 328), ([*[0] * 299, 1], 64, 14336), ([0, 0], 64, 64)],
)
def test_few_rows_are_multiplied(sizes: list[int], n: int, k: int, name: str, gate: str) -> None:
    artifact = provide_grouped("routing").of(kernels.kernels()[name])
    assert artifact is not None
    bind = kernels.load(artifact.path, 0)
    dtype = torch.float16 if "fp16" in name else torch.bfloat16
    a, weights, ends, bias = operands(sizes, n * (1 + bool(gate)), k, 2, dtype)
    total = a.shape[0]
    for added in (None, bias):
        memory = torch.full((total + 2, n), POISON, device="cuda", dtype=dtype)
        ctas, numbers = kernels.few_numbers(
            rows=total, count=len(sizes), n=n, units=k // 8, gated=bool(gate), interleaved=gate == "turns",
            strides=(a.stride(0) // 8, weights.stride(0) // 8, weights.stride(1) // 8),
            bias_stride=None if added is None else added.stride(0),
        )  # fmt: skip
        bind(ctas, **numbers)(a, weights, ends, a if added is None else added, memory[1:-1])
        silu = (lambda g, u: torch.nn.functional.silu(g) * u) if gate else None
        reference = expected(sizes, a, weights, added, silu, gate == "turns")
        assert error(memory[1 : 1 + sum(sizes)], reference) < 4e-3
        assert bool((memory[:1] == POISON).all()) and bool((memory[1 + sum(sizes) :] == POISON).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gate", [SILU, Gate(1.0, float("inf"), 0.0), Gate()])
@pytest.mark.parametrize(
    ("tokens", "chosen", "count", "hidden", "inner"),
    [
        (1, 8, 128, 2048, 768),
        (1, 2, 8, 1032, 2056),
        (3, 2, 300, 200, 328),
        (2, 11, 200, 72, 8),
        (1, 1, 1, 8, 72),
    ],
)
def test_a_layer_of_few_tokens_is_two_launches(
    around: Routing, tokens: int, chosen: int, count: int, hidden: int, inner: int, gate: Gate, dtype: Any
) -> None:
    """Beside fp32, into poisoned memory, of strided operands, with numbers that name no expert."""
    torch.manual_seed(0)
    half: dict[str, Any] = {"device": "cuda", "dtype": dtype}
    x = torch.randn(tokens, hidden + 8, **half)[:, :hidden]
    gate_up = torch.randn(count, 2 * inner + 1, hidden + 8, **half)[:, :-1, :hidden] * hidden**-0.5
    down = torch.randn(count, hidden, inner + 16, **half)[..., :inner] * inner**-0.5
    biased = [torch.randn(count, size, **half) for size in (2 * inner, hidden)]
    index = torch.stack([torch.randperm(count + 2, device="cuda")[:chosen] - 1 for _ in range(tokens)])
    here = (index >= 0) & (index < count)
    inside = index.clamp(0, count - 1)
    for biases, weights_dtype in itertools.product(((None, None), biased), (dtype, torch.float32)):
        weights = torch.rand(tokens, chosen + 3, device="cuda").to(weights_dtype)[:, :chosen]
        weights[~here] = float("nan")
        both = torch.einsum("tk,tjnk->tjn", x.float(), gate_up[inside].float())
        each = both if biases[0] is None else both + biases[0][inside].float()
        each = torch.einsum("tjk,tjnk->tjn", gate(each.view(-1, 2 * inner)).view(tokens, chosen, inner),
                            down[inside].float())  # fmt: skip
        each = each if biases[1] is None else each + biases[1][inside].float()
        reference = torch.where(here[..., None], each * weights.float()[..., None], 0.0).sum(1)
        rows = torch.full((tokens * chosen + 2, inner), POISON, **half)
        out = torch.full((tokens + 2, hidden), POISON, **half)
        first, last = routing.plan_layer(x, gate_up, down, index.int(), weights, biases, gate)
        of_up, of_down = (x if bias is None else bias for bias in biases)
        bound(first)(index.int(), x, gate_up, of_up, rows[1:-1])
        bound(last)(index.int(), rows[1:-1], down, of_down, weights, out[1:-1])
        assert error(out[1:-1], reference) < 8e-3 if bool(here.any()) else not bool(out[1:-1].any())
        assert bool((rows[1:-1][~here.view(-1)] == POISON).all())
        assert all(bool((line == POISON).all()) for line in (rows[0], rows[-1], out[0], out[-1]))
        result = around.layer(x, gate_up, down, index, weights, biases, gate)
        assert result is not None and torch.equal(result, out[1:-1])


def bound(planned: routing.Planned) -> routing.Launch:
    artifact = provide_grouped("routing").of(kernels.kernels()[planned.name])
    assert artifact is not None
    return kernels.load(artifact.path, 0)(planned.ctas, **planned.numbers)


@pytest.mark.parametrize("tokens", [1, 16, 300, 3000])
@pytest.mark.parametrize("kind", ["silu", "gpt-oss"])
def test_layers_ask_torch_for_nothing_else(around: Routing, tokens: int, kind: str) -> None:
    torch.manual_seed(0)
    # Of many rows a group weights with n contiguous are torch's.
    count, hidden, inner, chosen = 64 if tokens > 300 else 16, 256, 256, 4
    x = torch.randn(tokens, hidden, device="cuda").bfloat16()
    gate_up = (torch.randn(count, 2 * inner, hidden, device="cuda") * 4 * hidden**-0.5).bfloat16()
    down = (torch.randn(count, hidden, inner, device="cuda") * inner**-0.5).bfloat16()
    weights, index = torch.rand(tokens, count, device="cuda").topk(chosen)
    more: dict[str, Any] = {}
    if kind == "gpt-oss":
        gate_up, down = (each.mT.contiguous().mT for each in (gate_up, down))
        more = {
            "activation": Gate(),
            "gate_up_bias": torch.randn(count, 2 * inner, device="cuda").bfloat16(),
            "down_bias": torch.randn(count, hidden, device="cuda").bfloat16(),
        }
    index[::5, 0] = count
    reference = torch.zeros(tokens, hidden, device="cuda")
    for expert in range(count):
        share = (weights * (index == expert)).sum(1, keepdim=True)
        both = x.float() @ gate_up[expert].float().t()
        if more:
            inner_rows = Gate()(both + more["gate_up_bias"][expert].float())
        else:
            inner_rows = Gate(1.0, float("inf"), 0.0, False)(both)
        found = inner_rows @ down[expert].float().t()
        reference += share * (found + more["down_bias"][expert].float() if more else found)

    def call() -> torch.Tensor:
        return tunegemm.experts(x, gate_up, down, index, weights, elsewhere=True, **more)

    assert error(call(), reference) < 8e-3
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        result = call()
    assert error(result, reference) < 8e-3
    asked = {event.name for event in profile.events() if event.name.startswith("aten::")}
    assert not asked & {
        "aten::sort",
        "aten::searchsorted",
        "aten::index",
        "aten::embedding_bag",
        "aten::mv",
    }
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    index.copy_(index.roll(1, 0))
    weights.copy_(weights.roll(1, 0))
    x.copy_(x.roll(1, 0))
    graph.replay()
    assert error(result, reference.roll(1, 0)) < 8e-3


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_code_runs_the_kernels_of_the_call(around: Routing, mode: str) -> None:
    """Also from its first call on, which a CUDA graph of the next one follows."""
    assert not provide_grouped("gated").failures
    torch.manual_seed(0)
    half: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    x, up = torch.randn(16, 256, **half), torch.randn(8, 512, 256, **half) / 16
    down, weights = torch.randn(8, 256, 256, **half) / 16, torch.rand(16, 2, **half)
    torch._dynamo.reset()
    compiled = torch.compile(tunegemm.experts, mode=mode, fullgraph=True)
    for _ in range(4):
        index = drawn(16, 2, 8, torch.int64, 0)
        torch.compiler.cudagraph_mark_step_begin()
        result = compiled(x, up, down, index, weights).clone()
        kept = api.dispatcher.planner.state.launches[around.launches]
        served = {name for (name, *_), every in kept.items() if any(known.launch for known in every)}
        assert served == {"route", "combine"}
        assert torch.equal(result, tunegemm.experts(x, up, down, index, weights))


@pytest.mark.parametrize("nobodys", [-1, -(2**31), 8, 2**31 - 1])
def test_experts_of_other_processes_add_nothing_by_any_way(around: Routing, nobodys: int) -> None:
    """Kernels, torch's operations with gradients, and compiled code."""
    assert not provide_grouped("gated").failures
    torch.manual_seed(0)
    half: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    x, up = torch.randn(16, 256, **half), torch.randn(8, 512, 256, **half) / 16
    down = torch.randn(8, 256, 256, **half) / 16
    weights, index = torch.rand(16, 8, device="cuda").topk(2)
    index[::3, 1] = nobodys
    index[4] = nobodys
    given = up, down, index.contiguous(), weights.to(torch.bfloat16)
    served = tunegemm.experts(x, *given, elsewhere=True)
    assert not bool(served[4].any())
    torch._dynamo.reset()
    compiled = torch.compile(tunegemm.experts, backend="aot_eager", fullgraph=True)
    for result in (
        tunegemm.experts(x.clone().requires_grad_(), *given, elsewhere=True),
        compiled(x, *given, elsewhere=True),
    ):
        assert error(result, served.float()) < 2e-2


@pytest.mark.parametrize("grad", [False, True])
def test_a_layer_of_no_tokens_gives_none(around: Routing, grad: bool) -> None:
    half: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": grad}
    up, down = torch.randn(8, 512, 256, **half), torch.randn(8, 256, 256, **half)
    x, weights = torch.randn(0, 256, **half), torch.rand(0, 2, **half)
    index = torch.zeros(0, 2, device="cuda", dtype=torch.int64)
    for call in (tunegemm.experts, torch.compile(tunegemm.experts, backend="aot_eager", fullgraph=True)):
        result = call(x, up, down, index, weights)
        assert result.shape == (0, 256)
        if grad:
            grads = torch.autograd.grad(result.float().sum(), (x, up, down, weights))
            assert not any(bool(each.any()) for each in grads)
