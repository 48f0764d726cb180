"""Products mean what torch's mean: PyTorch's own samples, and operands that it refuses, with kernels planted.

A stand-in on CPU tensors computes every problem in fp32 and counts; tests/gpu/test_as_torch.py has kernels.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

import tunegemm
from tests.support.as_torch import (
    BUILT_ON,
    OURS,
    PAIRS,
    SECOND,
    TAKEN,
    Outcome,
    StandIn,
    agree,
    check,
    compare,
    difference,
    enabled,
    operators,
    outcome_of,
    strange_operands,
)
from tests.support.fusing import serve_recorded
from tunegemm.describe.precision import computing_fp32_in

DEVICE = "cpu"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: Samples of an operator that are tried each time, and where slow tests run: nearly all, but of the 192 of
#: multi_head_attention_forward, which combine options that torch itself makes the same products of.
MOST_SAMPLES, ALL_SAMPLES = 6, 16


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """Serves every problem of CPU tensors, those of fp32, too."""
    kernel = StandIn()
    serve_recorded(monkeypatch, kernel)
    with warnings.catch_warnings(), computing_fp32_in("tf32"):
        warnings.simplefilter("ignore")
        yield kernel
    tunegemm.disable()


@pytest.fixture(scope="module")
def known() -> dict[str, list[Any]]:
    pytest.importorskip("expecttest", reason="torch.testing._internal imports it: pip install expecttest")
    return operators((*TAKEN, *BUILT_ON))


@pytest.mark.parametrize(
    "dtype", [DTYPES[0], pytest.param(DTYPES[1], marks=pytest.mark.slow), DTYPES[2]], ids=str
)
@pytest.mark.parametrize("name", TAKEN)
def test_products_mean_what_torchs_mean(known, kernel, name, dtype):
    for op in known[name]:
        check(compare(kernel, DEVICE, op, dtype), 0.25)


@pytest.mark.parametrize("name", [name for name in TAKEN if name in OURS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_products_under_autocast_have_its_dtype(known, kernel, name, dtype):
    for op in known[name]:
        check(compare(kernel, DEVICE, op, dtype, MOST_SAMPLES, cast=True), 0.2)


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, *(pytest.param(each, marks=pytest.mark.slow) for each in DTYPES[1:])],
    ids=str,
)
@pytest.mark.parametrize("name", BUILT_ON)
def test_what_is_built_on_products(known, kernel, thorough, name, dtype):
    served = 0
    for op in known[name]:
        if dtype in op.supported_dtypes(DEVICE):
            found = compare(kernel, DEVICE, op, dtype, ALL_SAMPLES if thorough else MOST_SAMPLES)
            check(found, 0.0)
            served += found.served
    if name in ("__rmatmul__", "einsum", "linalg.multi_dot", "tensordot"):
        assert served


# Operands that torch takes or refuses, of every rank


@pytest.mark.parametrize("name", PAIRS)
def test_two_operands_of_every_rank(kernel, name):
    call, ours = PAIRS[name]
    operands = strange_operands(DEVICE, torch.bfloat16)
    served = sum(agree(kernel, call, ours, a, operands[b]) for a in operands.values() for b in SECOND)
    assert served >= (3 if name == "bmm" else 15)


@pytest.mark.parametrize("scalars", [(1, 1), (0, 0.5), (2, 1)])
@pytest.mark.parametrize("name", ["addmm", "baddbmm"])
def test_three_operands_of_every_rank(kernel, name, scalars):
    call, ours = getattr(torch, name), getattr(tunegemm, name)
    operands = strange_operands(DEVICE, torch.bfloat16)
    fitting = {"addmm": ("4x4", "3x4", "negated", "0x4"), "baddbmm": ("2x4x4", "1x4x4", "0x4x4")}[name]
    strange = [operands[each] for each in ("4", "other dtype", "2x4x3", "4x3")]
    products = [(operands[a], operands["4x4" if name == "addmm" else a]) for a in fitting]
    products += [(products[0][0], each) for each in strange] + [(each, products[0][1]) for each in strange]
    keywords = dict(zip(("beta", "alpha"), scalars, strict=True))
    served = sum(
        agree(kernel, call, ours, c, a, b, **keywords) for c in operands.values() for a, b in products
    )
    assert served >= 3


@pytest.mark.parametrize("name", ["mm", "bmm", "matmul", "addmm", "baddbmm"])
def test_outputs_of_every_shape(kernel, name):
    """Written, resized with a warning, or refused."""
    operands = strange_operands(DEVICE, torch.bfloat16)
    a, c = operands["2x4x4" if "bmm" in name else "4x4"], operands["4"]
    given = (c, a, a) if "add" in name else (a, a)
    call, ours = getattr(torch, name), None if "add" in name or name == "mm" else getattr(tunegemm, name)
    for out in operands.values():
        if out.storage_offset() or 0 in out.stride():
            continue
        outcomes = []
        for way in (call, enabled(call), *([ours] if ours else [])):
            mine = out.detach().clone()
            kernel.calls.clear()
            outcomes.append(outcome_of(partial(way, out=mine), given, {}))
            tunegemm.disable()
        for other in outcomes[1:]:
            assert not difference(outcomes[0], other, 2e-2), (name, out.shape, out.dtype)


@pytest.mark.parametrize(
    "scalars", [(1j, 1), (1, 1j), (True, 1), (1, True), (float("nan"), 1), (1, float("inf")), (3, -2)]
)
def test_scalars_of_every_kind(kernel, scalars):
    a = strange_operands(DEVICE, torch.bfloat16)["4x4"]
    agree(kernel, torch.addmm, tunegemm.addmm, a, a, a, beta=scalars[0], alpha=scalars[1])


def test_a_gradient_of_a_c_that_is_not_read(kernel):
    """torch's is of zeros, of C's shape."""
    a, c = torch.ones(4, 4, dtype=torch.bfloat16), torch.ones(4, dtype=torch.bfloat16)
    for alpha in (1, 0.5):
        given = ((c, a, a), {"beta": 0, "alpha": alpha})
        expected = outcome_of(torch.addmm, *given, grad=True)
        assert not difference(expected, outcome_of(tunegemm.addmm, *given, grad=True), 1e-2)


@pytest.mark.parametrize("place", range(4))
def test_negated_views_and_zeros_without_memory(kernel, place):
    """Of operands, C and the output: known products are not mistaken for them."""
    a, b, c = torch.randn(3, 16, 16).bfloat16()
    for lazy in (torch._neg_view, lambda tensor: torch._efficientzerotensor(16, 16, dtype=tensor.dtype)):
        given = [a, b, c]
        out = torch.zeros_like(c)
        tunegemm.addmm(c, a, b)
        tunegemm.matmul(a, b, out=out)
        if place < 3:
            given[place] = lazy(given[place])
            a_, b_, c_ = given
            expected = torch.addmm(c_, a_, b_)
            for result in (tunegemm.addmm(c_, a_, b_), enabled(torch.addmm)(c_, a_, b_)):
                torch.testing.assert_close(result, expected, rtol=2e-2, atol=1e-1)
            expected = torch.matmul(a_, b_)
            for result in (tunegemm.matmul(a_, b_), enabled(torch.matmul)(a_, b_)):
                torch.testing.assert_close(result, expected, rtol=2e-2, atol=1e-1)
        elif lazy is torch._neg_view:
            tunegemm.matmul(a, b, out=lazy(out))
            torch.testing.assert_close(-out, torch.matmul(a, b), rtol=2e-2, atol=1e-1)
        tunegemm.disable()


def test_a_gradient_that_is_a_negated_view(kernel):
    a = torch.randn(32, 64).bfloat16()
    w = torch.randn(48, 64).bfloat16()
    grad = torch._neg_view(torch.randn(32, 48).bfloat16())
    found = []
    for call in (torch.matmul, tunegemm.matmul, enabled(torch.matmul)):
        leaves = [a.clone().requires_grad_(), w.clone().requires_grad_()]
        kernel.calls.clear()
        result = call(leaves[0], leaves[1].t())
        found.append(torch.autograd.grad(result, leaves, grad))
        tunegemm.disable()
        assert len(kernel.calls) == (0 if call is torch.matmul else 3)
    for other in found[1:]:
        assert not difference(Outcome(gradients=[*found[0]]), Outcome(gradients=[*other]), 2e-2)
