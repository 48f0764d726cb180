"""For processes beside an engine: records and kernels of CPU tensors in the place of a GPU's."""

from __future__ import annotations

from tests.support.fusing import Recorded
from tests.support.serving import Kernel, dispatcher_of
from tunegemm.describe.problem import Problem
from tunegemm.dispatch import api
from tunegemm.dispatch.launchers import Prepared
from tunegemm.torch import ops


def serve_on_cpu(*problems: Problem, digest: str = "") -> Kernel:
    """From now on CPU tensors are served by records of these problems, or of every one; who multiplies.

    digest: of the records, for processes that have the same; by default no other process has them.
    """
    snapshot, kernel = Recorded(*problems), Kernel()
    snapshot.digest = digest or snapshot.digest
    prepare = lambda record, _: Prepared(kernel.of(record.problem), record=record)  # noqa: E731
    api.serve_by(dispatcher_of(snapshot, prepare=prepare))
    ops.DEVICE_TYPE = "cpu"
    return kernel
