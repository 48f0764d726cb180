"""`experts` in compiled and exported code: one operator, which does what the call does."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.decorators import mark_unbacked
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import tunegemm
from tests.groups import test_scaled_experts
from tests.groups.test_experts import CHOSEN, EXPERTS, HIDDEN, INNER, by_loops, layer, model
from tests.support.grouped import Loops
from tunegemm.errors import ProblemError
from tunegemm.groups.routing import SILU, Gate

BF16 = torch.bfloat16
BIASES = {"gate_up_bias": torch.randn(EXPERTS, 2 * INNER), "down_bias": torch.randn(EXPERTS, HIDDEN)}
BACKENDS = "eager", "aot_eager", "tunegemm"


class Compiled:
    """A function or a module, compiled without a break."""

    def __init__(self, call: Callable[..., Any] = tunegemm.experts, backend: str = "aot_eager") -> None:
        self.graphs: list[list[str]] = []
        """The names of the functions that each graph calls."""
        torch._dynamo.reset()

        def see(graph: torch.fx.GraphModule, examples: Any) -> Any:
            nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
            self.graphs.append([str(node.target).removeprefix("tunegemm.") for node in nodes])
            return lookup_backend(backend)(graph, examples)

        self.call = torch.compile(call, backend=see, fullgraph=True, dynamic=True)

    def __call__(self, *arguments: Any, **words: Any) -> Any:
        return self.call(*arguments, **words)


class Layer(torch.nn.Module):
    """A layer with its router."""

    def __init__(self, dtype: torch.dtype = BF16, **words: Any) -> None:
        super().__init__()
        given = layer(dtype=dtype)
        self.gate_up, self.down = (torch.nn.Parameter(given[name]) for name in ("gate_up", "down"))
        self.router = torch.nn.Linear(HIDDEN, EXPERTS, dtype=dtype)
        self.words = words

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, index = self.router(x).softmax(-1).topk(CHOSEN)
        return tunegemm.experts(2 * x, self.gate_up, self.down, index, weights, **self.words) + x


def rows(tokens: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(tokens)).to(dtype)


@pytest.mark.parametrize("backend", [*BACKENDS, "inductor"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
def test_a_compiled_layer_is_one_operator(loops: Loops, dtype: torch.dtype, backend: str) -> None:
    given = layer(dtype=dtype)
    compiled, calls = Compiled(backend=backend), []
    for call in (tunegemm.experts, compiled):
        loops.calls.clear()
        result = call(**given)
        calls.append([each[4:] for each in loops.calls])
        assert result.dtype is dtype and result.is_contiguous()
        assert torch.equal(result, tunegemm.experts(**given))
    steps = {torch.float32: [], torch.float16: [(), ()], BF16: [("swiglu",), ()]}
    assert calls[0] == calls[1] == steps[dtype]
    assert [graph[-1] for graph in compiled.graphs] == ["experts"]


WORDS: dict[str, dict[str, Any]] = {
    "biases": BIASES, "turns": {"interleaved": True, "activation": "gelu_tanh"},
    "gate": {"activation": Gate()}, "no limit": {"activation": SILU}, "elsewhere": {"elsewhere": True},
}  # fmt: skip


@pytest.mark.parametrize("name", WORDS)
def test_all_settings_reach_the_operator(name: str) -> None:
    given = layer(dtype=torch.float32) | WORDS[name]
    if name == "elsewhere":
        given["index"][::3, 0] = -1
        given["index"][1] = EXPERTS
    compiled = Compiled()
    assert torch.equal(compiled(**given), tunegemm.experts(**given)) and compiled.graphs[0][-1] == "experts"
    module = Layer(torch.float32, **WORDS[name]).requires_grad_(False)  # of fp32 torch traces no gradient
    exported = torch.export.export(module, (rows(5, torch.float32),))
    torch.export.save(exported, file := io.BytesIO())
    file.seek(0)
    x = rows(5, torch.float32)
    assert torch.equal(torch.export.load(file).module()(x), module(x))


def test_block_scales_reach_the_operator() -> None:
    given = test_scaled_experts.layer()
    compiled = Compiled()
    assert torch.equal(compiled(**given), tunegemm.experts(**given)) and compiled.graphs[0][-1] == "experts"
    broken = torch.compile(tunegemm.experts, backend="eager")
    with pytest.raises(ProblemError, match="experts with block scales have no gradient"):
        broken(**given | {"x": given["x"].clone().requires_grad_()})


@pytest.mark.parametrize(
    "activation", [lambda both: both[:, :INNER] * both[:, INNER:], type("Own", (Gate,), {})()]
)
def test_a_gate_of_ones_own_is_traced(loops: Loops, activation: Any) -> None:
    given = layer(dtype=BF16)
    compiled = Compiled()
    result = compiled(**given, activation=activation)
    torch.testing.assert_close(result, tunegemm.experts(**given, activation=activation), rtol=5e-2, atol=3e-2)
    assert "experts" not in compiled.graphs[0] and "grouped_mm" in compiled.graphs[0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_graph_serves_any_number_of_rows(loops: Loops, backend: str) -> None:
    module = Layer().requires_grad_(False)
    compiled = Compiled(module, backend)
    first = rows(5)
    mark_unbacked(first, 0)
    for x in (first, *map(rows, (1, 0, 7, 300))):
        assert torch.equal(compiled(x), module(x))
    assert len(compiled.graphs) == 1


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_layer_is_one_operator_for_any_number_of_rows(loops: Loops, strict: bool) -> None:
    """Whose gradients are the call's."""
    module = Layer()
    dynamic = ({0: torch.export.Dim("tokens", min=0, max=4096)},)
    exported = torch.export.export(module, (rows(5),), dynamic_shapes=dynamic, strict=strict)
    assert [str(node.target) for node in exported.graph.nodes].count("tunegemm.experts.default") == 1
    loaded = exported.module()
    for x in map(rows, (5, 1, 0, 9)):
        assert torch.equal(loaded(x), module(x))
        with torch.no_grad():
            assert torch.equal(loaded(x), module(x))
    for each in (loaded, module):
        each(rows(9)).float().square().sum().backward()
    expected = dict(module.named_parameters())
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter.grad, expected[name].grad), name


