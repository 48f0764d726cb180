"""For processes beside an engine: records and kernels of CPU tensors in the place of a GPU's."""

from __future__ import annotations

from tests.support.fusing import Recorded
from tests.support.serving import Kernel
from tunegemm.describe.device import find_device
from tunegemm.describe.problem import Problem
from tunegemm.dispatch import api
from tunegemm.dispatch.dispatcher import Dispatcher
from tunegemm.dispatch.launchers import Prepared
from tunegemm.dispatch.planning import Planner
from tunegemm.torch import ops


def serve_on_cpu(*problems: Problem, digest: str = "") -> Kernel:
    """From now on CPU tensors are served by records of these problems, or of every one; who multiplies.

    digest: of the records, for processes that have the same; by default no other process has them.
    """
    snapshot, kernel = Recorded(*problems), Kernel()
    snapshot.digest = digest or snapshot.digest
    planner = Planner(
        device_type="cpu",
        read=lambda: snapshot,
        find=lambda spec: find_device("model:h200"),
        prepare=lambda record, device: Prepared(kernel.of(record.problem), record=record),
    )
    api.serve_by(Dispatcher(planner))
    ops.DEVICE_TYPE = "cpu"
    return kernel
