"""Gates of one weight, gate's rows before up's, by kernels of groups with all rows in one group."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from tunegemm.dispatch import extension
from tunegemm.dispatch.guards import capturing, deterministic
from tunegemm.groups import grouped

#: The gate that these kernels have.
GATE = "swiglu"
#: Where an H100 and an H200 have shown them faster than torch's product, or two, and steps, in one run each
#: (2026-11-27): numbers of rows from and to, and of rows of weights, gate's and up's together. At 128 rows
#: they took 1.01 to 1.17 times as long with 7168 rows of weights, and with 51200 as long as two products.
MOST_ROWS = 8192
SERVED = (
    (1, 64, 7168, 51200),
    (65, 255, 14336, 28672),
    (225, 256, 7168, 14335),
    (256, 1023, 14336, 51200),
    (1024, MOST_ROWS, 7168, 51200),
)

#: By device and number of rows where one group ends: views of all numbers, which are at None. They stay,
#: since captured graphs read them.
_ends: dict[tuple[torch.device, int | None], torch.Tensor] = {}


def refusal(dtype: torch.dtype, columns: int, gate: str) -> str:
    """Why no kernel takes the gate of the halves of so many columns; empty where one may."""
    if gate != GATE or dtype is not torch.bfloat16:
        return "gate and up in one weight have kernels for silu's gate in bf16 only"
    if columns % 16:
        return "gate and up are not each a multiple of 8"
    return ""


@cache
def is_served(rows: int, columns: int) -> bool:
    """Whether they were seen to be faster at so many rows, and rows of weights."""
    return any(least <= rows <= most and few <= columns <= many for least, most, few, many in SERVED)


def one_group(weight: torch.Tensor) -> torch.Tensor:
    """A layer's weight as `gated` takes it."""
    return weight[None].mT


def gated(
    x: torch.Tensor, weight: torch.Tensor, bias: Sequence[torch.Tensor], gate: str, *, in_turns: bool
) -> torch.Tensor | None:  # fmt: skip
    """``silu(gate) * up`` of what the rows of a weight, as `one_group`, give; None where it is torch's.

    in_turns: whether rows of gate and up alternate.
    """
    count = x.numel() // max(x.shape[-1], 1)
    if gate != GATE or not is_served(count, weight.shape[-1]):
        return None
    if deterministic() or extension.policy().is_batch_invariant:
        return None
    device = x.device
    ends = _ends.get((device, count))
    if ends is None:
        if capturing(device) and (device, None) not in _ends:
            return None
        ends = _ends[device, count] = _numbers(device)[count : count + 1]
    rows = x if x.ndim == 2 else x.reshape(count, -1)
    result = grouped.groups.below_autograd(rows, weight, ends, bias[0] if bias else None, gate, in_turns)
    return result if result is None or x.ndim == 2 else result.view(*x.shape[:-1], -1)


def _numbers(device: torch.device) -> torch.Tensor:
    """Number i is i."""
    if (device, None) not in _ends:
        # From the host, for which it waits: any stream may read them from then on.
        numbers = torch.arange(MOST_ROWS + 1, dtype=torch.int32, device="cpu")
        _ends[device, None] = numbers.to(device)
    return _ends[device, None]
