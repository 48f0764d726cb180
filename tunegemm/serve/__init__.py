"""Names of 0.1 that programs may still import: of functions, and of modules, each an alias of another one."""

import importlib
import sys
from typing import Any

import tunegemm


def __getattr__(name: str) -> Any:
    return getattr(tunegemm, name)


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
