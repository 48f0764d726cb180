"""Multiples of a step that lie on a device for good, as ends of groups and places of rows."""

from __future__ import annotations

import torch

from tunegemm.dispatch.guards import capturing

#: By device, dtype, step and count. They stay: captured graphs read them.
kept: dict[tuple[torch.device, torch.dtype, int, int], torch.Tensor] = {}


def multiples(device: torch.device, dtype: torch.dtype, step: int, count: int) -> torch.Tensor | None:
    """0, step, 2 step, ...: `count` numbers. None during a capture, unless a call made them before."""
    key = device, dtype, step, count
    found = kept.get(key)
    if found is None and not capturing(device):
        # From the host, for which it waits: any stream may read them from then on.
        found = torch.arange(0, count * step, step, dtype=dtype, device="cpu").to(device)
        kept[key] = found
    return found
