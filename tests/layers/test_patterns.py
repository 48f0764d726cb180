"""What the pass finds in graphs, by any spelling, and what it must not touch."""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import tunegemm
from tests.support.fusing import close
from tests.support.gates import Kernels
from tests.support.grouped import Loops, groups_of
from tests.support.layers import INNER, WIDTH, Layer, Own, compiled, counts_of, given, made, then
from tests.support.serving import calls_of, dispatcher_of, serve_with
from tunegemm.errors import TunegemmWarning
from tunegemm.groups import grouped
from tunegemm.layers import backend, fusion, patterns, sites
from tunegemm.layers.graph import linear_of

silu = F.silu


pytestmark = pytest.mark.usefixtures("planner")


GATES: dict[str, Callable[..., torch.Tensor]] = {
    "operator": lambda m, x: silu(m.a(x)) * m.b(x),
    "other way round": lambda m, x: m.b(x) * silu(m.a(x)),
    "method": lambda m, x: silu(m.a(x)).mul(m.b(x)),
    "function": lambda m, x: torch.mul(m.b(x), nn.SiLU()(m.a(x))),
    "up first": lambda m, x: (m.b(x), silu(m.a(x)))[1] * m.b(x),
    "gelu": lambda m, x: F.gelu(m.a(x)) * m.b(x),
    "gelu tanh": lambda m, x: F.gelu(m.a(x), approximate="tanh") * m.b(x),
    "relu": lambda m, x: m.a(x).relu() * m.b(x),
    "linear of a parameter": lambda m, x: (
        silu(F.linear(x, m.a.weight)) * F.linear(input=x, weight=m.b.weight)
    ),
    "products": lambda m, x: silu(x @ m.a.weight.T) * torch.matmul(x, m.b.weight.t()),
    "products' methods": lambda m, x: (
        silu(x.matmul(m.a.weight.transpose(-1, 0))) * x.matmul(m.b.weight.permute(1, 0))
    ),
    "einsums": lambda m, x: (
        silu(torch.einsum("...i,oi->...o", x, m.a.weight)) * torch.einsum("bsi, oi -> bso", x, m.b.weight)
    ),
    "keywords": lambda m, x: torch.mul(other=F.gelu(input=m.a(x), approximate="none"), input=m.b(x)),
    "a method's keyword": lambda m, x: F.silu(input=m.a(x), inplace=False).mul(other=m.b(x)),
    "no output": lambda m, x: torch.mul(silu(m.a(x)), m.b(x), out=None),
    "in place": lambda m, x: silu(m.a(x)).mul_(m.b(x)),
    "in place, the gate": lambda m, x: operator.imul(silu(m.a(x)), m.b(x)),
    "in place, the up": lambda m, x: operator.imul(m.b(x), silu(m.a(x))),
    "an activation in place": lambda m, x: F.silu(m.a(x), inplace=True) * m.b(x),
    "an activation in place by a keyword": lambda m, x: F.relu(inplace=True, input=m.a(x)) * m.b(x),
    "statements in place": lambda m, x: then(m.a(x), torch.relu_, lambda y: y.mul_(m.b(x))),
    "casts to its own dtype": lambda m, x: silu(m.a(x).to(x.dtype)).type_as(x) * m.b(x).contiguous(),
    "a dropout that is off": lambda m, x: F.dropout(silu(m.a(x)), 0.5, m.training) * m.b(x),
}


@pytest.mark.parametrize("name", GATES)
def test_a_gate_of_two_weights_is_one_call(kernels: Kernels, name: str) -> None:
    assert counts_of(made(Own(GATES[name])), given())["gate"] == 1 and len(kernels.gates) == 2


