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
    """Who waits for another kernel waits on, and who was served meanwhile stays."""
    state, record = State(), cast(Any, Row(COMPILED, device.fingerprint))
    served = cast(Plan, object())
    state.plans |= {("fell back",): None, ("is served",): served}
    state.prepared[COMPILED, 0] = Prepared(record=record, compiling="a")
    state.prepared[MISSING, 0] = Prepared(record=record, compiling="b")
    state.prepared[READY, 0] = Prepared(lambda *_: None)
    state.forget_missing("c")
    assert state.plans == {("fell back",): None, ("is served",): served} and len(state.prepared) == 3
    state.forget_missing("a")
    assert state.plans == {("is served",): served}
    assert {*state.prepared} == {(MISSING, 0), (READY, 0)}
