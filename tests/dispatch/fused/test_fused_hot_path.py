"""The short way of a fused call that is known."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

import tunegemm
from tests.support.fusing import layer
from tests.support.serving import BF16, calls_of, deterministic
from tunegemm.describe.epilogue import MAX_WORDS
from tunegemm.dispatch import api
from tunegemm.errors import TunegemmWarning


def test_a_known_call_is_one_check_one_allocation_and_one_launch(by_address):
    kernel = by_address("bias_n")
    x, weight, bias, _ = layer()
    expected = functional.linear(x, weight, bias)
    for call in (lambda: tunegemm.linear(x, weight, bias), lambda: tunegemm.linear(x, weight, bias)):
        assert torch.equal(call(), expected)
        dispatcher = api.dispatcher
        lock, dispatcher.planner.lock = dispatcher.planner.lock, None
        python, c = calls_of(call)
        dispatcher.planner.lock = lock
        before_launch = python[: python.index("tests.support.fusing.launch")]
        assert len(before_launch) <= 6
        assert not any(name.endswith("dispatcher.compute") or "planning" in name for name in before_launch)
        before = c[: c.index("append")]
        assert len(before) <= 11 and "check" in before
        assert not {"stride", "acquire", "execute", "open", "format"} & set(before)
    assert {len(words) for words in kernel.words} == {MAX_WORDS}
    assert all(words[0] == bias.data_ptr() and not any(words[1:]) for words in kernel.words)


@pytest.mark.parametrize(
    "text", ["bias_n+gelu", "residual", "bias_n+relu+residual", "alpha+beta_c+bias_n", "silu"]
)
def test_words_are_those_of_the_call(by_address, text):
    """Other tensors and numbers than those that the plan was made with."""
    kernel = by_address(text)
    x, weight, _, _ = layer()
    problem = kernel.problem
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        given = [
            seed + 0.5
            if each.kind == "number"
            else torch.randint(-3, 4, problem.operand_shape(each), generator=generator).to(BF16)
            for each in problem.fused.operands
        ]
        named = {each.name: value for each, value in zip(problem.fused.operands, given, strict=True)}
        expected = problem.fused.reference(x.float() @ weight.t().float(), named).to(BF16)
        assert torch.equal(tunegemm.matmul(x, weight.t(), epilogue=text, operands=given), expected)
    assert len(kernel.words) == 3


def test_a_bias_at_an_odd_address_is_torchs(by_address):
    kernel = by_address("bias_n")
    x, weight, bias, _ = layer()
    odd = torch.cat((bias[:1], bias))[1:]
    assert odd.data_ptr() % 4 == 2
    expected = functional.linear(x, weight, bias)
    with pytest.warns(TunegemmWarning, match="not a packed, aligned vector"):
        assert torch.equal(tunegemm.linear(x, weight, odd), expected)
    assert not kernel.words
    for each, launches in ((bias, 1), (odd, 1), (bias, 2), (odd, 2)):
        assert torch.equal(tunegemm.linear(x, weight, each), expected)
        assert len(kernel.words) == launches


def test_what_a_known_call_minds(by_address):
    kernel = by_address("bias_n")
    x, weight, bias, _ = layer()
    tunegemm.linear(x, weight, bias)
    for other in (bias.clone(), torch.nn.Parameter(bias, requires_grad=False)):
        assert torch.equal(tunegemm.linear(x, weight, other), functional.linear(x, weight, bias))
    assert len(kernel.words) == 3
    with deterministic():
        tunegemm.linear(x, weight, bias)
    assert len(kernel.words) == 3
    learned = bias.clone().requires_grad_()
    assert tunegemm.linear(x, weight, learned).requires_grad
    with torch.no_grad():
        assert not tunegemm.linear(x, weight, learned).requires_grad
