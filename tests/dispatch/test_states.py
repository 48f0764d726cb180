"""What a policy's state forgets. No GPU needed."""

from __future__ import annotations

from typing import Any, cast

from tests.support.serving import Row
from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.dispatch.launchers import Prepared
from tunegemm.dispatch.planning import Plan
from tunegemm.dispatch.states import State

COMPILED, MISSING, READY = Problem(8, 8, 8), Problem(16, 8, 8), Problem(32, 8, 8)


def test_a_kernel_that_is_there_is_planned_for_whoever_waited_for_it(device: Device) -> None:
    """Others wait on, and who was served meanwhile stays."""
    state, record = State(), cast(Any, Row(COMPILED, device.fingerprint))
    served = cast(Plan, object())
    state.plans |= {("waits",): None, ("is served",): served, ("waits for another",): None}
    state.wait(COMPILED, 0, "a", record).update([("waits",), ("is served",)])
    state.wait(MISSING, 0, "b", record).add(("waits for another",))
    state.prepared[READY, 0] = Prepared(lambda *_: None)
    state.forget_missing("a")
    assert state.plans == {("is served",): served, ("waits for another",): None}
    assert {*state.prepared} == {(MISSING, 0), (READY, 0)}
