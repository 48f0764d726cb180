"""Our products in graphs: traced, compiled and exported ones, and the operators that they hold.

Without a GPU: the dispatcher serves CPU tensors, and its kernels are torch's.
"""

from __future__ import annotations

import io
import warnings

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import linear as torch_linear

import tunegemm
from tests.support.serving import (
    BF16,
    CANDIDATE,
    Row,
    batch,
    calls_of,
    dispatcher_of,
    operands,
    uncached,
)
from tunegemm.describe.device import find_device
from tunegemm.describe.problem import Problem
from tunegemm.dispatch import api
from tunegemm.dispatch.launchers import Prepared
from tunegemm.errors import TunegemmWarning
from tunegemm.torch import ops

pytestmark = [
    pytest.mark.filterwarnings("error::tunegemm.errors.TunegemmWarning"), pytest.mark.usefixtures("clean")
]  # fmt: skip


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


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(("dtype", "cast"), [(torch.float16, BF16), (BF16, torch.float16), (BF16, BF16)])
def test_autocast_casts_each_operand_of_a_traced_layer(kernel, backend, mode, dtype, cast):
    """Some backends run a graph as it stands, so that autocast is on while the operator computes; in
    inference mode below it."""
    a, b = operands(dtype=dtype)
    bias = torch.linspace(-2, 2, 48)
    torch._dynamo.reset()
    run = torch.compile(tunegemm.linear, backend=backend)
    with mode(), torch.autocast("cpu", cast):
        expected = torch.nn.functional.gelu(torch.nn.functional.linear(a, b.t(), bias))
        result = run(a, b.t(), bias, activation="gelu")
        plain = run(a, b.t(), bias.to(dtype), activation="gelu")
    assert result.dtype is plain.dtype is cast
    torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(plain, expected, rtol=2e-2, atol=2e-2)


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


def test_on_a_cpu_graphs_hold_torchs_product():
    a, b = operands()
    program = torch.export.export(_Matmul(), (a, b))
    assert "tunegemm" not in program.graph_module.code


class _Matmul(torch.nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return tunegemm.matmul(a, b)


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
