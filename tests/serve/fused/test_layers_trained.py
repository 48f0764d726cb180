"""Layers that are trained in eager code: gates by kernels in Triton's interpreter, q, k, v as one product.

On a GPU: tests/gpu/test_trained.py.
"""

from __future__ import annotations

import copy
import gc
import importlib
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import tunegemm
from tests.support.fusing import close
from tests.support.gates import ACTIVATIONS, SIZES, by_torch, check, check_odd_values, drawn
from tests.support.layers import BF16, INNER, TOLERANCE, WIDTH, Attention, Gates, fuse, given, made
from tunegemm.errors import TunegemmWarning
from tunegemm.serve import planning
from tunegemm.serve.launchers import Prepared
from tunegemm.serve.torch.layers import trained
from tunegemm.serve.torch.layers.trained import TrainedGate, TrainedLayers

STEP = ["joined", "forward", "backward"]


@pytest.fixture
def ran(monkeypatch) -> Iterator[list[str]]:
    """The names of the gates' kernels that ran from now on, "joined" for each product of several layers."""
    pytest.importorskip("triton")
    from tunegemm.generate import kernel_gates

    names: list[str] = []
    launch, joined = trained.launch, TrainedLayers.forward

    def note(name, *arguments):
        done = launch(name, *arguments)
        names.extend([name] * done)
        return done

    def note_joined(*arguments):
        names.append("joined")
        return joined(*arguments)

    with pytest.MonkeyPatch.context() as inner:
        inner.setenv("TRITON_INTERPRET", "1")
        importlib.reload(kernel_gates)
    monkeypatch.setattr(planning, "LOOK_SECONDS", 3600.0)  # after which a step is layer by layer
    monkeypatch.setattr(trained, "served", True)
    monkeypatch.setattr(trained, "least", 0)
    monkeypatch.setattr(trained, "launch", note)
    monkeypatch.setattr(TrainedLayers, "forward", staticmethod(note_joined))
    yield names
    importlib.reload(kernel_gates)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gate", ACTIVATIONS)
def test_results_and_gradients_are_rounded_once(ran, gate, dtype):
    for shape in SIZES:
        check(gate, dtype, shape, "cpu")
    check_odd_values(gate, dtype, "cpu")


def make() -> nn.Module:
    return nn.Sequential(Attention(), Gates())


@pytest.fixture
def pair(serve, ran) -> Callable[..., tuple[nn.Module, nn.Module]]:
    """torch's model and ours, of whose products torch computes all, as is known after a first step."""

    def pair(make: Callable[[], nn.Module] = make, *, train: bool = True) -> tuple[nn.Module, nn.Module]:
        plain, model = made(make, train=True), made(make, train=train)
        fuse(model)
        serve(prepared=Prepared(None))
        step(model.train())
        model.zero_grad()
        ran.clear()
        return plain, model

    return pair


def step(model: nn.Module, call: Callable[..., torch.Tensor] | None = None) -> list[torch.Tensor]:
    """The result of a model, and all gradients of a training step."""
    x = given().requires_grad_()
    model.zero_grad()
    result = (call or model)(x)
    result.float().square().mean().backward()
    assert x.grad is not None
    return [result.detach(), x.grad, *(each.grad for each in model.parameters() if each.grad is not None)]


def alike(ours: list[torch.Tensor], torchs: list[torch.Tensor], bound: float = 6e-2) -> None:
    for mine, other in zip(ours, torchs, strict=True):
        close(mine, other, bound)


@pytest.mark.parametrize("train", [True, False])
def test_a_step_is_one_node_for_the_gate_and_one_for_q_k_and_v(pair, ran, train):
    """train: gate and up lie after one another, or, of a model patched in evaluation, in turns."""
    plain, model = pair(train=train)
    alike(step(model), step(plain))
    assert ran == STEP


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "relu", "sigmoid"])
def test_activations(pair, ran, name):
    activation = {
        "silu": functional.silu, "gelu": nn.GELU(), "gelu_tanh": nn.GELU("tanh"), "relu": torch.relu,
        "sigmoid": torch.sigmoid,
    }[name]  # fmt: skip
    plain, model = pair(lambda: Gates(activation))
    alike(step(model), step(plain))
    assert ran == (["joined"] if name == "sigmoid" else STEP[1:])


def test_a_kernel_that_is_known_computes_its_layer(serve, ran, kernel):
    model = made(make, train=True)
    fuse(model)
    serve()
    for _ in range(3):
        step(model)
    assert kernel.calls and not ran


