"""Gates of one layer whose weight is gate's rows and then up's, as Phi-3 and merged models have it.

Kernels of groups read the two halves as they lie; all rows are one group here. Nothing is packed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tunegemm.serve import api, grouped
from tunegemm.serve.guards import capturing, deterministic

#: The gate that these kernels have.
GATE = "swiglu"
#: Numbers of rows, from and to, of which a GPU has shown them faster than torch's product and steps.
SERVED: tuple[tuple[int, int], ...] = ()

#: By device where one group ends: number i is i. They stay: captured graphs read them.
_ends: dict[torch.device, torch.Tensor] = {}


def refusal(layer: torch.nn.Linear, gate: str) -> str:
    """Why no kernel takes the gate of a layer's halves; empty where one may."""
    if not SERVED:
        return "kernels that take gate and up from one weight wait for their times"
    if gate != GATE or layer.weight.dtype is not torch.bfloat16:
        return "of gate and up in one weight the gate is silu's, in bf16"
    return "gate and up are not each a multiple of 8" if layer.out_features % 16 else ""


def gated(x: torch.Tensor, weight: torch.Tensor, bias: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """``silu(gate) * up`` of the halves of a layer's result; None where it is torch's."""
    rows = x.reshape(-1, x.shape[-1])
    count = rows.shape[0]
    planner = api.dispatcher.planner
    is_served = any(least <= count <= most for least, most in SERVED)
    if not is_served or deterministic() or planner.state.policy.is_batch_invariant:
        return None
    ends = _ends.get(x.device)
    if ends is None:
        if capturing(x.device):
            return None
        # From the host, for which it waits: any stream may read them from then on.
        most = max(most for _, most in SERVED)
        ends = _ends[x.device] = torch.arange(most + 1, dtype=torch.int32, device="cpu").to(x.device)
    given = rows, weight[None].mT, ends[count : count + 1], bias[0] if bias else None
    result = grouped.groups.below_autograd(*given, GATE)
    return None if result is None else result.view(*x.shape[:-1], -1)
