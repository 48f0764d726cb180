"""vLLM: the plug-in that the entry point `vllm.general_plugins` names. Written for 0.26 to 0.33.

16-bit linear layers and logits call `default_unquantized_gemm`, a name in vLLM's module that its layers look
up; `VLLM_BATCH_INVARIANT` has a separate function. fp8 layers take the first kernel class in a list that can
compute a layer. Only calls with CUDA tensors are served.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch

from tunegemm.choose.policies import read_switch
from tunegemm.dispatch import api, extension
from tunegemm.engines import common
from tunegemm.engines.common import Misfit, of_engine, replace
from tunegemm.generate.blocks import BLOCK

#: Its parent is vLLM's logger, which shows lines of this level.
_log = logging.getLogger("vllm.tunegemm")
_attempt = partial(common.attempt, _log)

#: Our key in `VllmConfig.additional_config`, which is part of the key of vLLM's compile cache.
CONFIG_KEY = "tunegemm"
#: Part of that key, beside the records: says that vLLM's graphs contain the operator of `vllm_gates`.
GATES = "gates"
#: The name of our kernel class for fp8 layers, also in `VLLM_DISABLED_KERNELS`.
FP8_KERNEL = "TunegemmFP8ScaledMMLinearKernel"
#: The name of each of our classes for fp8 layers with block scales.
BLOCK_KERNEL = "TunegemmFp8BlockScaledMMKernel"
#: vLLM's classes for them whose weights keep their layout; FlashInfer's quantises rows in its product.
_FLASHINFER = "FlashInferFp8DeepGEMMDynamicBlockScaledKernel"
_BLOCK_KERNELS = _FLASHINFER, *(f"{of}Fp8BlockScaledMMKernel" for of in ("DeepGemm", "Cutlass", "Triton"))

_LINEAR = "vllm.model_executor.kernels.linear"
_LAYERS = "vllm.model_executor.layers"
_HOPPER = 90


def register() -> None:
    """Serve the engine of this process. May be called again, and without a GPU; raises nothing."""
    gates = read_switch("TUNEGEMM_VLLM_GATES", _log.warning)
    common.install(
        "vllm",
        _log,
        {
            "bf16 and fp16 layers": _sixteen_bits,
            "batch invariance": _batch_invariance,
            "fp8 layers": fp8_layers,
            "fp8 layers with block scales": block_layers,
            "the compile cache's key": partial(configuration, gates=gates),
            "the line at the start": _start,
        },
    )


def _sixteen_bits() -> None:
    def make(own: Any) -> Any:
        def default_unquantized_gemm(
            layer: torch.nn.Module, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
        ) -> torch.Tensor:
            if common.is_served_kind(x, weight):
                return common.linear(x, weight, bias)
            return own(layer, x, weight, bias)

        return default_unquantized_gemm

    replace(f"{_LAYERS}.utils.default_unquantized_gemm", ("layer", "x", "weight", "bias"), make)


def _batch_invariance() -> None:
    _, envs = of_engine("vllm.envs")
    if not envs.VLLM_BATCH_INVARIANT:
        return
    api.policy("batch_invariant", max_sms=extension.policy().max_sms)

    def make(own: Any) -> Any:
        common.own["vllm_invariant"] = own

        def linear_batch_invariant(
            input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
        ) -> torch.Tensor:
            if common.is_served_kind(input, weight):
                return torch.ops.tunegemm.engine_linear(input, weight, bias, "vllm_invariant")
            return own(input, weight, bias)

        return linear_batch_invariant

    for module in ("linear", "vocab_parallel_embedding"):  # each module imports the name
        replace(f"{_LAYERS}.{module}.linear_batch_invariant", ("input", "weight", "bias"), make)


def fp8_layers() -> None:
    _, possible = of_engine(f"{_LINEAR}._POSSIBLE_FP8_KERNELS")
    _, cutlass = of_engine(f"{_LINEAR}.CutlassFP8ScaledMMLinearKernel")
    _, platforms = of_engine("vllm.platforms.PlatformEnum")
    kernels = possible.get(platforms.CUDA)
    if not isinstance(kernels, list):
        raise Misfit("there are no fp8 kernels of CUDA")
    for name in ("is_supported", "process_weights_after_loading", "apply_scaled_mm"):
        of_engine(f"{_LINEAR}.CutlassFP8ScaledMMLinearKernel.{name}")
    if all(kernel.__name__ != FP8_KERNEL for kernel in kernels):
        kernels.insert(0, _fp8_kernel(cutlass))


def _fp8_kernel(cutlass: Any) -> type:
    """The kernel class for fp8 layers.

    It inherits from CUTLASS's class, which prepares weights and computes products without a kernel of ours.
    """
    _, custom_ops = of_engine("vllm._custom_ops")
    _, replace_parameter = of_engine(f"{_LAYERS}.quantization.utils.replace_parameter")

    def cutlass_scaled_mm(
        a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor,
        bias: torch.Tensor | None, out_dtype: torch.dtype,
    ) -> torch.Tensor:  # fmt: skip
        return custom_ops.cutlass_scaled_mm(
            a, b, out_dtype=out_dtype, scale_a=scale_a, scale_b=scale_b, bias=bias
        )

    common.own["vllm_fp8"] = cutlass_scaled_mm

    class Kernel(_on_hopper(cutlass)):  # type: ignore[misc]
        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            super().process_weights_after_loading(layer)
            names = self.layer_param_names
            weight, scale = getattr(layer, names[0]), getattr(layer, names[1])
            by_row = not self.config.activation_quant_key.scale.group_shape.is_per_tensor()
            if by_row and scale.numel() == 1:
                # Kernels take scales of rows and columns, or neither. The expanded scale means the same.
                columns = scale.data.reshape(1, 1).expand(weight.shape[1], 1).contiguous()
                replace_parameter(layer, names[1], columns)

        def apply_scaled_mm(
            self, *, A: torch.Tensor, B: torch.Tensor, out_dtype: torch.dtype, As: torch.Tensor,
            Bs: torch.Tensor, bias: torch.Tensor | None, output_shape: list[int],
        ) -> torch.Tensor:  # fmt: skip
            is_padded = A.shape[1] != B.shape[0] or output_shape[-1] != B.shape[1]
            if is_padded or (bias is not None and bias.dtype != out_dtype):
                return super().apply_scaled_mm(
                    A=A, B=B, out_dtype=out_dtype, As=As, Bs=Bs, bias=bias, output_shape=output_shape
                )
            result = torch.ops.tunegemm.engine_scaled_mm(A, B, As, Bs, bias, out_dtype, "vllm_fp8")
            return result.view(*output_shape)

    Kernel.__name__ = Kernel.__qualname__ = FP8_KERNEL
    return Kernel


def _on_hopper(own: Any) -> Any:
    """A class that inherits from vLLM's class `own`, and is supported on Hopper alone."""
    _, envs = of_engine("vllm.envs")
    _, platform = of_engine("vllm.platforms.current_platform")

    class OnHopper(own):  # type: ignore[misc]
        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            if own.__name__ in envs.VLLM_DISABLED_KERNELS:
                return False, f"falls back to {own.__name__}, which is disabled"
            if getattr(envs, "VLLM_TEST_FORCE_FP8_MARLIN", False):
                return False, "leaves fp8 to Marlin, as VLLM_TEST_FORCE_FP8_MARLIN asks"
            if compute_capability is None:
                results = platform.get_device_capability()
                compute_capability = None if results is None else results.to_int()
            if compute_capability != _HOPPER:
                return False, "requires compute capability 90 (Hopper)"
            return super().is_supported(compute_capability)

    return OnHopper


