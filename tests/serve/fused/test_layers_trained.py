"""Layers that are trained with their gate in kernels, for which torch stands in; the kernels themselves:
tests/serve/test_gates.py and tests/gpu/test_gates.py."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import tunegemm
from tests.support.fusing import close
from tests.support.gates import ACTIVATIONS, by_torch, derived, serve_gates
from tests.support.gates import made as made_gates
from tests.support.layers import BF16, INNER, TOLERANCE, WIDTH, Gates, fuse, given, made
from tunegemm.describe.epilogue import activate
from tunegemm.errors import TunegemmWarning
from tunegemm.serve.launchers import Prepared
from tunegemm.serve.torch.layers import gates
from tunegemm.serve.torch.layers.gates import Gate


class Halves(nn.Module):
    """Phi-3's way to write it."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(WIDTH, 2 * INNER, False), nn.Linear(INNER, WIDTH, False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.both(x).chunk(2, -1)
        return self.down(up * functional.silu(gate))


class Kernels:
    """Of a gate, for CPU tensors."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.found = True

    def __call__(self, name: str, index: int) -> Callable[..., Callable[..., None]] | None:
        kind, _, activation = name.split()

        def launch(*tensors: torch.Tensor) -> None:
            self.calls.append(kind)
            if kind == "multiply":
                gate, up, out = tensors
                out.copy_(activate(activation, gate.float()) * up.float())
                return
            grad, gate, up, of_gate, of_up = tensors
            x = gate.detach().float().requires_grad_()
            with torch.enable_grad():
                value = activate(activation, x)
            of_up.copy_(grad.float() * value)
            of_gate.copy_(torch.autograd.grad(value, x, grad.float() * up.float())[0])

        return (lambda ctas, **numbers: launch) if self.found else None


@pytest.fixture
def kernels(monkeypatch) -> Kernels:
    found = Kernels()
    serve_gates(monkeypatch, found)
    return found


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_derivatives_by_torchs_operators(name):
    """For who differentiates them, and where there is no kernel."""
    for count in (1, 2):
        leaves = [each.requires_grad_() for each in made_gates((2, 3), 5, torch.float64, "cpu", count)]
        assert torch.autograd.gradcheck(Gate.apply, (name, *leaves))
        assert torch.autograd.gradgradcheck(Gate.apply, (name, *leaves))


def _step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The result of a model, and all gradients of a training step."""
    x = x.detach().clone().requires_grad_()
    model.zero_grad()
    result = model(x)
    result.float().square().mean().backward()
    assert x.grad is not None
    return [result.detach(), x.grad, *(each.grad for each in model.parameters() if each.grad is not None)]


def _pair(activation=None, *, bias=False) -> tuple[nn.Module, nn.Module]:
    return _fused(lambda: Gates(activation, bias))


def _fused(make: Callable[[], nn.Module], dtype: torch.dtype = BF16) -> tuple[nn.Module, nn.Module]:
    plain, model = (made(make, train=True, dtype=dtype) for _ in range(2))
    fuse(model)
    return plain, model


def _check(model: nn.Module, plain: nn.Module, x: torch.Tensor) -> None:
    for ours, torchs in zip(_step(model, x), _step(plain, x), strict=True):
        close(ours, torchs, TOLERANCE)


STEP = ["multiply", "derive"]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "relu", "sigmoid"])
def test_a_gated_mlp_trains(serve, kernels, name, bias):
    activation = {
        "silu": functional.silu, "gelu": nn.GELU(), "gelu_tanh": nn.GELU("tanh"), "relu": torch.relu,
        "sigmoid": torch.sigmoid,
    }[name]  # fmt: skip
    plain, model = _pair(activation, bias=bias)
    for prepared in (None, Prepared(None)):  # with kernels for products, and without
        serve(prepared=prepared)
        kernels.calls.clear()
        warnings.simplefilter("ignore", TunegemmWarning)
        _check(model, plain, given())
        assert kernels.calls == ([] if name == "sigmoid" else STEP)


def test_halves_of_one_layer_train(serve, kernels):
    plain, model = _fused(Halves)
    serve()
    _check(model, plain, given())
    assert kernels.calls == STEP
    assert _step(model, given(1, WIDTH))[0].shape == (1, WIDTH, WIDTH)


def test_after_an_evaluation_without_kernels_for_products(serve, kernels):
    """Which leaves the whole forward to torch."""
    plain, model = _pair()
    serve(prepared=Prepared(None))
    warnings.simplefilter("ignore", TunegemmWarning)
    rows = given(3000)
    for _ in range(3):
        with torch.no_grad():
            model(rows)
    assert not kernels.calls
    _check(model, plain, rows)
    assert kernels.calls == STEP


