"""Module names of 0.1 that programs may still import; each is now an alias of another module."""

import importlib
import sys

from tunegemm.dispatch.api import policy, refresh
from tunegemm.groups.gated_experts import experts
from tunegemm.groups.grouped import grouped_mm
from tunegemm.groups.scaled_groups import scaled_grouped_mm
from tunegemm.torch.functions import (
    addmm,
    baddbmm,
    bmm,
    gated_linear,
    interleave,
    linear,
    matmul,
    mm,
    scaled_mm,
)

__all__ = [
    "addmm", "baddbmm", "bmm", "experts", "gated_linear", "grouped_mm", "interleave", "linear", "matmul",
    "mm", "policy", "refresh", "scaled_grouped_mm", "scaled_mm",
]  # fmt: skip

for _old, _new in {
    "api": "dispatch.api",
    "dispatcher": "dispatch.dispatcher",
    "launchers": "dispatch.launchers",
    "operation": "dispatch.operation",
    "planning": "dispatch.planning",
    "snapshot": "choose.snapshot",
    "grouped": "groups.grouped",
    "routing": "groups.routing",
    "gated_experts": "groups.gated_experts",
    "integrations": "engines",
    "integrations.transformers": "engines.transformers",
    "torch": "torch",
    "torch.functions": "torch.functions",
    "torch.ops": "torch.ops",
    "torch.takeover": "torch.takeover",
}.items():
    sys.modules[f"{__name__}.{_old}"] = importlib.import_module(f"tunegemm.{_new}")
    if "." not in _old:
        globals()[_old] = sys.modules[f"{__name__}.{_old}"]
