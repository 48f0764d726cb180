"""Dispatchers that serve CPU tensors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.grouped import Loops, groups_of
from tests.support.serving import ByAddress, Kernel, Row, dispatcher_of
from tunegemm.describe.device import Device, find_device
from tunegemm.describe.problem import Problem
from tunegemm.dispatch import api
from tunegemm.dispatch.dispatcher import Dispatcher
from tunegemm.dispatch.launchers import Prepared
from tunegemm.groups import grouped


@pytest.fixture(scope="module")
def device() -> Device:
    return find_device("model:h200")


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


@pytest.fixture
def serve(device, kernel):
    """A dispatcher on CPU tensors whose database holds the given problems."""

    def make(*problems: Problem, prepared: Prepared | None = None, prepare=None) -> Dispatcher:
        rows = [Row(problem, device.fingerprint) for problem in problems]
        return dispatcher_of(rows, prepare=prepare or (lambda *_: prepared or Prepared(kernel, tma=True)))

    return make


@pytest.fixture
def by_address(serve):
    """A kernel of addresses and a dispatcher that serves it for 32x48x64."""
    kernel = ByAddress(Problem(32, 48, 64))
    return kernel, serve(kernel.problem, prepared=Prepared(kernel.launcher, tma=True))


@pytest.fixture
def loops(serve, monkeypatch: pytest.MonkeyPatch) -> Iterator[Loops]:
    found = Loops()
    monkeypatch.setattr(grouped, "groups", groups_of(found.load))
    before = api.serve_by(serve())
    yield found
    api.serve_by(before)


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()
