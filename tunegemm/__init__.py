"""tunegemm finds the fastest matrix-product kernel for your GPU, stores it, and runs it.

The public names below load on first use, so `import tunegemm` takes milliseconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tunegemm.describe.device import Device
    from tunegemm.describe.epilogue import Epilogue
    from tunegemm.describe.problem import Problem
    from tunegemm.describe.space import Candidate
    from tunegemm.dispatch.api import policy, refresh
    from tunegemm.dispatch.operation import Operation
    from tunegemm.errors import TunegemmError, TunegemmWarning
    from tunegemm.groups.gated_experts import experts
    from tunegemm.groups.grouped import grouped_mm
    from tunegemm.groups.scaled_groups import scaled_grouped_mm
    from tunegemm.layers.inductor import enable
    from tunegemm.layers.modules import patch, unpatch
    from tunegemm.measure.outcome import Failure, Measurement
    from tunegemm.report.explain import explain
    from tunegemm.report.space import Space
    from tunegemm.store import Database
    from tunegemm.store.record import Record
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
    from tunegemm.torch.recording import record
    from tunegemm.torch.takeover import disable
    from tunegemm.tuning.progress import Progress, TuneResult
    from tunegemm.tuning.tuner import tune

__version__ = "0.2.0"

__all__ = [
    "Candidate", "Database", "Device", "Epilogue", "Failure", "Measurement", "Operation", "Problem",
    "Progress", "Record", "Space", "TuneResult", "TunegemmError", "TunegemmWarning", "addmm", "baddbmm",
    "bmm", "disable", "enable", "experts", "explain", "gated_linear", "grouped_mm", "interleave",
    "linear", "matmul", "mm", "patch", "policy", "record", "refresh", "scaled_grouped_mm", "scaled_mm",
    "tune", "unpatch",
]  # fmt: skip

_HOMES = {
    "Candidate": "describe.space",
    "Database": "store",
    "Device": "describe.device",
    "Epilogue": "describe.epilogue",
    "Failure": "measure.outcome",
    "Measurement": "measure.outcome",
    "Operation": "dispatch.operation",
    "Problem": "describe.problem",
    "Progress": "tuning.progress",
    "Record": "store.record",
    "Space": "report.space",
    "TuneResult": "tuning.progress",
    "TunegemmError": "errors",
    "TunegemmWarning": "errors",
    "addmm": "torch.functions",
    "baddbmm": "torch.functions",
    "bmm": "torch.functions",
    "disable": "torch.takeover",
    "enable": "layers.inductor",
    "experts": "groups.gated_experts",
    "explain": "report.explain",
    "gated_linear": "torch.functions",
    "grouped_mm": "groups.grouped",
    "interleave": "torch.functions",
    "linear": "torch.functions",
    "matmul": "torch.functions",
    "mm": "torch.functions",
    "patch": "layers.modules",
    "policy": "dispatch.api",
    "record": "torch.recording",
    "refresh": "dispatch.api",
    "scaled_grouped_mm": "groups.scaled_groups",
    "scaled_mm": "torch.functions",
    "tune": "tuning.tuner",
    "unpatch": "layers.modules",
}


if not TYPE_CHECKING:  # type checkers know the names above, and no others

    def __getattr__(name):
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        except ModuleNotFoundError as error:
            from tunegemm.extras import lack

            raise lack(error) or error from None
        globals()[name] = value  # so that the next access costs one dictionary look-up
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
