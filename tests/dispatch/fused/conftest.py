"""tunegemm's fused functions on CPU tensors, served by torch's arithmetic in the place of kernels."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

import tunegemm
from tests.support.fusing import FusedByAddress, Recorded
from tests.support.serving import Kernel, serve_with
from tunegemm.describe.device import find_device
from tunegemm.describe.problem import Problem
from tunegemm.dispatch.dispatcher import Dispatcher
from tunegemm.dispatch.launchers import Prepared
from tunegemm.dispatch.planning import Planner
from tunegemm.errors import TunegemmWarning


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


@pytest.fixture
def serve(kernel, monkeypatch):
    """tunegemm's functions serve CPU tensors from records of the given problems, or of every problem."""

    def make(*problems: Problem, prepared: Prepared | None = None) -> Recorded:
        snapshot = Recorded(*problems)
        dispatcher = Dispatcher(
            Planner(
                device_type="cpu",
                read=lambda: snapshot,
                find=lambda _: find_device("model:h200"),
                prepare=lambda record, _: prepared or Prepared(kernel.of(record.problem)),
            )
        )
        serve_with(monkeypatch, dispatcher)
        return snapshot

    return make


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", TunegemmWarning)
        yield
    tunegemm.disable()
    torch._dynamo.reset()


@pytest.fixture
def by_address(monkeypatch):
    def make(text: str) -> FusedByAddress:
        kernel = FusedByAddress(Problem(32, 48, 64, epilogue=text))
        dispatcher = Dispatcher(
            Planner(
                device_type="cpu",
                read=lambda: Recorded(kernel.problem),
                find=lambda _: find_device("model:h200"),
                prepare=lambda *_: Prepared(kernel.launcher, tma=True),
            )
        )
        serve_with(monkeypatch, dispatcher)
        return kernel

    return make
