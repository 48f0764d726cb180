"""Gates of one layer whose weight is gate's rows and then up's: kernels of groups read it as it lies."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import tunegemm
from tests.support.fusing import close
from tests.support.layers import INNER, TOLERANCE, WIDTH, Gates, by_torch, fuse, fused, given, made
from tunegemm.describe.problem import Problem
from tunegemm.serve import api
from tunegemm.serve.torch.layers import halves


class Merged(nn.Module):
    """Phi-3's MLP."""

    def __init__(self, bias: bool = False, activation: nn.Module | None = None) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(WIDTH, 2 * INNER, bias), nn.Linear(INNER, WIDTH, bias=False)
        self.activation = activation or nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = self.gate_up(x)
        gate, up = up.chunk(2, dim=-1)
        return self.down(up * self.activation(gate))


def _split(both: torch.Tensor) -> torch.Tensor:
    gate, up = both.split(INNER, dim=-1)
    return functional.silu(gate) * up


def _sliced(both: torch.Tensor) -> torch.Tensor:
    half = both.shape[-1] // 2
    return functional.silu(both[..., :half]) * both[..., half:]


def _unflattened(both: torch.Tensor) -> torch.Tensor:
    gate, up = torch.unbind(both.unflatten(-1, (2, INNER)), -2)
    return torch.mul(up, functional.silu(gate))


def _swapped(both: torch.Tensor) -> torch.Tensor:
    up, gate = torch.chunk(both, 2, -1)
    return functional.silu(gate) * up


def _in_turns(both: torch.Tensor) -> torch.Tensor:
    return functional.silu(both[..., ::2]) * both[..., 1::2]


def _twice(both: torch.Tensor) -> torch.Tensor:
    gate, up = both.chunk(2, -1)
    return functional.silu(gate) * up + gate


def _whole(both: torch.Tensor) -> torch.Tensor:
    gate, up = both.chunk(2, -1)
    return functional.silu(gate) * up * both.sum()


