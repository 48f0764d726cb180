"""TUNEGEMM_MODE: how far dispatch goes."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager

import pytest
import torch

from tests.choose.test_neighbours import kernel as candidate
from tests.support.serving import Kernel, Row, dispatcher_of, operands, quietly
from tests.support.waiting import until
from tunegemm.choose.policies import read_mode, read_switch
from tunegemm.describe.device import Device, find_device
from tunegemm.describe.problem import Problem
from tunegemm.dispatch.background import OnlineTuning
from tunegemm.dispatch.dispatcher import Dispatcher
from tunegemm.dispatch.launchers import Prepared
from tunegemm.errors import ArtifactError

N, K = 48, 64


@pytest.fixture
def device() -> Device:
    return find_device("model:h200")


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


class Store:
    """Records of some m, which tuning adds to."""

    def __init__(self, device: Device, *extents: int) -> None:
        self.device = device
        self.rows = [self.row(m) for m in extents]

    def row(self, m: int) -> Row:
        return Row(Problem(m, N, K), self.device.fingerprint, candidate(), 1.5)

    def dispatcher(self, kernel: Kernel, **more) -> Dispatcher:
        return dispatcher_of(self.rows, **{"prepared": Prepared(kernel, tma=True)} | more)


def product(dispatcher: Dispatcher, m: int) -> None:
    a, b = operands(m, N, K)
    assert torch.equal(dispatcher.matmul(a, b), torch.matmul(a, b))


@pytest.mark.parametrize(("mode", "calls"), [(None, 2), ("predict", 2), ("exact", 1), ("off", 0)])
@pytest.mark.filterwarnings("ignore::tunegemm.errors.TunegemmWarning")
def test_how_far_each_mode_goes(monkeypatch, device, kernel, mode, calls):
    if mode is None:
        monkeypatch.delenv("TUNEGEMM_MODE", raising=False)
    else:
        monkeypatch.setenv("TUNEGEMM_MODE", mode)
    dispatcher = Store(device, 64, 128).dispatcher(kernel)
    for m in (64, 112):
        product(dispatcher, m)
    assert len(kernel.calls) == calls


def test_an_unknown_mode_is_a_warning_and_predict(monkeypatch):
    monkeypatch.setenv("TUNEGEMM_MODE", "fast")
    said: list[str] = []
    assert read_mode(said.append) == "predict"
    assert "'fast' is not known" in said[0] and "off, exact, predict, online" in said[0]


def test_compiling_in_the_background_is_on_unless_the_environment_says_0(monkeypatch):
    said: list[str] = []
    for text, expected in (("", True), ("1", True), ("0", False), ("no", True)):
        monkeypatch.setenv("TUNEGEMM_COMPILE", text)
        assert read_switch("TUNEGEMM_COMPILE", said.append) is expected
    assert said == ["TUNEGEMM_COMPILE='no' is not known and has no effect; use 0 or 1 or unset it"]


def test_a_near_hit_is_silent_and_takes_the_next_option_where_an_object_is_missing(device, kernel):
    """The two neighbours' kernels are in order of promise; the store has but the second."""
    tried = []

    def prepare(record, device):
        tried.append(record.candidate)
        if len(tried) == 1:
            raise ArtifactError("its compiled kernel is not in the object store")
        return Prepared(kernel, tma=True)

    store = Store(device, 120, 128)
    quietly(product, store.dispatcher(kernel, prepared=None, prepare=prepare), 124)
    assert len(tried) == 2 and len(kernel.calls) == 1


# online


def test_what_neighbours_refuse_is_silently_torchs(device, kernel):
    store = Store(device, 64, 128)
    store.rows[1] = Row(Problem(128, N, K), device.fingerprint, candidate(), 1.0)
    quietly(product, store.dispatcher(kernel), 112)
    assert kernel.calls == []


def test_the_budget_is_the_processs(monkeypatch, device):
    seconds: list[float] = []
    said: list[str] = []

    @contextmanager
    def measuring(device: Device):
        def measure(problem: Problem, options: object, most: float) -> None:
            seconds.append(most)
            time.sleep(0.06)  # a measurement of known length, which the budget is to count

        yield measure

    def tuned(*problems: Problem) -> None:
        online = OnlineTuning(measuring=measuring, wait=lambda device: True)
        for problem in problems:
            online.later(problem, device, (), lambda _, warning: said.append(warning))
            until(lambda: online.is_idle)

    monkeypatch.setenv("TUNEGEMM_ONLINE_BUDGET", "0.05")
    tuned(Problem(8, N, K), Problem(16, N, K))
    assert seconds == [pytest.approx(0.05, abs=0.02)] and "is spent" in said[-1]
    monkeypatch.setenv("TUNEGEMM_ONLINE_BUDGET", "much")
    tuned(Problem(8, N, K))
    assert seconds[1:] == [15] and any("'much' is not a number of seconds" in words for words in said)


@pytest.mark.slow
def test_online_loads_the_search_when_it_is_needed_only(forks):
    code = (
        "import sys, tunegemm.dispatch.background as online\n"
        "assert not {'optuna', 'sqlalchemy', 'tunegemm.tuning.tuner'} & set(sys.modules)"
    )
    done = forks.run(code, env=os.environ)
    assert done.returncode == 0, done.stderr