@pytest.mark.parametrize("tokens", [0, 1, 9])
@pytest.mark.parametrize(
    "wanted", [("x",), ("gate_up", "down"), ("weights",), ("x", "gate_up", "down", "weights")]
)
def test_gradients_are_the_calls(loops: Loops, wanted: tuple[str, ...], tokens: int) -> None:
    results, calls = [], []
    compiled = Compiled()
    for call in (tunegemm.experts, compiled):
        given = layer(9, BF16)
        given |= {name: given[name][:tokens] for name in ("x", "index", "weights")}
        for name in wanted:
            given[name] = given[name].detach().requires_grad_()
        loops.calls.clear()
        result = call(**given)
        results.append((result, *torch.autograd.grad(result.float().square().sum(), map(given.get, wanted))))
        calls.append(len(loops.calls))
    # Of shares alone the call's own first product has the gate, which it rounds once less.
    bound = {"rtol": 5e-2, "atol": 0.2} if wanted == ("weights",) else {"rtol": 0, "atol": 0}
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, **bound)
    assert calls[0] == calls[1] and bool(calls[0]) == bool(tokens)
    assert [graph[-1] for graph in compiled.graphs] == ["experts"]


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_gradients_of_weights_in_another_order(dtype: torch.dtype) -> None:
    """In fp32, whose products torch (2.13) does not trace, too."""
    given = layer(9, dtype)
    given["weights"] = given["weights"].t().contiguous().t()
    found = []
    for call in (tunegemm.experts, Compiled()):
        leaves = [each.detach().requires_grad_() for each in (given["x"], given["weights"])]
        result = call(**given | {"x": leaves[0], "weights": leaves[1]})
        found.append(torch.autograd.grad(result.float().square().sum(), leaves))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


WAYS: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", BF16), "no_grad": torch.no_grad,
    "inference mode": torch.inference_mode, "one order": lambda: tunegemm.policy("batch_invariant"),
}  # fmt: skip


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("tokens", [1, 11])
def test_surroundings_change_nothing(tokens: int, name: str) -> None:
    given = layer(tokens, BF16)
    given["x"].requires_grad_(name in ("no_grad", "inference mode"))
    compiled = Compiled()
    with nullcontext() if name == "one order" else WAYS[name]():
        compiled(**given)  # of which a policy is not part
    with WAYS[name]():
        assert torch.equal(compiled(**given), tunegemm.experts(**given))
    assert len(compiled.graphs) == 1


def test_under_a_dispatch_mode_the_kernels_serve(loops: Loops) -> None:
    """As under the one by which torch checks operators at the first call of compiled code."""
    seen: list[Any] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function)
            return function(*args, **kwargs or {})

    given = layer(dtype=BF16)
    expected = tunegemm.experts(**given)
    loops.calls.clear()
    with Watch():
        result = torch.ops.tunegemm.experts(*given.values(), *[None] * 4, "silu", None, False, False)
    assert torch.equal(result, expected) and [each[4:] for each in loops.calls] == [("swiglu",), ()]
    assert seen == [torch.ops.tunegemm.experts.default]


def test_deterministic_mode_is_minded_at_each_call(loops: Loops) -> None:
    given = layer(dtype=BF16)
    compiled = Compiled()
    compiled(**given)
    loops.calls.clear()
    torch.use_deterministic_algorithms(True)
    try:
        result = compiled(**given)
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(result.float(), by_loops(**given), rtol=5e-2, atol=3e-2)
    assert not loops.calls


