"""Policy `batch_invariant` in dispatch: every number of rows goes to a kernel of the class."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.batch_invariance import product
from tests.choose.test_neighbours import kernel
from tests.support.serving import Kernel, Row, dispatcher_of, operands, quietly, serve_with
from tunegemm.choose.policies import Policy
from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.dispatch.dispatcher import Dispatcher
from tunegemm.dispatch.launchers import Prepared
from tunegemm.errors import TunegemmWarning
from tunegemm.generate.families import reduction_class
from tunegemm.measure.operands import make_operands
from tunegemm.store.record import Record

POLICY = Policy("batch_invariant")
#: Kinds of products that kernels of the class ship for.
KINDS: list[dict[str, str]] = [
    {}, {"dtype": "fp16"}, {"dtype": "fp8_e4m3", "epilogue": "scale_rowwise"}, {"epilogue": "swiglu"},
    {"epilogue": "bias_n+gelu_tanh"},
]  # fmt: skip


@pytest.fixture
def planted(device: Device) -> tuple[Dispatcher, Kernel]:
    """Dispatch that knows a split kernel for 32 rows and one of the class, which is watched, for 64."""
    watched = Kernel()

    def prepare(record: Record, device: Device) -> Prepared:
        assert reduction_class(record.problem, record.candidate) == "ordered"
        return Prepared(watched, tma=True)

    rows = [
        Row(Problem(32, 48, 64), device.fingerprint, kernel(split_k=2)),
        Row(Problem(64, 48, 64), device.fingerprint, kernel(), ratio=0.7),
    ]
    made = dispatcher_of(rows, prepare=prepare, rivals=lambda problem: ())
    made.planner.use(POLICY)
    return made, watched


def test_all_rows_go_to_a_kernel_of_the_class(planted: tuple[Dispatcher, Kernel]) -> None:
    made, watched = planted
    for number, m in enumerate((1, 31, 32, 64, 65, 1000), start=1):
        a, b = operands(m)
        assert torch.equal(made.matmul(a, b), a @ b) and len(watched.calls) == number


def test_further_steps_are_done_to_their_product(planted: tuple[Dispatcher, Kernel]) -> None:
    """Where no kernel does them: torch's call with a bias would multiply by the library."""
    from tunegemm.dispatch.forms import LINEAR, form_of

    made, watched = planted
    x, b = operands(32, dtype=torch.float16)
    bias = torch.arange(48, dtype=x.dtype)
    weight, form = b.t().contiguous(), form_of(LINEAR, "bias_n+relu")
    expected = torch.relu(x @ b + bias)
    with pytest.warns(TunegemmWarning, match="epilogue bias_n"):
        assert torch.equal(made.fused(form, x, weight, (bias,)), expected)
    assert torch.equal(quietly(made.fused, form, x, weight, (bias,)), expected) and len(watched.calls) == 2


def test_compiled_code_asks_for_them_whatever_they_gain(planted: tuple[Dispatcher, Kernel]) -> None:
    from tunegemm.dispatch.forms import MATMUL, form_of

    made, _ = planted
    a, b = operands(33)
    assert made.planner.serves(form_of(MATMUL, ""), a, b, 0)


def test_a_product_that_none_computes_is_a_warning(planted: tuple[Dispatcher, Kernel]) -> None:
    made, watched = planted
    a, b = operands(32)
    b = b.contiguous()  # of another layout
    with pytest.warns(TunegemmWarning, match=r"a row's bits may depend on the number of rows.*tunegemm tune"):
        made.matmul(a, b)
    assert not watched.calls


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: " ".join(kind.values()) or "bf16")
def test_the_benchmarks_calls_are_dispatched(
    monkeypatch: pytest.MonkeyPatch, device: Device, kind: dict[str, Any]
) -> None:
    """And compared: of a kernel on the CPU, whose rows are each their own."""
    problem, watched = Problem.parse("64x48x64", **kind), Kernel()
    made = dispatcher_of(
        [Row(problem, device.fingerprint, kernel())],
        prepare=lambda record, _: Prepared(watched.of(record.problem), tma=True),
    )
    serve_with(monkeypatch, made)
    made.planner.use(POLICY)
    operands = make_operands(problem, torch.device("cpu"), 0).arguments
    result = product(problem)(*operands[:2], *operands[3:])
    assert len(watched.calls) == 1 and result.shape == (64, problem.out_n)
