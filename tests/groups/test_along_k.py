"""Products of groups along k on a CPU: what a stand-in that computes in loops is given; what is torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import grouped_mm as torchs

import tunegemm
from tests.support.grouped import groups_of
from tunegemm.dispatch import api
from tunegemm.errors import ProblemError
from tunegemm.groups import grouped
from tunegemm.model.grouped import AlongKChoice, listed_along_k

BF16 = torch.bfloat16
SIZES, M, N = (3, 0, 9, 1), 48, 64
ENDS = torch.tensor(SIZES).cumsum(0).to(torch.int32)


class Along:
    """The kernel: groups one after the other, in fp32. Products of other kinds are torch's."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, ...]] = []

    def load(self, choice: Any, device: Any) -> Any:
        return self.of if isinstance(choice, AlongKChoice) else None

    def of(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, offs: torch.Tensor) -> Any:
        assert a.stride(1) == b.stride(1) == 1 and out.is_contiguous()
        return self

    def __call__(self, turned: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, out: torch.Tensor) -> None:
        a = turned.mT
        self.calls.append((*out.shape, len(a)))
        first = 0
        for group, end in enumerate(offs.tolist()):
            out[group] = a[first:end].float().t() @ b[first:end].float()
            first = end


@pytest.fixture
def along(serve: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    found = Along()
    choice = AlongKChoice(listed_along_k()[0], 8)
    monkeypatch.setattr(grouped, "choose_along_k", lambda *extents, gpu: choice)
    monkeypatch.setattr(grouped, "groups", groups_of(found.load))
    before = api.serve_by(serve())
    yield found
    api.serve_by(before)


def operands(rows: int = sum(SIZES)) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(rows, M, dtype=BF16), torch.randn(rows, N, dtype=BF16)


def test_a_kernel_serves_what_fits(along: Along) -> None:
    a, b = operands(15)
    result = tunegemm.grouped_mm(a.t(), b, offs=ENDS)
    assert torch.equal(result, torchs(a.t(), b, offs=ENDS)) and not result[1].any()
    wide_a, wide_b = (torch.randn(13, width, dtype=BF16) for width in (M + 8, N + 16))
    a, b = wide_a[:, :M], wide_b[:, 8 : N + 8]
    assert torch.equal(tunegemm.grouped_mm(a.t(), b, offs=ENDS), torchs(a.t(), b, offs=ENDS))
    assert along.calls == [(4, M, N, 15), (4, M, N, 13)]


def unfit() -> dict[str, tuple[Any, ...]]:
    a, b = operands()
    return {
        "a as it lies": (torch.randn(M, 13 + 3, dtype=BF16)[:, :13], b, ENDS),
        "b by columns": (a.t(), torch.randn(N, 16, dtype=BF16).t()[:13], ENDS),
        "n no multiple of 8": (a.t(), torch.randn(13, 16, dtype=BF16)[:, :12], ENDS),
        "lines of no multiple of 16 bytes": (torch.randn(13, M + 4, dtype=BF16)[:, :M].t(), b, ENDS),
        "an address of no 16 bytes": (torch.randn(13, M + 8, dtype=BF16)[:, 1 : M + 1].t(), b, ENDS),
        "fp32": (a.float().t(), b.float(), ENDS),
        "fp16": (a.half().t(), b.half(), ENDS),
        "int64 ends": (a.t(), b, ENDS.long()),
        "no groups": (a.t(), b, ENDS[:0]),
        "no rows": (a[:0].t(), b[:0], torch.zeros(4, dtype=torch.int32)),
        "no ends": (a.t(), b, None),
    }


@pytest.mark.parametrize("name", unfit())
def test_what_does_not_fit_is_torchs(along: Along, name: str) -> None:
    a, b, offs = unfit()[name]
    try:
        expected = torch._grouped_mm(a, b, offs=offs)
    except RuntimeError as error:
        with pytest.raises(type(error)):
            tunegemm.grouped_mm(a, b, offs=offs)
    else:
        assert torch.equal(tunegemm.grouped_mm(a, b, offs=offs), expected)
    assert not along.calls


def test_a_weights_gradient_is_served(along: Along) -> None:
    a, weights = operands()[0], torch.randn(4, N, M, dtype=BF16)
    found = []
    for call in (tunegemm.grouped_mm, torchs):
        x, w = (each.detach().clone().requires_grad_() for each in (a, weights))
        (call(x, w.mT, offs=ENDS).float() ** 2).sum().backward()
        assert x.grad is not None and w.grad is not None and w.grad.stride() == w.stride()
        found.append((x.grad, w.grad))
    assert along.calls == [(4, N, M, 13)]
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


def test_gradients_of_gradients_and_of_such_products_are_torchs(along: Along) -> None:
    a, b = (each.requires_grad_() for each in operands())
    found = []
    for call in (tunegemm.grouped_mm, torch._grouped_mm):
        result = call(a.t(), b, offs=ENDS)
        found.append(torch.autograd.grad(result.float().square().sum(), (a, b)))
    weights = torch.randn(4, N, M, dtype=BF16).requires_grad_()
    for call in (tunegemm.grouped_mm, torch._grouped_mm):
        result = call(a, weights.mT, offs=ENDS).float()
        (of_w,) = torch.autograd.grad(result.pow(3).sum(), weights, create_graph=True)
        found.append(torch.autograd.grad(of_w.float().sum(), (a, weights)))
    for ours, theirs in (found[:2], found[2:]):
        for mine, other in zip(ours, theirs, strict=True):
            assert torch.allclose(mine.float(), other.float(), rtol=2e-2, atol=1e-1)
    assert len(along.calls) == 1  # the last, of which nobody asked for gradients


def test_compiled_code_has_the_gradient_as_an_operator(along: Along) -> None:
    a, weights = operands()[0], torch.randn(4, N, M, dtype=BF16).requires_grad_()
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, w: tunegemm.grouped_mm(x, w.mT, offs=ENDS) * 2, backend="aot_eager", fullgraph=True
    )
    compiled(a, weights).float().square().sum().backward()
    assert along.calls == [(4, N, M, 13)] and weights.grad is not None


def test_ends_are_checked_against_rows(along: Along, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNEGEMM_CHECK_GROUPS", "1")
    api.refresh()
    a, b = operands()
    tunegemm.grouped_mm(a.t(), b, offs=ENDS)
    with pytest.raises(ProblemError, match=r"offs\[3\] is 14, after 12 and with 13 rows"):
        tunegemm.grouped_mm(a.t(), b, offs=ENDS + torch.tensor([0, 0, 0, 1], dtype=torch.int32))
