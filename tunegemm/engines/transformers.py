"""transformers: layers of experts, and fp8 models with block scales.

Written for 5.17 to 5.23. transformers has no entry points: a program calls `register` once, before or after
it creates a model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from tunegemm.dispatch.extension import is_hopper
from tunegemm.dispatch.guards import are_plain, has_gradient
from tunegemm.generate.blocks import BLOCK
from tunegemm.groups.gated_experts import experts
from tunegemm.groups.quantize import quantize
from tunegemm.groups.routing import Gate
from tunegemm.layers import mlp
from tunegemm.torch import blocks

NAME = "tunegemm"
_FP8 = torch.float8_e4m3fn


def register() -> None:
    """Register ``config._experts_implementation = "tunegemm"``, and serve `FP8Linear` layers.

    Layers of fp8 weights with fp32 scales of 128x128 blocks and dynamic activations are served on Hopper;
    transformers computes other calls. May be called again. Raises ImportError without transformers.
    """
    from transformers.integrations import finegrained_fp8
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS.register(NAME, fp8_experts_forward)
    if not hasattr(finegrained_fp8.fp8_linear, "tunegemm_replaced"):
        finegrained_fp8.fp8_linear = _in_place_of(finegrained_fp8.fp8_linear)


def _in_place_of(own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`fp8_linear` of transformers, by kernels where they serve; own: transformers' function."""

    @wraps(own)
    def fp8_linear(
        input: torch.Tensor, weight: torch.Tensor, weight_scale_inv: torch.Tensor,
        block_size: Any = None, bias: torch.Tensor | None = None,
        activation_scale: torch.Tensor | None = None, *others: Any, **words: Any,
    ) -> torch.Tensor:  # fmt: skip
        if activation_scale is None and is_served(input, weight, weight_scale_inv, block_size):
            rows = input.reshape(-1, input.shape[-1])
            result = _product(rows, weight, weight_scale_inv)
            if result is not None:
                result = result.view(*input.shape[:-1], weight.shape[0])
                return result if bias is None else result.add_(bias)  # which keeps its dtype
        return own(input, weight, weight_scale_inv, block_size, bias, activation_scale, *others, **words)

    fp8_linear.tunegemm_replaced = own  # type: ignore[attr-defined]
    return fp8_linear


def is_served(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, block_size: Any) -> bool:
    """Whether x and fp8 weights with block scales are operands for our kernels, on a Hopper GPU."""
    return (
        is_hopper(x.device)
        and weight.dtype is _FP8
        and scale.dtype is torch.float32
        and block_size is not None
        and tuple(block_size) == (BLOCK, BLOCK)
        and x.dtype is torch.bfloat16
        and x.numel() > 0
        and not has_gradient(x)
    )


def _product(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor | None:
    """``x @ (weight * scale).T`` for rows that are quantised first; None without a kernel."""
    values, scales = quantize(x)
    given = values, weight.detach().t(), scales, scale.detach().t()
    if blocks.scale_k_of(*given) != BLOCK:  # such as a slice of a weight beside all scales
        return None
    if torch.compiler.is_compiling():
        return blocks.scaled_mm(*given, None, x.dtype, False)
    result = blocks.product(*given, x.dtype)
    if result is None and blocks.torch_takes(*given):
        return torch._scaled_mm(*given, out_dtype=x.dtype)
    return result


def fp8_experts_forward(
    layer: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Compute a layer of fp8 experts as transformers represents it (`FP8Experts`).

    Returns (tokens, hidden). transformers' grouped product computes layers without a gate, and calls that
    `is_served` refuses.
    """
    from transformers.integrations import finegrained_fp8

    given = hidden_states, top_k_index, top_k_weights
    if (
        not layer.has_gate
        or layer.activation_scheme != "dynamic"
        or has_gradient(top_k_weights)
        or not is_served(hidden_states, layer.gate_up_proj, layer.gate_up_proj_scale_inv, layer.block_size)
    ):
        return finegrained_fp8.fp8_grouped_mm_experts_forward(layer, *given)
    limits = ("limit", "swiglu_alpha", "swiglu_limit", "gate_softcap")
    if all(getattr(layer, name, None) is None for name in limits):
        activation = activation_of(layer, finegrained_fp8.FP8Experts._apply_gate)
    else:
        activation = layer._apply_gate
    return experts(
        hidden_states, layer.gate_up_proj.detach(), layer.down_proj.detach(), top_k_index, top_k_weights,
        activation=activation, elsewhere=getattr(layer, "_is_expert_parallel", True),
        gate_up_scale=layer.gate_up_proj_scale_inv.detach(), down_scale=layer.down_proj_scale_inv.detach(),
    )  # fmt: skip


def experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Compute a layer of experts as transformers represents it (`use_experts_implementation`).

    Returns (tokens, hidden). transformers itself computes some layers, with torch's grouped product: layers
    without a gate, layers with a norm after each expert, and compiled layers of dtypes other than bf16.
    """
    from transformers.integrations import moe

    if (
        not getattr(self, "has_gate", True)
        or getattr(self, "has_post_expert_norm", False)
        or (torch.compiler.is_compiling() and self.gate_up_proj.dtype is not torch.bfloat16)
    ):
        return moe.grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
    gate_up, down = self.gate_up_proj, self.down_proj
    if getattr(self, "is_transposed", False):
        gate_up, down = gate_up.mT, down.mT
    dtype = hidden_states.dtype
    if dtype is not gate_up.dtype:  # autocast leaves fp32 before a layer
        hidden_states = hidden_states.to(gate_up.dtype)
    result = experts(
        hidden_states,
        gate_up,
        down,
        top_k_index,
        top_k_weights,
        gate_up_bias=getattr(self, "gate_up_proj_bias", None),
        down_bias=getattr(self, "down_proj_bias", None),
        activation=activation_of(self, getattr(moe, "_default_apply_gate", None)),
        elsewhere=getattr(self, "_is_expert_parallel", True),
    )
    return result if result.dtype is dtype else result.to(dtype)


def activation_of(layer: Any, default_gate: Any) -> Any:
    """The name of a layer's activation.

    For a layer that gates in another way, the `Gate` that computes the same, or else the layer's own function
    of gate and up.
    """
    if type(layer)._apply_gate is default_gate:
        # `str` makes a constant of Dynamo's own, of whose type `experts` may ask (torch 2.13).
        return str(mlp.activation_of(layer.act_fn)) or layer._apply_gate
    if isinstance(limit := getattr(layer, "limit", None), int | float):
        gate = Gate(getattr(layer, "alpha", 1.0), limit)
        if not torch.compiler.is_compiling() and _are_equal(layer, gate):
            return gate
    return layer._apply_gate


equal_gates: dict[tuple[type, Gate], bool] = {}


def _are_equal(layer: Any, gate: Gate) -> bool:
    """Whether a gate computes the same as a layer's own, tested on some numbers once for each class."""
    key = type(layer), gate
    if key not in equal_gates and are_plain():
        numbers = torch.linspace(-3 * gate.limit, 3 * gate.limit, 64, device="cpu").view(2, 32)
        try:
            equal_gates[key] = torch.allclose(layer._apply_gate(numbers), gate(numbers))
        except (RuntimeError, TypeError, AttributeError):  # a gate of another kind
            equal_gates[key] = False
    return equal_gates.get(key, False)
