"""Products with ever new numbers of rows, as steps of a serving engine have: what a plan of one costs."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from tests.support.fusing import FP8, Recorded
from tests.support.serving import BF16, Kernel, dispatcher_of
from tunegemm.choose.predictions import Fitted
from tunegemm.choose.selection import select
from tunegemm.choose.snapshot import Snapshot
from tunegemm.describe.device import find_device
from tunegemm.describe.problem import Problem
from tunegemm.dispatch import planning
from tunegemm.dispatch.dispatcher import Dispatcher
from tunegemm.dispatch.forms import BELOW_AUTOGRAD, MATMUL, form_of
from tunegemm.dispatch.launchers import Prepared

pytestmark = pytest.mark.filterwarnings("ignore::tunegemm.errors.TunegemmWarning")

PLAIN = form_of(BELOW_AUTOGRAD, "")
SCALED = form_of(BELOW_AUTOGRAD, "scale_rowwise", BF16)
DEVICE = find_device("model:h200")


def multiply(served: Dispatcher, dtype: torch.dtype) -> Callable[[int], object]:
    """Asks for a product of so many rows and one weight; None where it is not served."""
    n, k = 4096, 4096
    weight = torch.empty(n, k, dtype=dtype).t()
    rows = torch.empty(4096, k, dtype=dtype)
    scales, of_columns = torch.ones(4096, 1), torch.ones(1, n)
    if dtype is FP8:
        return lambda m: served.fused(SCALED, rows[:m], weight, (scales[:m], of_columns))
    return lambda m: served.fused(PLAIN, rows[:m], weight, ())


@pytest.mark.parametrize("dtype", [BF16, FP8])
def test_a_new_number_of_rows_is_a_look_up(dtype: torch.dtype, monkeypatch) -> None:
    """With the shipped records and trees. To find anew that nothing serves 200 numbers of rows took 110 and
    700 ms (bf16, fp8; a CPU of 2026); each step of 8 layers has four weights."""
    ask = multiply(dispatcher_of(), dtype)
    counted = {"records": 0, "trees": 0}

    def count(what: str, owner: type, name: str) -> None:
        function = getattr(owner, name)

        def counting(*arguments: object) -> object:
            counted[what] += 1
            return function(*arguments)

        monkeypatch.setattr(owner, name, counting)

    count("records", Snapshot, "judged")
    count("trees", Fitted, "expected")
    for m in range(2100, 4097, 100):
        assert ask(m) is None
    first = dict(counted)
    begin = time.process_time()
    assert all(ask(m) is None for m in range(2101, 4096, 10))
    spent_ms = (time.process_time() - begin) * 1e3
    assert counted == first, "looked up again"
    assert first["trees"] <= 10, "an end of a range is asked about once"
    assert spent_ms < 60


def test_what_is_known_of_a_range_is_what_each_of_its_rows_would_be_told(monkeypatch) -> None:
    known = [Problem(m, 512, 256) for m in (8, 96, 640, 2048)]
    snapshot, kernel = Recorded(*known), Kernel()
    served = dispatcher_of(snapshot, prepare=lambda record, _: Prepared(kernel.of(record.problem)))
    a, b = torch.zeros(9000, 256, dtype=BF16), torch.zeros(512, 256, dtype=BF16).t()
    numbers = [1, 2, 7, 8, 9, 95, 96, 97, 300, 639, 640, 641, 1500, 2047, 2048, 2049, 4096, 4097, 9000]
    for m in [*numbers, *reversed(numbers), *range(3, 9000, 601)]:
        expected = bool(select(snapshot, Problem(m, 512, 256), DEVICE).options)
        assert (served.below_autograd(a[:m], b) is not None) == expected, m
    assert served.planner.state.misses, "nothing was remembered"


def test_other_strides_and_addresses_are_not_what_is_known(monkeypatch) -> None:
    """A weight without a kernel says nothing of one like it that lies otherwise."""
    snapshot, kernel = Recorded(Problem(32, 48, 64), Problem(640, 48, 64, b_major="n")), Kernel()
    served = dispatcher_of(snapshot, prepare=lambda record, _: Prepared(kernel.of(record.problem)))
    a, b = torch.zeros(900, 64, dtype=BF16), torch.zeros(48, 64, dtype=BF16).t()
    assert served.below_autograd(a[:640], b) is None and served.below_autograd(a[:641], b) is None
    assert served.below_autograd(a[:640], b.contiguous()) is not None


def test_what_is_known_is_bounded(monkeypatch) -> None:
    """Products of attention have a new "weight" in every step, and slices of rows new strides."""
    monkeypatch.setattr("tunegemm.dispatch.planning.MAX_PLANS", 8)
    dispatcher = dispatcher_of()
    ask = dispatcher.below_autograd
    for n in range(400, 460):
        assert ask(torch.zeros(3000, 4 * n, dtype=BF16)[:, :256], torch.zeros(n, 256, dtype=BF16).t()) is None
    assert 0 < len(dispatcher.planner.state.misses) <= 8


def test_code_for_any_rows_is_served_where_some_are_predicted() -> None:
    """Engines trace with the rows of a long prompt, and generate by the same code."""
    planned = dispatcher_of(prepared=Prepared(lambda *tensors: None)).planner
    form = form_of(MATMUL, "")

    def serves(n: int, rows: int = 8192, **more: bool) -> bool:
        a, b = (torch.empty(each, 8192, dtype=BF16, device="meta") for each in (rows, n))
        return planned.serves(form, a, b.t(), 0, **more)

    assert serves(3088, 16) and serves(3088, any_m=True) and not serves(3088)
    assert not serves(48, any_m=True), "there predictions end"


def test_new_rows_of_linear_are_a_look_up_too(monkeypatch) -> None:
    asked, named = [], planning.named
    monkeypatch.setattr(planning, "named", lambda *call: asked.append(call) or named(*call))
    served = dispatcher_of()
    a, weight = torch.zeros(3002, 256, dtype=BF16), torch.zeros(400, 256, dtype=BF16)
    for m in (3000, 3001, 3002):
        served.linear(a[:m], weight)
    assert len(asked) == 1
