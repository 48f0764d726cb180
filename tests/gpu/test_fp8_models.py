"""Layers of transformers in fp8 with block scales, by kernels, beside the same weights in fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tunegemm.engines import transformers as ours

pytestmark = pytest.mark.gpu
HIDDEN, INNER, EXPERTS = 1024, 512, 16


@pytest.fixture(scope="module")
def fp8() -> Any:
    """transformers' module; its own products are not there without a download, so none can be by them."""
    pytest.importorskip("transformers")
    from transformers.integrations import finegrained_fp8

    own = finegrained_fp8.fp8_linear
    ours.register()
    yield finegrained_fp8
    finegrained_fp8.fp8_linear = own


def filled(layer: Any) -> Any:
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            is_scale = "scale" in name
            values = torch.rand(parameter.shape) + 0.5 if is_scale else torch.randn(parameter.shape)
            parameter.copy_((values / 64 if is_scale else values).to(parameter.dtype))
    return layer.cuda().requires_grad_(False)


def dequantized(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    across = scale.repeat_interleave(128, -2).repeat_interleave(128, -1)
    return weight.float() * across[..., : weight.shape[-2], : weight.shape[-1]]


def error_of(result: torch.Tensor, expected: torch.Tensor) -> float:
    assert result.shape == expected.shape and result.dtype is torch.bfloat16
    return float((result.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("rows", [1, 17, 64, 65, 300, 1024])
@pytest.mark.parametrize(("n", "k"), [(2048, HIDDEN), (2112, 1536), (136, 640)])
def test_a_layer(fp8: Any, rows: int, n: int, k: int) -> None:
    torch.manual_seed(rows)
    layer = filled(fp8.FP8Linear(k, n, block_size=(128, 128), has_bias=True))
    x = torch.randn(rows, k, dtype=torch.bfloat16, device="cuda")
    expected = x.float() @ dequantized(layer.weight, layer.weight_scale_inv).t() + layer.bias.float()
    assert error_of(layer(x), expected) < 0.04
    steps = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(steps):
        result = layer(x)
    x.neg_()
    steps.replay()
    assert error_of(result, 2 * layer.bias.float() - expected) < 0.04


@pytest.mark.parametrize("tokens", [1, 16, 200])
def test_a_layer_of_experts(fp8: Any, tokens: int) -> None:
    from transformers import MixtralConfig
    from transformers.integrations.moe import use_experts_implementation

    config = MixtralConfig(
        hidden_size=HIDDEN, intermediate_size=INNER, num_local_experts=EXPERTS, num_experts_per_tok=4
    )
    config._experts_implementation = ours.NAME
    made = use_experts_implementation(
        type("Experts", (fp8.FP8Experts,), {}), experts_interface=fp8.ALL_FP8_EXPERTS_FUNCTIONS
    )
    torch.manual_seed(tokens)
    layer = filled(made(config, block_size=(128, 128)))
    x = torch.randn(tokens, HIDDEN, dtype=torch.bfloat16, device="cuda")
    weights, index = torch.rand(tokens, EXPERTS, device="cuda").softmax(1).bfloat16().topk(4)
    gate_up = dequantized(layer.gate_up_proj, layer.gate_up_proj_scale_inv)
    down = dequantized(layer.down_proj, layer.down_proj_scale_inv)
    gate, up = torch.einsum("th,enh->ten", x.float(), gate_up).chunk(2, 2)
    every = torch.einsum("ten,ehn->teh", torch.nn.functional.silu(gate) * up, down)
    chosen = every.gather(1, index[..., None].expand(-1, -1, HIDDEN))
    expected = (chosen * weights[..., None].float()).sum(1)
    with torch.no_grad():
        assert error_of(layer(x, index, weights), expected) < 0.06
