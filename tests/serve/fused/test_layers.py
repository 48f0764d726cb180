"""Layers that `patch(model, fuse=True)` computes as one, by planted kernels; the rest: test_layers_left."""

from __future__ import annotations

import copy
import io
import warnings
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional

import tunegemm
from tests.support.fusing import close
from tests.support.layers import (
    ALL,
    INNER,
    TOLERANCE,
    WIDTH,
    Attention,
    Gates,
    Model,
    by_torch,
    fuse,
    fused,
    given,
    made,
)
from tests.support.serving import calls_of
from tunegemm.describe.problem import Problem
from tunegemm.errors import TunegemmWarning
from tunegemm.serve import api
from tunegemm.serve.launchers import Prepared
from tunegemm.serve.torch.layers.shared import Shared


def test_a_model_is_fused_and_served(serve, kernel):
    model = made()
    with torch.no_grad():
        expected = model(given())
    report = fuse(model)
    assert sorted(fused(report)) == ALL and report.patched == 9
    asked = serve()
    with torch.no_grad():
        close(model(given()), expected, TOLERANCE)
    assert {(problem.n, problem.epilogue) for problem in asked.asked} == {
        (WIDTH + 64, ""), (WIDTH, "residual"), (2 * INNER, "swiglu"), (INNER, "bias_n+gelu_tanh"),
        (WIDTH, "bias_n+residual"),
    }  # fmt: skip
    assert len(kernel.calls) == 6


def test_what_has_no_kernel_is_torchs_to_the_bit():
    for make in (Model, lambda: Attention(bias=True), lambda: Gates(bias=True)):
        model = made(make)
        expected = by_torch(model, given())
        assert fused(fuse(model))
        assert torch.equal(by_torch(model, given()), expected)
        assert torch.equal(by_torch(model, given(3)[None]), by_torch(copy.deepcopy(model), given(3)[None]))


def _joined(model: nn.Module, x: torch.Tensor) -> bool:
    """Whether q, k and v are of one product; they are torch's, and right."""
    parameters = [(layer.weight, layer.bias) for layer in (model.q, model.k, model.v)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TunegemmWarning)
        results = [layer(x) for layer in (model.q, model.k, model.v)]
    is_joined = len({each.untyped_storage().data_ptr() for each in results}) == 1
    expected = [functional.linear(x, *each) for each in parameters]
    if is_joined:
        weight = torch.cat([weight for weight, _ in parameters])
        bias = None if model.q.bias is None else torch.cat([bias for _, bias in parameters])
        expected = list(functional.linear(x, weight, bias).split([WIDTH, 32, 32], -1))
    assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))
    return is_joined


@pytest.mark.parametrize("bias", [False, True])
def test_few_rows_without_a_kernel_are_one_product_of_torchs(serve, kernel, bias):
    model = made(lambda: Attention(bias))
    fuse(model)
    serve(Problem(1, 8, 8))
    with torch.no_grad():
        for _ in range(3):
            assert _joined(model, given(2, 128)) and _joined(model, given(1, 1))
            assert not _joined(model, given(1, 257)), "it gains nothing there"
        model.k.weight.data = model.k.weight.data * 2
        assert not _joined(model, given()), "one is elsewhere"
    assert not kernel.calls


def test_where_one_product_of_torchs_would_mean_something_else(serve, monkeypatch):
    model = made(Attention)
    fuse(model)
    serve(prepared=Prepared(None))
    assert not _joined(model, given()), "gradients are wanted"
    with torch.no_grad():
        assert _joined(model, given())
        with torch.autocast("cpu", torch.float16):
            assert not _joined(model, given()), "weights are cast"
        with tunegemm.policy("deterministic"):
            assert _joined(model, given())
        with tunegemm.policy("batch_invariant"):
            assert not _joined(model, given()), "a row's bits would depend on how many there are"
        with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied|incompatible"):
            model.q(given()[..., 1:])
        with pytest.raises(RuntimeError, match="dtype"):
            model.q(given().float())
        monkeypatch.setenv("TUNEGEMM_MODE", "off")
        serve(prepared=Prepared(None))
        assert not _joined(model, given())


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "relu", "sigmoid"])
@pytest.mark.parametrize("bias", [False, True])
def test_gates(serve, kernel, name, bias):
    activation = {
        "silu": functional.silu, "gelu": nn.GELU(), "gelu_tanh": nn.GELU("tanh"), "relu": torch.relu,
        "sigmoid": torch.sigmoid,
    }[name]  # fmt: skip
    model = made(lambda: Gates(activation, bias))
    with torch.no_grad():
        expected = model(given())
        lines = fused(fuse(model))
        serve()
        close(model(given()), expected, TOLERANCE)
    assert (lines, len(kernel.calls)) == (["{w1,w3}"], 2)
    widths = {shapes[2][-1] for shapes in kernel.calls} - {WIDTH}
    assert widths == {2 * INNER if bias or name == "sigmoid" else INNER}, "with the gate, or two results"


