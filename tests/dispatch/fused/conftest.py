"""tunegemm's fused functions on CPU tensors, served by torch's arithmetic in the place of kernels."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

import tunegemm
from tests.support.fusing import FusedByAddress, Recorded, serve_recorded
from tests.support.serving import Kernel
from tunegemm.describe.problem import Problem
from tunegemm.dispatch.launchers import Prepared
from tunegemm.errors import TunegemmWarning


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


@pytest.fixture
def serve(kernel, monkeypatch):
    """tunegemm's functions serve CPU tensors from records of the given problems, or of every problem."""

    def make(*problems: Problem, prepared: Prepared | None = None) -> Recorded:
        parts = {"prepare": lambda *_: prepared} if prepared else {}
        return serve_recorded(monkeypatch, kernel, *problems, **parts)

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
        prepared = Prepared(kernel.launcher, tma=True)
        serve_recorded(monkeypatch, kernel, kernel.problem, prepare=lambda *_: prepared)
        return kernel

    return make
