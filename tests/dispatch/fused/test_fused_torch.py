"""torch's own machinery around fused calls: gradients, autocast, compiled code, `enable`, `patch`."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.nn import functional

import tunegemm
from tests.support.fusing import FP8, bent, close, layer
from tests.support.serving import BF16, calls_of, operands
from tunegemm.describe.problem import Problem
from tunegemm.errors import TunegemmWarning


def gradients(call, *inputs: torch.Tensor) -> list[torch.Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    result = call(*leaves)
    upstream = torch.linspace(-1, 1, result.numel()).view(result.shape).to(result.dtype)
    return [result.detach(), *torch.autograd.grad(result, leaves, upstream)]


CALLS = {
    "bias": (
        lambda x, w, bias, _: tunegemm.linear(x, w, bias) + 0 * _.sum(),
        lambda x, w, bias, _: functional.linear(x, w, bias) + 0 * _.sum(),
    ),
    "bias, gelu, residual": (
        lambda x, w, bias, residual: tunegemm.linear(x, w, bias, "gelu", residual),
        lambda x, w, bias, residual: functional.gelu(functional.linear(x, w, bias)) + residual,
    ),
    "gated": (
        lambda x, w, bias, _: tunegemm.gated_linear(x, w, bias) + 0 * _.sum(),
        lambda x, w, bias, _: functional.silu(functional.linear(x, w[0::2], bias[0::2]))
        * functional.linear(x, w[1::2], bias[1::2]) + 0 * _.sum(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("lead", [(32,), (2, 16)])
@pytest.mark.parametrize("name", CALLS)
def test_gradients(serve, kernel, name, lead):
    serve()
    ours, theirs = (gradients(call, *layer(*lead)) for call in CALLS[name])
    for mine, torchs in zip(ours, theirs, strict=True):
        close(mine, torchs)
    assert len(kernel.calls) == 3  # forward, and two products backward


@pytest.mark.parametrize("expand", [lambda bias: bias.expand(32, -1), lambda bias: bias[:1].expand(32, 48)])
def test_the_gradient_of_an_expanded_row_has_all_rows(serve, kernel, expand):
    """The first row had the sum of all, and the others zeros."""
    serve()
    x, weight, bias, _ = layer()
    row = expand(bias).detach().requires_grad_()
    given = torch.linspace(-4, 4, 32 * 48).view(32, 48).to(BF16)
    for call in (tunegemm.addmm, torch.compile(tunegemm.addmm, backend="aot_eager")):
        (found,) = torch.autograd.grad(call(row, x, weight.t()), row, given)
        assert torch.equal(found, given)


def test_transforms_are_torchs(serve, kernel):
    serve()
    x, weight, bias, _ = layer()
    many = torch.stack((x, -x))

    def ours(x):
        return tunegemm.linear(x, weight, bias, "silu")

    def theirs(x):
        return functional.silu(functional.linear(x, weight, bias))

    close(torch.vmap(ours)(many), torch.vmap(theirs)(many))
    close(torch.func.jvp(ours, (x,), (x,))[1], torch.func.jvp(theirs, (x,), (x,))[1])
    close(torch.func.grad(lambda x: ours(x).sum())(x), torch.func.grad(lambda x: theirs(x).sum())(x))


@pytest.mark.parametrize("dtypes", ["wide", "weights", "skip", "cast"])
@pytest.mark.parametrize("grad", [False, True])
def test_autocast_means_what_it_means_for_torchs_calls(serve, kernel, dtypes, grad):
    """dtypes: what is fp32: all, all but the input, the residual and bias, or nothing."""
    serve()
    x, weight, bias, skip = layer()
    if dtypes == "wide":
        x = x.float()
    if dtypes in ("wide", "weights"):
        weight = weight.float()
    if dtypes != "cast":
        bias, skip = bias.float(), skip.float()
    gated = functional.silu
    calls = {
        "relu": (lambda: tunegemm.linear(x, weight, bias, "relu"),
                 lambda: torch.relu(functional.linear(x, weight, bias))),
        "no bias": (lambda: tunegemm.linear(x, weight, None, "silu"),
                    lambda: functional.silu(functional.linear(x, weight))),
        "residual": (lambda: tunegemm.linear(x, weight, bias, "gelu", skip),
                     lambda: functional.gelu(functional.linear(x, weight, bias)) + skip),
        "residual alone": (lambda: tunegemm.linear(x, weight, residual=skip),
                           lambda: functional.linear(x, weight) + skip),
        "gated": (lambda: tunegemm.gated_linear(x, weight, bias),
                  lambda: gated(functional.linear(x, weight[0::2], bias[0::2]))
                  * functional.linear(x, weight[1::2], bias[1::2])),
        "addmm": (lambda: tunegemm.addmm(skip, x, weight.t(), alpha=2, beta=3),
                  lambda: torch.addmm(skip, x, weight.t(), alpha=2, beta=3)),
        "row": (lambda: tunegemm.addmm(bias, x, weight.t()), lambda: torch.addmm(bias, x, weight.t())),
        "baddbmm": (lambda: tunegemm.baddbmm(skip[None], x[None], weight.t()[None]),
                    lambda: torch.baddbmm(skip[None], x[None], weight.t()[None])),
    }  # fmt: skip
    for tensor in (x, weight, bias, skip):
        tensor.requires_grad_(grad)
    wanted = [x, weight, bias, skip]
    for name, (ours, theirs) in calls.items():
        with torch.autocast("cpu", dtype=BF16):
            mine, torchs = ours(), theirs()
            kernel.calls.clear()
            ours()
            assert kernel.calls or (grad and "add" in name), name
        close(mine, torchs)
        if grad:
            pairs = [
                torch.autograd.grad(result.float().sum(), wanted, allow_unused=True)
                for result in (mine, torchs)
            ]
            for one, other in zip(*pairs, strict=True):
                assert (one is None) == (other is None), name
                if one is not None:
                    close(one, other)


def test_autocast_leaves_scaled_products_and_other_devices_alone(serve, kernel):
    serve()
    x, weight, bias, _ = layer()
    a, b, one = x.to(FP8), weight.to(FP8).t(), torch.ones(())
    plain = tunegemm.scaled_mm(a, b, one, one, bias=bias, out_dtype=BF16)
    expected = tunegemm.linear(x, weight, bias, "relu")
    with torch.autocast("cpu", dtype=torch.float16):
        assert torch.equal(tunegemm.scaled_mm(a, b, one, one, bias=bias, out_dtype=BF16), plain)
    with torch.autocast("cuda", dtype=torch.float16):
        assert torch.equal(tunegemm.linear(x, weight, bias, "relu"), expected)
    assert len(kernel.calls) == 4


def test_autocast_of_operands_that_have_its_dtype_is_as_short_as_none(by_address):
    kernel = by_address("bias_n")
    x, weight, bias, _ = layer()
    with torch.autocast("cpu", dtype=BF16):
        tunegemm.linear(x, weight, bias)
        again: list[torch.Tensor] = []
        python, _ = calls_of(lambda: again.append(tunegemm.linear(x, weight, bias)))
        assert not any(name.endswith("dispatcher.compute") for name in python) and len(kernel.words) == 2
    with torch.autocast("cpu", dtype=torch.float16), warnings.catch_warnings():
        warnings.simplefilter("ignore", TunegemmWarning)
        assert tunegemm.linear(x, weight, bias).dtype == torch.float16
    assert len(kernel.words) == 2


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.long
def test_compiled_code_launches_the_kernel(serve, kernel, backend, mode):
    serve()
    x, weight, bias, residual = layer(2, 16)

    def function(x, weight, bias, residual):
        hidden = tunegemm.linear(x, weight, bias, "gelu_tanh", residual)
        return tunegemm.gated_linear(hidden, weight.t().contiguous()) + 1

    with mode():
        compiled = torch.compile(function, backend=backend, fullgraph=True)
        close(compiled(x, weight, bias, residual), function(x, weight, bias, residual))
    assert len(kernel.calls) == 4


def test_code_in_cpp_is_torchs(serve, kernel):
    """It would call us through torch's dispatcher, and may run where there is no Python."""
    from torch._dynamo.backends.common import aot_autograd

    serve()
    x, weight, _, _ = layer()
    graphs = []

    def compiler(graph, _):
        graphs.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    backend = aot_autograd(fw_compiler=compiler)
    with torch.no_grad(), torch._inductor.config.patch(cpp_wrapper=True):
        compiled = torch.compile(
            lambda x: tunegemm.linear(tunegemm.linear(x, weight), weight.t(), None, "relu"),
            backend=backend,
            fullgraph=True,
        )
        compiled(x)
    assert "aten.mm.default" in graphs and not any("tunegemm" in target for target in graphs)