def test_torch_has_few_elements_and_what_is_not_trained(serve, kernels, monkeypatch):
    plain, model = _pair()
    serve()
    x = given()
    monkeypatch.setattr(gates, "LEAST", x.numel() // WIDTH * INNER + 1)
    _check(model, plain, x)
    monkeypatch.setattr(gates, "LEAST", gates.LEAST - 1)
    plain.requires_grad_(False)
    model.requires_grad_(False)
    with torch.no_grad():
        close(model(x), plain(x), TOLERANCE)
    close(model(x), plain(x), TOLERANCE)
    assert not kernels.calls
    model.w1.requires_grad_(True)  # one of two
    plain.w1.requires_grad_(True)
    (mine,), (torchs,) = (
        torch.autograd.grad(one(x).float().square().mean(), [one.w1.weight]) for one in (model, plain)
    )
    close(mine, torchs, TOLERANCE)
    assert not kernels.calls
    _check(model, plain, x)  # through both: that of the input
    assert kernels.calls == STEP


def test_no_more_is_kept_than_torch_keeps(serve, kernels):
    kept: dict[str, int] = {}
    for name, model in zip(("torch", "ours"), _pair(), strict=True):
        serve()
        storages: dict[int, int] = {}

        def pack(tensor, storages=storages, model=model):
            own = {each.untyped_storage().data_ptr() for each in model.parameters()}
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = model(given().requires_grad_())
        kept[name] = sum(storages.values())
        del result
    assert kept["torch"] - kept["ours"] == given().numel() // WIDTH * INNER * 2, "the activation's result"


@pytest.mark.parametrize("found", [True, False])
def test_what_was_saved_may_be_packed_and_computed_again(serve, kernels, found):
    plain, model = _pair()
    serve()
    kernels.found = found

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float()

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(BF16).mT.contiguous().mT  # laid out otherwise

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        _check(model, plain, given())
    for reentrant in (False, True):
        kernels.calls.clear()
        _check(*(_Checkpointed(one, use_reentrant=reentrant) for one in (model, plain)), given())
        first = [] if reentrant else ["multiply"]  # reentrant it has no gradients
        assert kernels.calls == [*first, *STEP] * found

    def contexts():
        return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])

    kernels.calls.clear()
    chosen = {"use_reentrant": False, "context_fn": contexts}
    _check(*(_Checkpointed(one, **chosen) for one in (model, plain)), given())
    assert not kernels.calls, "who looks on sees torch's operators"


class _Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, **words) -> None:
        super().__init__()
        self.inner, self.words = inner, words

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, **self.words)


def test_a_kernel_that_comes_between_a_pass_and_its_checkpoint(serve, kernels):
    """Nothing else is kept then: torch raises where it is."""
    plain, model = _pair()
    serve()
    kernels.found = False
    x = given().requires_grad_()
    result = checkpoint(model, x, use_reentrant=False)
    kernels.found = True
    tunegemm.refresh()
    result.float().square().mean().backward()
    assert kernels.calls == STEP
    close(x.grad, _step(plain, given())[1], TOLERANCE)


def test_gradients_of_gradients(serve, kernels):
    for make in (Gates, Halves):
        found = []
        plain, model = _fused(make)
        serve()
        kernels.calls.clear()
        for each in (model, plain):
            x = given().requires_grad_()
            (of_x,) = torch.autograd.grad(each(x).float().square().mean(), x, create_graph=True)
            of_x.float().square().sum().backward()
            found.append([of_x.detach(), x.grad, *(one.grad for one in each.parameters())])
        for ours, torchs in zip(*found, strict=True):
            close(ours, torchs, 6e-2)
        assert kernels.calls == STEP, "of the result itself, in the end"


