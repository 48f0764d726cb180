"""Fused calls on CPU tensors: kernels that compute by address with torch, for all products and gates."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

from tests.support.fusing import serve_recorded
from tests.support.gates import Kernels
from tunegemm.dispatch import api
from tunegemm.dispatch.planning import Planner
from tunegemm.errors import TunegemmWarning
from tunegemm.layers import sites


@pytest.fixture
def planner(monkeypatch: pytest.MonkeyPatch, kernels: Kernels) -> Planner:
    serve_recorded(monkeypatch, kernels)
    monkeypatch.setattr(sites, "load", kernels.load)
    return api.dispatcher.planner


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
