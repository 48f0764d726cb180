"""tunegemm: find, remember and dispatch the fastest matrix-product kernel for your GPU.

The public names below load on first use, so that `import tunegemm` costs milliseconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tunegemm.database import Database
    from tunegemm.device import Device
    from tunegemm.dispatch import (
        addmm,
        baddbmm,
        bmm,
        gated_linear,
        interleave,
        linear,
        matmul,
        policy,
        scaled_mm,
    )
    from tunegemm.dispatch.recording import record
    from tunegemm.dispatch.takeover import disable, enable, patch, unpatch
    from tunegemm.epilogue import Epilogue
    from tunegemm.errors import TunegemmError
    from tunegemm.operation import Operation
    from tunegemm.problem import Problem
    from tunegemm.report.explain import explain
    from tunegemm.space import Candidate
    from tunegemm.tuning import tune

__version__ = "0.1.0"

__all__ = [
    "Candidate",
    "Database",
    "Device",
    "Epilogue",
    "Operation",
    "Problem",
    "TunegemmError",
    "addmm",
    "baddbmm",
    "bmm",
    "disable",
    "enable",
    "explain",
    "gated_linear",
    "interleave",
    "linear",
    "matmul",
    "patch",
    "policy",
    "record",
    "scaled_mm",
    "tune",
    "unpatch",
]

_HOMES = {
    "Candidate": "space",
    "Database": "database",
    "Device": "device",
    "Epilogue": "epilogue",
    "Operation": "operation",
    "Problem": "problem",
    "TunegemmError": "errors",
    "addmm": "dispatch",
    "baddbmm": "dispatch",
    "bmm": "dispatch",
    "disable": "dispatch.takeover",
    "enable": "dispatch.takeover",
    "explain": "report.explain",
    "gated_linear": "dispatch",
    "interleave": "dispatch",
    "linear": "dispatch",
    "matmul": "dispatch",
    "patch": "dispatch.takeover",
    "policy": "dispatch",
    "record": "dispatch.recording",
    "scaled_mm": "dispatch",
    "tune": "tuning",
    "unpatch": "dispatch.takeover",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value  # so that the next access costs one dictionary look-up
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