def test_what_torch_computes_layer_by_layer(pair, ran):
    plain, model = pair()
    biased = pair(lambda: nn.Sequential(Attention(bias=True), Gates(bias=True)))
    alike(*map(step, biased[::-1]))
    handle = model[1].activation.register_forward_hook(lambda *given: given[2] + 1)
    assert not torch.allclose(step(model)[0], step(plain)[0], atol=0.1)
    handle.remove()
    ran.clear()
    with torch.no_grad():
        close(model(given()), plain(given()), TOLERANCE)
    assert not ran
    for each in (plain, model):
        each[0].q.weight.requires_grad_(False)
        each[1].w3.weight.requires_grad_(False)
    alike(step(model), step(plain))
    assert not ran


def test_from_how_many_rows_on(pair, ran, monkeypatch):
    _, model = pair()
    monkeypatch.setattr(trained, "least", given().numel() * 2 * INNER)
    step(model)
    assert ran == STEP[1:], "q, k and v have fewer weights"
    monkeypatch.setattr(trained, "least", given().numel() * 2 * INNER + 1)
    step(model)
    assert ran == STEP[1:]


def test_policies_and_modes_that_are_torchs(serve, ran, monkeypatch):
    model = made(make, train=True)
    fuse(model)
    serve(prepared=Prepared(None))
    with tunegemm.policy("batch_invariant"):
        step(model), step(model)
    assert not ran
    monkeypatch.setenv("TUNEGEMM_MODE", "off")
    serve(prepared=Prepared(None))
    step(model), step(model)
    assert not ran


def test_what_was_saved_may_be_packed_and_computed_again(pair, ran):
    plain, model = pair(lambda: Gates())

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(BF16).mT.contiguous().mT  # laid out otherwise

    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.float, unpack):
        alike(step(model), step(plain))
    for reentrant in (True, False):
        ran.clear()
        alike(step(model, lambda x, way=reentrant: checkpoint(model, x, use_reentrant=way)), step(plain))
        assert ran == STEP[1:2] * (not reentrant) + STEP[1:], (
            "the first of a reentrant one is without gradients"
        )


def test_less_is_kept_than_torch_keeps(pair):
    kept: list[int] = []
    for model in pair():
        storages: dict[int, int] = {}
        own = {each.untyped_storage().data_ptr() for each in model.parameters()}

        def pack(tensor, storages=storages, own=own):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = model(given().requires_grad_())
        kept.append(sum(storages.values()))
        del result
    assert kept[0] - kept[1] >= given().numel() // WIDTH * INNER * 2, "the activation's result"


def test_autocast_to_the_weights_dtype_and_to_another(pair, ran):
    plain, model = pair()
    for dtype, expected in ((BF16, STEP), (torch.float16, [])):
        found = []
        for each in (model, plain):
            with torch.autocast("cpu", dtype):
                found.append(step(each))
        alike(*found)
        assert ran == expected
        ran.clear()


def test_gradients_of_gradients(pair, ran):
    plain, model = pair(lambda: Gates())
    found = []
    for each in (model, plain):
        x = given().requires_grad_()
        (of_x,) = torch.autograd.grad(each(x).float().square().mean(), x, create_graph=True)
        of_x.float().square().sum().backward()
        found.append([of_x.detach(), x.grad, *(one.grad for one in each.parameters())])
    alike(*found)
    assert ran == STEP[1:], "of the result itself, in the end"