def test_memory_is_not_doubled():
    model = made()
    before = {name: each.detach().clone() for name, each in model.state_dict().items()}
    fuse(model)
    q, k, v = (layer.weight for layer in (model.attention.q, model.attention.k, model.attention.v))
    assert len({each.untyped_storage().data_ptr() for each in (q, k, v)}) == 1
    assert q.untyped_storage().nbytes() == 2 * (q.numel() + k.numel() + v.numel())
    gate, up = model.mlp.w1.weight, model.mlp.w3.weight
    assert gate.stride() == (2 * WIDTH, 1) and up.data_ptr() == gate.data_ptr() + 2 * WIDTH
    assert model.mlp.w2.weight.untyped_storage().nbytes() == 2 * INNER * WIDTH
    tunegemm.unpatch(model)
    for name, each in model.state_dict().items():
        assert torch.equal(each, before[name]) and each.is_contiguous()
        assert each.untyped_storage().nbytes() == each.nbytes
    assert "_fused_with" not in vars(model.mlp.w1) and type(model.mlp) is Gates


def test_fused_unpatched_and_fused_again(serve, kernel):
    model = made()
    with torch.no_grad():
        expected = model(given())
    for _ in range(2):
        assert sorted(fused(fuse(model))) == ALL
        again = fuse(model)
        assert again.patched == 0 and not again.of("left")
        assert tunegemm.unpatch(model) == 9
        assert torch.equal(by_torch(model, given()), expected)
    assert tunegemm.patch(model) == 9 and sorted(fused(fuse(model))) == ALL
    serve()
    with torch.no_grad():
        close(model(given()), expected, TOLERANCE)
    assert len(kernel.calls) == 6


def _saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, _saved], ids=["deepcopy", "pickle"])
def test_copies_are_fused_and_apart(serve, kernel, copied):
    model = made()
    fuse(model)
    other = copied(model)
    assert other.attention.q.weight.untyped_storage().nbytes() == 2 * WIDTH * (WIDTH + 64)
    assert other.attention.q.weight.data_ptr() != model.attention.q.weight.data_ptr()
    with torch.no_grad():
        model.mlp.w1.weight.zero_()
    expected = by_torch(made(), given())
    serve()
    with torch.no_grad():
        close(other(given()), expected, TOLERANCE)
    assert len(kernel.calls) == 6 and tunegemm.unpatch(other) == 9 and type(other.mlp) is Gates


def test_loading_into_a_fused_model(serve, kernel):
    model, other = made(), made()
    with torch.no_grad():
        for each in other.parameters():
            each.add_(0.01)
    expected = by_torch(other, given())
    fuse(model)
    serve()
    for assign in (False, True):
        model.load_state_dict(other.state_dict(), assign=assign)
        kernel.calls.clear()
        with torch.no_grad():
            close(model(given()), expected, TOLERANCE)
        assert len(kernel.calls) == 6, "they are together again"


def test_weights_that_are_pruned_where_they_lie_are_noticed(serve):
    """Their addresses and strides are as before."""
    model, plain = made(), made()
    fuse(model)
    serve()
    with torch.no_grad():
        model(given())
    for one in (model, plain):
        for layer in (one.mlp.w1, one.mlp.w3, one.plain.up):
            layer.weight.data = layer.weight.data[:48]
        one.plain.up.bias.data = one.plain.up.bias.data[:48]
        for layer in (one.mlp.w2, one.plain.down):
            layer.weight.data = layer.weight.data[:, :48]
    close(by_torch(model, given()), by_torch(plain, given()), TOLERANCE)


def test_what_moves_weights_is_noticed(serve, kernel):
    model = made()
    fuse(model)
    serve()
    model.half()
    expected = by_torch(made(dtype=torch.float16), given().half())
    with torch.no_grad():
        close(model(given().half()), expected, TOLERANCE)
        assert len(kernel.calls) == 6
        for layer in (model.attention.k, model.mlp.w3, model.plain.up):
            layer.weight.data = layer.weight.data * 2
        kernel.calls.clear()
        result = model(given().half())
    assert len(kernel.calls) == 9, "layers whose weights are elsewhere are served each by itself"
    tunegemm.unpatch(model)
    close(result, by_torch(model, given().half()), TOLERANCE)
    fuse(model)
    model.float()
    assert by_torch(model, given().float()).dtype is torch.float32


def test_an_optimizers_steps_are_seen(serve):
    model = made()
    fuse(model)
    serve()
    for options in ({}, {"fused": True}, {"foreach": True}):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
        for each in model.parameters():
            each.grad = torch.ones_like(each)
        optimizer.step()
        plain = copy.deepcopy(model)
        tunegemm.unpatch(plain)
        with torch.no_grad():
            close(model(given()), plain(given()), TOLERANCE)


