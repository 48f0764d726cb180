"""Fused layers in the graphs of torch.compile and torch.export, with kernels planted."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch.nn import functional

import tunegemm
from tests.support.fusing import close
from tests.support.layers import (
    INNER,
    TOLERANCE,
    WIDTH,
    Attention,
    Gates,
    Model,
    by_torch,
    fuse,
    given,
    made,
)
from tunegemm.describe.problem import Problem
from tunegemm.errors import TunegemmWarning

BACKENDS = ["eager", "aot_eager", "inductor"]
MERGED = WIDTH + 64


def widths(kernel) -> list[int]:  # type: ignore[no-untyped-def]
    return [shapes[2][-1] for shapes in kernel.calls]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_compiled_layers_are_fused_as_in_eager(serve, kernel, backend, mode):
    model = made()
    with torch.no_grad():
        expected = model(given())
    fuse(model)
    serve()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with mode():
        close(compiled(given()), expected, TOLERANCE)
        kernel.calls.clear()
        close(compiled(given()), expected, TOLERANCE)
    found = widths(kernel)
    assert sorted(set(found)) == [WIDTH, INNER, MERGED]
    if backend == "inductor":
        assert len(found) == 6 and found.count(MERGED) == 1, "equal calls are one"


def test_modes_and_ragged_rows(serve, kernel):
    model = made(lambda: Gates(bias=True)), made(lambda: Attention(bias=True))
    for one in model:
        plain = copy.deepcopy(one)
        fuse(one)
        serve()
        reduced = torch.compile(one, mode="reduce-overhead", fullgraph=True)
        ragged = torch.compile(one, dynamic=True, fullgraph=True)
        with torch.no_grad():
            close(reduced(given()), plain(given()), TOLERANCE)
            for rows in (5, 7, 16, 33):
                kernel.calls.clear()
                close(ragged(given(2, rows)), plain(given(2, rows)), TOLERANCE)
                assert {2 * INNER, MERGED} & set(widths(kernel))
        torch._dynamo.reset()


@pytest.mark.parametrize("bias", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.long
def test_what_has_no_kernel_is_layer_by_layer_but_for_few_rows(serve, kernel, monkeypatch, bias):
    """Of up to 256 rows q, k and v are one product of torch's."""

    def make() -> torch.nn.Module:
        return torch.nn.Sequential(Attention(bias), Gates(bias=bias))

    def calls(*lead: int, **how: bool) -> int:
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, **how)
        _, (code,) = torch._inductor.utils.run_and_get_code(compiled, given(*lead))
        close(compiled(given(*lead)), plain(given(*lead)), TOLERANCE)
        return code.count("extern_kernels.tunegemm_product")

    model, plain = made(make), made(make)
    fuse(model)
    serve(Problem(1, 8, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TunegemmWarning)
        with torch.no_grad():
            assert calls(2, 128) == 1 + bias, "gate and up, too, where they lie after one another"
            assert calls(2, 129) == 0, "it gains nothing there"
            assert calls(2, 129, dynamic=True) == 1 + bias, "it may be fewer later"
        assert calls(2, 128) == 0, "gradients are wanted"
        monkeypatch.setenv("TUNEGEMM_MODE", "off")
        serve()
        with torch.no_grad():
            assert calls() == 0
    assert not kernel.calls


def test_weights_that_move_after_compiling(serve, kernel):
    model, plain = made(), made()
    fuse(model)
    serve()
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        compiled(given())
        for each in (model, plain):
            for layer in (each.attention.k, each.mlp.w3, each.plain.up):
                layer.weight.data = layer.weight.data * 2
        close(compiled(given()), plain(given()), TOLERANCE)
        state = {name: one * 1.5 for name, one in plain.state_dict().items()}
        for each in (model, plain):
            each.load_state_dict(state, assign=True)
        close(compiled(given()), plain(given()), TOLERANCE)
        kernel.calls.clear()
        compiled(given())
    assert widths(kernel).count(MERGED) == 1


@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("train", [False, True])
def test_gradients_of_compiled_layers(serve, kernel, backend, train):
    plain, model = made(train=True), made(train=train)
    fuse(model)
    serve()
    compiled = torch.compile(model.train(), backend=backend, fullgraph=True)
    for each, call in ((plain, plain), (model, compiled)):
        x = given().requires_grad_()
        call(x).square().mean().backward()
        each.seen = x.grad
    close(model.seen, plain.seen, TOLERANCE)
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert one.grad is not None and one.grad.shape == other.grad.shape, name
        close(one.grad, other.grad, 6e-2)
    assert kernel.calls and not {MERGED, 2 * INNER} & set(widths(kernel)), "they are of each layer's own"


def test_layers_that_do_not_read_what_the_first_read_are_apart(serve):
    """The others are given something else, one is frozen, one is not asked for."""

    class Between(Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, x = self.q(x), x * 2
            return torch.cat((q, self.k(x), self.v(x)), -1)

    class Without(Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.q(x) + functional.pad(self.k(x), (0, WIDTH - 32))

    for make in (Between, Without, Attention):
        plain, model = made(make, train=True), made(make, train=True)
        # As they are seen where the input is not written into.
        model.__class__ = Attention
        fuse(model)
        model.__class__ = make
        serve()
        for each in (plain, model):
            each.k.weight.requires_grad_(make is not Attention)
        for backend in BACKENDS:
            torch._dynamo.reset()
            found = []
            for each in (plain, torch.compile(model, backend=backend, fullgraph=True)):
                x = given().requires_grad_()
                each(x).square().mean().backward()
                layers = getattr(each, "_orig_mod", each)
                found.append([x.grad, *(getattr(layers, name).weight.grad for name in "qkv")])
                layers.zero_grad()
            for ours, torchs in zip(*found, strict=True):
                assert (ours is None) == (torchs is None)
                if ours is not None:
                    close(ours, torchs, TOLERANCE)


def test_gradients_of_gradients_of_graphs_that_run_eagerly(serve):
    plain, model = made(Gates, train=True), made(Gates, train=True)
    fuse(model)
    serve()
    found = []
    for each in (plain, torch.compile(model, backend="eager", fullgraph=True)):
        x = given().requires_grad_()
        (of_x,) = torch.autograd.grad(each(x).float().square().mean(), x, create_graph=True)
        of_x.float().square().sum().backward()
        found.append([of_x.detach(), x.grad, *(one.grad for one in each.parameters())])
    for ours, torchs in zip(*found, strict=True):
        close(ours, torchs, 6e-2)


def test_hooks_and_replaced_layers_are_called(serve):
    model, plain = made(), made()
    fuse(model)
    for each in (model, plain):
        for name in ("attention.k", "mlp.w1", "plain.up"):
            each.get_submodule(name).register_forward_hook(lambda module, given, result: result + 1)
        down = each.plain.down
        each.plain.down = torch.nn.Sequential(down, torch.nn.ReLU())
    serve()
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        close(compiled(given()), plain(given()), TOLERANCE)


def test_broadcast_streams_and_other_dtypes_are_added_by_torch(serve):
    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = torch.nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
            return stream + self.down(x)

    model = made(Odd)
    plain = copy.deepcopy(model)
    fuse(model)
    serve()
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        for stream in (given(1, 1), given().float(), given()):
            close(compiled(given(), stream), plain(given(), stream), TOLERANCE)


def test_exported_layers(serve, kernel):
    model, plain = made(), made()
    fuse(model)
    serve()
    with torch.no_grad():
        expected = plain(given())
        program = torch.export.export(model, (given(),))
        kernel.calls.clear()
        close(program.module()(given()), expected, TOLERANCE)
        assert INNER in widths(kernel), "gates are one product; q, k and v each their own"
        ragged = torch.export.export(model, (given(),), dynamic_shapes=({1: torch.export.Dim.AUTO},))
        close(ragged.module()(given(2, 21)), plain(given(2, 21)), TOLERANCE)
        kernel.calls.clear()
        close(model(given()), expected, TOLERANCE)
    assert len(kernel.calls) == 6, "the model itself is as it was"


@pytest.mark.parametrize("bias", [False, True])
def test_vmap_in_compiled_code(serve, bias):
    def make() -> torch.nn.Module:
        return torch.nn.Sequential(Attention(bias), Gates(bias=bias))

    model, plain = made(make), made(make)
    fuse(model)
    serve()
    compiled = torch.compile(lambda x: torch.vmap(model)(x), backend="aot_eager")
    with torch.no_grad():
        close(compiled(given(3, 4, 5)), torch.vmap(plain)(given(3, 4, 5)), TOLERANCE)


def test_operators_mapped_over_weights(serve):
    serve()
    x = given()
    weights, biases = torch.randn(2, 3, 32, WIDTH).to(x.dtype) / 8, torch.randn(2, 3, 32).to(x.dtype)

    def part(x, weights, biases):  # type: ignore[no-untyped-def]
        return torch.ops.tunegemm.part(x, list(weights), list(biases), 1)

    def gated(x, weights, biases):  # type: ignore[no-untyped-def]
        return torch.ops.tunegemm.gated(x, list(weights), list(biases), "swiglu")

    def of_torch(x, weights, biases):  # type: ignore[no-untyped-def]
        both = [functional.linear(x, *one) for one in zip(weights, biases, strict=True)]
        return both[1], functional.silu(both[0]) * both[1]

    for dims in ((None, 1, 1), (0, None, 1), (0, 1, None), (0, None, None), (None, None, 1)):
        mapped = [torch.stack((x, -x, x)) if dims[0] == 0 else x]
        mapped += [each if dim else each[:, 0] for dim, each in zip(dims[1:], (weights, biases), strict=True)]
        expected = torch.vmap(of_torch, dims)(*mapped)
        close(torch.vmap(part, dims)(*mapped), expected[0], TOLERANCE)
        close(torch.vmap(gated, dims)(*mapped), expected[1], TOLERANCE)


def test_autocast_in_compiled_code(serve):
    def make() -> torch.nn.Module:
        return torch.nn.Sequential(Attention(bias=True), Gates())

    model, plain = made(make), made(make)
    fuse(model)
    serve()
    compiled = torch.compile(model, backend="aot_eager")
    for dtype in (torch.bfloat16, torch.float16):
        with torch.no_grad(), torch.autocast("cpu", dtype):
            close(compiled(given()), plain(given()), TOLERANCE)


def test_the_operators_by_themselves(serve, kernel):
    x = given()
    weights = [torch.randn(rows, WIDTH).to(x.dtype) / 8 for rows in (32, 32)]
    biases = [torch.randn(32).to(x.dtype) for _ in weights]
    both = [functional.linear(x, *one) for one in zip(weights, biases, strict=True)]
    for is_served in (False, True):
        if is_served:
            serve()
        close(torch.ops.tunegemm.part(x, weights, biases, 1), both[1], TOLERANCE)
        gate = torch.ops.tunegemm.gated(x, weights, biases, "swiglu")
        close(gate, functional.silu(both[0]) * both[1], TOLERANCE)
        whole = torch.ops.tunegemm.several(x, weights, biases, "bias_n")
        close(whole, torch.cat(both, -1), TOLERANCE)
    arguments = (x, weights, biases)
    for name, more in (("several", ("bias_n",)), ("several", ("bias_n+swiglu",))):
        torch.library.opcheck(getattr(torch.ops.tunegemm, name).default, (*arguments, *more))


def test_compiled_after_unpatching(serve):
    model, plain = made(Model), made(Model)
    fuse(model)
    serve()
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        compiled(given())
        tunegemm.unpatch(model)
        assert torch.equal(by_torch(model, given()), plain(given()))
        close(compiled(given()), plain(given()), TOLERANCE)
