"""Models through torch.compile's backend `tunegemm`: whatever is done to them, results are torch's."""

from __future__ import annotations

import copy
import importlib.metadata
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import tunegemm
from tests.support.fusing import close
from tests.support.gates import Kernels
from tests.support.layers import MLP, WIDTH, Layer, Own, given, made
from tests.support.serving import deterministic
from tunegemm.dispatch import extension
from tunegemm.dispatch.planning import Planner
from tunegemm.layers import backend, sites

pytestmark = pytest.mark.usefixtures("planner")


def compiled(model: nn.Module, **words: Any) -> Callable[..., torch.Tensor]:
    return torch.compile(model, backend=backend.tunegemm, **words)


def same(model: nn.Module, run: Callable[..., torch.Tensor], *x: Any) -> None:
    """The compiled model gives what the model gives."""
    close(run(*x), model(*x))


def test_its_name_is_an_entry_point() -> None:
    (found,) = importlib.metadata.entry_points(group="torch_dynamo_backends", name="tunegemm")
    assert found.load() is backend.tunegemm
    torch.compile(made(MLP()), backend="tunegemm")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_layer_is_served(kernels: Kernels, mode: Any) -> None:
    model, x = made(nn.Sequential(Layer(), Layer())), given()
    run = compiled(model)
    with mode():
        same(model, run, x)
        before = len(kernels.calls)
        run(x)
        assert len(kernels.calls) - before == 2 * 2, "two that end with a residual"
        assert len(kernels.gates) == len(kernels.several) == 4


PARTS: dict[str, Callable[..., torch.Tensor]] = {
    "a region": torch.compiler.nested_compile_region(lambda m, x: F.silu(m.a(x)) * m.b(x)),
    "a checkpoint": lambda m, x: checkpoint(lambda x: F.silu(m.a(x)) * m.b(x), x, use_reentrant=False),
    "a branch": lambda m, x: torch.cond(x[0, 0, 0] < 9, lambda x: F.silu(m.a(x)) * m.b(x), m.a, (x,)),
    "a branch of a region": torch.compiler.nested_compile_region(lambda m, x: PARTS["a branch"](m, x)),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_that_torch_keeps_in_a_graph_of_its_own_is_served(kernels: Kernels, name: str) -> None:
    model, x = made(Own(lambda m, x: PARTS[name](m, x) + PARTS[name](m, x + 1))), given()
    for parameter in model.parameters():  # torch refuses weights in one memory there
        parameter.data = parameter.data.clone()
    run = compiled(model)
    with torch.no_grad():
        same(model, run, x)
    assert len(kernels.gates) == 2
    if "region" not in name:  # whose backward pass torch (2.13) leaves to AOTAutograd
        results = [call(x).float().square().sum() for call in (run, model)]
        close(*(torch.autograd.grad(each, model.a.weight)[0] for each in results))
        assert len(kernels.gates) == 2


@pytest.mark.parametrize("name", ["tunegemm", backend.tunegemm])
@pytest.mark.parametrize("fuse", [False, True])
def test_a_patched_model_is_fused_as_well(kernels: Kernels, name: Any, fuse: bool) -> None:
    plain, model, x = made(Layer()), made(Layer()), given()
    tunegemm.patch(model, fuse=fuse)
    run = torch.compile(model, backend=name)
    with torch.no_grad():
        same(plain, run, x)
        assert len(kernels.gates) == len(kernels.several) == 1
        same(plain, torch.compile(model, backend="eager"), x)  # another backend gets the layers' operators
        assert len(kernels.gates) == len(kernels.several) == 1


def test_layers_of_one_kind_decide_together(monkeypatch: pytest.MonkeyPatch) -> None:
    decided: list[str] = []
    for kind in (sites.Linear, sites.Joint):
        own = kind.decide
        monkeypatch.setattr(
            kind, "decide", lambda self, *given, own=own: (decided.append(self.label), own(self, *given))[1]
        )
    run = compiled(made(nn.Sequential(*(Layer() for _ in range(4)))))
    with torch.no_grad():
        for _ in range(3):
            run(given())
    assert sorted(decided) == [
        "3 layers of one input", "gate and up with silu", "linear+residual", "linear+residual",
    ]  # fmt: skip


@pytest.mark.parametrize("patched", [False, True])
def test_gradients_are_torchs(kernels: Kernels, patched: bool) -> None:
    ours, torchs = made(Layer()), made(Layer())
    if patched:
        tunegemm.patch(ours)
    run, x = compiled(ours), given()
    for model, forward in ((ours, run), (torchs, torchs)):
        forward(x).float().square().sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
    for a, b in zip(ours.parameters(), torchs.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    assert not kernels.calls and not kernels.gates
    with torch.no_grad():  # another graph, by Dynamo's guards
        same(ours, run, x)
    assert kernels.calls and kernels.gates


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_a_trained_step_is_seen(optimizer: Any) -> None:
    model, x = made(Layer()), given()
    run = compiled(model)
    steps = optimizer(model.parameters(), lr=0.01, fused=True)
    for _ in range(2):
        with torch.no_grad():
            same(model, run, x)
        run(x).float().square().sum().backward()
        steps.step()
    with torch.no_grad():
        same(model, run, x)


def _hook(model: Layer) -> None:
    model.gate.register_forward_hook(lambda module, inputs, result: result * 2)


def _pre_hook(model: Layer) -> None:
    model.up.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))