def test_operands_of_any_layout(loops: Loops) -> None:
    given = layer(8, BF16)
    compiled = Compiled(lambda x, **more: tunegemm.experts(x.mT, **more))
    given |= {"x": given["x"].mT.contiguous(), "index": given["index"].mT.contiguous().mT}
    given |= {name: given[name].mT.contiguous().mT for name in ("gate_up", "down")}
    given["weights"] = torch.rand(8, 2 * CHOSEN).to(BF16)[:, ::2]
    expected = tunegemm.experts(**given | {"x": given["x"].mT})
    assert torch.equal(compiled(**given), expected)


def test_weights_are_read_at_each_call(loops: Loops) -> None:
    """Changed in place, replaced, of a copy of the module, and of `functional_call`."""
    module = Layer().requires_grad_(False)
    compiled, x = Compiled(module), rows(9)
    before = compiled(x)
    module.down.mul_(2)
    assert torch.equal(compiled(x), module(x)) and not torch.equal(compiled(x), before)
    module.down = torch.nn.Parameter(module.down.flip(0), requires_grad=False)
    assert torch.equal(compiled(x), module(x))
    other = copy.deepcopy(compiled.call)
    module.gate_up.zero_()
    assert torch.equal(compiled(x), x) and not torch.equal(other(x), x)
    given = {name: 3 * each for name, each in Layer().state_dict().items()}
    called = Compiled(lambda x: torch.func.functional_call(module, given, (x,)))
    assert torch.equal(called(x), torch.func.functional_call(module, given, (x,)))


def test_transforms_are_the_calls() -> None:
    given = layer(6, BF16)
    pairs = [given[name].unflatten(0, (2, 3)) for name in ("x", "index", "weights")]

    def call(x: Any, index: Any, weights: Any) -> torch.Tensor:
        return tunegemm.experts(x, given["gate_up"], given["down"], index, weights)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return call(x, given["index"], given["weights"]).float().square().sum()

    shares = given["weights"]
    of_shares = partial(call, given["x"], given["index"])
    _, tangent = Compiled(lambda: torch.func.jvp(of_shares, (shares,), (shares,)))()
    torch.testing.assert_close(tangent, of_shares(shares), rtol=5e-2, atol=3e-2)
    vmapped = Compiled(lambda: torch.vmap(call)(*pairs))()
    torch.testing.assert_close(vmapped.flatten(0, 1), tunegemm.experts(**given), rtol=5e-2, atol=3e-2)
    differentiated = Compiled(lambda: torch.func.grad(loss)(given["x"]))()
    assert torch.equal(differentiated, torch.func.grad(loss)(given["x"]))


def test_any_tracer_has_operators_with_derivatives(loops: Loops) -> None:
    """Also one that does not say that it compiles, as torch's own for backward passes before 2.13."""

    def gradient(x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        result = torch.ops.tunegemm.experts(x, *others, *[None] * 4, "silu", None, False, False)
        return torch.autograd.grad(result.float().square().sum(), x)[0]

    given = layer(dtype=BF16).values()
    graph = make_fx(gradient, tracing_mode="fake")(*given)
    targets = [node.target for node in graph.graph.nodes]
    assert targets.count(torch.ops.tunegemm.grouped_mm.default) == 4
    assert torch.equal(graph(*given), gradient(*given))


def test_threads_share_compiled_code(loops: Loops) -> None:
    compiled = Compiled()
    layers = [layer(tokens, BF16) for tokens in (11, 7, 30, 12)]
    expected = [tunegemm.experts(**given) for given in layers]
    compiled(**layers[0])
    with ThreadPoolExecutor(2) as threads:
        found = threads.map(lambda given: [compiled(**given) for _ in range(9)], layers)
        for results, wanted in zip(found, expected, strict=True):
            assert all(torch.equal(result, wanted) for result in results)


def test_numbers_of_no_expert_are_named() -> None:
    given = layer()
    compiled = Compiled()
    compiled(**given)
    given["index"][3, 1] = EXPERTS
    with pytest.raises(ProblemError, match="index names expert 6 of 6; give numbers from 0 on"):
        compiled(**given)


def test_a_layer_of_transformers_is_one_operator() -> None:
    made = model("Mixtral").to(BF16)
    made.set_experts_implementation("tunegemm")
    module = next(each for each in made.modules() if type(each).__name__ == "MixtralExperts")
    weights, index = torch.rand(5, EXPERTS).topk(CHOSEN)
    for grad in (False, True):
        compiled = Compiled(module)
        with torch.set_grad_enabled(grad):
            given = rows(5), index, weights.to(BF16)
            assert torch.equal(compiled(*given), module(*given))
        assert "experts" in compiled.graphs[0]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("gate", [("silu", None), ("", [1.5, 7.0, 1.0, 1.0])])
def test_the_operator_passes_torchs_own_check(gate: Any, grad: bool) -> None:
    given = layer(dtype=BF16)
    for name in ("x", "gate_up", "down", "weights"):
        given[name].requires_grad_(grad)
    arguments = (
        *given.values(),
        *(each.bfloat16() for each in BIASES.values()),
        None,
        None,
        *gate,
        False,
        False,
    )
    torch.library.opcheck(torch.ops.tunegemm.experts.default, arguments)
