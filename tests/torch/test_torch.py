"""torch's own machinery around our products: gradients, transforms, graphs, and the takeover of ATen.

Without a GPU: the dispatcher serves CPU tensors, and its kernels are torch's. test_gpu_torch.py has the rest.
"""

from __future__ import annotations

import copy
import io
import threading
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import linear as torch_linear

import tunegemm
from tests.support.fusing import Recorded, serve_recorded
from tests.support.serving import (
    BF16,
    CANDIDATE,
    Kernel,
    Row,
    calls_of,
    dispatcher_of,
    operands,
    serve_with,
    uncached,
)
from tunegemm.describe.device import find_device
from tunegemm.describe.problem import Problem
from tunegemm.dispatch import api
from tunegemm.dispatch.launchers import TORCH, Prepared
from tunegemm.errors import TunegemmWarning
from tunegemm.torch import ops, takeover

pytestmark = pytest.mark.filterwarnings("error::tunegemm.errors.TunegemmWarning")


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """All problems of CPU tensors are served by it."""
    kernel = Kernel()
    serve_recorded(monkeypatch, kernel)
    return kernel


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    assert not takeover.active
    torch._dynamo.reset()


def batch(count: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = operands()
    scale = torch.arange(1, count + 1).to(BF16).view(count, 1, 1)
    return a * scale, b.contiguous() * scale


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


@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("in_dims", [(0, None, None), (1, None, 0), (None, None, 0), (0, 2, None)])
def test_vmap_of_a_layer_with_steps_is_traced(kernel, in_dims, activation):
    (a, b), bias = operands(), torch.linspace(-2, 2, 48).to(BF16)
    given = [
        each if dim is None else torch.stack((each, -each), dim)
        for dim, each in zip(in_dims, (a, b.t(), bias), strict=True)
    ]

    def ours(*given: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda *one: tunegemm.linear(*one, activation), in_dims)(*given)

    plain = torch.vmap(torch_linear, in_dims)(*given)
    result = torch.compile(ours, backend="eager", fullgraph=True)(*given)
    assert torch.equal(result, plain if activation is None else plain.relu())


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


# Graphs


@pytest.mark.parametrize("served", [True, False])
@pytest.mark.parametrize("lead", [(), (3,)])
def test_inductor_calls_by_a_function_and_leaves_the_untuned_to_aten(kernel, monkeypatch, served, lead):
    """Not through torch's dispatcher, which costs more than a small product; and nothing for nothing."""
    from torch._inductor.utils import run_and_get_code

    monkeypatch.setattr(api.dispatcher.planner, "serves", lambda *_, **__: served)
    a, b = batch() if lead else operands()
    function = torch.compile(lambda a, b: tunegemm.matmul(a, b).relu(), fullgraph=True)
    with uncached():
        result, (code, *_) = run_and_get_code(function, a, b)
    assert torch.equal(result, torch.matmul(a, b).relu())
    assert torch.equal(function(a, b), result)  # not under the mode that looked at the code
    assert ("extern_kernels.tunegemm_product(" in code) == served == bool(kernel.calls)
    assert "torch.ops.tunegemm" not in code


def test_inductor_is_taught_by_every_traced_graph(monkeypatch):
    """torch 2.11 compiles without raising the flag of `is_compiling`: its code called operators for it."""
    from torch._guards import TracingContext, tracing

    taught = []
    monkeypatch.setattr(ops, "lower", lambda: taught.append(1))
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", False)
    ops.teach_inductor()
    assert not taught
    with tracing(TracingContext(FakeTensorMode())):
        ops.teach_inductor()
    assert taught


def test_inductors_code_is_what_it_is_with_torchs_products(kernel):
    """No operand is copied, or computed for each product that reads it."""
    from torch._inductor.utils import run_and_get_code

    x, b = operands()
    weight = b.t().contiguous()

    def code(multiply):
        def layer(x):
            normed = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True)).to(BF16)
            return torch.nn.functional.silu(multiply(normed, weight)) * multiply(normed, weight + 1)

        torch._dynamo.reset()
        _, (text,) = run_and_get_code(torch.compile(layer, fullgraph=True), x.view(2, 16, 64))
        called = text[text.index("def call(") : text.index("runner = ")]
        return [
            called.count(word) for word in ("empty_strided", "cpp_fused", "_product(", "extern_kernels.mm(")
        ]

    with uncached():
        ours, torchs = code(tunegemm.linear), code(torch_linear)
    assert ours[:2] == torchs[:2] and ours[2:] == [2, 0] and torchs[2:] == [0, 2]


