"""`scaled_grouped_mm` on a CPU, where torch has none: what a stand-in is given, and what is torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tunegemm
from tests.support.grouped import Loops
from tunegemm.torch import takeover

GROUPS, N, K = 3, 48, 64
BF16 = torch.bfloat16


def operands() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    a = torch.randn(9, K).to(torch.float8_e4m3fn)
    b = torch.randn(GROUPS, N, K).to(torch.float8_e4m3fn).mT
    offs = torch.tensor([4, 4, 9], dtype=torch.int32)
    return a, b, torch.rand(9) + 0.5, torch.rand(GROUPS, N) + 0.5, offs


def call(**changes: Any) -> torch.Tensor:
    a, b, scale_a, scale_b, offs = operands()
    words = {"offs": offs, "out_dtype": BF16, "use_fast_accum": True} | changes
    places = [words.pop(name, value) for name, value in zip("ab", (a, b), strict=True)]
    places += [words.pop(name, value) for name, value in (("scale_a", scale_a), ("scale_b", scale_b))]
    return tunegemm.scaled_grouped_mm(*places, **words)


def expected() -> torch.Tensor:
    a, b, scale_a, scale_b, _ = operands()
    group = torch.tensor([0] * 4 + [2] * 5)
    product = torch.einsum("rk,rkn->rn", a.float(), b.float()[group])
    return product * scale_a[:, None] * scale_b[group]


def test_a_kernel_is_given_both_scales(loops: Loops) -> None:
    torch.testing.assert_close(call().float(), expected(), rtol=1e-2, atol=1e-2)
    assert loops.calls == [(9, GROUPS, N, K, "scale_rowwise")]


def test_a_takeover_serves_torchs_operator(loops: Loops, monkeypatch: pytest.MonkeyPatch) -> None:
    # torch has no kernel of it for a CPU, but may be given one, below which ours is not.
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_grouped_mm", lambda *_, **__: torch.zeros(()), "CPU")
    try:
        monkeypatch.setattr(takeover, "DEVICE_KEYS", ("CPU",))
        a, b, scale_a, scale_b, offs = operands()
        with takeover.enable():
            run: Callable[..., torch.Tensor] = torch._scaled_grouped_mm
            found = run(a, b, scale_a, scale_b, offs=offs, out_dtype=BF16, use_fast_accum=True)
            assert run(a, b, scale_a, scale_b, offs=offs, out_dtype=BF16).ndim == 0
        torch.testing.assert_close(found.float(), expected(), rtol=1e-2, atol=1e-2)
        assert len(loops.calls) == 1
    finally:
        library._destroy()


UNFIT: dict[str, dict[str, Any]] = {
    "exact sums": {"use_fast_accum": False},
    "fp32": {"out_dtype": torch.float32},
    "no dtype of the result": {"out_dtype": None},
    "a bias": {"bias": torch.zeros(N)},
    "no groups": {"offs": None},
    "bf16 scales": {"scale_a": torch.ones(9, dtype=BF16)},
    "too few scales": {"scale_a": torch.ones(8)},
    "scales of one group": {"scale_b": torch.ones(N)},
    "a is fp32": {"a": torch.randn(9, K)},
    "b by rows": {"b": torch.randn(GROUPS, K, N).to(torch.float8_e4m3fn)},
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_does_not_fit_is_torchs_to_refuse(loops: Loops, name: str) -> None:
    with pytest.raises((NotImplementedError, RuntimeError, ValueError)):  # which it is differs by version
        call(**UNFIT[name])
    assert loops.calls == []
