"""Gates that are trained, by their kernels in Triton's interpreter; on a GPU: tests/gpu/test_gates.py."""

from __future__ import annotations

import pytest

from tests.support.processes import run_interpreted

#: Triton decides at the import whether kernels are interpreted: a process of their own.
SCRIPT = """
import pytest, torch
from tests.support.gates import ACTIVATIONS, SIZES, check, check_odd_values, serve_gates
from tunegemm.choose.snapshot import Snapshot
from tunegemm.describe.device import find_device
from tunegemm.generate import routing as kernels
from tunegemm.generate.routing import kernel
from tunegemm.serve import api
from tunegemm.serve.dispatcher import Dispatcher
from tunegemm.serve.planning import Planner

calls = []

def load(name, index):
    kind, _, activation = name.split()
    def bind(ctas, **numbers):
        def launch(*tensors):
            calls.append(name)
            constants = {"columns": kernels.GATE_COLUMNS, "activation": activation}
            getattr(kernel, kind)[(ctas,)](*tensors, **numbers, **constants)
        return launch
    return bind

device = find_device("model:h200")
api.serve_by(Dispatcher(Planner(device_type="cpu", read=lambda: Snapshot([]), find=lambda spec: device)))
serve_gates(pytest.MonkeyPatch(), load)
for gate in ACTIVATIONS:
    for dtype in (torch.bfloat16, torch.float16):
        for lead, columns in SIZES:
            for count in (1, 2):
                check(gate, dtype, lead, columns, "cpu", count)
        check_odd_values(gate, dtype, "cpu")
assert len(calls) == 2 * 4 * 2 * (2 * len(SIZES) + 1)
assert {name.split()[0] for name in calls} == set(kernels.TRAINED)
"""


@pytest.mark.slow
def test_results_and_gradients_are_rounded_once() -> None:
    run_interpreted(SCRIPT)