def block_layers() -> None:
    """Put a class of ours before each of vLLM's: vLLM's own order and conditions decide between them."""
    _, possible = of_engine(f"{_LINEAR}._POSSIBLE_FP8_BLOCK_KERNELS")
    _, platforms = of_engine("vllm.platforms.PlatformEnum")
    kernels = possible.get(platforms.CUDA)
    known = [each for each in kernels if each.__name__ in _BLOCK_KERNELS] if isinstance(kernels, list) else []
    if not known:
        raise Misfit("there are no kernels of CUDA for block scales")
    if all(kernel.__name__ != BLOCK_KERNEL for kernel in kernels):
        for own, ours in [(own, _block_kernel(own)) for own in known]:
            kernels.insert(kernels.index(own), ours)


def _block_kernel(own: Any) -> type:
    """A kernel class for fp8 layers with block scales.

    It inherits from vLLM's class `own`, which prepares weights, quantises rows, and computes products of many
    rows.
    """
    of_engine(f"{_LINEAR}.{own.__name__}.apply_block_scaled_mm", ("self", "A", "B", "As", "Bs"))
    _, quantise = of_engine(f"{_LAYERS}.quantization.utils.fp8_utils.per_token_group_quant_fp8")
    name = f"vllm_{own.__name__}"
    if own.__name__ == _FLASHINFER:
        words = {"group_size": BLOCK, "column_major_scales": True, "use_ue8m0": False}
        common.quantisers[name] = partial(quantise, **words)

    class Kernel(_on_hopper(own)):  # type: ignore[misc]
        @classmethod
        def can_implement(cls, config: Any) -> tuple[bool, str | None]:
            keys = config.activation_quant_key, config.weight_quant_key
            groups = [tuple(key.scale.group_shape) for key in keys]
            if groups != [(1, BLOCK), (BLOCK, BLOCK)] or config.out_dtype != torch.bfloat16:
                return False, "requires blocks of 1x128 and 128x128, and bf16"
            if extension.policy().is_batch_invariant:
                return False, "has no batch-invariant kernels"
            return super().can_implement(config)

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            common.own[name] = super().apply_block_scaled_mm  # the same for all layers

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            super().process_weights_after_loading(layer)
            setattr(layer, common.IN_BLOCKS, True)

        def apply_block_scaled_mm(
            self, A: torch.Tensor, B: torch.Tensor, As: torch.Tensor, Bs: torch.Tensor
        ) -> torch.Tensor:
            return torch.ops.tunegemm.engine_block_scaled_mm(A, B, As, Bs, self.config.out_dtype, name)

    Kernel.__name__ = Kernel.__qualname__ = BLOCK_KERNEL
    return Kernel


