"""Models of transformers in fp8 with block scales: what is served, and that it is their product."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from tunegemm.engines import transformers as ours
from tunegemm.torch import blocks

FP8 = torch.float8_e4m3fn
HIDDEN, INNER, EXPERTS = 256, 128, 4


@pytest.fixture
def fp8() -> Iterator[ModuleType]:
    """transformers' module, with `register` undone at the end, and its own products only counted."""
    pytest.importorskip("transformers")
    from transformers.integrations import finegrained_fp8

    own = finegrained_fp8.fp8_linear

    def counted(input: torch.Tensor, weight: torch.Tensor, *others: Any, **words: Any) -> torch.Tensor:
        calls.append((input, weight, *others))
        return input.new_zeros((*input.shape[:-1], weight.shape[0]))

    calls: list[Any] = []
    finegrained_fp8.fp8_linear, finegrained_fp8.calls = counted, calls
    yield finegrained_fp8
    finegrained_fp8.fp8_linear = own
    del finegrained_fp8.calls


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of the CPU are served, by fp32 in place of a kernel."""

    def product(
        a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, dtype: torch.dtype,
        *, scale_k: int = 128,
    ) -> torch.Tensor:  # fmt: skip
        assert scale_k == 128
        return blocks.emulated(a, b, scale_a, scale_b, None, dtype)

    monkeypatch.setattr(ours, "is_hopper", lambda device: True)
    monkeypatch.setattr(blocks, "product", product)


def layer_of(module: ModuleType, **words: Any) -> Any:
    torch.manual_seed(0)
    layer = module.FP8Linear(HIDDEN, 384, **({"block_size": (128, 128)} | words))
    with torch.no_grad():
        layer.weight.copy_(torch.randn(384, HIDDEN).to(FP8))
        layer.weight_scale_inv.copy_(torch.rand(layer.weight_scale_inv.shape) + 0.5)
        if layer.bias is not None:
            layer.bias.copy_(torch.randn(384))
    return layer


def dequantized(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    across = scale.repeat_interleave(128, -2).repeat_interleave(128, -1)
    return weight.float() * across[..., : weight.shape[-2], : weight.shape[-1]]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("shape", [(1, HIDDEN), (3, 5, HIDDEN)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_layer_is_its_product(fp8: ModuleType, shape: tuple[int, ...], has_bias: bool) -> None:
    layer = layer_of(fp8, has_bias=has_bias)
    ours.register()
    ours.register()
    x = torch.randn(shape, dtype=torch.bfloat16)
    for context in (torch.no_grad(), torch.enable_grad()):
        with context:
            result = layer(x)
        expected = x.float() @ dequantized(layer.weight, layer.weight_scale_inv).t()
        if has_bias:
            expected = expected + layer.bias
        error = (result.float() - expected).norm() / expected.norm()
        assert not fp8.calls and result.shape == expected.shape and error < 0.03  # of fp8 rows
        assert result.dtype is x.dtype


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("words", "dtype"),
    [
        ({"block_size": (64, 128)}, torch.bfloat16),
        ({"block_size": None}, torch.bfloat16),
        ({"activation_scheme": "static"}, torch.bfloat16),
        ({"scale_fmt": "ue8m0"}, torch.bfloat16),
        ({}, torch.float16),
        ({}, torch.float32),
    ],
)
def test_transformers_computes_other_layers(
    fp8: ModuleType, words: dict[str, Any], dtype: torch.dtype
) -> None:
    layer = layer_of(fp8, **words)
    ours.register()
    layer(torch.randn(2, HIDDEN, dtype=dtype))
    assert len(fp8.calls) == 1


@pytest.mark.usefixtures("kernels")
def test_transformers_computes_a_slice_of_a_weight_beside_all_scales(fp8: ModuleType) -> None:
    layer = layer_of(fp8)
    ours.register()
    x = torch.randn(2, HIDDEN, dtype=torch.bfloat16)
    fp8.fp8_linear(x, layer.weight[:128], layer.weight_scale_inv, layer.block_size)
    assert len(fp8.calls) == 1


@pytest.mark.usefixtures("kernels")
def test_gradients_are_transformers_and_so_are_empty_inputs(fp8: ModuleType) -> None:
    layer = layer_of(fp8)
    ours.register()
    x = torch.randn(2, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    fp8.fp8_linear(x, layer.weight, layer.weight_scale_inv, layer.block_size)
    fp8.fp8_linear(x[:0].detach(), layer.weight, layer.weight_scale_inv, layer.block_size)
    assert len(fp8.calls) == 2
    if hasattr(fp8, "FP8LinearFunction"):  # in later versions than 5.17; it has a backward pass of its own
        layer(x).sum().backward()
        expected = dequantized(layer.weight, layer.weight_scale_inv).sum(0)
        assert x.grad is not None and len(fp8.calls) == 2
        torch.testing.assert_close(x.grad[0].float(), expected, rtol=0.02, atol=0.2)


def test_transformers_computes_where_no_kernel_serves(
    fp8: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another device; or our device without a kernel, where torch refuses the scales."""
    layer = layer_of(fp8)
    ours.register()
    x = torch.randn(5, HIDDEN, dtype=torch.bfloat16)
    layer(x)
    monkeypatch.setattr(ours, "is_hopper", lambda device: True)
    monkeypatch.setattr(blocks, "product", lambda *given: None)
    layer(x)
    assert len(fp8.calls) == 2


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("limit", [None, 0.5])
def test_experts_are_their_loop(fp8: ModuleType, limit: float | None) -> None:
    from transformers import MixtralConfig
    from transformers.integrations.moe import use_experts_implementation

    config = MixtralConfig(
        hidden_size=HIDDEN, intermediate_size=INNER, num_local_experts=EXPERTS, num_experts_per_tok=2
    )
    config.swiglu_limit = limit
    made = type("Experts", (fp8.FP8Experts,), {})
    made = use_experts_implementation(made, experts_interface=fp8.ALL_FP8_EXPERTS_FUNCTIONS)
    torch.manual_seed(1)
    layer = made(config, block_size=(128, 128))
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            values = torch.rand(parameter.shape) + 0.5 if "scale" in name else torch.randn(parameter.shape)
            parameter.copy_(values.to(parameter.dtype))
    ours.register()
    x = torch.randn(6, HIDDEN, dtype=torch.bfloat16) / 16
    weights, index = torch.rand(6, EXPERTS).softmax(1).to(torch.bfloat16).topk(2)
    results = {}
    for name in ("eager", "tunegemm"):
        config._experts_implementation = name
        with torch.no_grad():
            results[name] = layer(x, index, weights).float()
    assert not fp8.calls
    error = (results["tunegemm"] - results["eager"]).norm() / results["eager"].norm()
    assert error < 0.02 and results["eager"].norm() > 0


@pytest.mark.usefixtures("kernels")
def test_a_compiled_layer_is_served_without_a_break(fp8: ModuleType) -> None:
    layer = layer_of(fp8).requires_grad_(False)
    ours.register()
    x = torch.randn(3, HIDDEN, dtype=torch.bfloat16)
    with torch.no_grad():
        torch.compiler.reset()
        compiled = torch.compile(layer, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), layer(x), rtol=0.02, atol=0.2)
    assert not fp8.calls
