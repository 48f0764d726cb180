"""Predictions are measured on a GPU: by the command, and in idle time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.choose.test_predictions import odd_problems
from tests.support.commands import process
from tests.support.waiting import until
from tunegemm.choose.predictions import Fitted
from tunegemm.choose.snapshot import Snapshot
from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.dispatch.background import OnlineTuning
from tunegemm.dispatch.dispatcher import Dispatcher
from tunegemm.dispatch.planning import Planner
from tunegemm.measure.evidence import Evidence
from tunegemm.store import Database
from tunegemm.tuning.tuner import Tuner, open_device
from tunegemm.tuning.verify import predictions

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def device() -> Device:
    device = open_device("cuda:0")
    if Fitted.of("plain", device.name) is None:
        pytest.skip(f"there are no predictions for {device.name}")
    torch.cuda.init()  # so that the library is asked, as in the command
    return device


@pytest.fixture(scope="module")
def problem(device: Device) -> Problem:
    """Served by prediction, whose kernels are compiled: not every checkout has those that ship."""
    for problem in odd_problems(200):
        if options := predictions(Snapshot(), problem, device)[0]:
            with Tuner(device) as tuner:
                tuner.race(problem, [option.record.candidate for option in options])
            return problem
    pytest.fail("of 200 problems none is predicted")


def check_record(path: Path, problem: Problem, device: Device) -> None:
    """What is stored is the outcome of one race, and no product that lost is served by its kernel."""
    with Database.open(path, create=True) as database:
        record = database.best(problem, device.fingerprint)
        entries = database.measurements(problem)
    assert record is not None and (record.is_torch or record.ratio >= 1)
    measured = [entry for entry in entries if not entry.is_torch]
    assert measured and all(entry.evidence >= Evidence.RACE for entry in entries)
    assert record.is_torch or record.candidate in {entry.candidate for entry in measured}


def test_the_command_measures_what_is_predicted(problem: Problem, device: Device, tmp_path: Path) -> None:
    path = tmp_path / "tuning.sqlite"
    command = ("verify", "--predicted", "--shape", problem.shape, "--db", path)
    line = process(*command).stdout
    assert line.startswith(f"{problem}: ") and " x torch.mm and measured at " in line, line
    check_record(path, problem, device)
    assert "not predicted: it has a record" in process(*command).stdout


def idle_tuning(
    problem: Problem, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, OnlineTuning, Dispatcher, torch.Tensor, torch.Tensor]:
    """An empty database, what tunes into it and what serves from it, and operands of the problem."""
    monkeypatch.setenv("TUNEGEMM_MODE", "online")
    path = folder / "tuning.sqlite"
    Database.open(path, create=True).close()
    monkeypatch.setenv("TUNEGEMM_DB", str(path))
    online = OnlineTuning()
    a = torch.randn(problem.m, problem.k, dtype=torch.bfloat16, device="cuda")
    b = torch.randn(problem.n, problem.k, dtype=torch.bfloat16, device="cuda").t()
    return path, online, Dispatcher(Planner(online=online)), a, b


def test_online_tunes_what_is_not_predicted_when_the_gpu_is_idle(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = Problem(160, 272, 528)
    path, online, dispatcher, a, b = idle_tuning(problem, tmp_path, monkeypatch)
    for _ in range(2):
        torch.testing.assert_close(dispatcher.matmul(a, b), torch.matmul(a, b), rtol=2e-2, atol=1.0)
        until(lambda: online.is_idle, seconds=180)
    with Database.open(path, read_only=True) as database:
        assert [record.problem for record in database.records()] == [problem]


def test_online_measures_it_when_the_gpu_is_idle(
    problem: Problem, device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, online, dispatcher, a, b = idle_tuning(problem, tmp_path, monkeypatch)
    torch.testing.assert_close(dispatcher.matmul(a, b), torch.matmul(a, b), rtol=2e-2, atol=1.0)
    until(lambda: online.is_idle, seconds=120)
    check_record(path, problem, device)
    torch.testing.assert_close(dispatcher.matmul(a, b), torch.matmul(a, b), rtol=2e-2, atol=1.0)
