"""torch's own machinery around our products: gradients, transforms, the takeover of ATen. Graphs
are in test_traced.py.

Without a GPU: the dispatcher serves CPU tensors, and its kernels are torch's.
"""

from __future__ import annotations

import copy
import io
import threading

import pytest
import torch
from torch.nn.functional import linear as torch_linear

import tunegemm
from tests.support.fusing import Recorded, serve_recorded
from tests.support.serving import (
    BF16,
    batch,
    dispatcher_of,
    operands,
    serve_with,
)
from tunegemm.dispatch.launchers import TORCH, Prepared

pytestmark = [
    pytest.mark.filterwarnings("error::tunegemm.errors.TunegemmWarning"), pytest.mark.usefixtures("clean")
]  # fmt: skip


# Gradients


@pytest.mark.parametrize("lead", [(), (2, 3)])
@pytest.mark.parametrize("grads", [(True, False), (False, True), (True, True)])
def test_the_products_of_the_backward_pass_are_dispatched(kernel, lead, grads):
    x, b = operands(m=6)
    x = x.view(*lead, 1, 64) if lead else x
    weight = b.t().contiguous()
    x.requires_grad_(grads[0])
    weight.requires_grad_(grads[1])
    wanted = [tensor for tensor in (x, weight) if tensor.requires_grad]
    result = tunegemm.linear(x, weight)
    upstream = torch.arange(result.numel()).view(result.shape).remainder(5).to(BF16)
    ours = torch.autograd.grad(result, wanted, upstream)
    theirs = torch.autograd.grad(torch_linear(x, weight), wanted, upstream)
    for mine, torchs in zip(ours, theirs, strict=True):
        assert torch.equal(mine, torchs) and mine.stride() == torchs.stride()
    expected = [((6, 64), (64, 48), (6, 48))]
    expected += [((6, 48), (48, 64), (6, 64))] if grads[0] else []
    expected += [((48, 6), (6, 64), (48, 64))] if grads[1] else []
    assert kernel.calls == expected


@pytest.mark.parametrize("a_major", "km")
@pytest.mark.parametrize("b_major", "kn")
@pytest.mark.parametrize("extents", [(32, 48, 64), (1, 48, 64), (32, 1, 64), (32, 48, 1), (24, 40, 20, 3)])
def test_backward_names_the_problems_that_autograd_asks_for(kernel, monkeypatch, a_major, b_major, extents):
    m, n, k, *lead = extents
    a = torch.ones(*lead, m, k, dtype=BF16) if a_major == "k" else torch.ones(*lead, k, m, dtype=BF16).mT
    b = torch.ones(*lead, k, n, dtype=BF16) if b_major == "n" else torch.ones(*lead, n, k, dtype=BF16).mT
    asked = []
    prepare = lambda record, _: asked.append(record.problem) or Prepared(kernel)  # noqa: E731
    serve_recorded(monkeypatch, kernel, prepare=prepare)
    a.requires_grad_()
    b.requires_grad_()
    result = tunegemm.matmul(a, b)
    torch.autograd.grad(result, (a, b), torch.ones_like(result))
    forward = asked[0]
    assert set(asked[1:]) - {forward} == set(forward.backward()) - {forward}


def test_gradients_are_right_to_the_last_bit_of_double_precision(monkeypatch, kernel):
    """gradcheck, once and twice, with double numbers let through to a kernel that computes in them."""
    from tunegemm.dispatch.autograd import differentiably

    def product(a, b):
        with torch.no_grad():
            return torch.matmul(a, b)

    def multiply(a, b):
        return differentiably(product, a, b)

    for a_shape, b_shape in (((3, 4), (4, 5)), ((2, 2, 4), (4, 3)), ((2, 3, 4), (2, 4, 3))):
        a = torch.randn(a_shape, dtype=torch.double, requires_grad=True)
        b = torch.randn(b_shape, dtype=torch.double, requires_grad=True)
        assert torch.autograd.gradcheck(multiply, (a, b), check_batched_grad=True)
        assert torch.autograd.gradgradcheck(multiply, (a, b))
        columns = b.detach().mT.contiguous().mT.requires_grad_()
        assert torch.autograd.gradcheck(multiply, (a, columns))


