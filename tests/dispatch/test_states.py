"""What a policy's state forgets. No GPU needed."""

from __future__ import annotations

from typing import Any, cast

from tests.support.serving import Row
from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.dispatch.launchers import Prepared
from tunegemm.dispatch.planning import Plan
from tunegemm.dispatch.states import COMPOSED, State

COMPILED, MISSING, READY = Problem(8, 8, 8), Problem(16, 8, 8), Problem(32, 8, 8)


def test_a_kernel_that_is_there_is_planned_for_whoever_waited_for_it(device: Device) -> None:
    """Others wait on, or remain torch's; and who was served meanwhile stays."""
    state, record = State(), cast(Any, Row(COMPILED, device.fingerprint))
    served = cast(Plan, object())
    stay = {("is served",): served, ("waits for another",): None, ("torch's",): None, ("composed",): COMPOSED}
    state.plans |= {("waits",): None, ("composed meanwhile",): COMPOSED, **stay}
    state.prepared[COMPILED, 0] = Prepared(
        record=record, compiling="a", waiting={("waits",), ("composed meanwhile",), ("is served",)}
    )
    state.prepared[MISSING, 0] = Prepared(record=record, compiling="b", waiting={("waits for another",)})
    state.prepared[READY, 0] = Prepared(lambda *_: None)
    state.forget_missing("a")
    assert state.plans == stay
    assert {*state.prepared} == {(MISSING, 0), (READY, 0)}
