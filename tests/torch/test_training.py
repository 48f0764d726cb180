"""A layer that is trained: each of its three products has its own answer. On a CPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear as torch_linear

import tunegemm
from tests.support.fusing import serve_recorded
from tests.support.serving import BF16, ByAddress, deterministic, operands, uncached
from tunegemm.dispatch import api
from tunegemm.dispatch.launchers import Prepared

pytestmark = pytest.mark.filterwarnings("error::tunegemm.errors.TunegemmWarning")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """The extents of what kernels of addresses compute, of which there is one for every problem."""
    found: list[tuple[int, int, int]] = []

    class Noted(ByAddress):
        def make(self, *strides: int):
            launch, problem = super().make(*strides), self.problem

            def noted(a: int, b: int, d: int, *bias: int) -> None:
                found.append((problem.m, problem.n, problem.k))
                if (problem.a_major, problem.b_major, bias) == ("k", "k", ()):  # what `ByAddress` computes
                    launch(a, b, d)

            return noted

    def prepare(record, _):
        return Prepared(Noted(record.problem).launcher, tma=True)

    serve_recorded(monkeypatch, None, prepare=prepare)
    return found


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("columns", [48, 64])  # a square weight has as many elements in and out
def test_a_step_asks_for_its_three_products(launched, columns, bias):
    """Forward, backward, and the forward pass of an evaluation between two steps."""
    x = operands()[0].view(2, 16, 64).requires_grad_()
    layer = torch.nn.Linear(64, columns, bias=bias, dtype=BF16)
    upstream = torch.ones(2, 16, columns, dtype=BF16)
    held = []  # outputs keep their addresses: `b` of a weight's gradient is the input

    def step() -> None:
        launched.clear()
        result = tunegemm.linear(x, layer.weight, layer.bias)
        held.append(torch.autograd.grad(result, (x, *layer.parameters()), upstream))
        assert launched == [(32, columns, 64), (32, 64, columns), (columns, 64, 32)]

    step()
    step()
    with torch.no_grad():
        expected = torch_linear(x, layer.weight, layer.bias)
        for _ in range(2):
            assert torch.equal(tunegemm.linear(x, layer.weight, layer.bias), expected) or bias
    step()


@pytest.mark.parametrize("wants", ["the input", "the weight", "the bias"])
def test_a_patched_layer_that_is_trained_is_torchs_and_its_evaluation_is_served(launched, wants):
    """Its three products have kernels; the way to them would be Python's (docs/decisions/0028)."""
    x = operands()[0].requires_grad_(wants == "the input")
    layer = torch.nn.Linear(64, 48, dtype=BF16)
    layer.weight.requires_grad_(wants == "the weight")
    layer.bias.requires_grad_(wants == "the bias")
    tunegemm.patch(layer)
    for _ in range(2):
        result = layer(x)
        assert torch.equal(result, torch_linear(x, layer.weight, layer.bias))
        result.sum().backward()
        assert not launched
        with torch.no_grad():
            layer(x)
        assert launched == [(32, 48, 64)]
        launched.clear()


def test_a_layer_that_is_not_trained_is_served_in_grad_mode_and_minds_the_modes(launched):
    x = operands()[0]
    layer = torch.nn.Linear(64, 48, bias=False, dtype=BF16).requires_grad_(False)
    tunegemm.patch(layer)
    for _ in range(2):
        layer(x)
    assert launched == [(32, 48, 64)] * 2
    layer.weight.requires_grad_()
    with deterministic():
        assert layer(x).requires_grad
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        assert torch.autograd.forward_ad.unpack_dual(layer(dual)).tangent is not None
    assert torch.func.vmap(layer)(x[:, None]).shape == (32, 1, 48)
    assert launched == [(32, 48, 64)] * 2


def test_a_weight_that_is_kept_transposed_gets_a_gradient_of_its_strides(kernel):
    x, b = operands()
    for weight in (b.t().contiguous(), b.t().contiguous().t().contiguous().t()):
        parameter = torch.nn.Parameter(weight)
        tunegemm.linear(x, parameter).sum().backward()
        ours, parameter.grad = parameter.grad, None
        torch_linear(x, parameter).sum().backward()
        assert torch.equal(ours, parameter.grad) and ours.stride() == weight.stride()


@pytest.mark.parametrize("served", ["forward", "of x", "of the weight", "none"])
def test_compiled_training_asks_for_each_of_the_three_products(kernel, monkeypatch, served):
    """One that has a kernel is served, whatever the other two have."""
    torch._dynamo.reset()  # of what it made where others were served
    x, b = operands()
    weight = torch.nn.Parameter(b.t().contiguous())
    extents = {"forward": (32, 48, 64), "of x": (32, 64, 48), "of the weight": (48, 64, 32)}

    def only(form, left, right, *_, **__):
        return (*left.shape, right.shape[-1]) == (*extents[served][::2], extents[served][1])

    monkeypatch.setattr(
        api.dispatcher.planner, "serves", only if served in extents else lambda *_, **__: False
    )
    x.requires_grad_()
    with uncached():
        torch.compile(lambda x: tunegemm.linear(x, weight).relu(), fullgraph=True)(x).sum().backward()
    assert [(a[0], b[1], a[1]) for a, b, _ in kernel.calls] == [
        extents[one] for one in (served,) if one in extents
    ]
    ours = x.grad.clone(), weight.grad.clone()
    x.grad = weight.grad = None
    torch_linear(x, weight).relu().sum().backward()
    assert torch.equal(ours[0], x.grad) and torch.equal(ours[1], weight.grad)