def test_derivatives(ran, monkeypatch):
    monkeypatch.setattr(trained, "launch", lambda *_: False)
    for name in ACTIVATIONS:
        inputs = [
            drawn(shape, torch.float64, "cpu", 0).requires_grad_() for shape in ((2, 3, 4), (5, 4), (5, 4))
        ]
        assert torch.autograd.gradcheck(TrainedGate.apply, (*inputs, name))
        assert torch.autograd.gradgradcheck(TrainedGate.apply, (*inputs, name))

    def run(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return TrainedLayers.apply(x, torch.cat(weights).detach(), *weights)

    inputs = [drawn(shape, torch.float64, "cpu", 0).requires_grad_() for shape in ((2, 3, 4), (5, 4), (2, 4))]
    assert torch.autograd.gradcheck(run, inputs) and torch.autograd.gradgradcheck(run, inputs)


def test_hooks_are_called_once(pair):
    plain, model = pair()
    seen: dict[nn.Module, list[tuple[int, ...]]] = {plain: [], model: []}
    for each, shapes in seen.items():
        for one in each.parameters():
            one.register_hook(lambda grad, shapes=shapes: shapes.append(grad.shape) or grad / 2)
    alike(step(model), step(plain))
    assert sorted(seen[model]) == sorted(seen[plain])
    for each in seen:
        x = given().requires_grad_()
        torch.autograd.grad(each[1](x).float().square().mean(), x, create_graph=True)
    assert len(seen[model]) == len(seen[plain])


def test_where_torchs_operators_are_asked_for(pair, ran):
    plain, model = pair(lambda: Gates())
    x = given()
    assert torch.equal(torch.vmap(model)(x), torch.vmap(plain)(x))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        close(torch.autograd.forward_ad.unpack_dual(model(dual)).tangent,
              torch.autograd.forward_ad.unpack_dual(plain(dual)).tangent, TOLERANCE)  # fmt: skip
    assert not ran
    leaf = x.clone().requires_grad_()
    result, upstream = model(leaf), torch.eye(2)[:, :, None, None].expand(2, 2, 8, WIDTH).to(BF16)
    (mapped,) = torch.autograd.grad(result, leaf, upstream, is_grads_batched=True, retain_graph=True)
    for index in range(2):
        (one,) = torch.autograd.grad(result, leaf, upstream[index], retain_graph=True)
        close(mapped[index], one, TOLERANCE)
    assert ran == ["forward", "backward", "backward"]


def test_threads_train_apart(pair, ran):
    plain, model = pair()
    inputs = [given(2, 8) * (1 + index) for index in range(8)]
    expected = [derived_of(plain, x) for x in inputs]
    found: list[torch.Tensor | None] = [None] * len(inputs)

    def work(index: int) -> None:
        found[index] = derived_of(model, inputs[index])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for ours, torchs in zip(found, expected, strict=True):
        assert ours is not None
        close(ours, torchs, TOLERANCE)
    assert sorted(ran) == sorted(STEP * 8)


def derived_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).float().square().mean(), x)
    return grad


def test_nothing_is_held_after_a_step(pair):
    _, model = pair()
    result = model(given().requires_grad_())
    kept = weakref.ref(result)
    result.sum().backward()
    del result
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}])
def test_optimizers_go_on_when_a_model_is_unpatched(pair, ran, options):
    """Gradients add up over two microbatches; frozen layers stay as they are."""
    models = pair()
    for each in models:
        each[0].o.requires_grad_(False)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3, **options) for each in models]
    for number in range(4):
        if number == 2:
            tunegemm.unpatch(models[1])
        for each, optimizer in zip(models, optimizers, strict=True):
            for index in range(2):
                each(given().requires_grad_() * (1 + index)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert ran == STEP * 4
    for mine, torchs in zip(models[1].parameters(), models[0].parameters(), strict=True):
        close(mine.detach(), torchs.detach(), TOLERANCE)


def test_weights_that_were_moved_are_trained_layer_by_layer(pair, ran):
    plain, model = pair()
    for each in (plain, model):
        each[0].k.weight.data = each[0].k.weight.data.clone() * 2
    alike(step(model), step(plain))
    assert ran == STEP[1:]
    copied = copy.deepcopy(model)
    step(copied)  # whose weights nothing is known of
    ran.clear()
    alike(step(copied), step(plain))
    assert ran == STEP


def test_a_compiler_that_fails_is_said_once(ran, monkeypatch):
    from tunegemm.generate import kernel_gates

    class Broken:
        def __getitem__(self, grid):
            raise RuntimeError("Failed to find C compiler.\nMore.")

    monkeypatch.setattr(kernel_gates, "forward", Broken())
    x, gate, up = (drawn((16, 16), BF16, "cpu", seed).requires_grad_() for seed in range(3))
    with pytest.warns(TunegemmWarning, match=r"are torch's: Triton .* \(Failed to find C compiler\.\)$"):
        ours = TrainedGate.apply(x, gate, up, "swiglu")
    first, second = (functional.linear(x, one).detach() for one in (gate, up))
    assert torch.equal(ours, by_torch(first, second, "swiglu", first)[0])
    grads = torch.autograd.grad(ours.float().sum(), (x, gate, up))
    right = torch.autograd.grad((functional.silu(x @ gate.t()) * (x @ up.t())).float().sum(), (x, gate, up))
    alike(list(grads), list(right))
    assert not trained.served and not ran