def test_what_changed_since_the_forward_pass_is_noticed(kernel):
    a, b = operands()
    b.requires_grad_()
    result = tunegemm.matmul(a, b)
    a.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def test_what_no_gradient_needs_may_change_and_is_not_kept(kernel):
    """As in `x += layer(x)` with a frozen weight, and with rows that no view has."""
    x, b = operands()
    learned = torch.zeros_like(x, requires_grad=True)
    kept = []

    def keep(saved):
        kept.append(saved.data_ptr())
        return saved

    for multiply in (torch.matmul, tunegemm.matmul):
        hidden = learned + x
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
            result = multiply(hidden, b)
        hidden.mul_(2)
        gradient = torch.autograd.grad(result.sum(), learned)[0]
        assert torch.equal(gradient, b.sum(1).expand(32, 64))
    assert kept == 2 * [b.data_ptr()]
    weight = b.clone().requires_grad_()
    for multiply in (torch.matmul, tunegemm.matmul):
        result = multiply(x, weight)
        with torch.no_grad():
            weight.mul_(2)
        assert torch.autograd.grad(result.sum(), weight)[0].shape == (64, 48)
        turned = x.t().repeat(3, 1, 1).mT
        result = multiply(turned, weight)
        turned.mul_(2)
        gradient = torch.autograd.grad(result.sum(), weight)[0]
        assert torch.equal(gradient, 3 * x.sum(0)[:, None].expand(64, 48))
    assert len(kernel.calls) >= 5


