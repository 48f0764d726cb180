"""Fused calls on CPU tensors: kernels that compute by address with torch, for all products and gates."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

from tests.support.fusing import Recorded
from tests.support.gates import Kernels
from tests.support.serving import serve_with
from tunegemm.describe.device import find_device
from tunegemm.dispatch.dispatcher import Dispatcher
from tunegemm.dispatch.launchers import Prepared
from tunegemm.dispatch.planning import Planner
from tunegemm.errors import TunegemmWarning
from tunegemm.layers import joint


@pytest.fixture
def planner(monkeypatch: pytest.MonkeyPatch, kernels: Kernels) -> Planner:
    snapshot = Recorded()
    planner = Planner(
        device_type="cpu",
        read=lambda: snapshot,
        find=lambda _: find_device("model:h200"),
        prepare=lambda record, _: Prepared(kernels.of(record.problem)),
    )
    serve_with(monkeypatch, Dispatcher(planner))
    monkeypatch.setattr(joint, "load", kernels.load)
    monkeypatch.setattr(joint, "failed", set())
    return planner


@pytest.fixture
def kernels() -> Kernels:
    return Kernels()


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error", TunegemmWarning)
        yield
    torch._dynamo.reset()