PRODUCTS: dict[str, tuple[Callable[..., torch.Tensor], int]] = {
    "matrices": (lambda m, x: torch.mm(x.flatten(0, 1), m.c.weight.t()), 1),
    "one transposed view for two": (lambda m, x: (lambda t: (x @ t) @ t)(m.c.weight.mT), 2),
    "not transposed": (lambda m, x: x @ m.c.weight, 0),
    "dimensions in their order": (lambda m, x: x @ m.c.weight.permute(0, 1), 0),
    "a copy": (lambda m, x: x @ m.c.weight.t().contiguous(), 0),
    "addmm": (lambda m, x: torch.addmm(m.c.weight[0], x[0], m.c.weight.t()), 1),
    "addmm's keywords": (
        lambda m, x: torch.addmm(input=x[0, 0], mat2=m.c.weight.t(), mat1=x[0], beta=1, alpha=1),
        1,
    ),
    "addmm's method": (lambda m, x: x[0, 0].addmm(x[0], m.c.weight.t()), 1),
    "addmm of other factors": (lambda m, x: torch.addmm(x[0, 0], x[0], m.c.weight.t(), alpha=2), 0),
    "addmm of a matrix": (lambda m, x: torch.addmm(x[0], x[0], m.c.weight.t()), 0),
    "addmm, not transposed": (lambda m, x: torch.addmm(x[0, 0], x[0], m.c.weight), 0),
    "keywords": (lambda m, x: torch.matmul(other=m.c.weight.t(), input=x), 1),
    "mm's keywords": (lambda m, x: torch.mm(x[0], mat2=m.c.weight.t()), 1),
    "inner": (lambda m, x: torch.inner(x, m.c.weight), 1),
    "inner of a batch": (lambda m, x: torch.inner(x, m.c.weight[None]), 0),
    "einsum": (lambda m, x: torch.einsum("bsd,ed->bse", x, m.c.weight), 1),
    "einsum of a transposed view": (lambda m, x: torch.einsum("...i,io->...o", x, m.c.weight.t()), 1),
    "einsum, not transposed": (lambda m, x: torch.einsum("...i,io->...o", x, m.c.weight), 0),
    "einsum into other dimensions": (lambda m, x: torch.einsum("bsi,oi->sbo", x, m.c.weight), 0),
    "einsum that adds rows": (lambda m, x: torch.einsum("bsi,oi->bo", x, m.c.weight), 0),
    "einsum of a diagonal": (lambda m, x: torch.einsum("ssi,oi->so", x[:, :2], m.c.weight), 0),
    "einsum of one letter twice": (lambda m, x: torch.einsum("bsi,si->bs", x, m.c.weight[:8]), 0),
    "einsum of an input's diagonal": (
        lambda m, x: torch.einsum("bii,oi->bio", x[..., :8], m.c.weight[:, :8]),
        0,
    ),
    "einsum of a weight's diagonal": (lambda m, x: torch.einsum("bsi,ii->bsi", x, m.c.weight), 0),
    "einsum that repeats a line": (lambda m, x: torch.einsum("bsi,oi->bso", x, m.c.weight[:, :1]), 0),
    "einsum that repeats a column": (lambda m, x: torch.einsum("bsi,io->bso", x, m.c.weight[:1]), 0),
    "einsum of three": (lambda m, x: torch.einsum("bsi,oi,o->bso", x, m.c.weight, x[0, 0]), 0),
    "rows of a weight": (lambda m, x: x @ m.a.weight[:32].t(), 1),
    "of a batch": (lambda m, x: x @ x.mT, 0),
    "the weight first": (lambda m, x: m.c.weight.t() @ x.mT, 0),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_with_a_transposed_weight_is_a_layer(name: str) -> None:
    spell, count = PRODUCTS[name]
    found = counts_of(made(Own(spell)), given())
    assert found["linear"] == count
    others = ("dimensions in their order", "a copy", "of a batch", "the weight first")
    assert found["product"] == ((name.endswith("not transposed") and "addmm" not in name) or name in others)


HALVES: dict[str, Callable[..., torch.Tensor]] = {
    "chunk": lambda m, x: (lambda g, u: silu(g) * u)(*m.both(x).chunk(2, dim=-1)),
    "split": lambda m, x: (lambda g, u: u * silu(g))(*torch.split(m.both(x), INNER, -1)),
    "split by sizes": lambda m, x: (lambda g, u: u * silu(g))(*m.both(x).split([INNER, INNER], dim=2)),
    "slices": lambda m, x: (lambda y: silu(y[..., :INNER]) * y[..., INNER:])(m.both(x)),
    "alternate": lambda m, x: (lambda y: silu(y[..., ::2]) * y[..., 1::2])(m.both(x)),
    "up first": lambda m, x: (lambda u, g: silu(g) * u)(*m.both(x).chunk(2, -1)),
    "in place": lambda m, x: (lambda u, g: silu(g).mul_(u))(*m.both(x).chunk(2, -1)),
    "a cast to its own dtype": lambda m, x: (lambda u, g: silu(g).to(x.dtype) * u)(*m.both(x).chunk(2, -1)),
    "other names": lambda m, x: (lambda g, u: silu(g.detach()) * u)(*m.both(x).tensor_split(2, -1)),
}


@pytest.mark.parametrize("written", [lambda y: y.mul_(2), lambda y: y[..., :INNER].mul_(2)])
def test_a_half_that_was_written_to_is_no_part_of_the_product(
    kernels: Kernels, written: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    def spell(m: Own, x: torch.Tensor) -> torch.Tensor:
        y = m.both(x)
        return silu(written(y)[..., :INNER]) * y[..., INNER:]

    assert counts_of(made(Own(spell)), given()) == {"linear": 1} and not kernels.gates


def test_a_matrix_is_not_added_as_the_bias_at_its_address() -> None:
    def spell(m: Own, x: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
        both = (torch.addmm(each, x[0], m.both.weight.t()).chunk(2, -1) for each in (more[0], more))
        return torch.cat([silu(gate) * up for gate, up in both])

    assert counts_of(made(Own(spell)), given(), given(8, 3).flatten(1)) == {"half gate": 1}


@pytest.mark.parametrize("name", HALVES)
def test_a_gate_of_one_weight_is_one_call(kernels: Kernels, name: str) -> None:
    assert counts_of(made(Own(HALVES[name])), given())["half gate"] == 1 and len(kernels.gates) == 2


CHAINS: dict[str, Callable[..., torch.Tensor]] = {
    "residual": lambda m, x: x + m.c(x),
    "residual last": lambda m, x: m.c(x).add(x),
    "dropout that is off": lambda m, x: x + F.dropout(m.c(x), 0.5, m.training),
    "activation": lambda m, x: F.gelu(m.a(x), approximate="tanh"),
    "both": lambda m, x: x + F.relu(m.c(x)),
    "keywords": lambda m, x: torch.add(other=m.c(x), input=x, alpha=1),
    "a method's keywords": lambda m, x: x.add(other=m.c(x), alpha=1),
    "to the layer, in place": lambda m, x: operator.iadd(m.c(x), x),
    "to the layer, in place, a statement": lambda m, x: then(m.c(x), lambda y: y.add_(x)),
    "to the residual, in place": lambda m, x: (lambda h: operator.iadd(h, m.c(h)))(x * 1),
    "to the residual, in place, a statement": lambda m, x: then(x * 1, lambda h: h.add_(m.c(h))) * 1,
    "to a dropout's result, in place": lambda m, x: (lambda h: operator.iadd(h, m.c(h)))(
        F.dropout(x * 1, 0.5, False)
    ),
    "before a dropout, in place": lambda m, x: F.dropout(operator.iadd(m.c(x), x), 0.5, False) * 1,
    "an activation in place": lambda m, x: nn.ReLU(inplace=True)(m.a(x)),
    "an activation in place, a statement": lambda m, x: then(m.a(x), torch.relu_),
    "a cast to its own dtype": lambda m, x: x + m.c(x).to(x.dtype),
}


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("name", CHAINS)
def test_steps_after_a_layer_are_its_kernels(kernels: Kernels, name: str, bias: bool) -> None:
    assert counts_of(made(Own(CHAINS[name], bias)), given()) == {"chain": 1} and len(kernels.calls) == 2


def test_of_two_layers_that_are_added_the_one_that_nobody_else_reads_is_the_sum() -> None:
    model = made(Own(lambda m, x: (lambda y: (m.c(x + 1) + y) * y)(m.c(x))))
    assert counts_of(model, given()) == {"chain": 1, "linear": 1}


def test_a_residual_of_any_number_of_rows_may_be_added_to_in_place() -> None:
    model = made(Own(CHAINS["to the residual, in place"]))
    run, found = compiled(model, dynamic=True)
    with torch.no_grad():
        for rows in (3, 7, 33):
            close(run(given(rows)), model(given(rows)))
    assert found == {"chain": 1}


def _viewed(m: Own, x: torch.Tensor, turned: Any = lambda k: k.mT) -> torch.Tensor:
    q, k = (layer(x).view(*x.shape[:-1], -1, 16).transpose(1, 2) for layer in (m.a, m.b))
    return (q @ turned(k)).softmax(-1) @ k


def _in_turn(m: Own, x: torch.Tensor) -> torch.Tensor:
    """Each weight is made after the result before it was used."""
    a, b = m.a.weight, m.b.weight.double()
    first = F.linear(x, a[:WIDTH]).unflatten(-1, (4, -1)).transpose(1, 2)
    second = (x @ a.narrow(0, 32, WIDTH).t()).unflatten(-1, (4, -1)).transpose(1, 2)
    return first + second * F.linear(x, b.to(x.dtype).split(WIDTH)[0]).unflatten(-1, (4, -1)).transpose(1, 2)


def _cast_after_a_write(m: Own, x: torch.Tensor) -> torch.Tensor:
    weight = m.a.weight.double()
    first = F.linear(x, m.b.weight)
    weight.neg_()
    return first.sum() + F.linear(x, weight.to(x.dtype))


def _random_between(m: Own, x: torch.Tensor) -> torch.Tensor:
    first = F.linear(x, m.a.weight)
    return first.sum() + F.linear(x, F.dropout(m.b.weight, 0.5, True)).sum() * 0


def _kept(cache: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    cache[:, :] = a
    return cache.mul_(2)


SEVERAL: dict[str, tuple[Callable[..., Any], bool]] = {
    "of two widths": (lambda m, x: torch.cat((m.a(x), m.c(x)), -1), True),
    "three": (lambda m, x: m.a(x) * m.b(x) + m.c(x).sum(-1, keepdim=True), True),
    "heads": (_viewed, True),
    "heads, as Dynamo of torch 2.14 has them": (partial(_viewed, turned=torch.ops.aten.mT), True),
    "one line": (lambda m, x: m.a(x).view(-1).sum() + m.b(x), False),
    "results": (lambda m, x: (m.a(x), m.b(x)), False),
    "results by another name": (lambda m, x: (m.a(x).detach(), m.b(x).sum()), False),
    "a result behind a dropout that is off": (
        lambda m, x: (F.dropout(m.a(x), 0.5, False), m.b(x).sum()),
        False,
    ),
    "a result that was written to": (lambda m, x: (F.relu(m.a(x), inplace=True), m.b(x).sum()), False),
    "a view that would be a copy, written to": (
        lambda m, x: (lambda a, b: (a.reshape(-1).mul_(2), a.sum(-1) + b.sum(-1))[1])(m.a(x), m.b(x)),
        False,
    ),
    "a view that would be a copy of other strides": (
        lambda m, x: (m.a(x).permute(1, 2, 0).reshape(-1, 2) * 2, m.b(x).sum()),
        False,
    ),
    "a view that would be a copy of the same strides": (
        lambda m, x: (m.a(x).reshape(-1, 16) * 2, m.b(x).sum()),
        True,
    ),
    "a copy that keeps gaps": (lambda m, x: torch.slice_scatter(m.a(x), m.b(x)[..., :8], 2, 0, 8) * 1, False),
    "a function of dense rows": (
        lambda m, x: torch.take_along_dim(m.a(x), torch.arange(8)).sum() + m.b(x),
        False,
    ),
    "weights that are made in turn": (_in_turn, True),
    "a cast of a weight that was written to": (_cast_after_a_write, False),
    "a dropout of a weight in between": (_random_between, False),
    "a weight that the first makes": (
        lambda m, x: (lambda a: a.sum() + F.linear(x, a[0, :, :WIDTH]))(m.a(x)),
        False,
    ),
    "einsums": (
        lambda m, x: torch.cat([torch.einsum("bsi,oi->bso", x, w) for w in (m.a.weight, m.b.weight)], -1) * 1,
        True,
    ),
    "one without a bias": (
        lambda m, x: torch.cat((m.a(x), F.linear(x, m.c.weight[:40]), m.b(x)), -1).sum(-1),
        True,
    ),
    "kept elsewhere": (lambda m, x: _kept(x.new_zeros(2, 8, INNER), m.a(x)) * m.b(x), True),
    "four": (lambda m, x: m.a(x).sum() + m.b(x).sum() + m.c(x).sum() + m.both(x), False),
    "other inputs": (lambda m, x: m.a(x) + m.b(x + 1), False),
    "weights made in between": (
        lambda m, x: F.linear(x, m.a.weight * 2).sum(-1, keepdim=True) + F.linear(x, m.c.weight * 2),
        False,
    ),
}


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("name", SEVERAL)
def test_layers_of_one_input_are_one_launch(kernels: Kernels, name: str, bias: bool) -> None:
    """Where nobody sees that their results are views of one."""
    spell, is_one = SEVERAL[name]
    model, x = made(Own(spell, bias)), given()
    run, found = compiled(model, dynamic=False)
    with torch.no_grad():
        results = [each if isinstance(each, tuple) else (each,) for each in (model(x), run(x), run(x))]
    for expected, *others in zip(*results, strict=True):
        for other in others:
            close(other, expected)
            assert other.stride() == expected.stride()
    assert found["several"] == is_one and len(kernels.several) == 2 * is_one


VIEWS = {
    "as_strided": lambda y: torch.ops.aten.as_strided.default(y, (16, INNER), (INNER, 1)),
    "view": lambda y: torch.ops.aten.view.default(y, (16, INNER)),
}


@pytest.mark.parametrize("name", VIEWS)
def test_operators_by_their_overloads_are_known_by_their_names(name: str) -> None:
    model, x = made(Own(lambda m, x: VIEWS[name](m.a(x)) * 2 + m.b(x).view(16, INNER))), given()
    assert counts_of(model, x)["several"] == (name == "view")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_dtypes_are_left(dtype: torch.dtype) -> None:
    assert not counts_of(made(Own(GATES["operator"]), dtype), given(dtype=dtype))


def test_a_residual_of_another_shape_or_dtype_is_torchs_to_add() -> None:
    model, x = made(Own(lambda m, x, other: m.c(x) + other)), given()
    for other in (
        torch.ones(WIDTH, dtype=x.dtype), torch.ones(2, 8, 1, dtype=x.dtype), x.float(), x[None],
    ):  # fmt: skip
        torch._dynamo.reset()
        assert counts_of(model, x, other) == {"linear": 1}


@pytest.mark.parametrize(
    "add", [lambda m, x, r: m.c(x) + r, lambda m, x, r: r + m.c(x), lambda m, x, r: (m.c(x) + r).view(-1)]
)
def test_a_sum_with_a_transposed_residual_keeps_its_strides(add: Callable[..., torch.Tensor]) -> None:
    """They are those of the first operand."""
    model, given_ = made(Own(add)), (given(2, 8), given(8, 2).transpose(0, 1))
    with torch.no_grad():
        expected, result = model(*given_), compiled(model)[0](*given_)
    close(result, expected)
    assert result.stride() == expected.stride()


@pytest.mark.parametrize("use", [lambda g: silu(g) * g, lambda g: g + silu(g), lambda g: g + g])
def test_a_layer_that_is_used_twice_is_computed_once(kernels: Kernels, use: Callable[..., Any]) -> None:
    assert counts_of(made(Own(lambda m, x: use(m.c(x)))), given()) == {"linear": 1}
    assert len(kernels.calls) == 2


def test_any_number_of_rows_is_one_graph(kernels: Kernels) -> None:
    model = made(Own(GATES["operator"]))
    run, found = compiled(model, dynamic=True)
    with torch.no_grad():
        for rows in (3, 7, 7, 33, 520):
            x = given(rows)
            close(run(x), model(x))
    assert found == {"gate": 1}
    assert [rows for rows, *_ in kernels.gates] == [3, 7, 7, 33, 520]


def test_a_weight_of_any_extent_is_torchs() -> None:
    run, found = compiled(F.linear, dynamic=True)
    for n in (32, 48):
        x, weight, bias = (torch.randn(shape).to(torch.bfloat16) for shape in ((4, 64), (n, 64), (n,)))
        close(run(x, weight, bias), F.linear(x, weight, bias))
    assert not found


def test_other_views_of_an_input_are_right() -> None:
    """A graph for any strides: an input whose rows have gaps, one that is transposed, one without rows."""
    model = made(Own(GATES["operator"]))
    run = torch.compile(model, backend=backend.tunegemm, dynamic=True)
    wide = torch.randn(6, 2 * WIDTH).to(torch.bfloat16)
    with torch.no_grad():
        for x in (wide[:, :WIDTH], wide[:, WIDTH:], given(4, 5).transpose(0, 1), given(0, 3), given(1)[0:1]):
            close(run(x), model(x))


GAPS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], bool]] = {
    "the last row": (lambda x: x[:, -1], True),
    "the last row, kept": (lambda x: x[:, -1:], True),
    "rows of another layer's columns": (lambda x: torch.cat((x, x), -1)[..., WIDTH:], True),
    "every other row": (lambda x: x[:, ::2], True),
    "dimensions in another order": (lambda x: x.transpose(0, 1), True),
    "every other column": (lambda x: torch.cat((x, x), -1)[..., ::2], False),
}


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("name", GAPS)
def test_a_layer_of_rows_with_gaps_is_served(kernels: Kernels, name: str, bias: bool) -> None:
    """Also with steps behind it, which torch computes then."""
    part, is_served = GAPS[name]
    for steps, kind in ((lambda y: y, "linear"), (F.relu, "chain")):
        kernels.calls.clear()
        torch._dynamo.reset()
        assert counts_of(made(Own(lambda m, x: steps(m.c(part(x))), bias)), given()) == {kind: 1}  # noqa: B023
        assert len(kernels.calls) == 2 * is_served


def test_nan_and_infinity_go_through() -> None:
    model, x = made(Own(lambda m, x: x + m.c(x))), given()
    x[0, 0, 0], x[1, 2, 3] = math.nan, math.inf
    run, found = compiled(model)
    with torch.no_grad():
        assert torch.equal(run(x).isnan(), model(x).isnan())
    assert found == {"chain": 1}


def test_where_nothing_has_a_kernel_a_call_is_looked_up_once(
    monkeypatch: pytest.MonkeyPatch, kernels: Kernels
) -> None:
    model, x = made(Layer()), given()
    run, found = compiled(model, dynamic=False)
    with torch.no_grad(), monkeypatch.context() as none, warnings.catch_warnings():
        warnings.simplefilter("ignore", TunegemmWarning)
        serve_with(none, dispatcher_of([]))
        none.setattr(sites, "chosen", lambda *_, **__: None)
        for _ in range(3):
            assert torch.equal(run(x), model(x))
        looks = calls_of(lambda: run(x))[0].count("tunegemm.dispatch.extension.find")
        assert looks == sum(found.values()) == 4
        tunegemm.refresh()
        assert calls_of(lambda: run(x))[0].count("tunegemm.dispatch.extension.find") > looks
        assert torch.equal(run(x), model(x)) and not kernels.calls
    with torch.no_grad():
        close(run(x), model(x))
    assert kernels.calls and kernels.gates and kernels.several


class Clamped(sites.Site):
    """A site as a contributor writes one: a layer whose result is clamped at 0, by a kernel of its own."""

    launched = 0

    def decide(self, x: torch.Tensor, *operands: Any) -> torch.Tensor:
        self.keep(x.shape, self.launch)
        return self.launch(x, *operands)

    def launch(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        Clamped.launched += 1
        return torch.clamp(x @ weight.t(), 0)

    def by_torch(self, x: torch.Tensor, *operands: Any) -> torch.Tensor:
        return torch.clamp(F.linear(x, *operands), 0)


def clamped(node: torch.fx.Node) -> patterns.Match | None:
    """A pattern as a contributor writes one."""
    if node.target is not torch.clamp or node.args[1:] != (0,):
        return None
    product = node.args[0]
    layer = linear_of(product) if isinstance(product, torch.fx.Node) else None
    if layer is None or len(layer) > 2:
        return None
    return patterns.Match("clamped", (product, node), layer, Clamped, ("clamped",))  # type: ignore[arg-type]


def test_a_pattern_is_a_function_its_site_and_its_place_in_the_list(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CONTRIBUTING.md names the files."""
    monkeypatch.setattr(fusion, "PATTERNS", (clamped, *patterns.PATTERNS))
    model, x = made(Own(lambda m, x: torch.clamp(m.a(x), 0))), given()
    assert counts_of(model, x) == {"clamped": 1} and Clamped.launched == 2
    # What has other users stays as it is: the pass refuses the match, not the pattern.
    twice = made(Own(lambda m, x: (y := m.a(x)) + torch.clamp(y, 0)))
    assert "clamped" not in counts_of(twice, x)


OF_NO_LAYER: dict[str, Callable[..., torch.Tensor]] = {
    "bmm": lambda m, x, y: torch.bmm(x, y),
    "bmm's method": lambda m, x, y: x.bmm(y),
    "operator": lambda m, x, y: x @ y,
    "one matrix for a batch": lambda m, x, y: torch.matmul(x, y[0]),
    "heads": lambda m, x, y: (x.unflatten(-1, (4, -1)).transpose(1, 2) @ y[:1, None, :16])[:, 0],
    "matrices": lambda m, x, y: torch.mm(x[0], y[0]),
}


@pytest.mark.parametrize("name", OF_NO_LAYER)
def test_products_that_are_no_layers(kernels: Kernels, name: str) -> None:
    model, x, y = Own(OF_NO_LAYER[name]).eval(), given(), given(2, 32).mT.contiguous()
    assert counts_of(model, x, y) == {"product": 1}
    assert bool(kernels.calls) == (name != "heads"), "torch broadcasts between batches"


def test_products_of_rows_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    loops = Loops()
    monkeypatch.setattr(grouped, "groups", groups_of(loops.load))
    weights, ends = given(3, WIDTH), torch.tensor([5, 5, 16], dtype=torch.int32)
    model = Own(lambda m, x, w, e: F.grouped_mm(x[0], w, offs=e)).eval()
    assert counts_of(model, given(1, 16), weights, ends) == {"product": 1} and len(loops.calls) == 2


@pytest.mark.parametrize("change", ["gradient", "fp32", "mixed", "vector", "into an output"])
def test_products_that_stay_torchs(change: str) -> None:
    x, y = given(), given(2, 32).mT.contiguous()
    function = lambda m, x, y: x @ y  # noqa: E731
    if change == "gradient":
        y.requires_grad_()
    elif change == "fp32":
        x, y = x.float(), y.float()
    elif change == "mixed":
        y, function = y.half(), lambda m, x, y: x @ y.bfloat16() + (x.half() @ y)
    elif change == "vector":
        y = y[0, :, 0]
    else:
        function = lambda m, x, y: torch.bmm(x, y, out=x.new_empty(2, 8, 32))  # noqa: E731
    model = Own(function).eval()
    run, found = compiled(model)
    with torch.set_grad_enabled(change == "gradient"):
        close(run(x, y), model(x, y))
    assert found == ({"product": 2} if change == "mixed" else {})


class Fakes(torch.fx.Interpreter):
    """Notes what each node computes."""

    def run_node(self, n: torch.fx.Node) -> Any:
        n.meta["val"] = result = super().run_node(n)
        return result


@pytest.mark.parametrize(
    ("select", "part"),
    [
        (lambda x: x[..., :4], "first"), (lambda x: x[..., 0:4:1], "first"),
        (lambda x: x[..., -8:-4], "first"), (lambda x: x[..., 4:], "second"),
        (lambda x: x[..., ::2], "even"), (lambda x: x[..., 1::2], "odd"),
        (lambda x: x.chunk(2, -1)[0], "first"), (lambda x: x.chunk(2, dim=1)[1], "second"),
        (lambda x: x.split(4, 1)[1], "second"), (lambda x: x.split([4, 4], dim=-1)[0], "first"),
        (lambda x: torch.split(x, 4, -1)[0], "first"),
        (lambda x: x[..., :3], None), (lambda x: x[..., 3:], None), (lambda x: x[..., 1:5], None),
        (lambda x: x[..., ::3], None), (lambda x: x[:, :4], "first"), (lambda x: x[..., :4, :], None),
        (lambda x: x[..., 2], None), (lambda x: x[:4], None), (lambda x: x[0], None),
        (lambda x: x[..., : x.shape[0]], None),
        (lambda x: x.chunk(2, -1)[-1], "second"), (lambda x: x.chunk(2, 0)[0], None),
        (lambda x: x.chunk(4, -1)[1], None), (lambda x: x.chunk(4, -1)[2], None),
        (lambda x: x.split(2, 1)[1], None), (lambda x: x.split([6, 2], 1)[0], None),
        (lambda x: x.split([4, 4, 0], 1)[0], "first"), (lambda x: x.split(2)[1], None),
        (lambda x: torch.unbind(x)[0], None), (lambda x: x.narrow(-1, 4, 4)[:], "second"),
        (lambda x: x[..., :4].contiguous(), None), (lambda x: x[..., :4].mul_(2), None),
        (lambda x: x[..., :4].view(torch.int32), None),
        (lambda x: x.expand(2, 5, -1)[0, :, :4], "first"),
    ],
)  # fmt: skip
def test_which_half_of_the_columns_a_node_selects(
    select: Callable[[torch.Tensor], torch.Tensor], part: str | None
) -> None:
    for columns, expected in ((8, part), (9, None)):
        graph, fakes = torch.fx.symbolic_trace(select).graph, FakeTensorMode()
        source = next(iter(graph.nodes))
        try:
            Fakes(torch.fx.GraphModule({}, graph)).run(fakes.from_tensor(torch.empty(5, columns)))
        except RuntimeError:  # sizes that add up to 8
            assert columns == 9
            continue
        last = next(iter(reversed(graph.nodes))).args[0]
        found = patterns.part_of(last)
        assert (found.part if found else None) == expected
        assert found is None or (found.whole is source and found.nodes[-1] is last)
    del source.meta["val"]
    assert patterns.part_of(next(iter(reversed(graph.nodes))).args[0]) is None