def of(gate: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    class Own(Merged):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(gate(self.gate_up(x)))

    return made(Own)


@pytest.fixture
def served(loops: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(halves, "is_served", lambda rows, columns: rows <= 512)
    return loops


@pytest.mark.parametrize("bias", [False, True])
def test_halves_are_gated_as_they_lie(served, bias):
    model = made(lambda: Merged(bias))
    expected, weight = by_torch(model, given()), model.gate_up.weight
    place, before = weight.data_ptr(), weight.detach().clone()
    assert fused(fuse(model)) == ["gate_up"]
    for x in (given(), given(1, 3, 2), given(512)):
        served.calls.clear()
        close(by_torch(model, x), by_torch(made(lambda: Merged(bias)), x), TOLERANCE)
        assert served.calls == [(x.numel() // WIDTH, 1, 2 * INNER, WIDTH, "swiglu")]
    assert model.gate_up.weight is weight and weight.data_ptr() == place and torch.equal(weight, before)
    close(by_torch(copy.deepcopy(model), given()), expected, TOLERANCE)
    tunegemm.unpatch(model)
    assert type(model) is Merged and weight.data_ptr() == place
    assert torch.equal(by_torch(model, given()), expected)


@pytest.mark.parametrize("bias", [False, True])
def test_inputs_of_a_shape_that_was_served_take_few_looks(served, bias):
    model, plain = made(lambda: Merged(bias)), made(lambda: Merged(bias))
    fuse(model)
    for x in (given(), given(3, 8)):
        by_torch(model, x)
        served.bound = 0
        for each in (x, 2 * x):
            close(by_torch(model, each), by_torch(plain, each), TOLERANCE)
        assert served.bound == 2
    wide = torch.zeros(*given().shape[:-1], 2 * WIDTH, dtype=given().dtype)
    wide[..., :WIDTH] = given()
    rows = torch.zeros(
        given().numel() + 4, dtype=given().dtype
    )  # an address between two multiples of 16 bytes
    rows[4:] = given().flatten()
    for x in (wide[..., :WIDTH], rows[4:].view(given().shape), torch._neg_view(given())):
        close(by_torch(model, x), by_torch(plain, x), TOLERANCE)
    assert served.bound == 2, "they are laid out otherwise"
    model.gate_up.weight.data = plain.gate_up.weight.data = 2 * plain.gate_up.weight.data
    close(by_torch(model, given()), by_torch(plain, given()), TOLERANCE)
    with tunegemm.policy("batch_invariant"):
        by_torch(model, given())
    served.found = False
    tunegemm.refresh()
    served.calls.clear()
    close(by_torch(model, given()), by_torch(plain, given()), TOLERANCE)
    assert not served.calls, "there is no kernel any more"


def test_a_bound_launch_that_fails_is_forgotten(served):
    model, plain = made(Merged), made(Merged)
    fuse(model)
    by_torch(model, given())
    served.fails = True
    for _ in range(2):
        close(by_torch(model, given()), by_torch(plain, given()), TOLERANCE)
    assert served.bound == 2, "each call has made a new one"
    served.fails = False
    by_torch(model, given())
    assert served.bound == 3


@pytest.mark.parametrize("gate", [_split, _sliced, _unflattened])
def test_ways_to_cut_a_result(served, gate):
    model = of(gate)
    expected = by_torch(model, given())
    assert fused(fuse(model)) == ["gate_up"]
    close(by_torch(model, given()), expected, TOLERANCE)
    assert len(served.calls) == 1


@pytest.mark.parametrize("gate", [_swapped, _in_turns, _twice, _whole])
def test_what_is_no_gate_of_halves(served, gate):
    model = of(gate)
    expected = by_torch(model, given())
    assert not any("half" in line.why for line in fuse(model))
    close(by_torch(model, given()), expected)
    assert not served.calls


def test_other_gates_and_dtypes_are_left_with_a_reason(served):
    for make, dtype in ((lambda: Merged(activation=nn.GELU()), torch.bfloat16), (Merged, torch.float16)):
        model = made(make, dtype=dtype)
        (line,) = fuse(model).of("left")
        assert line.name == "gate_up" and "silu's, in bf16" in line.why
        by_torch(model, given().to(dtype))
    assert not served.calls


def test_what_is_not_served_is_torchs_to_the_bit(served, monkeypatch):
    model = made(Merged)
    expected = {count: by_torch(model, given(count)) for count in (16, 513)}
    fuse(model)
    assert torch.equal(by_torch(model, given(513)), expected[513])
    with tunegemm.policy("batch_invariant"):
        assert torch.equal(by_torch(model, given(16)), expected[16])
    monkeypatch.setattr(halves, "is_served", lambda rows, columns: False)
    tunegemm.refresh()
    assert torch.equal(by_torch(model, given(16)), expected[16]) and not served.calls


def test_gate_and_up_in_turns_without_a_kernel_of_their_own(served):
    model = made(Gates)
    expected, weights = by_torch(model, given()), torch.stack((model.w1.weight, model.w3.weight), 1)
    assert fused(fuse(model)) == ["{w1,w3}"]
    close(by_torch(model, given()), expected, TOLERANCE)
    assert served.calls == [(16, 1, 2 * INNER, WIDTH, "swiglu")]
    assert torch.equal(by_torch(model, given(600)), by_torch(made(Gates), given(600))), "by two products"
    served.found = False
    tunegemm.refresh()
    both = functional.linear(given(), weights.flatten(0, 1).detach())
    expected = functional.linear(functional.silu(both[..., ::2]) * both[..., 1::2], model.w2.weight)
    for _ in range(2):
        assert torch.equal(by_torch(model, given()), expected.detach()), "by one product of torch's"


def test_kernels_of_each_layer_go_before_one_product_of_torchs(serve, kernel):
    model, plain = made(lambda: Gates(nn.GELU())), made(lambda: Gates(nn.GELU()))
    fuse(model)
    api.serve_by(serve(Problem(16, INNER, WIDTH)))
    for _ in range(3):
        close(by_torch(model, given()), by_torch(plain, given()), TOLERANCE)
    assert [shapes[2] for shapes in kernel.calls] == [(16, INNER)] * 6


@pytest.mark.parametrize("bias", [False, True])
def test_gate_and_up_after_one_another(served, bias):
    """As a model that is patched in training mode has them, and one with biases."""
    model, plain = made(lambda: Gates(bias=bias), train=True), made(lambda: Gates(bias=bias))
    assert "one product with its gate, silu" in str(fuse(model))
    for each in (model, plain):
        each(given()).float().square().mean().backward()
    close(model.w1.weight.grad, plain.w1.weight.grad, TOLERANCE)
    assert not served.calls, "each layer by itself"
    model.eval()
    close(by_torch(model, given()), by_torch(plain, given()), TOLERANCE)
    assert served.calls == [(16, 1, 2 * INNER, WIDTH, "swiglu")]
    biases = torch.cat((plain.w1.bias, plain.w3.bias)) if bias else None
    both = functional.linear(given(), torch.cat((plain.w1.weight, plain.w3.weight)), biases)
    expected = functional.linear(functional.silu(both[..., :INNER]) * both[..., INNER:], plain.w2.weight)
    served.found = False
    tunegemm.refresh()
    for _ in range(2):
        assert torch.equal(by_torch(model, given()), expected.detach()), "by one product of torch's"
    assert torch.equal(by_torch(model, given(600)), by_torch(plain, given(600))), "by two"


@pytest.mark.parametrize("rows", [1, 64, 65, 224, 225, 255, 256, 257, 1023, 1024, 8192, 8193])
def test_where_they_are_served(loops, rows):
    """At extents that were measured: of few rows the weights count, and of few rows of weights tiles."""
    loops.quiet = True
    for columns in (7152, 7168, 16384, 28672, 51200, 51216):
        loops.calls.clear()
        x, weight = (
            torch.empty(rows, 64, dtype=torch.bfloat16),
            torch.empty(columns, 64, dtype=torch.bfloat16),
        )
        result = halves.gated(x, halves.one_group(weight), (), "swiglu", in_turns=False)
        is_served = rows <= 8192 and 7168 <= columns <= 51200
        if 64 < rows < 1024 and columns == 7168:
            is_served = 225 <= rows <= 256
        if 64 < rows < 256 and columns == 51200:
            is_served = False
        assert (result is not None) == is_served == bool(loops.calls), columns


def test_gradients_hooks_and_compilers_have_the_layer_as_it_is(served):
    model, plain = made(Merged), made(Merged)
    fuse(model)
    for each in (model, plain):
        each(given()).float().square().mean().backward()
    close(model.gate_up.weight.grad, plain.gate_up.weight.grad, TOLERANCE)
    with torch.no_grad():
        result = torch.compile(model, backend="aot_eager", fullgraph=True)(given())
        close(result, plain(given()), TOLERANCE)
        exported = torch.export.export(model, (given(),)).module()(given())
        close(exported, plain(given()), TOLERANCE)
        fired: list[torch.Tensor] = []
        model.gate_up.register_forward_hook(lambda *_: fired.append(_[2]))
        close(model(given()), plain(given()), TOLERANCE)
    assert fired[0].shape[-1] == 2 * INNER and not served.calls