def test_compiled_code_of_every_rank_and_out(kernel):
    a, b = operands()
    many_a, many_b = batch()
    out = torch.full((32, 48), float("nan"), dtype=BF16)

    def function(a, b, many_a, many_b, out):
        tunegemm.matmul(a, b, out=out)
        return (
            tunegemm.matmul(many_a, b), tunegemm.bmm(many_a, many_b), tunegemm.matmul(a, b[:, 0]),
            tunegemm.matmul(a[None, None], many_b), tunegemm.addmm(out, a, b, beta=0), out + 1,
        )  # fmt: skip

    results = torch.compile(function, backend="aot_eager", fullgraph=True)(a, b, many_a, many_b, out)
    product = torch.matmul(a, b)
    expected = (
        torch.matmul(many_a, b), torch.bmm(many_a, many_b), torch.matmul(a, b[:, 0]),
        torch.matmul(a[None, None], many_b), product, product + 1,
    )  # fmt: skip
    assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))
    assert torch.equal(out, product)
    assert len(kernel.calls) == 4

    into = torch.compile(lambda a, out: tunegemm.matmul(a, b, out=out), backend="aot_eager", fullgraph=True)
    assert into(a.requires_grad_(), out.clone()).requires_grad and len(kernel.calls) == 4


def test_a_traced_result_of_no_grad_may_be_added_to_with_gradients(kernel):
    """As torch's may: autograd refuses it for a view."""
    (many_a, _), b = batch(), operands()[1]
    product = torch.matmul(many_a, b)
    with torch.no_grad():
        result = torch.compile(tunegemm.matmul, backend="eager", fullgraph=True)(many_a, b)
    result += torch.ones(48, dtype=BF16, requires_grad=True)
    assert kernel.calls and result.requires_grad and torch.equal(result, product + 1)


def test_a_traced_layer_takes_the_biases_that_torchs_takes():
    """To a vector torch adds a row in place, and no bias of another dtype."""
    a, b = operands()
    weight, bias = b.t(), torch.ones(1, 48, dtype=BF16)
    for x in (a[0], a):
        result = torch.compile(tunegemm.linear, backend="eager", fullgraph=True)(x, weight, bias)
        assert torch.equal(result, torch.nn.functional.linear(x, weight, bias))
    with pytest.raises(RuntimeError, match="dtype"):
        torch.compile(tunegemm.linear, backend="eager")(a[0], weight, bias[0].float())


