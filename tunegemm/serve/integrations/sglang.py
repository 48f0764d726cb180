"""SGLang: what the entry point `sglang.srt.plugins` names. Written for 0.5.23.

Hooks stand around the linear layers of 16 bits and the fp8 product that has a scale for each row and column.
Logits are a `torch.matmul` of SGLang's own, which `tunegemm.enable` serves.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

import tunegemm
from tunegemm.serve import api
from tunegemm.serve.integrations import engines
from tunegemm.serve.integrations.engines import of_engine
from tunegemm.serve.torch import ops

#: SGLang shows what reaches the root of loggers.
_log = logging.getLogger("tunegemm")

_QUANTIZATION = "sglang.srt.layers.quantization"
#: What the process that started the engine serves by, for those that it starts.
_RECORDS = "_TUNEGEMM_SGLANG_RECORDS"

_hooked: set[str] = set()


def register() -> None:
    """Serves the engine of this process. May be called again, and where there is no GPU; raises nothing."""
    parts = {"bf16 and fp16 layers": _sixteen_bits, "fp8 layers": _fp8, "the line at the start": _start}
    engines.install("sglang", _log, parts)


def _around(target: str, parameters: tuple[str, ...], hook: Any) -> None:
    of_engine(target, parameters)
    _, registry = of_engine("sglang.srt.plugins.hook_registry.HookRegistry")
    _, kinds = of_engine("sglang.srt.plugins.hook_registry.HookType")
    if target not in _hooked:
        registry.register(target, hook, kinds.AROUND)
        _hooked.add(target)


def _sixteen_bits() -> None:
    for name in ("get_bf16_gemm_backend", "is_batch_invariant_mode_enabled"):
        of_engine(f"{_QUANTIZATION}.unquant.{name}")
    target = f"{_QUANTIZATION}.unquant.UnquantizedLinearMethod.apply"
    _around(target, ("self", "layer", "x", "bias"), linear)


def _fp8() -> None:
    _around(
        "sglang.kernels.ops.gemm.fp8_scaled_mm",
        ("mat_a", "mat_b", "scales_a", "scales_b", "out_dtype", "bias"),
        scaled_mm,
    )


def linear(
    own: Any, method: Any, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Around `UnquantizedLinearMethod.apply`. A backend that the user chose is left alone, and so is SGLang's
    batch invariance, unless it is tunegemm's policy, too."""
    from sglang.srt.layers.quantization import unquant

    backend = unquant.get_bf16_gemm_backend()
    invariant = unquant.is_batch_invariant_mode_enabled()
    if (
        not engines.is_served_kind(x, layer.weight)
        or backend.is_cutedsl()
        or backend.is_gemv()
        or (invariant and not api.dispatcher.planner.policy.is_batch_invariant)
    ):
        return own(method, layer, x, bias)
    return api.linear(x, engines.plain(layer.weight), bias)


def scaled_mm(
    own: Any,
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    scales_a: torch.Tensor,
    scales_b: torch.Tensor,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Around `fp8_scaled_mm`."""

    def sglangs(
        a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor,
        bias: torch.Tensor | None, out_dtype: torch.dtype,
    ) -> torch.Tensor:  # fmt: skip
        return own(a, b, scale_a, scale_b, out_dtype, bias)

    if mat_a.device.type != ops.DEVICE_TYPE:
        return own(mat_a, mat_b, scales_a, scales_b, out_dtype, bias)
    engines.own.setdefault("sglang_fp8", sglangs)
    return torch.ops.tunegemm.engine_scaled_mm(
        mat_a, mat_b, scales_a, scales_b, bias, out_dtype, "sglang_fp8"
    )


def _start() -> None:
    _, version = of_engine("sglang.__version__")
    mine = engines.fingerprint(anywhere=True)
    is_first = _RECORDS not in os.environ
    given = os.environ.setdefault(_RECORDS, mine)
    if is_first:  # processes that it starts have the variable, too
        _log.info(
            "tunegemm %s in SGLang %s: linear layers by recorded kernels where there are any, logits and "
            "experts by its own; policy %s, records %s",
            tunegemm.__version__, version, api.dispatcher.planner.policy, mine,
        )  # fmt: skip
    elif why := engines.compared(given):
        _log.warning("tunegemm: %s", why)
