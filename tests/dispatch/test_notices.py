"""What is said of products that torch computes: once for each weight, and in sum at the end."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.forks import Forks
from tests.support.processes import environment
from tunegemm.describe.problem import Problem
from tunegemm.dispatch import notices
from tunegemm.dispatch.dispatcher import Dispatcher
from tunegemm.dispatch.notices import MOST_WARNINGS, Notices, weight_of
from tunegemm.errors import ProblemError, TunegemmWarning

BF16 = torch.bfloat16


@pytest.fixture
def said() -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


def test_a_weight_is_named_once_for_all_numbers_of_rows(
    serve: Callable[..., Dispatcher], said: list[warnings.WarningMessage]
) -> None:
    dispatcher = serve()
    for n in (48, 56):
        for m in range(1, 200):
            dispatcher.matmul(torch.ones(m, 64, dtype=BF16), torch.ones(64, n, dtype=BF16))
    ours = [str(one.message) for one in said if one.category is TunegemmWarning]
    assert len(ours) == 2 and "1x48x64" in ours[0] and "tunegemm tune --shape 1x56x64" in ours[1]


def test_after_so_many_warnings_there_are_no_more(said: list[warnings.WarningMessage]) -> None:
    notices, made = Notices(), []
    for number in range(3 * MOST_WARNINGS):
        notices.warn(lambda: made.append(1) or "a product falls back", number)
    assert len(said) == len(made) == MOST_WARNINGS + 1
    assert ", the last one" in str(said[-1].message)
    notices.forget()
    notices.warn("again", 0)
    assert str(said[-1].message) == "again"


def test_weights_do_not_depend_on_rows_alone() -> None:
    one = Problem(16, 64, 128)
    assert weight_of(one) == weight_of(Problem(4096, 64, 128)) == weight_of(Problem(16, 64, 128, batch=3))
    assert weight_of(one) != weight_of(Problem(16, 64, 128, epilogue="bias_n"))
    assert weight_of(one) != weight_of(Problem(16, 128, 64))


_PROGRAM = """
import warnings
warnings.simplefilter("ignore")
import torch
from tunegemm.describe.device import find_device
from tunegemm.dispatch import notices
from tunegemm.dispatch.dispatcher import Dispatcher
from tunegemm.dispatch.planning import Planner
from tunegemm.choose.snapshot import Snapshot
device = find_device("model:h200")
served = Dispatcher(Planner(device_type="cpu", find=lambda spec: device, read=lambda: Snapshot()))
for m in (3, 700, 12):
    served.matmul(torch.ones(m, 64, dtype=torch.bfloat16), torch.ones(64, 48, dtype=torch.bfloat16))
"""


@pytest.mark.parametrize("asked", ["1", "0", ""])
def test_a_program_that_asks_for_it_gets_a_summary(asked: str, forks: Forks, tmp_path: Path) -> None:
    run = forks.run(_PROGRAM, env=environment(TUNEGEMM_SUMMARY=asked), cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    lines = [line for line in run.stderr.splitlines() if line.startswith("tunegemm:")]
    if asked != "1":
        assert not lines
        return
    (line,) = lines
    assert "700x48x64" in line and "from 3 up" in line and "tunegemm tune --shape 700x48x64" in line


def test_a_summary_names_each_weight_with_its_most_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "MOST_WEIGHTS", 2)
    found = notices.Notices()
    found.untuned(Problem(1, 64, 64))
    assert not found.sums_up and found.summary() == []
    monkeypatch.setattr(notices.atexit, "register", lambda *_: None)
    found.sum_up()
    assert found.sums_up
    for m in (16, 8, 32):
        found.untuned(Problem(m, 64, 64))
    assert found.summary() == [
        "torch computed 32x64x64 bf16 tn and other numbers of rows from 8 up, without a record: "
        "tunegemm tune --shape 32x64x64 --dtype bf16 --layout tn"
    ]
    found.untuned(Problem(8, 64, 128))
    found.untuned(Problem(8, 64, 256))
    assert found.summary()[1:] == [
        "torch computed 8x64x128 bf16 tn, without a record: "
        "tunegemm tune --shape 8x64x128 --dtype bf16 --layout tn",
        "further products than these 2 also ran in torch",
    ]


def test_errors_and_callers_by_their_names() -> None:
    class Odd(Exception):
        pass

    errors = (KeyError("x"), Odd(), Odd("why"), ValueError("bad"), RuntimeError("no"), ProblemError("odd"))
    assert [notices.named_error(error) for error in errors] == [
        "KeyError: 'x'", "Odd", "Odd: why", "bad", "no", "odd"
    ]  # fmt: skip
    assert (notices.who("matmul"), notices.who("")) == ("tunegemm.matmul", "tunegemm")


def test_another_kind_of_product_is_another_warning(
    serve: Callable[..., Dispatcher], said: list[warnings.WarningMessage]
) -> None:
    dispatcher = serve()
    x, w = torch.ones(32, 64, dtype=BF16), torch.ones(48, 64, dtype=BF16)
    for _ in range(2):
        dispatcher.matmul(x, w.t())
        dispatcher.linear(x, w, torch.ones(48, dtype=BF16))
        dispatcher.matmul(x.half(), w.t().half())
    assert len([one for one in said if one.category is TunegemmWarning]) == 3