@pytest.mark.filterwarnings("default::tunegemm.errors.TunegemmWarning")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_a_step_after_a_vectors_layer_keeps_it_a_vector(dtype: torch.dtype, compiled: bool) -> None:
    """Also with a bias of one row, which torch takes."""
    a, b = operands()
    x, weight, bias = (each.to(dtype) for each in (a[0], b.t(), torch.ones(1, 48)))
    product = torch.nn.functional.linear(x, weight, bias)
    assert product.shape == (48,)
    for call, expected in (
        (lambda *given: tunegemm.linear(*given, "relu"), product.relu()),
        (lambda *given: tunegemm.gated_linear(*given, "relu"), product[::2].relu() * product[1::2]),
    ):
        run = torch.compile(call, backend="eager", fullgraph=True) if compiled else call
        torch.testing.assert_close(run(x, weight, bias), expected)


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_layer_within_inference_mode_is_traced(kernel, has_bias):
    """Torch's is, though not every view of a weight (2.13)."""
    a, b = operands()
    weight, bias = b.t().contiguous(), torch.ones(48, dtype=BF16) if has_bias else None

    def call(x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return tunegemm.linear(x, weight, bias)

    result = torch.compile(call, backend="aot_eager", fullgraph=True)(a)
    assert kernel.calls and torch.equal(result, torch.nn.functional.linear(a, weight, bias))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_steps_after_a_layer_under_another_autocast_are_traced(kernel, backend):
    a, b = operands()

    def call(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.float16):
            return tunegemm.linear(x, b.t(), activation="relu")

    result = torch.compile(call, backend=backend, fullgraph=True)(a)
    assert result.dtype is torch.float16 and torch.equal(result, (a.half() @ b.half()).relu())
    assert not kernel.calls


def test_steps_after_a_layer_with_one_output_are_traced(kernel):
    a, b = operands()
    run = torch.compile(tunegemm.linear, backend="eager", fullgraph=True)
    assert torch.equal(run(a, b[:, 0], activation="relu"), (a @ b[:, 0]).relu())


@pytest.mark.parametrize("has_bias", [False, True])
def test_layers_in_branches_of_a_graph_are_traced(kernel, has_bias):
    a, b = operands()
    weight, bias = b.t().contiguous(), torch.ones(48, dtype=BF16) if has_bias else None

    def layer(x: torch.Tensor) -> torch.Tensor:
        return tunegemm.linear(x, weight, bias)

    def call(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, layer, lambda x: layer(x) * 2, (x,))

    result = torch.compile(call, backend="aot_eager", fullgraph=True)(a)
    once = torch.nn.functional.linear(a, weight, bias)
    assert kernel.calls and torch.equal(result, once if a.sum() > 0 else once * 2)


@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs_hold_the_operator(kernel, strict):
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(operands()[1].t().contiguous())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return tunegemm.linear(x, self.weight).relu()

    layer, x = Layer(), operands()[0]
    shapes = {"x": {0: torch.export.Dim("rows", min=2, max=512)}}
    program = torch.export.export(layer, (x,), dynamic_shapes=shapes, strict=strict)
    assert torch.ops.tunegemm.mm.default in [node.target for node in program.graph.nodes]
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    kernel.calls.clear()
    assert torch.equal(loaded(x[:5]), torch_linear(x[:5], layer.weight).relu())
    assert kernel.calls == [((5, 64), (64, 48), (5, 48))]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", ["mm", "bmm"])
def test_operators_pass_torchs_own_check(kernel, name, grad):
    arguments = operands(5, 6, 8) if name == "mm" else batch(2)
    arguments = tuple(tensor.detach().clone().requires_grad_(grad) for tensor in arguments)
    torch.library.opcheck(getattr(torch.ops.tunegemm, name).default, arguments)


def test_the_operator_that_writes_passes_torchs_own_check(kernel):
    out = torch.zeros(32, 48, dtype=BF16)
    torch.library.opcheck(torch.ops.tunegemm.matmul_out.default, (*operands(), out))
    version = out._version
    torch.ops.tunegemm.matmul_out(*operands(), out)
    assert out._version > version


def test_operators_refuse_what_is_no_product():
    with FakeTensorMode() as mode:
        a, b = (mode.from_tensor(operand) for operand in operands())
        for bad in ((a, b.t()), (a, b.float()), (a[None], b)):
            with pytest.raises(RuntimeError, match=r"do not multiply|convert one|takes 2-D"):
                torch.ops.tunegemm.mm(*bad)
        assert torch.ops.tunegemm.mm(a, b).shape == (32, 48)


def test_an_operator_takes_the_short_way_unless_a_tensor_asks_to_see_it(kernel):
    seen: list[str] = []

    class Seen(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            seen.append(function.name())
            return product

    a, b = operands()
    product = a @ b
    assert not any("redispatch" in name for name in calls_of(lambda: torch.ops.tunegemm.mm(a, b))[0])
    for pair in ((a.as_subclass(Seen), b), (a, b.as_subclass(Seen))):
        assert torch.ops.tunegemm.mm(*pair) is product
    assert seen == ["tunegemm::mm"] * 2


# Further functions


# enable


def test_on_a_cpu_graphs_hold_torchs_product():
    a, b = operands()
    program = torch.export.export(_Matmul(), (a, b))
    assert "tunegemm" not in program.graph_module.code


class _Matmul(torch.nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return tunegemm.matmul(a, b)


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


# What torch.compile keeps on disk


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


def test_compiled_code_is_kept_by_the_records_that_decided(kernel):
    """Calls of the kernel, and what was taken from torch's caches, as records change under one function."""
    from torch._dynamo.utils import counters
    from torch._inductor.utils import fresh_cache

    device = find_device("model:h200")

    def run(*ratios: float) -> list[int]:
        rows = [Row(Problem(32, 48, 64), device.fingerprint, CANDIDATE, ratio) for ratio in ratios]
        api.serve_by(dispatcher_of(rows, Prepared(kernel), modified=lambda: ()))
        torch._dynamo.reset()
        counters.clear()
        kernel.calls.clear()
        torch.compile(tunegemm.matmul, fullgraph=True)(*operands())
        caches = counters["aot_autograd"]["autograd_cache_hit"], counters["inductor"]["fxgraph_cache_hit"]
        return [len(kernel.calls), *caches]

    with fresh_cache(), warnings.catch_warnings():
        warnings.simplefilter("ignore", TunegemmWarning)
        assert run() == [0, 0, 0]
        assert run(1.1) == [1, 0, 0], "a record since"
        assert run(1.1) == [1, 1, 1], "all as before"
        assert run(1.2) == [1, 0, 1], "another record, the same decision: Inductor's part is kept"
        assert run(1.001) == [0, 0, 1], "not worth it: the code of before the record"


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


def test_one_graph_serves_every_size(kernel):
    b = operands()[1]
    counter = CompileCounter()
    compiled = torch.compile(
        lambda x: tunegemm.linear(x, b.t()) + 1, backend=counter, fullgraph=True, dynamic=True
    )
    for m in (2, 7, 32):
        x = operands(m)[0]
        assert torch.equal(compiled(x), torch.matmul(x, b) + 1)
    assert [call[0] for call in kernel.calls] == [(2, 64), (7, 64), (32, 64)]
    assert counter.frame_count == 1


def test_a_miss_under_enable_is_torchs_own_kernel(kernel, monkeypatch):
    """Nothing recurses where dispatch falls back to torch."""
    serve_with(monkeypatch, dispatcher_of(Recorded(), TORCH))
    a, b = operands()
    a.requires_grad_()
    with tunegemm.enable():
        tunegemm.matmul(a, b).sum().backward()
        torch.mm(a, b).sum().backward()
    assert not kernel.calls


class Tripled(torch.Tensor):
    """Gives torch's layer a meaning of its own."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result * 3 if func is torch_linear else result


def _jagged(rows: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor([rows[:5], rows[5:]], layout=torch.jagged)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("of", [lambda rows: rows.as_subclass(Tripled), _jagged])
def test_a_compiled_layer_has_the_meaning_that_a_subclass_gives_it(kernel, of, bias):
    layer, x = torch.nn.Linear(64, 48, bias).to(BF16), of(operands()[0])
    run = torch.compile(layer, backend="eager")
    with torch.no_grad():
        expected = run(x)
        tunegemm.patch(layer)
        torch._dynamo.reset()
        result = run(x)
    if x.is_nested:
        result, expected = result.values(), expected.values()
    assert torch.equal(result, expected) and not kernel.calls


def test_steps_after_a_layer_of_a_subclass_are_traced(kernel):
    (a, b), run = operands(), torch.compile(tunegemm.linear, backend="eager")
    result = run(_jagged(a), b.t(), activation="relu")
    assert torch.equal(result.values(), (a @ b).relu()) and not kernel.calls


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
