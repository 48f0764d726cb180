"""What each function asks the dispatcher, and what it asks torch, by its arguments."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tunegemm.dispatch.forms import ADDMM, BMM, LINEAR, MATMUL, SCALED_MM
from tunegemm.errors import ProblemError
from tunegemm.torch import functions, linear, ops, takeover

BF16 = torch.bfloat16
A, B = torch.arange(12.0).view(3, 4), torch.arange(20.0).view(4, 5)
W, BIAS, C = B.t().contiguous(), torch.arange(5.0), torch.arange(15.0).view(3, 5)
AS, BS = torch.stack((A, A)), torch.stack((B, B))
Asked = list[tuple[Any, ...]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """What the dispatcher is asked: the call, the steps, tensors, numbers, output, dtype, accumulation."""
    calls: Asked = []

    def product(call: int, a: Any, b: Any, out: Any = None) -> str:
        calls.append((call, "", (), (), out))
        return "plain"

    def fused(form: Any, a: Any, b: Any, tensors: Any = (), numbers: Any = (), out: Any = None) -> str:
        calls.append(
            (form.call, form.text, tuple(tensors), tuple(numbers), out, form.out_dtype, form.accumulation)
        )
        return "fused"

    monkeypatch.setattr(functions, "product", product)
    monkeypatch.setattr(functions.api, "dispatcher", SimpleNamespace(fused=fused))
    return calls


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """What is traced while torch.compile looks."""
    calls: Asked = []
    monkeypatch.setattr(functions, "_is_compiling", lambda: True)
    for name in ("traced_matmul", "traced_linear", "traced_fused"):
        monkeypatch.setattr(ops, name, lambda *given, name=name: calls.append((name, *given)) or name)
    return calls


def test_plain_calls_ask_for_plain_products(asked: Asked) -> None:
    out = torch.empty(3, 5)
    assert (
        functions.matmul(A, B)
        == functions.mm(A, B)
        == functions.linear(A, W)
        == functions.bmm(AS, BS)
        == "plain"
    )  # type: ignore[comparison-overlap]
    functions.matmul(A, B, out=out)
    functions.mm(A, B, out=out)
    assert [(call, given_out) for call, _, _, _, given_out in asked] == [
        (MATMUL, None), (MATMUL, None), (LINEAR, None), (BMM, None), (MATMUL, out), (MATMUL, out)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "text", "tensors", "numbers", "of"),
    [
        (lambda: functions.linear(A, W, BIAS), "bias_n", (BIAS,), (), LINEAR),
        (lambda: functions.linear(A, W, None, "relu"), "relu", (), (), LINEAR),
        (lambda: functions.linear(A, W, BIAS, None, C), "bias_n+residual", (BIAS, C), (), LINEAR),
        (lambda: functions.linear(A, W, None, None, C), "residual", (C,), (), LINEAR),
        (lambda: functions.linear(A, W, BIAS, "silu", C), "bias_n+silu+residual", (BIAS, C), (), LINEAR),
        (lambda: functions.gated_linear(A, W), "swiglu", (), (), LINEAR),
        (lambda: functions.gated_linear(A, W, BIAS, "relu"), "bias_n+reglu", (BIAS,), (), LINEAR),
        (lambda: functions.matmul(A, B, bias=BIAS), "bias_n", (BIAS,), (), MATMUL),
        (lambda: functions.matmul(A, B, activation="gelu", residual=C), "gelu+residual", (C,), (), MATMUL),
        (
            lambda: functions.matmul(A, B, epilogue="alpha+bias_n", operands=[2, BIAS]),
            "alpha+bias_n", (BIAS,), (2.0,), MATMUL,
        ),
        (lambda: functions.addmm(BIAS, A, B), "bias_n", (BIAS,), (), ADDMM),
        (lambda: functions.addmm(C, A, B, beta=2, alpha=3), "alpha+beta_c", (C,), (3.0, 2.0), ADDMM),
        (lambda: functions.baddbmm(torch.stack((C, C)), AS, BS, beta=2), "beta_c", None, (2.0,), ADDMM),
    ],
)  # fmt: skip
def test_steps_are_asked_for_as_an_epilogue(
    asked: Asked, call: Any, text: str, tensors: Any, numbers: tuple[float, ...], of: int
) -> None:
    assert call() == "fused"
    ((found_call, found_text, found_tensors, found_numbers, *_),) = asked
    assert (found_call, found_text, found_numbers) == (of, text, numbers)
    assert tensors is None or [each is other for each, other in zip(found_tensors, tensors, strict=True)] == [
        True
    ] * len(tensors)


def test_a_dtype_is_asked_for_where_it_is_another(asked: Asked) -> None:
    for dtype, expected in ((None, None), (torch.float32, None), (BF16, BF16)):
        functions.matmul(A, B, out_dtype=dtype)
        assert asked[-1][5] == expected
    with torch.autocast("cpu", dtype=BF16):
        functions.matmul(A, B, out_dtype=torch.float32)
    assert asked[-1][5] is torch.float32, "which autocast would change"
    functions.matmul(A, B, out_dtype=torch.float32, bias=BIAS)
    assert asked[-1][5] is torch.float32


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


def test_an_unknown_keyword_is_named() -> None:
    with pytest.raises(TypeError, match="activate"):
        functions.matmul(A, B, activate="relu")  # type: ignore[call-arg]


def test_interleaved_rows_alternate() -> None:
    gate, up = torch.arange(6).view(3, 2), -torch.arange(6).view(3, 2)
    assert functions.interleave(gate, up).tolist() == [[0, 1], [0, -1], [2, 3], [-2, -3], [4, 5], [-4, -5]]
    assert functions.interleave(gate[:, 0], up[:, 0]).tolist() == [0, 0, 2, -2, 4, -4]


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


def test_what_the_dispatcher_leaves_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions.api, "dispatcher", SimpleNamespace(fused=lambda *_: None))
    assert torch.equal(functions.addmm(C, A, B, beta=2, alpha=3), torch.addmm(C, A, B, beta=2, alpha=3))
    cs = torch.stack((C, -C))
    assert torch.equal(functions.baddbmm(cs, AS, BS, beta=2), torch.baddbmm(cs, AS, BS, beta=2))


@pytest.mark.parametrize(
    ("watched", "modes", "by"), [(True, 1, "torch"), (False, 1, "ours"), (True, 0, "ours")]
)
def test_modes_that_watch_functions_see_mm(
    monkeypatch: pytest.MonkeyPatch, asked: Asked, watched: bool, modes: int, by: str
) -> None:
    monkeypatch.setattr(functions, "function_modes", lambda: modes)
    monkeypatch.setattr(functions, "are_functions_watched", lambda: watched)
    out = torch.empty(3, 5)
    for words in ({}, {"out": out}):
        result = functions.mm(A, B, **words)
        assert torch.equal(result, A @ B) if by == "torch" else result == "plain"
    assert len(asked) == (2 if by == "ours" else 0)


@pytest.mark.parametrize(
    ("dtype", "words", "text", "out_dtype", "accumulation"),
    [
        (torch.float8_e4m3fn, {}, "scale_tensor", None, "two_level"),
        (torch.float8_e4m3fn, {"use_fast_accum": True, "out_dtype": BF16}, "scale_tensor", BF16, "fast"),
        (torch.float8_e4m3fn, {"bias": torch.ones(16)}, "scale_tensor+bias_n", None, "two_level"),
        (torch.int8, {}, "scale_tensor", BF16, "fast"),
        (torch.int8, {"out_dtype": torch.float32}, "scale_tensor", torch.float32, "fast"),
    ],
)  # fmt: skip
def test_scaled_products(
    asked: Asked, dtype: torch.dtype, words: dict[str, Any], text: str, out_dtype: Any, accumulation: str
) -> None:
    a, b, one = torch.zeros(16, 32).to(dtype), torch.zeros(16, 32).to(dtype).t(), torch.ones(())
    assert functions.scaled_mm(a, b, one, one, **words) == "fused"  # type: ignore[comparison-overlap]
    ((call, found, tensors, _, _, found_dtype, found_accumulation),) = asked
    assert (call, found, found_dtype, found_accumulation) == (SCALED_MM, text, out_dtype, accumulation)
    assert len(tensors) == 2 + ("bias" in words)


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
    node = linear._module_node(layer, proxy)
    assert (node is not None) == is_module
    if is_module:
        assert (node.node.op, node.node.target, node.node.args) == ("call_module", "0", (proxy.node,))
    assert linear._module_node(layer, A) is None


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
    assert takeover._has_int8_extents(*given) == has


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
    serve = takeover._of_int8(SimpleNamespace(call_boxed=lambda *_, **__: "torch's"))
    left, right = torch.zeros(3, 4).to(a), torch.zeros(4, 5).to(b)
    assert serve(None, left, right) == (answer or "torch's" if is_asked else "torch's")
    assert len(calls) == is_asked
    assert serve(None, left[0], right) == "torch's" and len(calls) == is_asked