def test_safetensors_saves_as_before(tmp_path):
    saving = pytest.importorskip("safetensors.torch")
    for train in (False, True):  # weights in turns, and after one another
        model = made(train=train)
        expected = {name: each.clone() for name, each in model.state_dict().items()}
        fuse(model)
        saving.save_file(model.state_dict(), tmp_path / "a")
        saving.save_model(model, str(tmp_path / "b"))
        for name in "ab":
            found = saving.load_file(tmp_path / name)
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[key], each) for key, each in expected.items())
        saving.load_model(model, str(tmp_path / "b"))


# Training


def test_gradients_are_of_each_layers_own_products(serve, kernel):
    """In graphs they are of one product: test_layers_compiled."""
    plain, model = made(train=True), made(train=True)
    report = fuse(model)
    assert "mlp.{w1,w3}" in fused(report) and model.mlp.w1.weight.is_contiguous()
    gelu = fuse(made(lambda: Gates(nn.GELU()), train=True))
    assert "gelu and the product with it are torch's" in str(gelu)
    serve()
    for _ in range(2):  # which add up
        for each in (plain, model):
            x = given().requires_grad_()
            each(x).square().mean().backward()
            each.seen = x.grad
    close(model.seen, plain.seen, TOLERANCE)
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert one.grad is not None and one.grad.shape == other.grad.shape, name
        close(one.grad, other.grad, 6e-2)
    merged = [shapes for shapes in kernel.calls if shapes[1] == (WIDTH, WIDTH + 64)]
    assert kernel.calls and not merged
    with torch.no_grad():
        close(model(given()), plain(given()), TOLERANCE)
    assert any(shapes[1] == (WIDTH, WIDTH + 64) for shapes in kernel.calls), "without gradients"


def test_frozen_weights_and_inputs_keep_nothing(serve):
    model = made(Attention, train=True)
    fuse(model)
    serve()
    model.q.weight.requires_grad_(False)
    model(given()).sum().backward()
    assert model.q.weight.grad is None and model.k.weight.grad is not None
    for layer in (model.k, model.v, model.o):
        layer.requires_grad_(False)
    x = given().requires_grad_()
    model(x).sum().backward()
    assert x.grad is not None


def test_results_are_written_into_apart(serve):
    class InPlace(Attention):
        def forward(self, x):  # type: ignore[no-untyped-def]
            q, k, v = self.q(x), self.k(x), self.v(x)
            k.add_(1)
            return torch.cat((q, k.mul_(2), v), -1)

    model = made(InPlace, train=True)
    expected = model(given())
    assert fused(fuse(model)) == ["{q,k,v}"]
    serve()
    with torch.no_grad():
        close(model(given()), expected, TOLERANCE)
    close(model(given()), expected, TOLERANCE)
    model(given()).sum().backward()


def test_a_call_is_looked_at_once(serve):
    """What the host does for a layer beside its launches, which eager decode waits for."""
    model = made()
    fuse(model)
    serve()
    for _ in range(2):
        by_torch(model, given())
    python, _ = calls_of(lambda: by_torch(model, given()))
    place = "tunegemm.serve.torch.layers."
    counts = Counter(name.removeprefix(place) for name in python if name.startswith(place))
    assert counts["shared.is_in_place"] == counts["shared.taken"] == len(ALL)
    assert sum(counts.values()) <= 64


@pytest.mark.parametrize("rows", [8, 300])
def test_where_no_step_has_a_kernel_forward_is_the_modules_own(serve, kernel, rows):
    """Until records are looked at again; few rows of gate and up are one product of torch's."""
    model, x = made(Gates), given(rows)
    expected = by_torch(model, x)
    fuse(model)

    def steps() -> int:
        return sum("layers.steps." in name for name in calls_of(lambda: by_torch(model, x))[0])

    serve(Problem(1, 8, 8))
    asked = [steps() for _ in range(3)]
    assert asked[0] and bool(asked[2]) == (rows == 8)
    close(by_torch(model, x), expected)
    api.dispatcher.planner.next_look = 0.0
    assert steps(), "there might be a record now"
    serve()
    close(by_torch(model, x), expected, TOLERANCE)
    assert steps() and kernel.calls


def test_a_training_step_asks_no_fused_step(serve, monkeypatch):
    """All would be torch's: asking each cost the host of a 1B model 0.16 ms a layer."""
    serve()
    plain, model = made(), made()
    fuse(model)
    asked: list[object] = []
    taken = Shared.taken
    monkeypatch.setattr(Shared, "taken", lambda self, *given: asked.append(self) or taken(self, *given))
    found = []
    for each in (model, plain):
        x = given().requires_grad_()
        each(x).float().square().mean().backward()
        found.append([x.grad, *(one.grad for one in each.parameters())])
    assert not asked
    for ours, torchs in zip(*found, strict=True):
        close(ours, torchs, TOLERANCE)
    with torch.no_grad():
        model(given())
    assert asked
