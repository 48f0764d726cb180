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
    from tunegemm.groups.quantize import quantize
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
    "linear", "matmul", "mm", "patch", "policy", "quantize", "record", "refresh", "scaled_grouped_mm",
    "scaled_mm", "tune", "unpatch",
]  # fmt: skip

#: The public names, by the modules that have them.
_HOMES = {
    "describe.device": "Device",
    "describe.epilogue": "Epilogue",
    "describe.problem": "Problem",
    "describe.space": "Candidate",
    "dispatch.api": "policy refresh",
    "dispatch.operation": "Operation",
    "errors": "TunegemmError TunegemmWarning",
    "groups.gated_experts": "experts",
    "groups.grouped": "grouped_mm",
    "groups.scaled_groups": "scaled_grouped_mm",
    "layers.inductor": "enable",
    "layers.modules": "patch unpatch",
    "measure.outcome": "Failure Measurement",
    "report.explain": "explain",
    "report.space": "Space",
    "store": "Database",
    "store.record": "Record",
    "torch.functions": "addmm baddbmm bmm gated_linear interleave linear matmul mm scaled_mm",
    "groups.quantize": "quantize",
    "torch.recording": "record",
    "torch.takeover": "disable",
    "tuning.progress": "Progress TuneResult",
    "tuning.tuner": "tune",
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names.split()}


if not TYPE_CHECKING:  # type checkers know the names above, and no others

    def __getattr__(name):
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
        except ModuleNotFoundError as error:
            from tunegemm.extras import lack

            raise lack(error) or error from None
        globals()[name] = value  # so that the next access costs one dictionary look-up
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