@pytest.mark.filterwarnings("error:(?s).*lru_cache")
def test_compiled_calls_of_every_kind(serve, kernel):
    serve()
    x, weight, bias, skip = layer()
    a, b, one = x.to(FP8), weight.to(FP8).t(), torch.ones(())
    rows, columns = torch.ones(32, 1), torch.ones(1, 48)
    out = torch.zeros_like(skip)

    def function(x, weight, bias, skip, amax, out):
        tunegemm.matmul(x, weight.t(), bias=bias, out=out)
        return (
            tunegemm.matmul(x, weight.t(), epilogue=bent, operands=(bias, skip, 3)),
            tunegemm.matmul(x, weight.t(), epilogue="bias_n+amax", operands=(bias, amax)),
            tunegemm.addmm(skip, x, weight.t(), alpha=2),
            tunegemm.addmm(bias, x, weight.t()),
            tunegemm.scaled_mm(a, b, one, one, out_dtype=BF16),
            tunegemm.scaled_mm(a, b, rows, columns, out_dtype=BF16),
            tunegemm.matmul(x, weight.t(), out_dtype=torch.float32),
            amax + 1,
            out + 1,
        )

    given = [x, weight, bias, skip]
    expected = function(*given, torch.zeros(()), torch.zeros_like(out))
    calls = len(kernel.calls)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for result, wanted in zip(compiled(*given, torch.zeros(()), out), expected, strict=True):
        close(result, wanted)
    close(out + 1, expected[-1])
    assert len(kernel.calls) == 2 * calls


