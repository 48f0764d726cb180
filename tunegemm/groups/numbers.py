"""Multiples of a step, kept on a device for good: they serve as ends of groups and positions of rows."""

from __future__ import annotations

import torch

from tunegemm.dispatch.guards import capturing

#: Tensors by device, dtype, step and count. Never freed, because captured graphs read them.
kept: dict[tuple[torch.device, torch.dtype, int, int], torch.Tensor] = {}


def multiples(device: torch.device, dtype: torch.dtype, step: int, count: int) -> torch.Tensor | None:
    """0, step, 2 step, ...: `count` numbers. None during a capture, unless a call made them before."""
    key = device, dtype, step, count
    result = kept.get(key)
    if result is None and not capturing(device):
        # The copy from the host is synchronous, so any stream may read the tensor afterwards.
        result = torch.arange(0, count * step, step, dtype=dtype, device="cpu").to(device)
        kept[key] = result
    return result
