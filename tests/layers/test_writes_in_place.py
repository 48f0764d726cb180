"""Graphs that write to tensors, and others in which a layer must stay: all results are eager's."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.support.fusing import close
from tests.support.layers import WIDTH, Own, compiled, counts_of, given, made, then

silu = F.silu


pytestmark = pytest.mark.usefixtures("planner")


def _written_between(m: Own, x: torch.Tensor, write: Any = lambda h: h.add_(1)) -> torch.Tensor:
    h = x * 1
    gate = silu(m.a(h))
    write(h)
    return gate * m.b(h)


def _weight_written(m: Own, x: torch.Tensor) -> torch.Tensor:
    gate = silu(m.a(x))
    m.a.weight.mul_(2)
    return gate * m.b(x)


def _buffer_written(m: Own, x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    gate = silu(m.a(x))
    kept.add_(1)
    return gate * m.b(x)


def _by_view(m: Own, x: torch.Tensor) -> torch.Tensor:
    h = x * 1
    view = h.transpose(0, 1)
    gate = silu(m.a(h))
    view[0] = 0
    return gate * m.b(h)


def _by_dropout(m: Own, x: torch.Tensor) -> torch.Tensor:
    h = x * 1
    same = F.dropout(h, 0.5, False)
    gate = silu(m.a(h))
    same.view(-1).add_(1)
    return gate * m.b(h)


def _behind_dropout(m: Own, x: torch.Tensor) -> torch.Tensor:
    h = x * 1
    same = torch.dropout(h, 0.0, True)
    gate = silu(m.a(same))
    h.add_(1)
    return gate * m.b(same)


LEFT: dict[str, Callable[..., torch.Tensor]] = {
    "an input written to as a dropout's result": _by_dropout,
    "a dropout's result written to as its input": _behind_dropout,
    "an input written to in between": _written_between,
    "an input written to through a view": _by_view,
    "an input written to by a special method": partial(_written_between, write=lambda h: h.__iadd__(1)),
    "a weight written to in between": _weight_written,
    "another use of the gate": lambda m, x: silu(m.a(x)) * m.b(x) + m.a(x).sum() * 0 + _twice(m, x),
    "another input": lambda m, x: silu(m.a(x)) * m.b(x + 1),
    "a weight that is normalised in between": lambda m, x: (
        silu(m.a(x)) * (F.embedding(torch.zeros(2, dtype=torch.long), m.b.weight, max_norm=0.1), m.b(x))[1]
    ),
    "a layer's result that was written to": lambda m, x: silu(m.a(x).neg_()) * m.b(x),
    "another activation": lambda m, x: torch.sigmoid(m.a(x)) * m.b(x),
}


def _twice(m: Own, x: torch.Tensor) -> torch.Tensor:
    gate = silu(m.b(x))
    return gate * m.a(x) + gate


@pytest.mark.parametrize("name", LEFT)
def test_what_is_not_the_same_stays(name: str) -> None:
    spell, x = LEFT[name], given()
    run, found = compiled(made(Own(spell)))
    with torch.no_grad():
        close(run(x), made(Own(spell))(x), 0.03)
    assert found["gate"] == (1 if name == "another use of the gate" else 0)


def _seen(
    m: Own, x: torch.Tensor, see: Any, write: Any = lambda m, h: operator.iadd(h, m.c(h))
) -> torch.Tensor:
    """Adds to an intermediate in place; `see` makes something of it before, which is used afterwards."""
    h = m.both(x)[..., :WIDTH] * 1
    before = see(h)
    return write(m, h) + before


SEEN: dict[str, Callable[..., torch.Tensor]] = {
    "a view": partial(_seen, see=lambda h: h.view(16, WIDTH)[0]),
    "a part": partial(_seen, see=lambda h: h.split(16, -1)[0][..., :1]),
    "itself, of no dtype": partial(_seen, see=lambda h: h.to(h.dtype).detach()),
    "a dropout": partial(_seen, see=lambda h: F.dropout(h, 0.5, False)),
    "a view of a dropout": partial(_seen, see=lambda h: F.dropout(h.view(-1), 0.5, False)[0]),
    "the caller's": lambda m, x: operator.iadd(x, m.c(x)) * 1,
    "a view of the caller's": lambda m, x: operator.iadd(x[:, :], m.c(x)) * 1,
    "a dropout of the caller's": lambda m, x: F.dropout(x, 0.5, False).add_(m.c(x)) * 1,
    "with gaps": lambda m, x: operator.iadd(m.both(x)[..., :WIDTH], m.c(x)),
    "a part of more": lambda m, x: then(m.both(x), lambda y: y[..., :WIDTH].add_(m.c(x))),
    "an activated view": lambda m, x: (lambda y: (y.view(-1), y.relu_())[0].sum() + y)(m.a(x)),
    "a gate's up": lambda m, x: (
        lambda u: (lambda before: operator.imul(u, silu(m.a(x))) + before)(u.view(-1)[0])
    )(m.b(x)),
    "a half": lambda m, x: (lambda g, u: u.mul_(silu(g)))(*m.both(x).chunk(2, -1)),
    "an activated half": lambda m, x: (lambda g, u: F.silu(g, inplace=True) * u)(*m.both(x).chunk(2, -1)),
    "another factor": lambda m, x: m.c(x).add_(x, alpha=2),
    "one row for all": lambda m, x: m.c(x).add_(x[:, :1]),
    "another dtype": lambda m, x: m.c(x).add_(x.float()),
}


@pytest.mark.parametrize("name", SEEN)
def test_what_is_seen_of_a_write_in_place_stays(name: str) -> None:
    model, (x, own) = made(Own(SEEN[name])), (given(), given())
    run, found = compiled(model, dynamic=False)
    with torch.no_grad():
        expected, result = model(own), run(x)
    close(result, expected)
    close(x, own)
    assert result.stride() == expected.stride()
    assert not (found["gate"] or found["half gate"]) and found["chain"] == (name == "a gate's up")


def test_gradients_of_writes_in_place_are_torchs() -> None:
    """Where another layer of the graph is fused, so that the graph's code is written anew."""

    def forward(m: Own, x: torch.Tensor) -> torch.Tensor:
        sum_ = then(x * 1, lambda h: h.add_(m.c(x)), lambda h: h.relu_())
        return sum_ + F.relu(m.a(x.detach()))[..., :WIDTH]

    model, x = made(Own(forward)), given().requires_grad_()
    model.a.requires_grad_(False)
    run, found = compiled(model)
    results = [call(x).float().square().sum() for call in (run, model)]
    for ours, torchs in zip(*(torch.autograd.grad(y, (x, model.c.weight)) for y in results), strict=True):
        close(ours, torchs)
    assert found == {"chain": 1}