def test_a_recording_sees_what_is_asked_for(serve, kernel):
    """Whichever functions of torch compute it; in a graph without records they are all there is."""
    serve()
    x, weight, bias, skip = layer()
    with tunegemm.record() as recording:
        tunegemm.linear(x, weight, bias, "gelu", skip)
        tunegemm.addmm(skip, x, weight.t())
        torch.compile(lambda x: tunegemm.linear(x, weight, bias), backend="aot_eager", fullgraph=True)(x)
    assert sorted((each.kind.op, each.kind.epilogue, each.calls) for each in recording.products) == [
        ("addmm", "beta_c", 1), ("addmm", "bias_n", 1), ("linear", "bias_n+gelu+residual", 1)
    ]  # fmt: skip
    assert not kernel.calls


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("dynamic", [False, True])
def test_graphs_without_records_are_torchs_operators(serve, kernel, mode, dynamic):
    serve(Problem(4096, 4096, 4096))
    targets = []

    def compiler(graph, _):
        targets.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    x, weight, bias, _ = layer()
    backend = torch._dynamo.backends.common.aot_autograd(fw_compiler=compiler)
    function = torch.compile(
        lambda x, w, bias: tunegemm.linear(x, w, bias, "relu"),
        backend=backend,
        fullgraph=True,
        dynamic=dynamic,
    )
    with mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore", TunegemmWarning)
        close(function(x, weight, bias), torch.relu(functional.linear(x, weight, bias)))
    assert "aten.addmm.default" in targets and not any("tunegemm" in target for target in targets)


def test_compiled_training(serve, kernel):
    serve()
    for ours, theirs in CALLS.values():
        compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
        for mine, torchs in zip(gradients(compiled, *layer()), gradients(theirs, *layer()), strict=True):
            close(mine, torchs)