def test_what_was_changed_meanwhile_is_an_error(serve, kernels):
    _, model = _pair()
    serve()
    seen: list[torch.Tensor] = []
    keep = lambda *given: seen.append(given[2])  # noqa: E731
    model.w3.register_forward_hook(keep)
    result = model(given().requires_grad_())
    seen[0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()
    assert kernels.calls == ["multiply"]


def test_hooks_and_what_takes_a_layers_place(serve, kernels):
    """Of layers, and in their place, they are called as before; for an activation's, steps are torch's."""
    plain, model = _pair()
    serve()
    order: list[str] = []
    for name, one in model.named_modules():
        one.register_forward_hook(lambda *_, name=name: order.append(name))
    _check(model, plain, given())
    assert order == ["w1", "activation", "w3", "w2", ""] and not kernels.calls
    plain, model = _pair()
    order.clear()
    for name in ("w1", "w3"):
        getattr(model, name).register_forward_hook(lambda *_, name=name: order.append(name))
        getattr(model, name).register_full_backward_hook(lambda *_, name=name: order.append(name))
    _check(model, plain, given())
    assert order[:2] == ["w1", "w3"] and sorted(order[2:]) == ["w1", "w3"] and kernels.calls == STEP

    class Adapted(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            torch.manual_seed(2)
            self.a, self.b = nn.Linear(WIDTH, 4, False), nn.Linear(4, INNER, False)
            self.to(BF16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + self.b(self.a(x))

    plain, model = _pair()
    for one in (plain, model):
        one.w1, one.w3 = Adapted(one.w1), Adapted(one.w3)
    kernels.calls.clear()
    _check(model, plain, given())
    assert kernels.calls == STEP


def test_where_torchs_operators_are_asked_for(serve, kernels):
    plain, model = _pair()
    serve()
    x = given()
    with torch.no_grad():
        expected = plain(x)
    assert torch.equal(torch.vmap(model)(x), torch.vmap(plain)(x))
    of = [torch.func.grad(lambda x, one=one: one(x).float().square().mean())(x) for one in (model, plain)]
    assert torch.equal(*of)
    of = [torch.func.jvp(one, (x,), (torch.ones_like(x),))[1] for one in (model, plain)]
    close(*of, TOLERANCE)
    with torch.autocast("cpu", torch.float16):
        close(model(x), plain(x), TOLERANCE)
    for one in (tunegemm.unpatch, fuse):
        one(model)
        close(torch.jit.trace(model, x, check_trace=False)(x), expected, TOLERANCE)
    assert not kernels.calls
    leaf = x.clone().requires_grad_()
    result, upstream = model(leaf), torch.eye(2)[:, :, None, None].expand(2, 2, 8, WIDTH).to(BF16)
    (mapped,) = torch.autograd.grad(result, leaf, upstream, is_grads_batched=True, retain_graph=True)
    assert kernels.calls == ["multiply"]
    for index in range(2):
        (one,) = torch.autograd.grad(result, leaf, upstream[index], retain_graph=True)
        close(mapped[index], one, TOLERANCE)
    assert kernels.calls == ["multiply", "derive", "derive"]


def test_compiled_it_is_inductors(serve, kernels):
    plain, model = _pair()
    serve()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    leaf, other = (given().requires_grad_() for _ in range(2))
    compiled(leaf).float().square().mean().backward()
    plain(other).float().square().mean().backward()
    close(leaf.grad, other.grad, TOLERANCE)
    assert not kernels.calls


def test_odd_layouts_are_torchs(serve, kernels):
    """And of a gradient that was spread out, or lies at an odd address, the kernel reads a copy."""
    serve()
    wide = made_gates((4,), 24, BF16, "cpu")
    wrong: list[list[torch.Tensor]] = [
        [each.mT.contiguous().mT for each in wide],
        [each[:, :20].contiguous() for each in wide],
        [each.float() for each in wide],
        [wide[0], wide[1].half()],
        [wide[0], wide[1][:1]],
        [each[:0] for each in wide],
        [torch.cat(wide, -1)[:, :47].contiguous()],
    ]
    for tensors in wrong:
        assert not gates.takes(*(each.detach().requires_grad_() for each in tensors))
    assert gates.takes(*(each.detach().requires_grad_() for each in wide))
    odd = torch.ones(4 * 24 + 1, dtype=BF16)[1:].view(4, 24)
    for grad in (torch.ones((), dtype=BF16).expand(4, 24), odd, torch.ones(24, 4, dtype=BF16).mT):
        found = [derived(call, wide, "swiglu", grad) for call in (Gate.apply, by_torch)]
        for mine, torchs in zip(*found, strict=True):
            close(mine, torchs)
    assert kernels.calls == STEP * 3


def test_threads_train_apart(serve, kernels):
    plain, model = _pair()
    serve()
    inputs = [given(2, rows) for rows in range(1, 9)]
    expected = [_derived_of(plain, x) for x in inputs]
    found: list[torch.Tensor | None] = [None] * len(inputs)

    def work(index: int) -> None:
        found[index] = _derived_of(model, inputs[index])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for ours, torchs in zip(found, expected, strict=True):
        assert ours is not None
        close(ours, torchs, TOLERANCE)
    assert sorted(kernels.calls) == ["derive"] * 8 + ["multiply"] * 8


def _derived_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).float().square().mean(), x)
    return grad


def test_nothing_is_held_after_a_step(serve, kernels):
    _, model = _pair()
    serve()
    result = model(given().requires_grad_())
    kept = weakref.ref(result)
    result.sum().backward()
    del result
    gc.collect()
    assert kept() is None
