"""tunegemm: find, remember and dispatch the fastest matrix-product kernel for your GPU.

The public names below load on first use, so that `import tunegemm` costs milliseconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tunegemm.database import Database
    from tunegemm.device import Device
    from tunegemm.dispatch import addmm, bmm, linear, matmul, policy
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
    "bmm",
    "disable",
    "enable",
    "explain",
    "linear",
    "matmul",
    "patch",
    "policy",
    "record",
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
    "bmm": "dispatch",
    "disable": "dispatch.takeover",
    "enable": "dispatch.takeover",
    "explain": "report.explain",
    "linear": "dispatch",
    "matmul": "dispatch",
    "patch": "dispatch.takeover",
    "policy": "dispatch",
    "record": "dispatch.recording",
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