def _turned(m: Own, x: torch.Tensor) -> torch.Tensor:
    weight = (m.c.weight * 1).t()
    first = F.linear(x, weight)
    weight.t_()
    return first - F.linear(x, m.c.weight)


def _detached(m: Own, x: torch.Tensor) -> torch.Tensor:
    y = m.c(x)
    doubled = y * 2
    y.detach_()
    return doubled


def _viewed_before(m: Own, x: torch.Tensor) -> torch.Tensor:
    weight = (m.c.weight * 1).view(WIDTH, WIDTH)
    first = x @ weight
    weight.t_()
    return first + 1


@pytest.mark.parametrize(
    ("spell", "others"), [(_turned, {"linear": 1}), (_detached, {}), (_viewed_before, {"product": 0})]
)
def test_a_tensor_whose_facts_change_later_has_those_of_the_end(
    spell: Callable[..., torch.Tensor], others: dict[str, int]
) -> None:
    """Its node has no others: a weight that was turned, a result that has no gradient any more. What else
    the graph computes is fused."""

    def forward(m: Own, x: torch.Tensor) -> torch.Tensor:
        return spell(m, x) + (silu(m.a(x)) * m.b(x))[..., :WIDTH]

    model, x = made(Own(forward)), given()
    run, found = compiled(model)
    for grad in (False, True, True):
        with torch.set_grad_enabled(grad):
            expected, result = model(x), run(x)
        close(result, expected)
        assert result.requires_grad == expected.requires_grad
    assert +found == +Counter({"gate": 1, **others})


def test_a_buffer_that_is_written_to_in_between_forbids_it() -> None:
    """The caller's tensors may share memory in ways that a graph does not show."""
    assert counts_of(made(Own(_buffer_written)), given(), torch.zeros(3)) == {"chain": 1, "linear": 1}
