"""Serves ATen's grouped products while `tunegemm.enable` is on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tunegemm.dispatch import extension
from tunegemm.dispatch.guards import deterministic
from tunegemm.groups import grouped, scaled_groups


def _grouping(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The implementation for ``_grouped_mm``, which torch.nn.functional.grouped_mm calls."""

    def serve(
        keyset: Any,
        a: torch.Tensor,
        b: torch.Tensor,
        offs: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Any:
        if offs is not None and bias is None and out_dtype in (None, a.dtype) and not deterministic():
            result = grouped.groups.below_autograd(a, b, offs, None)
            if result is not None:
                return result
        return kernel(keyset, a, b, offs=offs, bias=bias, out_dtype=out_dtype)

    return serve


def _scaled_grouping(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The implementation for ``_scaled_grouped_mm``."""

    def serve(keyset: Any, *arguments: Any, **keywords: Any) -> Any:
        result = scaled_groups.below_autograd(*arguments, **keywords)
        return kernel(keyset, *arguments, **keywords) if result is None else result

    return serve


extension.operators.update(_grouped_mm=_grouping, _scaled_grouped_mm=_scaled_grouping)
