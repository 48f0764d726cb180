"""SGLang: the plug-in that the entry point `sglang.srt.plugins` names. Written for 0.5.23.

Hooks wrap the 16-bit linear layers and the fp8 products with a scale for each row and column, or with block
scales. SGLang computes logits with `torch.matmul`, which `tunegemm.enable` serves. This plug-in has not been
timed on any GPU; it stays as a test of the parts of `common` that a second engine needs.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tunegemm.dispatch import extension
from tunegemm.engines import common
from tunegemm.engines.common import of_engine
from tunegemm.generate.blocks import BLOCK
from tunegemm.torch import ops

#: SGLang shows messages that reach the root logger.
_log = logging.getLogger("tunegemm")

_QUANTIZATION = "sglang.srt.layers.quantization"
RUNNER = "sglang.srt.model_executor.model_runner"
SCHEDULER = "sglang.srt.managers.scheduler"
#: The variable that passes the fingerprint of records from the engine's process to those that it starts.
RECORDS = "_TUNEGEMM_SGLANG_RECORDS"

#: Rows of the weights and values of k that share a scale.
_BLOCKS = [BLOCK, BLOCK]
#: Tokens in a step of prompts, by default.
_STEP = 8192

#: Classes of layers whose method computes no served product.
_LEFT_OUT = ("VocabParallelEmbedding", "ParallelLMHead")

hooked: set[str] = set()


def register() -> None:
    """Serve the engine of this process. May be called again, and without a GPU; raises nothing."""
    parts = {
        "bf16 and fp16 layers": sixteen_bits, "fp8 layers": _fp8, "fp8 layers with block scales": blocks,
        "the line at the start": start_line,
    }  # fmt: skip
    common.install("sglang", _log, parts)


def around(target: str, parameters: tuple[str, ...], make: Callable[[Any], Any]) -> None:
    """Register `make`'s hook for the function at a target, once."""
    if target in hooked:
        return
    _, own = of_engine(target, parameters)
    _, registry = of_engine("sglang.srt.plugins.hook_registry.HookRegistry")
    _, kinds = of_engine("sglang.srt.plugins.hook_registry.HookType")
    registry.register(target, make(own), kinds.AROUND)
    hooked.add(target)


def sixteen_bits() -> None:
    target = f"{_QUANTIZATION}.unquant.UnquantizedLinearMethod.apply"
    for name in ("get_bf16_gemm_backend", "is_batch_invariant_mode_enabled"):
        unquant, _ = of_engine(f"{_QUANTIZATION}.unquant.{name}")

    def linear(
        own: Any, method: Any, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        # Keep a backend that the user chose, and SGLang's batch invariance unless our policy has it, too.
        backend = unquant.get_bf16_gemm_backend()
        weight: Any = layer.weight
        others = unquant.is_batch_invariant_mode_enabled() and not extension.policy().is_batch_invariant
        if others or backend.is_cutedsl() or backend.is_gemv() or not common.is_served_kind(x, weight):
            return own(method, layer, x, bias)
        return common.linear(x, weight, bias)

    around(target, ("self", "layer", "x", "bias"), lambda own: linear)


def _fp8() -> None:
    def make(own: Any) -> Any:
        def sglangs(
            a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor,
            bias: torch.Tensor | None, out_dtype: torch.dtype,
        ) -> torch.Tensor:  # fmt: skip
            return own(a, b, scale_a, scale_b, out_dtype, bias)

        common.own["sglang_fp8"] = sglangs
        return scaled_mm

    parameters = ("mat_a", "mat_b", "scales_a", "scales_b", "out_dtype", "bias")
    around("sglang.kernels.ops.gemm.fp8_scaled_mm", parameters, make)


def scaled_mm(
    own: Any, mat_a: torch.Tensor, mat_b: torch.Tensor, scales_a: torch.Tensor, scales_b: torch.Tensor,
    out_dtype: torch.dtype, bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    if mat_a.device.type != ops.DEVICE_TYPE:
        return own(mat_a, mat_b, scales_a, scales_b, out_dtype, bias)
    return torch.ops.tunegemm.engine_scaled_mm(
        mat_a, mat_b, scales_a, scales_b, bias, out_dtype, "sglang_fp8"
    )


def blocks() -> None:
    """Both products that SGLang chooses between on a Hopper GPU."""
    parameters = ("A", "B", "As", "Bs", "block_size", "output_dtype")
    _, is_invariant = of_engine("sglang.srt.batch_invariant_ops.is_batch_invariant_mode_enabled")

    def make(name: str) -> Callable[[Any], Any]:
        def hook(own: Any) -> Any:
            common.own[name] = partial(own, block_size=_BLOCKS, output_dtype=torch.bfloat16)
            return product

        def product(
            own: Any, A: torch.Tensor, B: torch.Tensor, As: torch.Tensor, Bs: torch.Tensor,
            block_size: list[int], output_dtype: torch.dtype = torch.float16,
        ) -> torch.Tensor:  # fmt: skip
            is_other = A.device.type != ops.DEVICE_TYPE or A.ndim != 2 or output_dtype != torch.bfloat16
            if is_other or block_size != _BLOCKS or is_invariant() or extension.policy().is_batch_invariant:
                return own(A, B, As, Bs, block_size, output_dtype)
            return torch.ops.tunegemm.engine_block_scaled_mm(A, B, As, Bs, output_dtype, name)

        return hook

    for product in ("deepgemm", "triton"):
        target = f"sglang.kernels.ops.gemm.fp8_kernel.w8a8_block_fp8_matmul_{product}"
        around(target, parameters, make(f"sglang_{product}"))


def start_line() -> None:
    # Processes that this one starts inherit the variable.
    value = os.environ.setdefault(RECORDS, extension.fingerprint(anywhere=True))
    if why := common.compared(value):
        _log.warning("tunegemm: %s", why)
    if SCHEDULER in sys.modules:  # loaded in processes that compute; elsewhere imports would take seconds
        around(f"{RUNNER}.ModelRunner.load_model", ("self",), lambda own: _load)


def _load(own: Any, runner: Any) -> None:
    """Load the model. The first rank then logs the served weights, and all ranks learn the others."""
    own(runner)
    common.attempt(_log, lambda: report(runner))


def report(runner: Any) -> None:
    _, version = of_engine("sglang.__version__")
    step = runner.server_args.chunked_prefill_size
    most = step if isinstance(step, int) and step > 0 else _STEP
    summary = common.served(runner.model, most, left_out=_LEFT_OUT, all_blocks=True)
    _, ranks = of_engine("sglang.srt.runtime_context.get_parallel")
    if not ranks().tp_rank:
        _log.info(common.said(f"SGLang {version}", f"{summary}, logits by its own"))
