"""What functions refuse, what they leave to torch, and what traced calls become, by their arguments."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tunegemm.dispatch import api
from tunegemm.dispatch.forms import LINEAR, MATMUL
from tunegemm.errors import ProblemError
from tunegemm.torch import functions, linear, ops, takeover

BF16 = torch.bfloat16
A, B = torch.arange(12.0).view(3, 4), torch.arange(20.0).view(4, 5)
W, BIAS, C = B.t().contiguous(), torch.arange(5.0), torch.arange(15.0).view(3, 5)
AS, BS = torch.stack((A, A)), torch.stack((B, B))
Asked = list[tuple[Any, ...]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """What the dispatcher is asked."""
    calls: Asked = []
    monkeypatch.setattr(api, "product", lambda *given: calls.append(given))
    monkeypatch.setattr(api, "dispatcher", SimpleNamespace(fused=lambda *given: calls.append(given)))
    return calls


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """What is traced while torch.compile looks."""
    calls: Asked = []
    monkeypatch.setattr(functions, "compiling_now", lambda: True)
    for name in ("traced_matmul", "traced_linear", "traced_fused"):
        monkeypatch.setattr(ops, name, lambda *given, name=name: calls.append((name, *given)) or name)
    return calls


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: functions.matmul(A, B, operands=[1]), "operands without an epilogue"),
        (lambda: functions.matmul(A, B, epilogue="relu", bias=BIAS), "with bias, activation or residual"),
        (lambda: functions.matmul(A, B, epilogue="relu", activation="relu"), "with bias, activation"),
        (lambda: functions.matmul(A, B, epilogue="relu", residual=C), "with bias, activation or residual"),
        (lambda: functions.matmul(A, B, epilogue="relu", out_dtype="bf16"), "is not a torch.dtype"),  # type: ignore[arg-type]
        (lambda: functions.matmul(A, B, epilogue="alpha", operands="12"), "are not a sequence"),
        (lambda: functions.matmul(A, B, epilogue="alpha", operands=3), "are not a sequence"),  # type: ignore[arg-type]
        (lambda: functions.matmul(A, B, activation="tanh"), "activation 'tanh' is not known; use one of"),  # type: ignore[arg-type]
        (lambda: functions.linear(A, W, None, "swiglu"), "gated_linear applies it"),  # type: ignore[arg-type]
        (lambda: functions.linear(A, W, None, []), "is not known"),  # type: ignore[arg-type]
        (lambda: functions.gated_linear(A, W, None, "swiglu"), "has no gated form"),  # type: ignore[arg-type]
        (lambda: functions.gated_linear(A, W, None, None), "has no gated form"),  # type: ignore[arg-type]
        (lambda: functions.interleave(A, torch.tensor(1.0)), "up .* has no rows"),
        (lambda: functions.interleave(3, A), "gate 3 has no rows"),  # type: ignore[arg-type]
        (lambda: functions.interleave(A, A[:2]), "same shape"),
        (lambda: functions.interleave(A, A.double()), "same shape"),
        (lambda: functions.interleave(A, A.to("meta")), "same shape"),
    ],
)  # fmt: skip
def test_what_means_nothing_is_said(asked: Asked, call: Any, says: str) -> None:
    with pytest.raises(ProblemError, match=says):
        call()
    assert asked == []


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: functions.mm(AS, BS), RuntimeError), (lambda: functions.mm(A, BIAS), RuntimeError),
        (lambda: functions.mm(BIAS, B), RuntimeError), (lambda: functions.bmm(A, B), RuntimeError),
        (lambda: functions.bmm(AS, BS[:1]), RuntimeError), (lambda: functions.bmm(AS, B), RuntimeError),
        (lambda: functions.addmm(C, A, BS), RuntimeError),
        (lambda: functions.addmm(C[:2], A, B), RuntimeError),
        (lambda: functions.baddbmm(C, AS, B), IndexError),
        (lambda: functions.mm(A, 3), TypeError), (lambda: functions.bmm(AS, None), TypeError),  # type: ignore[arg-type]
        (lambda: functions.addmm(C, A, "b"), TypeError),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_what_torch_refuses_torch_refuses(asked: Asked, call: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        call()
    assert asked == []


def test_while_it_is_traced_each_call_is_an_operator(traced: Asked) -> None:
    for call in (
        lambda: functions.matmul(A, B), lambda: functions.mm(A, B), lambda: functions.bmm(AS, BS),
        lambda: functions.linear(A, W), lambda: functions.linear(A, W, BIAS),
        lambda: functions.linear(A, W, BIAS, "relu"),
        lambda: functions.matmul(A, B, out_dtype=torch.float32),
        lambda: functions.matmul(A, B, out_dtype=BF16),
        lambda: functions.addmm(C, A, B, beta=0),
    ):  # fmt: skip
        call()
    assert [name for name, *_ in traced] == [
        "traced_matmul", "traced_matmul", "traced_matmul", "traced_linear", "traced_linear", "traced_fused",
        "traced_matmul", "traced_fused", "traced_matmul",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("hooked", "leaf", "is_module"), [(False, True, True), (True, True, False), (False, False, False)]
)
def test_a_linear_layer_that_tracers_do_not_look_into_is_a_node(
    hooked: bool, leaf: bool, is_module: bool
) -> None:
    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, module: torch.nn.Module, path: str) -> bool:
            return leaf

    layer: Any = torch.nn.Linear(4, 5)
    if hooked:
        layer.register_forward_hook(lambda *_: None)
    tracer = Tracer()
    tracer.root, tracer.graph = torch.nn.Sequential(layer), torch.fx.Graph()
    tracer.submodule_paths = {module: name for name, module in tracer.root.named_modules()}
    proxy = tracer.proxy(tracer.graph.placeholder("x"))
    node = linear.module_node(layer, proxy)
    assert (node is not None) == is_module
    if is_module:
        assert (node.node.op, node.node.target, node.node.args) == ("call_module", "0", (proxy.node,))
    assert linear.module_node(layer, A) is None


class Extents:
    def __init__(self, rows: int, columns: int, is_cuda: bool) -> None:
        self.shape, self.is_cuda = (rows, columns), is_cuda


@pytest.mark.parametrize(
    ("rows", "k", "n", "is_cuda", "has"),
    [(17, 8, 8, True, True), (16, 8, 8, True, False), (17, 12, 8, True, False), (17, 8, 12, True, False),
     (1, 3, 3, False, True)],
)  # fmt: skip
def test_extents_of_int8_that_a_gpu_takes(rows: int, k: int, n: int, is_cuda: bool, has: bool) -> None:
    given: Any = Extents(rows, k, is_cuda), Extents(k, n, is_cuda)
    assert takeover.has_int8_extents(*given) == has


@pytest.mark.parametrize(
    ("a", "b", "is_asked"),
    [(torch.int8, torch.int8, True), (torch.uint8, torch.int8, False), (torch.int8, torch.uint8, False)],
)
@pytest.mark.parametrize("answer", [None, "ours"])
def test_int8_products_that_are_served(
    monkeypatch: pytest.MonkeyPatch, a: torch.dtype, b: torch.dtype, is_asked: bool, answer: Any
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(
        takeover.api, "dispatcher", SimpleNamespace(fused=lambda *given: calls.append(given) or answer)
    )
    serve = takeover.int8_products(lambda *_, **__: "torch's")
    left, right = torch.zeros(3, 4).to(a), torch.zeros(4, 5).to(b)
    assert serve(None, left, right) == (answer or "torch's" if is_asked else "torch's")
    assert len(calls) == is_asked
    assert serve(None, left[0], right) == "torch's" and len(calls) == is_asked


@pytest.mark.parametrize(
    ("words", "more", "dtype", "text"),
    [({}, (), BF16, "bias_n"), ({"beta": 2}, (), BF16, "beta_c"), ({"alpha": 2}, (), BF16, "alpha+bias_n"),
     ({}, (1,), BF16, None), ({}, (), torch.float64, None), ({"alpha": 2j}, (), BF16, None)],
)  # fmt: skip
@pytest.mark.parametrize("served", [True, False])
def test_sums_that_enable_serves(
    monkeypatch: pytest.MonkeyPatch, words: Any, more: Any, dtype: torch.dtype, text: str | None, served: bool
) -> None:
    asked: list[str] = []

    def fused(form: Any, *_: Any) -> Any:
        asked.append(form.text)
        return "ours" if served else None

    monkeypatch.setattr(takeover.api, "dispatcher", SimpleNamespace(fused=fused))
    serve = takeover.sums(lambda *_, **__: "torch's", 2)
    c, a, b = torch.zeros(5, dtype=dtype), torch.zeros(3, 4, dtype=dtype), torch.zeros(4, 5, dtype=dtype)
    assert serve(None, c, a, b, *more, **words) == ("ours" if text and served else "torch's")
    assert asked == [text] * (text is not None)
    assert serve(None, c, a, b[:3]) == "torch's"


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """The operators that traced calls become."""
    calls: Asked = []

    def named(name: str) -> Any:
        def operator(*given: Any, records: str = "") -> torch.Tensor:
            calls.append((name, *given))
            return torch.full((*given[0].shape[:-1], given[1].shape[-1]), 2.0).to(given[0].dtype)

        return operator

    known = {name: named(name) for name in ("mm", "bmm", "fused", "matmul_out")}
    monkeypatch.setattr(
        ops,
        "torch",
        SimpleNamespace(**vars(torch) | {"ops": SimpleNamespace(tunegemm=SimpleNamespace(**known))}),
    )
    monkeypatch.setattr(ops, "records", lambda: "")
    monkeypatch.setattr(ops, "DEVICE_TYPE", "cpu")
    monkeypatch.setattr(ops, "is_simple", lambda a, b: True)
    return calls


def half(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=BF16)


def test_traced_products_are_operators_of_their_rank(operators: Asked) -> None:
    for a, b, name, shape in (
        (half(3, 4), half(4, 5), "mm", (3, 5)), (half(2, 3, 4), half(2, 4, 5), "bmm", (2, 3, 5)),
        (half(2, 3, 4), half(4, 5), "mm", (2, 3, 5)),
    ):  # fmt: skip
        assert tuple(ops.traced_matmul(a, b).shape) == shape and operators.pop()[0] == name
    out = half(3, 5)
    assert ops.traced_matmul(half(3, 4), half(4, 5), out) is out and operators.pop()[0] == "matmul_out"
    assert tuple(ops.traced_linear(half(3, 4), half(5, 4)).shape) == (3, 5) and operators.pop()[0] == "mm"
    ops.traced_linear(half(3, 4), half(5, 4), half(5))
    assert operators.pop()[5] == "bias_n"


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize(
    ("a", "b", "out"),
    [
        (half(3, 4).float(), half(4, 5).float(), None), (half(3, 4).requires_grad_(), half(4, 5), half(3, 5)),
        (half(3, 4), half(4, 5).requires_grad_(), half(3, 5)), (half(3, 4), half(4, 5), half(1, 5)),
    ],
)  # fmt: skip
def test_traced_products_that_are_torchs(
    operators: Asked, a: torch.Tensor, b: torch.Tensor, out: Any
) -> None:
    try:
        ops.traced_matmul(a, b, out)
    except RuntimeError as error:  # torch's: an output does not take gradients
        assert "out=" in str(error) or "resize" in str(error)
    assert operators == []


def test_a_traced_maximum_is_raised_behind_the_product(operators: Asked) -> None:
    for start, raised in ((1.0, 2.0), (3.0, 3.0)):
        amax, out = torch.tensor(start), half(3, 5)
        result = ops.traced_fused(MATMUL, "relu+amax", half(3, 4), half(4, 5), (amax,), (), out, None, "fast")
        assert result is out and float(out[0, 0]) == 2.0 and float(amax) == raised
        assert operators.pop()[3:6] == ([], [], "relu")
    ops.traced_fused(MATMUL, "amax", half(3, 4), half(4, 5), (amax,), (), None, None, "fast")
    assert operators.pop()[5] == ""
    ops.traced_fused(LINEAR, "custom:amax", half(3, 4), half(5, 4), (amax,), (), None, None, "fast")
    name, _, right, tensors, *_ = operators.pop()
    assert (name, tuple(right.shape), len(tensors)) == ("fused", (4, 5), 1)


def test_hints_of_extents() -> None:
    assert ops.hint(7) == 7 and ops.hint(1) == 1


@pytest.mark.parametrize(
    ("a", "b", "autocast", "wrapper", "may"),
    [
        (half(3, 4), half(4, 5), None, False, True), (half(4), half(4, 5), None, False, False),
        (half(3, 4), half(4), None, False, False), (half(3, 4).to("meta"), half(4, 5), None, False, False),
        (half(3, 4), half(4, 5).to("meta"), None, False, False), (half(3, 4), half(4, 5), BF16, False, True),
        (half(3, 4), half(4, 5), torch.float16, False, False), (half(3, 4), half(4, 5), None, True, False),
    ],
)  # fmt: skip
def test_which_traced_products_may_become_calls(
    monkeypatch: pytest.MonkeyPatch, a: torch.Tensor, b: torch.Tensor, autocast: Any, wrapper: bool, may: bool
) -> None:
    monkeypatch.setattr(ops, "DEVICE_TYPE", "cpu")
    monkeypatch.setitem(sys.modules, "torch._inductor.config", SimpleNamespace(cpp_wrapper=wrapper))  # type: ignore[arg-type]
    with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
        assert ops.may_be_served(a, b) == may
