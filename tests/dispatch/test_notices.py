"""What is said of products that torch computes: once for each weight."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch

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