class Nothing(torch.autograd.Function):
    """Passes a tensor on, and no gradient back."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


def test_no_gradient_is_none_behind_a_product(kernel):
    """Not zeros, with which an optimizer would move a parameter."""
    a, b = operands()
    other = torch.zeros(48, dtype=BF16, requires_grad=True)
    for multiply in (torch.matmul, tunegemm.matmul):
        weight = b.clone().requires_grad_()
        (Nothing.apply(multiply(a, weight)) + other).sum().backward()
        assert weight.grad is None and other.grad is not None
    assert kernel.calls


def test_training_under_autocast_dispatches_all_three_products(kernel):
    layer = torch.nn.Linear(64, 48, bias=False)
    x = operands()[0].float().requires_grad_()
    grads = []
    for linear in (torch_linear, tunegemm.linear):
        with torch.autocast("cpu", dtype=BF16):
            result = linear(x, layer.weight)
        assert result.dtype == BF16
        grads.append(torch.autograd.grad(result.float().pow(2).sum(), (x, layer.weight)))
    assert len(kernel.calls) == 3
    for ours, theirs in zip(*grads, strict=True):
        assert ours.dtype == torch.float32 and (ours - theirs).norm() < 1e-2 * theirs.norm()


# Functions of torch.func


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("in_dims", [(0, None), (None, 0), (0, 0), (2, 1)])
def test_vmap(kernel, in_dims, compiled):
    a, b = operands()
    many_a, many_b = batch()
    arguments = (
        a if in_dims[0] is None else many_a.movedim(0, in_dims[0]),
        b if in_dims[1] is None else many_b.movedim(0, in_dims[1]),
    )
    mapped = torch.vmap(tunegemm.matmul, in_dims)
    result = (torch.compile(mapped, backend="aot_eager", fullgraph=True) if compiled else mapped)(*arguments)
    assert torch.equal(result, torch.vmap(torch.matmul, in_dims)(*arguments))
    assert not kernel.calls, "transforms are torch's"


@pytest.mark.parametrize("patched", [False, True])
def test_vmap_under_autocast_casts_as_torchs_does(kernel, patched):
    """Torch (2.13) leaves the dtype of a bias: vmap takes a layer apart before autocast sees it."""
    layer, x = torch.nn.Linear(64, 48), operands()[0].float()[:, None]
    ours = copy.deepcopy(layer)
    tunegemm.patch(ours)
    call = ours if patched else lambda x: tunegemm.linear(x, layer.weight, layer.bias)
    with torch.autocast("cpu", dtype=BF16), torch.no_grad():
        expected, result = torch.vmap(layer)(x), torch.vmap(call)(x)
    assert result.dtype == expected.dtype and torch.equal(result, expected)


def test_transforms_agree_with_torchs(kernel):
    a, b = operands(4, 6, 8)

    def of(multiply):
        return lambda x: multiply(x, b).pow(2).sum()

    def results(multiply):
        grad = torch.func.grad(of(multiply))
        return (
            grad(a),
            torch.vmap(grad)(torch.stack((a, -a))),
            torch.func.jvp(lambda x: multiply(x, b), (a,), (a,))[1],
            torch.func.jvp(lambda x: multiply(x, b), (a,), (a + 1,))[1],
            torch.func.jacrev(lambda x: multiply(x, b))(a),
            torch.func.jacfwd(lambda x: multiply(a, x))(b),
            torch.func.hessian(of(multiply))(a),
        )

    for ours, theirs in zip(results(tunegemm.matmul), results(torch.matmul), strict=True):
        assert torch.equal(ours, theirs)


# enable


def test_enable_serves_every_way_to_multiply(kernel):
    a, b = operands()
    many_a, many_b = batch()
    weight = b.t().contiguous()
    out = torch.empty(32, 48, dtype=BF16)
    ways = (
        lambda: a @ b, lambda: torch.mm(a, b), lambda: torch.mm(a, b, out=out),
        lambda: torch.matmul(many_a, b), lambda: torch_linear(many_a, weight),
        lambda: torch.einsum("mk,kn->mn", a, b), lambda: torch.bmm(many_a, many_b),
        lambda: torch.matmul(torch.stack((many_a, many_a)), torch.stack((many_b, many_b))),
    )  # fmt: skip
    for way in ways:
        expected = way().clone()
        kernel.calls.clear()
        with tunegemm.enable():
            assert torch.equal(way(), expected)
        assert len(kernel.calls) == 1
        way()
        assert len(kernel.calls) == 1


def test_enable_under_autograd_autocast_and_threads(kernel):
    layer = torch.nn.Linear(64, 48, bias=False)
    x = operands()[0].float()
    with tunegemm.enable(), torch.autocast("cpu", dtype=BF16):
        layer(x).float().pow(2).sum().backward()
    assert layer.weight.grad is not None and len(kernel.calls) == 2  # x needs no gradient
    a, b = operands()
    with tunegemm.enable():
        thread = threading.Thread(target=lambda: torch.mm(a, b))
        thread.start()
        thread.join()
    assert len(kernel.calls) == 3


@pytest.mark.parametrize("compile_first", [False, True])
def test_enable_reaches_compiled_code(kernel, compile_first):
    a, b = operands()
    compiled = torch.compile(lambda a, b: torch.mm(a, b).relu(), fullgraph=True)
    expected = torch.mm(a, b).relu()
    if compile_first:
        compiled(a, b)
    with tunegemm.enable():
        assert torch.equal(compiled(a, b), expected)
    assert len(kernel.calls) == 1
    assert torch.equal(compiled(a, b), expected) and len(kernel.calls) == 1


def test_dynamo_compiles_nothing_of_ours_within_a_frame_that_it_skips(kernel):
    """It looks at each frame that such a frame calls, and ATen calls one of ours."""

    def skipped(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        try:
            torch._dynamo.graph_break()
            return a @ b
        finally:
            pass

    a, b = operands()
    run = torch.compile(skipped, backend="eager")
    with tunegemm.enable():
        run(a, b)
        with torch.compiler.set_stance("fail_on_recompile"):
            assert torch.equal(run(a[:16], b), a[:16] @ b)
    assert len(kernel.calls) == 3


def test_enable_nests_and_disable_ends_all(kernel):
    a, b = operands()

    def served() -> bool:
        kernel.calls.clear()
        torch.mm(a, b)
        return bool(kernel.calls)

    outer = tunegemm.enable()
    with tunegemm.enable():
        assert served()
    assert served()
    with outer:
        assert served()
    assert not served()
    tunegemm.enable()
    block = tunegemm.enable()
    with block:
        tunegemm.disable()
        assert not served()
    assert not served()
    tunegemm.disable()
    with pytest.raises(ZeroDivisionError), tunegemm.enable():
        raise ZeroDivisionError
    assert not served()


@pytest.mark.parametrize("enable_first", [False, True])
def test_a_recording_sees_torchs_products_whoever_began_first(kernel, enable_first):
    a, b = operands()
    recording = tunegemm.record()
    if enable_first:
        tunegemm.enable()
        recording.__enter__()
    else:
        recording.__enter__()
        tunegemm.enable()
    torch.mm(a, b)
    tunegemm.matmul(a, b)
    assert not kernel.calls
    if enable_first:
        recording.__exit__()
    else:
        tunegemm.disable()
        torch.mm(a, b)
        recording.__exit__()
    assert sum(product.calls for product in recording.products) == 2 + (not enable_first)
    torch.mm(a, b)
    assert bool(kernel.calls) is enable_first
    tunegemm.disable()


# patch


def model() -> torch.nn.Sequential:
    layers = torch.nn.Sequential(
        torch.nn.Linear(64, 64, bias=False), torch.nn.ReLU(), torch.nn.Linear(64, 64, bias=False),
        torch.nn.MultiheadAttention(64, 4, bias=False), torch.nn.Linear(64, 48),
    ).to(BF16)  # fmt: skip
    for parameter in layers.parameters():  # small integers, as in `operands`
        parameter.data = torch.randint(-1, 2, parameter.shape).to(BF16)
    layers[2].weight = layers[0].weight
    return layers


def test_patch_and_unpatch_change_the_class_alone(kernel):
    layers = model()
    weights = {name: value.data_ptr() for name, value in layers.state_dict().items()}
    seen = []
    layers[0].register_forward_hook(lambda *_: seen.append(1))
    assert (tunegemm.patch(layers), tunegemm.patch(layers)) == (3, 0)
    assert isinstance(layers[0], torch.nn.Linear) and layers[2].weight is layers[0].weight
    assert {name: value.data_ptr() for name, value in layers.state_dict().items()} == weights
    x = operands()[0]
    with torch.no_grad():
        patched = layers[:3](x)
    assert len(kernel.calls) == 2 and seen == [1]
    for other in (copy.deepcopy(layers), _through_a_file(layers)):
        with torch.no_grad():
            assert torch.equal(other[:3](x), patched)
    assert len(kernel.calls) == 6
    assert (tunegemm.unpatch(layers), tunegemm.unpatch(layers)) == (3, 0)
    assert [type(layer) for layer in model()] == [type(layer) for layer in layers]
    with torch.no_grad():
        assert torch.equal(layers[:3](x), patched)
    assert len(kernel.calls) == 6


def _through_a_file(module: torch.nn.Module) -> torch.nn.Module:
    hooks, module[0]._forward_hooks = module[0]._forward_hooks, type(module[0]._forward_hooks)()
    file = io.BytesIO()
    torch.save(module, file)
    module[0]._forward_hooks = hooks
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_second_derivatives_are_dispatched(kernel):
    a, b = operands()
    a.requires_grad_()
    (first,) = torch.autograd.grad(tunegemm.matmul(a, b).pow(2).sum(), a, create_graph=True)
    count = len(kernel.calls)
    (second,) = torch.autograd.grad(first.sum(), a)
    (expected,) = torch.autograd.grad(torch.matmul(a, b).pow(2).sum(), a, create_graph=True)
    assert torch.equal(second, torch.autograd.grad(expected.sum(), a)[0])
    assert len(kernel.calls) > count


def test_deterministic_gradients_are_torchs(kernel):
    a, b = operands()
    a.requires_grad_()
    torch.use_deterministic_algorithms(True)
    try:
        tunegemm.matmul(a, b).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert not kernel.calls


def test_a_miss_under_enable_is_torchs_own_kernel(kernel, monkeypatch):
    """Nothing recurses where dispatch falls back to torch."""
    serve_with(monkeypatch, dispatcher_of(Recorded(), TORCH))
    a, b = operands()
    a.requires_grad_()
    with tunegemm.enable():
        tunegemm.matmul(a, b).sum().backward()
        torch.mm(a, b).sum().backward()
    assert not kernel.calls


def test_a_patched_model_trains_and_compiles(kernel):
    layers = model()[:3]
    x = operands()[0]
    before = torch.compile(layers, backend="aot_eager", fullgraph=True)
    expected = before(x)
    tunegemm.patch(layers)
    if torch.__version__ < "2.13":  # 2.11 does not guard on the class of torch's own modules
        torch._dynamo.reset()
    assert torch.equal(before(x), expected)
    assert len(kernel.calls) == 2
    before(x).float().sum().backward()
    assert layers[0].weight.grad is not None and len(kernel.calls) == 2 + 2 + 3
