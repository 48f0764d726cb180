"""TUNEGEMM_MODE: how far dispatch goes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest
import torch

from tests.choose.test_neighbours import kernel as candidate
from tests.support.serving import Kernel, Row, operands, quietly
from tunegemm.choose.snapshot import Snapshot
from tunegemm.describe.device import Device, find_device
from tunegemm.describe.problem import Problem
from tunegemm.errors import ArtifactError, MeasureError, TunegemmWarning
from tunegemm.serve.dispatcher import Dispatcher
from tunegemm.serve.launchers import Prepared
from tunegemm.serve.modes import read_compile, read_mode
from tunegemm.serve.online import OnlineTuning
from tunegemm.serve.planning import Planner

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
        defaults = {"prepare": lambda record, device: Prepared(kernel, tma=True)}
        return Dispatcher(
            Planner(
                device_type="cpu",
                read=lambda: Snapshot(self.rows),
                find=lambda spec: self.device,
                **defaults | more,
            )
        )


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
        assert read_compile(said.append) is expected
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
    quietly(product, store.dispatcher(kernel, prepare=prepare), 124)
    assert len(tried) == 2 and len(kernel.calls) == 1


def test_what_neighbours_refuse_is_silently_torchs(device, kernel):
    store = Store(device, 64, 128)
    store.rows[1] = Row(Problem(128, N, K), device.fingerprint, candidate(), 1.0)
    quietly(product, store.dispatcher(kernel), 112)
    assert kernel.calls == []


# online


def test_online_tunes_once_and_serves_from_then_on(monkeypatch, device, kernel):
    monkeypatch.setenv("TUNEGEMM_MODE", "online")
    store = Store(device)
    tuned = []

    def tune(problem: Problem, device: Device, seconds: float) -> None:
        assert 0 < seconds <= 15
        tuned.append(problem)
        store.rows.append(store.row(problem.m))

    dispatcher = store.dispatcher(kernel, online=OnlineTuning(tune))
    for _ in range(2):
        quietly(product, dispatcher, 96)
    assert tuned == [Problem(96, N, K)] and len(kernel.calls) == 2  # the first call, too


def test_a_failed_tuning_is_a_warning_and_is_not_tried_again(monkeypatch, device, kernel):
    monkeypatch.setenv("TUNEGEMM_MODE", "online")
    attempts = []

    def tune(problem: Problem, device: Device, seconds: float) -> None:
        attempts.append(problem)
        raise MeasureError("the GPU went away")

    dispatcher = Store(device).dispatcher(kernel, online=OnlineTuning(tune))
    with pytest.warns(TunegemmWarning, match="online failed .the GPU went away"):
        product(dispatcher, 96)
    dispatcher.planner.refresh()
    quietly(product, dispatcher, 96)
    assert len(attempts) == 1


def test_ctrl_c_is_the_programs(monkeypatch, device, kernel):
    """A tuning that it interrupts ends with a result; a call in the user's program does not."""
    from tunegemm.tuning import tuner

    monkeypatch.setenv("TUNEGEMM_MODE", "online")
    monkeypatch.setattr(tuner, "rank_by_model", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    dispatcher = Store(device).dispatcher(kernel, online=OnlineTuning())
    with pytest.raises(KeyboardInterrupt):
        product(dispatcher, 96)
    quietly(product, dispatcher, 96)  # the next call is served as before, and tunes nothing
    assert not kernel.calls


def test_the_budget_is_the_processs(monkeypatch, device):
    seconds: list[float] = []
    monkeypatch.setenv("TUNEGEMM_ONLINE_BUDGET", "0.05")

    def tune(problem: Problem, device: Device, budget: float) -> None:
        seconds.append(budget)
        threading.Event().wait(0.06)

    online = OnlineTuning(tune)
    assert online.attempt(Problem(8, N, K), device) and "is spent" in online.warning
    assert not online.attempt(Problem(16, N, K), device)
    assert seconds == [0.05]
    monkeypatch.setenv("TUNEGEMM_ONLINE_BUDGET", "much")
    other = OnlineTuning(lambda problem, device, budget: seconds.append(budget))
    assert other.attempt(Problem(8, N, K), device) and seconds[-1] == 15
    assert "'much' is not a number of seconds" in other.warning


def test_one_at_a_time_and_others_go_on_meanwhile(monkeypatch, device, kernel):
    """While a thread tunes, another one's products are served without waiting for it."""
    monkeypatch.setenv("TUNEGEMM_MODE", "online")
    store = Store(device, 32)
    began, end = threading.Event(), threading.Event()

    def tune(problem: Problem, device: Device, budget: float) -> None:
        began.set()
        assert end.wait(20)
        store.rows.append(store.row(problem.m))

    dispatcher = store.dispatcher(kernel, online=OnlineTuning(tune))
    thread = threading.Thread(target=product, args=(dispatcher, 256))
    thread.start()
    assert began.wait(20)
    for m in (32, 256, 1024):  # a hit, the problem that is being tuned, and one that is not
        product(dispatcher, m)
    assert thread.is_alive() and len(kernel.calls) == 1
    end.set()
    thread.join(20)
    product(dispatcher, 256)
    assert len(kernel.calls) == 3


def test_forked_children_and_compilers_do_not_tune(device):
    from torch._guards import CompileContext, compile_context

    online = OnlineTuning(lambda *_: pytest.fail("tuned"))
    child = os.fork()
    if child == 0:
        os._exit(0 if online.attempt(Problem(8, N, K), device) is False else 1)
    assert os.waitpid(child, 0)[1] == 0
    with compile_context(CompileContext(None)):
        assert not online.attempt(Problem(8, N, K), device)


def test_online_loads_the_search_when_it_is_needed_only():
    code = (
        "import sys, tunegemm.serve.online as online\n"
        "assert not {'optuna', 'sqlalchemy', 'tunegemm.tuning.tuner'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