def _lora(model: Layer) -> None:
    class Adapter(nn.Module):
        def __init__(self, layer: nn.Linear) -> None:
            super().__init__()
            self.layer = layer
            self.down, self.up = (
                nn.Linear(*way, bias=False).to(torch.bfloat16) for way in ((64, 4), (4, 96))
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) + self.up(self.down(x))

    model.gate = Adapter(model.gate)


def _assigned(model: Layer) -> None:
    model.load_state_dict({name: each * 2 for name, each in model.state_dict().items()}, assign=True)


def _tied(model: Layer) -> None:
    model.up.weight = model.gate.weight


def _data(model: Layer) -> None:
    model.gate.weight.data.mul_(3)
    model.up.weight.data = model.up.weight.data.clone() * 2


def _misaligned(model: Layer) -> None:
    for layer in (model.gate, model.up, model.down, model.q):
        room = torch.empty(layer.weight.numel() + 1, dtype=torch.bfloat16)
        layer.weight.data = room[1:].view_as(layer.weight).copy_(layer.weight)


def _strided(model: Layer) -> None:
    model.gate.weight.data = model.gate.weight.data.t().contiguous().t()


def _up_lies_first(model: Layer) -> None:
    both = torch.stack((model.up.weight.data, model.gate.weight.data))
    model.up.weight.data, model.gate.weight.data = both[0], both[1]


CHANGES: dict[str, Callable[[Any], object]] = {
    "a hook": _hook,
    "a hook before": _pre_hook,
    "an adapter": _lora,
    "weights assigned": _assigned,
    "tied": _tied,
    "data": _data,
    "misaligned": _misaligned,
    "column by column": _strided,
    "up before gate": _up_lies_first,
    "weight norm": lambda model: parametrizations.weight_norm(model.gate),
    "pruned": lambda model: prune.random_unstructured(model.gate, "weight", amount=0.5),
    "another layer": lambda model: setattr(model, "gate", made(nn.Linear(64, 96, bias=False))),
    "a bias": lambda model: setattr(model.gate, "bias", nn.Parameter(torch.ones(96, dtype=torch.bfloat16))),
    "fp32": lambda model: model.float(),
    "fp16": lambda model: model.half(),
}


#: One of each kind of change: of calls, of weights, of layout and of dtype. Slow tests make all of them.
QUICK = ("a hook", "an adapter", "tied", "misaligned", "another layer", "fp16")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CHANGES]
)
def test_what_is_changed_is_seen(name: str) -> None:
    """But for hooks that come later: torch.compile does not look at them again, whatever the backend."""
    model, x = made(Layer()), given()
    run = compiled(model)
    with torch.no_grad():
        if "hook" not in name:
            same(model, run, x)
        CHANGES[name](model)
        same(model, run, x.to(next(model.parameters()).dtype))


def test_copies_have_their_own_weights() -> None:
    model, x = made(Layer()), given()
    with torch.no_grad():
        compiled(model)(x)
        other = copy.deepcopy(model)
        other.gate.weight.data.mul_(2)
        same(other, compiled(other), x)
        weights = {name: each * 2 for name, each in model.named_parameters()}
        call = torch.compile(
            lambda w, x: torch.func.functional_call(model, w, (x,)), backend=backend.tunegemm
        )
        close(call(weights, x), torch.func.functional_call(model, weights, (x,)))


def test_autocast_may_be_toggled(kernels: Kernels) -> None:
    model, x = made(Layer(), torch.float32), given(dtype=torch.float32)
    run = compiled(model)
    with torch.no_grad():
        for on in (False, True, False):
            with torch.autocast("cpu", torch.bfloat16, enabled=on):
                same(model, run, x)


