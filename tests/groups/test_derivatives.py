"""Forward-mode AD and gradients of operators without a derivative: torch's error, never a silent zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, jvp, vmap

import tunegemm
from tunegemm.dispatch import extension
from tunegemm.groups import gated_experts  # noqa: F401 (defines operators)
from tunegemm.torch import blocks

FP8, BF16, F32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32
torch.manual_seed(0)
OFFS = torch.tensor([4, 16], dtype=torch.int32)
X, A, WEIGHTS = torch.randn(16, 256), torch.randn(16, 256).to(FP8), torch.randn(2, 128, 256).to(FP8)
OF_A, OF_WEIGHTS = torch.rand(16, 2), torch.rand(2, 1, 2)
GATE_UP, DOWN = torch.randn(2, 256, 256).to(BF16), torch.randn(2, 256, 128).to(BF16)
INDEX, SHARES = torch.tensor([[0, 1]] * 16), torch.rand(16, 2)
AS_FP8 = {"gate_up_scale": torch.rand(2, 2, 2), "down_scale": torch.rand(2, 2, 1)}


def in_blocks(scale: torch.Tensor) -> torch.Tensor:
    return tunegemm.scaled_mm(A, WEIGHTS[0].t(), scale, OF_WEIGHTS[0].t(), out_dtype=F32)


#: Of one operand. Torch has no derivative of these either, or does not support them.
CALLS: dict[str, tuple[Callable[[torch.Tensor], Any], torch.Tensor]] = {
    "quantize": (tunegemm.quantize, X),
    "quantize with a gate": (lambda x: tunegemm.quantize(x, gate="swiglu"), X),
    "scaled_mm": (
        lambda scale: tunegemm.scaled_mm(A, WEIGHTS[0].t(), scale, torch.ones(1, 128), out_dtype=BF16),
        torch.rand(16, 1),
    ),
    "groups with scales of rows": (
        lambda scale: tunegemm.scaled_grouped_mm(
            A, WEIGHTS.mT, scale, torch.ones(2, 128), offs=OFFS, out_dtype=BF16
        ),
        torch.rand(16),
    ),
    "groups with block scales": (
        lambda scale: tunegemm.scaled_grouped_mm(A, WEIGHTS.mT, scale, OF_WEIGHTS.mT, offs=OFFS),
        OF_A,
    ),
    "fp8 weights in groups": (
        lambda weights: tunegemm.scaled_grouped_mm(A, weights.mT, OF_A, OF_WEIGHTS.mT, offs=OFFS),
        WEIGHTS,
    ),
    "grouped_mm": (lambda x: tunegemm.grouped_mm(x, DOWN, offs=OFFS), X.bfloat16()),
    "the operator grouped_mm": (lambda x: torch.ops.tunegemm.grouped_mm(x, DOWN, OFFS), X.bfloat16()),
    "groups along k": (lambda x: torch.ops.tunegemm.grouped_along_k(x.t(), X.bfloat16(), OFFS), X.bfloat16()),
    "the operator experts": (
        lambda x: torch.ops.tunegemm.experts(
            x, GATE_UP, DOWN, INDEX, SHARES, *[None] * 4, "silu", None, False, False
        ),
        X.bfloat16(),
    ),
    "experts": (lambda x: tunegemm.experts(x, GATE_UP, DOWN, INDEX, SHARES), X.bfloat16()),
    "fp8 experts": (
        lambda x: tunegemm.experts(x, GATE_UP.to(FP8), DOWN.to(FP8), INDEX, SHARES, **AS_FP8),
        X,
    ),
}  # fmt: skip


def forward(call: Callable[[torch.Tensor], Any], x: torch.Tensor) -> Any:
    with forward_ad.dual_level():
        return call(forward_ad.make_dual(x, torch.ones_like(x)))


WAYS: dict[str, Callable[[Callable[[torch.Tensor], Any], torch.Tensor], Any]] = {
    "a dual tensor": forward,
    "jvp": lambda call, x: jvp(call, (x,), (x,)),
    "jvp of vmap": lambda call, x: jvp(vmap(call), (torch.stack((x, x)),), (torch.stack((x, x)),)),
    "a compiled call": lambda call, x: forward(torch.compile(call, backend="aot_eager"), x),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CALLS)
def test_a_tangent_raises_torchs_error(name: str, way: str) -> None:
    torch._dynamo.reset()
    call, x = CALLS[name]
    with pytest.raises(NotImplementedError, match=r"Trying to use forward AD with .* does not support it"):
        WAYS[way](call, x)


@pytest.mark.parametrize(
    ("call", "factors"),
    [
        (in_blocks, OF_A),
        (lambda shares: tunegemm.experts(X.bfloat16(), GATE_UP, DOWN, INDEX, shares), SHARES),
    ],
    ids=["block scales", "shares of experts"],
)  # fmt: skip
def test_what_is_linear_has_itself_as_derivative(call: Any, factors: torch.Tensor) -> None:
    result, tangent = jvp(call, (factors,), (factors,))
    torch.testing.assert_close(tangent, result)


def test_no_tangent_is_no_error() -> None:
    """Only operands count, not the mode."""
    for name in ("quantize", "groups with block scales", "the operator grouped_mm", "experts", "fp8 experts"):
        call, x = CALLS[name]
        with forward_ad.dual_level():
            inside = call(x)
        results = map(_several, (call(x), inside, vmap(call)(torch.stack((x, x)))))
        for wanted, found, of_two in zip(*results, strict=True):
            for each in (found, *of_two):  # transforms round the shares of experts later
                error = (each.float() - wanted.float()).norm() / wanted.float().norm()
                assert float(error) <= (4e-3 if "experts" in name else 0), name


def _several(results: Any) -> tuple[torch.Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_gradient_of_fp8_weights_is_refused_in_the_backward_pass(compiled: bool) -> None:
    """As torch._scaled_mm refuses it: a frozen parameter may be multiplied, and other gradients pass."""
    call, weights = CALLS["fp8 weights in groups"]
    call = torch.compile(call, backend="eager") if compiled else call
    result = call(torch.nn.Parameter(weights))
    assert torch.equal(result, call(weights)) and result.requires_grad
    with pytest.raises(
        RuntimeError, match="derivative for tunegemm::scaled_grouped_blocks is not implemented"
    ):
        result.sum().backward()
    with pytest.raises(
        RuntimeError, match="derivative for tunegemm::scaled_grouped_blocks is not implemented"
    ):
        grad(lambda weights: call(weights).float().sum())(weights)
    factor = torch.ones(1, requires_grad=True)
    (call(weights) * factor).sum().backward()
    assert factor.grad is not None and float(factor.grad) == pytest.approx(
        float(call(weights).float().sum()), rel=1e-2
    )


def test_kernels_refuse_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    served = torch.zeros(16, 128)
    monkeypatch.setattr(blocks, "product", lambda *_, scale_k: served)
    weight = torch.nn.Parameter(WEIGHTS[0])
    result = tunegemm.scaled_mm(A, weight.t(), OF_A, OF_WEIGHTS[0].t(), out_dtype=F32)
    with pytest.raises(RuntimeError, match=r"derivative for tunegemm\.scaled_mm is not implemented"):
        result.sum().backward()
    assert not in_blocks(OF_A).requires_grad
    with torch.no_grad():
        assert extension.undifferentiable("a name", served, weight) is served
    assert extension.undifferentiable("a name", served, weight.detach()) is served


@pytest.mark.filterwarnings("ignore")
def test_transforms_of_the_operator_of_groups_are_torchs() -> None:
    a, b = X.bfloat16(), DOWN

    def of(product: Any) -> Any:
        return lambda a: product(a).float().pow(2).sum()

    ours = lambda a: torch.ops.tunegemm.grouped_mm(a, b, OFFS)  # noqa: E731
    theirs = lambda a: torch._grouped_mm(a, b, offs=OFFS)  # noqa: E731
    for transform in (grad, lambda call: lambda a: vmap(grad(call))(torch.stack((a, 2 * a)))):
        assert torch.equal(transform(of(ours))(a), transform(of(theirs))(a))