def test_exported_programs_hold_the_operator(serve, kernel):
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            _, weight, bias, _ = layer()
            self.weight, self.bias = torch.nn.Parameter(weight, False), torch.nn.Parameter(bias, False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return tunegemm.linear(x, self.weight, self.bias, "silu")

    serve()
    module, x = Layer(), layer()[0]
    program = torch.export.export(module, (x,))
    assert "tunegemm.fused" in program.graph_module.code
    close(program.module()(x), module(x))
    assert len(kernel.calls) == 2


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("text", ["bias_n+gelu", "swiglu", "alpha+beta_c"])
def test_the_operator_passes_torchs_own_check(serve, kernel, text, grad):
    serve()
    x, weight, bias, c = layer()
    tensors = {"bias_n+gelu": [bias], "swiglu": [], "alpha+beta_c": [c]}[text]
    numbers = [2.0, 0.5] if text.startswith("alpha") else []
    given = [tensor.detach().clone().requires_grad_(grad) for tensor in (x, weight.t(), *tensors)]
    torch.library.opcheck(torch.ops.tunegemm.fused.default, (*given[:2], given[2:], numbers, text))


def test_enable_serves_what_adds_and_scales(serve, kernel):
    serve()
    x, weight, bias, c = layer()
    many = torch.stack((x, x)), torch.stack((weight.t(), weight.t())), torch.stack((c, c))
    a, b, one = x.to(FP8), weight.to(FP8).t(), torch.ones(())
    rows, columns = torch.ones(32, 1), torch.ones(1, 48)
    small = (x * 8).to(torch.int8)
    out = torch.empty_like(c)
    ways = (
        lambda: functional.linear(x, weight, bias),
        lambda: torch.addmm(c, x, weight.t(), beta=2),
        lambda: torch.addmm(bias, x, weight.t(), out=out),
        lambda: torch.baddbmm(many[2], *many[:2], alpha=0.5),
        lambda: torch._scaled_mm(a, b, one, one, out_dtype=BF16),
        lambda: torch._scaled_mm(a, b, rows, columns, bias=bias, out_dtype=BF16, use_fast_accum=True),
        lambda: torch._int_mm(small, weight.to(torch.int8).t()),
    )  # fmt: skip
    for way in ways:
        expected = way().clone()
        kernel.calls.clear()
        with tunegemm.enable():
            close(way(), expected)
        assert len(kernel.calls) == 1
        way()
        assert len(kernel.calls) == 1


def test_gradients_in_double_precision():
    """Of what torch computes where there is no kernel; the products of the backward pass: test_torch.py."""
    x, w = torch.randn(3, 4, dtype=torch.double), torch.randn(6, 4, dtype=torch.double)
    bias, residual = torch.randn(6, dtype=torch.double), torch.randn(3, 6, dtype=torch.double)
    everything = [tensor.requires_grad_() for tensor in (x, w, bias, residual)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TunegemmWarning)
        assert torch.autograd.gradcheck(
            lambda *given: tunegemm.linear(*given[:3], "silu", given[3]), everything
        )
        assert torch.autograd.gradcheck(lambda *given: tunegemm.gated_linear(*given), everything[:3])


def test_gradients_of_a_bias_twice(serve, kernel):
    from tunegemm.dispatch.autograd import differentiably

    def compute(a, b, bias):
        return torch.matmul(a, b) + bias

    given = [torch.randn(shape, dtype=torch.double, requires_grad=True) for shape in ((3, 4), (4, 5), (5,))]

    def call(a, b, bias):
        return differentiably(torch.matmul, a, b, False, bias, compute)

    assert torch.autograd.gradcheck(call, given)
    assert torch.autograd.gradgradcheck(call, given)


def test_inductors_code_calls_us_and_not_torchs_dispatcher(serve, kernel):
    serve()
    x, weight, bias, skip = layer()
    compiled = torch.compile(
        lambda x: tunegemm.linear(tunegemm.gated_linear(x, weight), weight[:, :24].contiguous(), bias) + skip,
        fullgraph=True,
    )
    with torch.no_grad():
        expected, (code,) = torch._inductor.utils.run_and_get_code(compiled, x)
        kernel.calls.clear()  # that ran under a mode, where torch computes products
        close(expected, compiled(x))
    assert code.count("extern_kernels.tunegemm_product_and_more(") == 2
    assert "torch.ops.tunegemm.fused.default(" not in code and len(kernel.calls) == 2


def test_a_graph_of_symbolic_rows_keeps_the_operator_where_any_rows_are_recorded(serve, kernel):
    serve(*(Problem(m, 48, 64, epilogue="bias_n") for m in (7, 32)))
    _, weight, bias, _ = layer()
    compiled = torch.compile(
        lambda x: tunegemm.linear(x, weight, bias), backend="aot_eager", fullgraph=True, dynamic=True
    )
    for m in (7, 32):
        x = operands(m)[0]
        close(compiled(x), functional.linear(x, weight, bias))
    assert [call[0] for call in kernel.calls] == [(7, 64), (32, 64)]


@pytest.mark.parametrize("grad", [False, True])
def test_an_operator_whose_gradient_nobody_wants_is_one_launch(serve, kernel, grad):
    """With gradients on of operands that want none, and off of a weight that would."""
    serve()
    x, weight, bias, _ = layer()
    given = x, weight.t().requires_grad_(not grad), [bias], [], "bias_n"
    with torch.set_grad_enabled(grad):
        result = torch.ops.tunegemm.fused(*given)
    close(result, functional.linear(x, weight, bias))
    assert len(kernel.calls) == 1
    assert not result.requires_grad
