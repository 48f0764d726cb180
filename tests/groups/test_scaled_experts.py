"""`experts` with fp8 weights and block scales: beside a loop over tokens, on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

import tunegemm
from tunegemm.errors import ProblemError

EXPERTS, HIDDEN, INNER, CHOSEN = 5, 272, 144, 2
FP8 = torch.float8_e4m3fn
BLOCK = 128


def blocks(*extents: int) -> list[int]:
    return [-(-extent // BLOCK) for extent in extents]


def layer(tokens: int = 9, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "x": torch.randn(tokens, HIDDEN, dtype=dtype),
        "gate_up": (torch.randn(EXPERTS, 2 * INNER, HIDDEN) * 20).to(FP8),
        "down": (torch.randn(EXPERTS, HIDDEN, INNER) * 20).to(FP8),
        "index": torch.stack([torch.randperm(EXPERTS)[:CHOSEN] for _ in range(tokens)]),
        "weights": torch.rand(tokens, CHOSEN, dtype=dtype),
        "gate_up_scale": torch.rand(EXPERTS, *blocks(2 * INNER, HIDDEN)) * 4e-3 + 1e-3,
        "down_scale": torch.rand(EXPERTS, *blocks(HIDDEN, INNER)) * 4e-3 + 1e-3,
    }


def wide(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    expanded = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return weight.float() * expanded[: weight.shape[0], : weight.shape[1]]


def quantised(row: torch.Tensor) -> torch.Tensor:
    """A row as its fp8 values and scales have it."""
    values, scales = tunegemm.quantize(row[None])
    return (values.float() * scales.repeat_interleave(BLOCK, 1)[:, : values.shape[1]])[0]


def by_loops(act: Any, x: Any, gate_up: Any, down: Any, index: Any, weights: Any, **scales: Any) -> Any:
    rows = []
    for token, numbers, shares in zip(x, index.tolist(), weights, strict=True):
        row = torch.zeros(HIDDEN)
        for number, share in zip(numbers, shares, strict=True):
            if 0 <= number < EXPERTS:
                both = wide(gate_up[number], scales["gate_up_scale"][number]) @ quantised(token)
                gate, up = both.bfloat16().chunk(2)
                inner = quantised(act(gate) * up)
                out = wide(down[number], scales["down_scale"][number]) @ inner
                row += share.float() * out.bfloat16().float()
        rows.append(row)
    return torch.stack(rows)


def assert_close(result: torch.Tensor, expected: torch.Tensor) -> None:
    """Sums in another order may round a bf16 value, and so an fp8 one, differently."""
    assert (result.float() - expected).abs().max() < 0.02 * expected.abs().max()


@pytest.mark.parametrize("tokens", [1, 2, 9, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_layer_is_what_loops_give(tokens: int, dtype: torch.dtype) -> None:
    given = layer(tokens, dtype)
    result = tunegemm.experts(**given)
    assert result.dtype is dtype and result.shape == given["x"].shape
    assert_close(result, by_loops(functional.silu, **given))


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_other_activations(activation: Any) -> None:
    given = layer()
    expected = by_loops(getattr(functional, activation), **given)
    assert_close(tunegemm.experts(**given, activation=activation), expected)
    # Gate and up in turns: each expert's rows, in an order that keeps their blocks' scales.
    given["gate_up_scale"] = given["gate_up_scale"][:, :1].expand(-1, 3, -1)
    expected = by_loops(getattr(functional, activation), **given)
    order = torch.stack([torch.arange(INNER), torch.arange(INNER) + INNER], 1).flatten()
    given["gate_up"] = given["gate_up"][:, order]
    assert_close(tunegemm.experts(**given, activation=activation, interleaved=True), expected)


@pytest.mark.parametrize("nobodys", [-1, EXPERTS, 1 << 20])
def test_experts_of_other_processes_add_nothing(nobodys: int) -> None:
    given = layer()
    given["index"][::2, 1] = nobodys
    expected = by_loops(functional.silu, **given)
    assert_close(tunegemm.experts(**given, elsewhere=True), expected)


def test_no_tokens_give_no_rows() -> None:
    given = layer(3)
    given |= {name: given[name][:0] for name in ("x", "index", "weights")}
    assert tunegemm.experts(**given).shape == (0, HIDDEN)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"down_scale": None}, r"down_scale is missing; give \(5, 3, 2\) torch.float32"),
        ({"gate_up_scale": torch.ones(EXPERTS, 3, 2)}, r"gate_up_scale is \(5, 3, 2\).*give \(5, 3, 3\)"),
        ({"gate_up_scale": torch.ones(EXPERTS, 3, 3).bfloat16()}, "torch.bfloat16; give"),
        ({"down": torch.zeros(EXPERTS, HIDDEN, INNER)}, "down is torch.float32; block scales"),
        ({"x": torch.zeros(9, HIDDEN, dtype=torch.int8)}, "x is torch.int8; give bfloat16"),
        ({"x": torch.zeros(9, HIDDEN, requires_grad=True)}, r"no gradient; detach\(\)"),
        ({"down_scale": 1.0}, r"down_scale is 1.0; give \(5, 3, 2\) torch.float32"),
        ({"gate_up_scale": None, "down_scale": None}, "give the scales of their blocks as gate_up_scale"),
        ({"gate_up_bias": torch.zeros(EXPERTS, 2 * INNER)}, "no bias"),
    ],
)
def test_operands_that_are_no_layer_are_named(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(ProblemError, match=named):
        tunegemm.experts(**(layer() | changed))


SLOPE = torch.ones((), requires_grad=True)


@pytest.mark.parametrize(
    ("activation", "named"),
    [
        (lambda both: None, "activation returned None; return"),
        (lambda both: both, r"activation returned \(18, 288\) torch.bfloat16; return \(18, 144\)"),
        (lambda both: both[:, :INNER].double(), "torch.float64"),
        (lambda both: both[:, :INNER] * SLOPE, "no gradient"),
    ],
)
def test_an_activation_that_gives_no_rows_is_named(activation: Any, named: str) -> None:
    with pytest.raises(ProblemError, match=named):
        tunegemm.experts(**layer(), activation=activation)
