"""Gates that are trained, by their kernels in Triton's interpreter; on a GPU: tests/gpu/test_gates.py."""

from __future__ import annotations

import gc
import importlib
import threading
import warnings
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.support.fusing import close
from tests.support.gates import ACTIVATIONS, SIZES, by_torch, check, check_odd_values, derived, matrix
from tests.support.layers import BF16, INNER, TOLERANCE, WIDTH, Gates, fuse, given, made
from tunegemm.errors import TunegemmWarning
from tunegemm.serve.launchers import Prepared
from tunegemm.serve.torch.layers import gates
from tunegemm.serve.torch.layers.gates import Gate


@pytest.fixture
def launched(monkeypatch) -> Iterator[list[str]]:
    """The names of the kernels that ran from now on."""
    pytest.importorskip("triton")
    from tunegemm.generate import kernel_gates

    names: list[str] = []
    original = gates.launch

    def note(name, *arguments):
        done = original(name, *arguments)
        names.extend([name] * done)
        return done

    with pytest.MonkeyPatch.context() as inner:
        inner.setenv("TRITON_INTERPRET", "1")
        importlib.reload(kernel_gates)
    monkeypatch.setattr(gates, "SERVED", True)
    monkeypatch.setattr(gates, "DEVICE_TYPE", "cpu")
    monkeypatch.setattr(gates, "launch", note)
    yield names
    importlib.reload(kernel_gates)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gate", ACTIVATIONS)
def test_results_and_gradients_are_rounded_once(launched, gate, dtype):
    for lead, columns in SIZES:
        check(gate, dtype, lead, columns, "cpu")
    check_odd_values(gate, dtype, "cpu")
    assert launched == ["forward", "backward"] * (len(SIZES) + 1)


@pytest.mark.parametrize("gate", ACTIVATIONS)
def test_derivatives_by_torchs_operators(gate):
    """For who differentiates them, and where there is no kernel."""
    whole = matrix((2, 3), 5, torch.float64, "cpu").requires_grad_()
    assert torch.autograd.gradcheck(Gate.apply, (whole, gate))
    assert torch.autograd.gradgradcheck(Gate.apply, (whole, gate))


def _step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The result of a model, and all gradients of a training step."""
    x = x.detach().clone().requires_grad_()
    model.zero_grad()
    result = model(x)
    result.float().square().mean().backward()
    assert x.grad is not None
    return [result.detach(), x.grad, *(each.grad for each in model.parameters() if each.grad is not None)]


def _pair(activation=None, *, bias=False) -> tuple[nn.Module, nn.Module]:
    plain, model = (made(lambda: Gates(activation, bias), train=True) for _ in range(2))
    fuse(model)
    return plain, model


def _check(model: nn.Module, plain: nn.Module, x: torch.Tensor) -> None:
    for ours, torchs in zip(_step(model, x), _step(plain, x), strict=True):
        close(ours, torchs, TOLERANCE)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "relu", "sigmoid"])
def test_a_gated_mlp_trains(serve, launched, name, bias):
    activation = {
        "silu": functional.silu, "gelu": nn.GELU(), "gelu_tanh": nn.GELU("tanh"), "relu": torch.relu,
        "sigmoid": torch.sigmoid,
    }[name]  # fmt: skip
    plain, model = _pair(activation, bias=bias)
    for prepared in (None, Prepared(None)):  # by a kernel, and by torch's product
        serve(prepared=prepared)
        launched.clear()
        warnings.simplefilter("ignore", TunegemmWarning)
        _check(model, plain, given())
        assert launched == ([] if name == "sigmoid" else ["forward", "backward"])


def test_no_more_is_kept_than_torch_keeps(serve, launched):
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


def test_what_was_saved_may_be_packed_and_computed_again(serve, launched):
    plain, model = _pair()
    serve()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float()

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(BF16).mT.contiguous().mT  # laid out otherwise

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        _check(model, plain, given())
    for reentrant in (False, True):
        launched.clear()
        found = []
        for one in (model, plain):
            x = given().requires_grad_()
            one.zero_grad()
            checkpoint(one, x, use_reentrant=reentrant).float().square().mean().backward()
            found.append([x.grad, *(each.grad for each in one.parameters())])
        for ours, torchs in zip(*found, strict=True):
            close(ours, torchs, TOLERANCE)
        assert launched == ["forward", "forward", "backward"]


def test_gradients_of_gradients(serve, launched):
    found = []
    plain, model = _pair()
    serve()
    for each in (model, plain):
        x = given().requires_grad_()
        (of_x,) = torch.autograd.grad(each(x).float().square().mean(), x, create_graph=True)
        of_x.float().square().sum().backward()
        found.append([of_x.detach(), x.grad, *(one.grad for one in each.parameters())])
    for ours, torchs in zip(*found, strict=True):
        close(ours, torchs, 6e-2)
    assert launched == ["forward", "backward"], "of the result itself, in the end"


def test_where_torchs_operators_are_asked_for(serve, launched):
    plain, model = _pair()
    serve()
    x = given()
    with torch.no_grad():
        expected = plain(x)
    assert torch.equal(torch.vmap(model)(x), torch.vmap(plain)(x))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        close(torch.autograd.forward_ad.unpack_dual(model(dual)).tangent,
              torch.autograd.forward_ad.unpack_dual(plain(dual)).tangent, TOLERANCE)  # fmt: skip
    with torch.autocast("cpu", torch.float16):
        close(model(x), plain(x), TOLERANCE)
    seen: list[torch.Tensor] = []
    handle = model.w1.register_forward_hook(lambda *given: seen.append(given[2]))
    close(model(x), expected, TOLERANCE)
    handle.remove()
    assert len(seen) == 1 and not launched
    leaf = x.clone().requires_grad_()
    result, upstream = model(leaf), torch.eye(2)[:, :, None, None].expand(2, 2, 8, WIDTH).to(BF16)
    (mapped,) = torch.autograd.grad(result, leaf, upstream, is_grads_batched=True, retain_graph=True)
    for index in range(2):
        (one,) = torch.autograd.grad(result, leaf, upstream[index], retain_graph=True)
        close(mapped[index], one, TOLERANCE)
    assert launched == ["forward", "backward", "backward"]


def test_threads_train_apart(serve, launched):
    plain, model = _pair()
    serve()
    inputs = [given(2, rows) for rows in range(1, 9)]
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
    assert sorted(launched) == ["backward"] * 8 + ["forward"] * 8


def derived_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).float().square().mean(), x)
    return grad


def test_nothing_is_held_after_a_step(serve, launched):
    _, model = _pair()
    serve()
    x = given().requires_grad_()
    result = model(x)
    kept = weakref.ref(result)
    result.sum().backward()
    del result
    gc.collect()
    assert kept() is None


def test_a_compiler_that_fails_is_said_once(launched, monkeypatch):
    from tunegemm.generate import kernel_gates

    class Broken:
        def __getitem__(self, grid):
            raise RuntimeError("Failed to find C compiler.\nMore.")

    monkeypatch.setattr(kernel_gates, "forward", Broken())
    whole, grad = matrix((3,), 16, BF16, "cpu"), matrix((3,), 8, BF16, "cpu", 1)
    with pytest.warns(TunegemmWarning, match=r"are torch's: Triton .* \(Failed to find C compiler\.\)$"):
        ours = derived(Gate.apply, whole, "swiglu", grad)
    for mine, torchs in zip(ours, derived(by_torch, whole, "swiglu", grad), strict=True):
        assert torch.equal(mine, torchs)
    assert not gates.takes(whole) and not launched