def test_torch_func_and_modes_look_on() -> None:
    model, x = made(MLP()), given()
    run = compiled(model)
    with torch.no_grad():
        same(model, run, x)
        close(torch.vmap(run)(x), torch.vmap(model)(x))
        seen: list[Any] = []

        class Functions(TorchFunctionMode):
            def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
                seen.append(function)
                return function(*args, **kwargs or {})

        class Operators(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
                seen.append(function)
                return function(*args, **kwargs or {})

        for mode in (Functions, Operators):
            seen.clear()
            with mode():
                result = run(x)
            close(result, model(x))
            assert seen


@pytest.mark.parametrize(
    "forward", [lambda m, x: x + m.c(x), lambda m, x: F.silu(m.a(x)) * m.b(x), lambda m, x: x @ x.mT]
)
def test_tangents_of_forward_mode_pass(kernels: Kernels, forward: Callable[..., torch.Tensor]) -> None:
    """Dynamo does not look at the level of forward-mode AD: it is the same graph."""
    model, x = made(Own(forward)), given()
    run = compiled(model)
    with torch.no_grad():
        run(x)
        before = len(kernels.calls), len(kernels.gates)
        with forward_ad.dual_level():
            ours, torchs = (forward_ad.unpack_dual(call(forward_ad.make_dual(x, x))) for call in (run, model))
            assert ours.tangent is not None
            close(ours.tangent, torchs.tangent)
        assert (len(kernels.calls), len(kernels.gates)) == before


def test_deterministic_algorithms_are_torchs(kernels: Kernels) -> None:
    model, x = made(MLP()), given()
    run = compiled(model)
    with torch.no_grad():
        run(x)
        before = len(kernels.gates), len(kernels.calls)
        with deterministic():
            same(model, run, x)
        assert (len(kernels.gates), len(kernels.calls)) == before
        run(x)
        assert len(kernels.gates) == before[0] + 1


def test_an_input_that_is_added_to_in_place() -> None:
    def forward(m: Own, x: torch.Tensor) -> torch.Tensor:
        x += m.c(x)
        return x * 1

    expected, result = given(), given()
    with torch.no_grad():
        close(compiled(made(Own(forward)))(result), made(Own(forward))(expected))
    close(result, expected)


def test_a_result_of_no_grad_may_be_added_to_with_gradients() -> None:
    """As torch's may: autograd refuses it for a view."""
    model, x, added = made(Own(lambda m, x: m.c(x))), given(), given().requires_grad_()
    run = compiled(model)
    for _ in range(2):
        with torch.no_grad():
            result = run(x)
        result += added
        close(result, model(x) + added)
        assert result.requires_grad


def test_a_graph_break_between_gate_and_up() -> None:
    def forward(m: Own, x: torch.Tensor) -> torch.Tensor:
        gate = F.silu(m.a(x))
        torch._dynamo.graph_break()
        return gate * m.b(x)

    model, x = made(Own(forward)), given()
    with torch.no_grad():
        same(model, compiled(model), x)


def test_branches_and_draws_are_dynamos() -> None:
    def forward(m: Own, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        h = m.c(x)
        if mask is not None:
            h = h * mask
        return x + F.dropout(h, 0.5, training=True) if m.training else x + h

    model, x = made(Own(forward)), given()
    run = compiled(model)
    with torch.no_grad():
        same(model, run, x)
        same(model, run, x, torch.zeros_like(x))
        model.train()
        assert not torch.equal(run(x), run(x)), "a draw of its own each time"


def test_eight_threads(kernels: Kernels) -> None:
    model = made(Layer())
    run, inputs = compiled(model, dynamic=True), [given(1, rows) for rows in range(2, 10)]
    with torch.no_grad():
        expected = [model(x) for x in inputs]
        run(inputs[0])

    def work(place: int) -> None:
        with torch.no_grad():
            for turn in range(20):
                which = (place + turn) % len(inputs)
                close(run(inputs[which]), expected[which])

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))


def test_a_policy_and_a_refresh_decide_anew(planner: Planner, kernels: Kernels) -> None:
    model, x = made(MLP()), given()
    run = compiled(model)
    with torch.no_grad():
        run(x)
        with tunegemm.policy(prefer="batch_invariant"):
            before = len(kernels.gates)
            same(model, run, x)
            assert len(kernels.gates) == before, "kernels of gates are not batch-invariant"
        run(x)
        assert len(kernels.gates) == before + 1
        tunegemm.refresh()
        same(model, run, x)
        resume = planner.suspend()
        before = len(kernels.gates), len(kernels.calls)
        same(model, run, x)
        assert (len(kernels.gates), len(kernels.calls)) == before
        resume()


