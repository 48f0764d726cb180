"""What a program does to a module after `patch(model, fuse=True)`, and a forward to its input."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional

import tunegemm
from tests.support.fusing import close
from tests.support.layers import (
    ALL,
    BF16,
    INNER,
    ROWS,
    TOLERANCE,
    WIDTH,
    Attention,
    Gates,
    fuse,
    fused,
    given,
    made,
)


class Adapted(nn.Module):
    """A layer and low ranks, as people write it themselves."""

    merged = False

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.a, self.b = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)
        self.scaling, self.note = 2.0, "mine"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.base(x)
        if not self.merged and getattr(self, "enabled", True):
            result = result + self.scaled(x)
        return result

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x)) * self.scaling


class Bent(nn.Module):
    """Its activation is a function that it holds, as torch.nn.TransformerEncoderLayer has it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER)
        self.down, self.activation = nn.Linear(INNER, WIDTH), functional.silu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.activation(self.gate(x)) * self.up(x))


def _pair(make) -> tuple[nn.Module, nn.Module]:
    plain, model = made(make), made(make)
    assert fused(fuse(model))
    return plain, model


def _check(plain: nn.Module, model: nn.Module) -> None:
    with torch.no_grad():
        for _ in range(2):
            close(model(given()), plain(given()), TOLERANCE)


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [
        (Adapted, "scaling", 0.1),
        (Adapted, "merged", True),
        (Adapted, "enabled", False),
        (Bent, "activation", torch.tanh),
        (Gates, "w3", None),
        (Gates, "activation", nn.Tanh()),
        (Gates, "w1", nn.Sequential(nn.Linear(WIDTH, INNER, bias=False, dtype=BF16))),
    ],
)
def test_what_forward_reads_may_be_set_later(serve, make, name, value):
    serve()
    plain, model = _pair(make)
    _check(plain, model)
    for one in (plain, model):
        setattr(one, name, value)
    _check(plain, model)
    for one in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        _check(plain, one)
    tunegemm.unpatch(model)
    assert type(model) is make
    fuse(model)
    _check(plain, model)


def test_an_attribute_may_go(serve):
    serve()
    plain, model = _pair(Adapted)
    for one in (plain, model):
        one.merged = True
    _check(plain, model)
    tunegemm.unpatch(model)
    fuse(model)
    for one in (plain, model):
        del one.merged
    _check(plain, model)


def test_what_it_does_not_read_or_is_the_same_changes_nothing(serve, kernel):
    serve()
    plain, model = _pair(Adapted)
    model.note, model.own, model.scaling, model.training = "yours", 1, model.scaling, True
    model.eval().train().requires_grad_(False)
    model.b = model.b  # modules are seen at each call
    kernel.calls.clear()
    _check(plain, model)
    assert len(kernel.calls) == 2 * 3, "base takes the sum"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_torchs(serve):
    serve()
    for make in (Adapted, Bent):
        plain, model = _pair(make)
        nested = torch.nested.nested_tensor([given(8), given(3)])
        for one in (given(), nested, nested):
            with torch.no_grad():
                ours, torchs = (
                    (each.unbind() if each.is_nested else [each]) for each in (model(one), plain(one))
                )
            for mine, other in zip(ours, torchs, strict=True):
                close(mine, other, TOLERANCE)


class Summed(nn.Module):
    """Writes into its input, which it reads later."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = x
        x += self.down(functional.relu(self.up(x)))
        return before + x


class Doubled(Bent):
    """The same between two layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gated = self.activation(self.gate(x))
        x.mul_(2)
        return self.down(gated * self.up(x))


class Cleared(Summed):
    """And between a layer and its activation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.up(x)
        torch.zero_(x)
        return self.down(functional.relu(inner, inplace=True)) + x


class Rectified(Summed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.relu(self.up(functional.relu(x, inplace=True)))) + x


@pytest.mark.parametrize("make", [Summed, Doubled, Cleared, Rectified])
def test_a_forward_that_writes_into_its_input(serve, make):
    serve()
    plain, model = made(make), made(make)
    fuse(model)
    for _ in range(2):
        given_to = [given(), given()]
        with torch.no_grad():
            close(model(given_to[0]), plain(given_to[1]), TOLERANCE)
        close(*given_to, TOLERANCE)


def test_an_activation_is_known_by_large_values_too(serve):
    """Where clipped ones, as of speech models, differ."""
    serve()
    plain, model = _pair(lambda: Gates(nn.Hardtanh(0.0, 20.0)))
    with torch.no_grad():
        close(model(40 * given()), plain(40 * given()), TOLERANCE)


@pytest.mark.parametrize("together", [True, False])
def test_weights_in_somebodys_buffer_stay_there(serve, kernel, together):
    """As optimizers and communication have them, which write there: what lies together is one product."""
    serve()
    plain, model = made(Attention), made(Attention)
    layers = [model.q, model.k, model.v]
    buffer = torch.zeros(200, WIDTH, dtype=BF16)
    start = 0
    for layer in layers:
        rows = buffer[start : start + layer.out_features]
        layer.weight.data = rows.copy_(layer.weight.detach())
        start += layer.out_features + (0 if together else 8)
    report = fuse(model)
    if not together:
        (line,) = report.of("left")
        assert line.name == "{q,k,v}" and line.why.endswith("through which something else may write")
    buffer.mul_(2)
    with torch.no_grad():
        for layer in (plain.q, plain.k, plain.v):
            layer.weight.mul_(2)
    _check(plain, model)
    assert ((2 * ROWS // 2, 128) in {(one[0][0], one[1][1]) for one in kernel.calls}) == together


def test_weights_that_lie_column_by_column_stay_so(serve):
    serve()
    plain, model = made(Attention), made(Attention)
    for layer in (model.q, model.k, model.v):
        layer.weight.data = layer.weight.detach().t().contiguous().t()
    assert not fused(fuse(model))
    _check(plain, model)
    assert model.q.weight.stride() == (1, WIDTH)


def test_gate_and_up_in_somebodys_buffer_are_taken_as_they_lie(serve):
    serve()
    plain, model = made(Gates), made(Gates)
    buffer = torch.cat(
        [model.w1.weight.detach(), model.w3.weight.detach(), torch.zeros(8, WIDTH, dtype=BF16)]
    )
    model.w1.weight.data, model.w3.weight.data, _ = buffer.split([INNER, INNER, 8])
    assert fused(fuse(model)) == ["{w1,w3}"]
    buffer.mul_(2)
    with torch.no_grad():
        plain.w1.weight.mul_(2), plain.w3.weight.mul_(2)
    _check(plain, model)


def test_a_model_is_patched_in_inference_mode_as_elsewhere(serve):
    serve()
    plain, model = made(), made()
    with torch.inference_mode():
        names = fused(fuse(model))
    assert sorted(names) == ALL
    _check(plain, model)
