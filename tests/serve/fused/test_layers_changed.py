"""What a program does to a module after `patch(model, fuse=True)`, which forward then reads otherwise."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional

import tunegemm
from tests.support.fusing import close
from tests.support.layers import BF16, INNER, TOLERANCE, WIDTH, Gates, fuse, fused, given, made


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