def test_a_launch_that_fails_is_torchs_but_in_a_capture_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph may not keep another way than the one that its program measured."""

    fails = False

    def launch(*_: int) -> None:
        if fails:
            raise RuntimeError("planted")

    monkeypatch.setattr(sites, "load", lambda *_: (lambda *_: launch, False))
    model, x = made(MLP()), given()
    run = compiled(model)
    with torch.no_grad():
        run(x)
        fails = True
        with monkeypatch.context() as during:
            during.setattr(extension, "capturing", lambda _: True)
            with pytest.raises(RuntimeError, match="planted"):
                run(x)
        with pytest.warns(tunegemm.TunegemmWarning, match="planted"):
            same(model, run, x)
        same(model, run, x)


def test_the_launch_of_a_linear_layer_fails_in_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(*_: int) -> None:
        raise RuntimeError("planted")

    x, weight = given(), torch.empty(WIDTH, WIDTH, dtype=torch.bfloat16)
    plan: Any = SimpleNamespace(
        launch_at=launch,
        words=None,
        output=(x.shape, x.stride(), x.dtype),
        guarded=False,
        device=x.device,
        reduces=False,
    )
    way = sites.launched(plan, tuple(x.shape), x.stride(), has_residual=False)
    assert way(x, weight) is None
    monkeypatch.setattr(sites, "capturing", lambda _: True)
    with pytest.raises(RuntimeError, match="planted"):
        way(x, weight)


def test_shapes_that_never_come_back_are_forgotten(planner: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "MAX_PLANS", 8)
    model = made(MLP())
    run = compiled(model, dynamic=True)
    with torch.no_grad():
        for rows in range(2, 40):
            run(given(rows))
    kept = [len(each) for each in planner.state.launches.values()]
    assert kept and max(kept) <= 8


def test_it_says_what_it_found(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger=backend.__name__), torch.no_grad():
        compiled(made(Layer()))(given())
        torch._dynamo.reset()
        compiled(nn.ReLU())(given())
    assert caplog.messages == [
        "tunegemm: 1 x gate, 2 x chain, 1 x several",
        "tunegemm: no linear layer of this graph is served",
    ]


@pytest.mark.parametrize("kind", ["inbuilt", "all"])
def test_without_guards_on_modules_inputs_and_modes_are_seen(kernels: Kernels, kind: str) -> None:
    skip = getattr(torch.compiler, f"skip_guard_on_{kind}_nn_modules_unsafe")
    model = made(nn.Sequential(Layer(), Layer()))
    plain, run = compiled(model), torch.compile(model, backend="tunegemm", options={"guard_filter_fn": skip})
    with torch.no_grad():
        for rows in (2, 8, 8):
            same(model, run, given(2, rows))
        assert len(kernels.gates) == 3 * 2
        for each in model.parameters():
            each.mul_(0.5)
        same(model, run, given())
        model.load_state_dict({name: each * 2 for name, each in model.state_dict().items()}, assign=True)
        same(model, run, given())
        same(model, plain, given())
        before = len(kernels.calls)
    run(given()).float().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert len(kernels.calls) == before


def test_checkpointing_and_pickled_state() -> None:
    model, other, x = made(Layer()), made(Layer()), given().requires_grad_()
    checkpoint(compiled(model), x, use_reentrant=False).sum().backward()
    first, x.grad = x.grad, None
    checkpoint(other, x, use_reentrant=False).sum().backward()
    assert first is not None and x.grad is not None
    close(first, x.grad)


@pytest.mark.filterwarnings("ignore")
def test_a_limit_of_recompiling_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = made(Own(lambda m, x, scale: m.c(x) * scale))
    run = compiled(model, dynamic=False)
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=2), caplog.at_level(logging.WARNING):
        for rows in range(2, 8):
            x = given(rows)
            close(run(x, 1.0), model(x, 1.0))
    assert any("recompile_limit" in message for message in caplog.messages)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"mode": "reduce-overhead"}, r"mode 'reduce-overhead' is Inductor's; .*tunegemm.enable\(\)"),
        ({"options": {"triton.cudagraphs": True}}, "no option 'triton.cudagraphs'"),
    ],
)
def test_what_inductor_alone_takes_is_refused_by_name(words: dict[str, Any], said: str) -> None:
    with pytest.raises(Exception, match=said):
        torch.compile(made(MLP()), backend="tunegemm", **words)(given())
    result = torch.compile(made(MLP()), backend="tunegemm", mode="default")(given())
    assert result.shape == given().shape
