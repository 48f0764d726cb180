"""transformers: computes layers of experts with `tunegemm.experts`, as ``experts_implementation="tunegemm"``.

Written for 5.17 to 5.23. transformers has no entry points: a program calls `register` once, before or after
it creates a model.
"""

from __future__ import annotations

from typing import Any

import torch

from tunegemm.groups import grouped
from tunegemm.groups.gated_experts import experts
from tunegemm.groups.routing import Gate

NAME = "tunegemm"


def register() -> None:
    """Register ``config._experts_implementation = "tunegemm"``. Raises ImportError without transformers."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


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


#: The activations that classes of `transformers.activations` and of torch compute.
_ACTIVATIONS = {
    "SiLUActivation": "silu", "SiLU": "silu", "GELUActivation": "gelu", "GELUTanh": "gelu_tanh",
    "ReLU": "relu",
}  # fmt: skip


def activation_of(layer: Any, default_gate: Any) -> Any:
    """The name of a layer's activation.

    For a layer that gates in another way, the `Gate` that computes the same, or else the layer's own function
    of gate and up.
    """
    if type(layer)._apply_gate is default_gate:
        result = type(layer.act_fn).__name__
        if result in _ACTIVATIONS and getattr(layer.act_fn, "approximate", "none") == "none":
            return _ACTIVATIONS[result]
    elif isinstance(limit := getattr(layer, "limit", None), int | float):
        gate = Gate(getattr(layer, "alpha", 1.0), limit)
        if not torch.compiler.is_compiling() and _are_equal(layer, gate):
            return gate
    return layer._apply_gate


equal_gates: dict[tuple[type, Gate], bool] = {}


def _are_equal(layer: Any, gate: Gate) -> bool:
    """Whether a gate computes the same as a layer's own, tested on some numbers once for each class."""
    key = type(layer), gate
    if key not in equal_gates and grouped.are_plain():
        numbers = torch.linspace(-3 * gate.limit, 3 * gate.limit, 64, device="cpu").view(2, 32)
        try:
            equal_gates[key] = torch.allclose(layer._apply_gate(numbers), gate(numbers))
        except (RuntimeError, TypeError, AttributeError):  # a gate of another kind
            equal_gates[key] = False
    return equal_gates.get(key, False)
