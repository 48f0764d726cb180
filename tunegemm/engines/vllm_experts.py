"""vLLM: layers of bf16 experts, by `tunegemm.experts`. Written for 0.26 to 0.33.

vLLM has classes of experts, of which the first that supports a layer computes it: on Hopper that is Triton's.
Ours is a subclass, and leaves to it all that grouped products do not serve: what is quantised, LoRA, experts
that a map places on other ranks, other gates, and batches for which no kernel is known to be faster. Tensor
parallelism shows in the weights' sizes alone.
"""

from __future__ import annotations

from typing import Any

import torch

from tunegemm.engines.common import Asker, of_engine, plain, replace
from tunegemm.groups import gated_experts

#: The class, as vLLM's log names it.
EXPERTS = "TunegemmExperts"
FAMILY = "grouped"
_FUSED = "vllm.model_executor.layers.fused_moe"
_SILU = f"{_FUSED}.activation.MoEActivation.SILU"
_PARAMETERS = (
    "self", "output", "hidden_states", "w1", "w2", "topk_weights", "topk_ids", "activation",
    "global_num_experts", "expert_map", "a1q_scale", "a2_scale", "workspace13", "workspace2",
    "expert_tokens_meta", "apply_router_weight_on_input",
)  # fmt: skip


def serve_experts() -> None:
    """Puts the class before Triton's. Raises Misfit for a version that is not known."""
    triton = f"{_FUSED}.experts.triton_moe.TritonExperts"
    _, own_class = of_engine(triton)
    of_engine(f"{triton}.apply", _PARAMETERS)
    ours = _class(own_class)

    def make(own: Any) -> Any:
        def backend_to_kernel_cls(backend: Any) -> list[Any]:
            found = list(own(backend))
            return [ours, *found] if found[:1] == [own_class] else found

        return backend_to_kernel_cls

    replace(f"{_FUSED}.oracle.unquantized.backend_to_kernel_cls", ("backend",), make)


def _class(own: Any) -> type:
    """The class of experts: Triton's, whose products of 16 bits are ours where they are served."""
    _, silu = of_engine(_SILU)

    class Experts(own):  # type: ignore[misc]
        @staticmethod
        def _supports_batch_invariance() -> bool:
            return False  # the kernel goes by the number of rows

        def apply(self, *arguments: Any, **words: Any) -> None:
            given = dict(zip(_PARAMETERS[1:], arguments, strict=False)) | words
            result = _computed(self, given) if given["activation"] == silu else None
            if result is None:
                super().apply(**given)
            elif result is not given["output"]:
                given["output"].copy_(result)

    Experts.__name__ = Experts.__qualname__ = EXPERTS
    return Experts


def asker(layer: Any) -> Asker | None:
    """Asks of a layer of experts, by its tokens; None where Triton computes it whatever they are."""
    of_method = getattr(layer.quant_method, "experts_cls", None)
    _, silu = of_engine(_SILU)
    if (
        getattr(of_method, "__name__", "") != EXPERTS
        or layer.activation != silu
        or layer.expert_map is not None
        or layer.apply_router_weight_on_input
        or getattr(layer, "swiglu_limit", None) is not None
    ):
        return None
    up, down, chosen = layer.w13_weight, layer.w2_weight, layer.top_k

    def family(tokens: int) -> str:
        sides = tuple(up.shape[1:]), tuple(down.shape[1:])
        is_chosen = gated_experts.are_chosen(
            up.shape[0], *sides, tokens * chosen, up.dtype, up.device, ordered=gated_experts.is_ordered()
        )
        return FAMILY if is_chosen else ""

    return family


def _computed(experts: Any, given: dict[str, Any]) -> torch.Tensor | None:
    """A layer with silu's gate; None where Triton is to compute it."""
    config = experts.quant_config
    if (
        given["expert_map"] is not None
        or given["a1q_scale"] is not None
        or given["a2_scale"] is not None
        or given["apply_router_weight_on_input"]
        or config.quant_dtype is not None
        or config.weight_quant_dtype is not None
        or config.gemm1_clamp_limit is not None
        or getattr(getattr(experts, "activation_config", None), "clamp_limit", None) is not None
        or getattr(experts, "_lora_context", None) is not None
    ):
        return None
    return gated_experts.served(
        given["hidden_states"], plain(given["w1"]), plain(given["w2"]), given["topk_ids"],
        given["topk_weights"], gate_up_bias=config.w1_bias, down_bias=config.w2_bias, out=given["output"],
    )  # fmt: skip