def _beside(path: str, parameters: tuple[str, ...], step: Callable[..., object], *, first: bool) -> None:
    """Let a method of the engine's also run a step of ours with its arguments: before it, or after it."""

    def make(own: Any) -> Any:
        @wraps(own)  # another plug-in, or ours once more, looks at its parameters
        def method(*arguments: Any, **words: Any) -> Any:
            if first:
                _attempt(lambda: step(*arguments))
            result = own(*arguments, **words)
            if not first:
                _attempt(lambda: step(*arguments))
            return result

        return method

    replace(path, parameters, make)


def configuration(*, gates: bool) -> None:
    def add(config: Any) -> None:
        if isinstance(config.additional_config, dict) and CONFIG_KEY not in config.additional_config:
            facts = {"served": extension.fingerprint(), "records": extension.fingerprint(anywhere=True)}
            more = {GATES: "with their product"} if gates else {}
            config.additional_config = {**config.additional_config, CONFIG_KEY: facts | more}

    _beside("vllm.config.vllm.VllmConfig.__post_init__", ("self",), add, first=False)


def _start() -> None:
    wrapper = "vllm.v1.worker.worker_base.WorkerWrapperBase"
    _beside(f"{wrapper}.init_device", ("self",), _prepare, first=True)
    _beside(f"{wrapper}.initialize_from_config", ("self", "kv_cache_configs"), report, first=False)


def _prepare(wrapper: Any) -> None:
    """Prepare a worker before it computes.

    Code from the compile cache calls functions that Inductor otherwise learns of only as it traces.
    """
    from tunegemm.torch.lowering import lower

    lower()
    common.lower()
    arguments = facts_of(wrapper.vllm_config)
    if GATES in arguments:
        _attempt(_gates)
    if why := common.compared(arguments.get("records")):
        _log.warning("tunegemm: %s", why)


def _gates() -> None:
    """Make Inductor's code call the operator's function, and rewrite each graph before vLLM compiles it.

    Imports vLLM's compiler, so only processes that compute call this.
    """
    from tunegemm.engines import vllm_gates

    def fuse(backend: Any, graph: torch.fx.GraphModule, *_: Any) -> None:
        if GATES in facts_of(backend.vllm_config):
            vllm_gates.fuse(graph)

    vllm_gates.lower()
    _beside("vllm.compilation.backends.VllmBackend.__call__", ("self", "graph"), fuse, first=True)


def facts_of(config: Any) -> dict[str, Any]:
    """The facts that the process that started the engine passes to those that compute."""
    facts = config.additional_config
    value = facts.get(CONFIG_KEY) if isinstance(facts, dict) else None
    return value if isinstance(value, dict) else {}


def report(wrapper: Any, *_: Any) -> None:
    """Before a worker's first step: the first rank logs served weights, and all ranks learn the others."""
    from tunegemm.engines import vllm_gates

    _, version = of_engine("vllm.__version__")
    most = wrapper.vllm_config.scheduler_config.max_num_batched_tokens
    what = common.served(wrapper.worker.get_model(), most)
    if not wrapper.rpc_rank:
        _log.info(common.said(f"vLLM {version}", what + vllm_gates.said()))
