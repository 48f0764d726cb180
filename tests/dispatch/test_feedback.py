"""Predictions are measured: what won is the record, what lost falls back. Only the times are made up."""

from __future__ import annotations

import functools
import json
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.choose.test_predictions import odd_problems
from tests.support.commands import here
from tests.support.forks import Forks
from tests.support.hopper import hopper
from tests.support.processes import environment
from tests.support.serving import Kernel, dispatcher_of, quietly
from tests.support.waiting import until
from tests.tuning.planted import DEVICE, Timed, planted_tuner
from tunegemm.choose.neighbours import Offer
from tunegemm.choose.selection import select
from tunegemm.choose.snapshot import Snapshot, read_snapshot
from tunegemm.cli.verify import prediction_line
from tunegemm.describe.device import Device, find_device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.dispatch import background
from tunegemm.dispatch.background import OnlineTuning, wait_until_idle
from tunegemm.dispatch.launchers import TORCH, Prepared
from tunegemm.errors import DeviceError, MeasureError, TunegemmWarning
from tunegemm.generate.cublaslt import TORCH_MM
from tunegemm.measure.settings import RaceSettings
from tunegemm.report.explain import explain_problem
from tunegemm.store import Database
from tunegemm.store.record import Record
from tunegemm.tuning.progress import TuneResult
from tunegemm.tuning.tuner import Tuner
from tunegemm.tuning.verify import Measure, measure, measuring, predictions


@functools.cache
def predicted() -> dict[Problem, Sequence[Offer]]:
    """Some problems that are served by prediction, each with more than one kernel that may be launched."""
    found = {problem: predictions(Snapshot(), problem, DEVICE)[0] for problem in odd_problems(60)}
    return {problem: options for problem, options in found.items() if len(options) > 1}


def problem_of(number: int = 0) -> Problem:
    return list(predicted())[number]


def zeros(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """Operands whose values nobody looks at: to draw those of so large products takes half a second."""
    a, b = (torch.zeros(extent, problem.k, dtype=torch.bfloat16) for extent in (problem.m, problem.n))
    return a, b.t()


def timed(*ratios: float, noise: float = 0.001) -> Timed:
    """A GPU on which the kernels predicted for the first problem are that many times as fast as torch.mm."""
    options = (option.record.candidate for option in predicted()[problem_of()])
    of = dict(zip(options, ratios, strict=False))

    def time_us(candidate: Candidate, settings: RaceSettings) -> float:
        return 10.0 / of.get(candidate, ratios[-1])

    return Timed(time_us, is_throttled=lambda _: False, noise=noise)


@pytest.fixture
def location(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The database that dispatch reads."""
    path = tmp_path / "tuning.sqlite"
    Database.open(path, create=True).close()
    monkeypatch.setenv("TUNEGEMM_DB", str(path))
    return path


@pytest.fixture
def database(location: Path) -> Iterator[Database]:
    with Database.open(location, create=True) as database:
        yield database


@pytest.fixture
def race(database: Database, tmp_path: Path) -> Iterator[Callable[[Timed], str]]:
    """Measures what is predicted of the first problem, and says what became of it."""
    with planted_tuner(DEVICE, database, cache=tmp_path) as tuner:

        def run(measurer: Timed) -> str:
            tuner.measurer_for = lambda problem: measurer  # type: ignore[method-assign,assignment]
            options = predicted()[problem_of()]
            return prediction_line(options[0], measure(tuner, problem_of(), options))

        yield run


def test_what_won_is_the_record_and_is_hit(race: Callable[[Timed], str], database: Database) -> None:
    first = predicted()[problem_of()][0]
    said = race(timed(1.07, 1.02))
    assert f"was predicted at {first.expected:.3f} x torch.mm and measured at 1.070: won" in said
    record = database.best(problem_of(), DEVICE.fingerprint)
    assert record is not None and record.candidate == first.record.candidate and record.confirmed
    found = select(read_snapshot(), problem_of(), DEVICE)
    assert found.outcome == "hit" and found.options[0].candidate == first.record.candidate
    none, why = predictions(read_snapshot(), problem_of(), DEVICE)
    assert not none and why == f"not predicted: it has a record, {first.record.label}"


@pytest.mark.slow
@pytest.mark.long
def test_what_lost_falls_back_in_a_new_process(
    race: Callable[[Timed], str], database: Database, location: Path, forks: Forks
) -> None:
    shape = problem_of().shape
    before = here("explain", "--shape", shape, "--device", "model:h200").stdout
    assert "dispatch  predicted, " in before
    said = race(timed(0.96))
    assert "measured at 0.960: lost, and torch.mm is the record" in said
    assert {entry.candidate for entry in database.measurements(problem_of())} >= {
        option.record.candidate for option in predicted()[problem_of()]
    }, "what was measured is kept"
    after = here("explain", "--shape", shape, "--device", "model:h200").stdout
    assert "dispatch  torch.mm: 10.0 us, the fastest" in after
    program = (
        "import torch; from tests.dispatch.test_feedback import *; from tests.support.serving import *\n"
        "from tunegemm.dispatch.planning import Planner\n"
        "prepared = []\n"
        "def prepare(record, device):\n"
        "    from tunegemm.dispatch.launchers import prepare\n"
        "    prepared.append(record.candidate)\n"
        "    return prepare(record, device)\n"
        "planner = Planner(device_type='cpu', find=lambda spec: DEVICE, prepare=prepare)\n"
        f"m, n, k = map(int, '{shape}'.split('x'))\n"
        "a, b = operands(m, n, k)\n"
        "assert torch.equal(quietly(Dispatcher(planner).matmul, a, b), torch.matmul(a, b))\n"
        "assert prepared == [TORCH_MM] and list(planner.state.plans.values()) == [None]\n"
    )
    done = forks.run(program, env=environment())
    assert done.returncode == 0, done.stderr


def test_explain_shows_a_prediction_until_it_is_measured(
    race: Callable[[Timed], str], location: Path
) -> None:
    device = find_device("model:h200")
    assert explain_problem(problem_of(), device).outcome == "predicted"
    race(timed(1.07, 1.02))
    after = explain_problem(problem_of(), device)
    assert after.outcome == "hit" and after.offer is None


def test_one_that_lost_to_another_prediction(race: Callable[[Timed], str], database: Database) -> None:
    first, second = predicted()[problem_of()][:2]
    said = race(timed(0.96, 1.05, 0.9))
    assert f"measured at 0.960: the record is {second.record.label}, also predicted" in said
    record = database.best(problem_of(), DEVICE.fingerprint)
    assert record is not None and record.candidate == second.record.candidate
    assert first.record.candidate != second.record.candidate


@pytest.mark.parametrize("ratio", [1.07, 0.96])
def test_a_race_beside_other_work_is_run_again(
    race: Callable[[Timed], str], database: Database, ratio: float
) -> None:
    """What it measured counts meanwhile, as after a tuning; the next race confirms a record."""
    for noise in (0.2, 0.001):
        assert predictions(read_snapshot(), problem_of(), DEVICE) == (predicted()[problem_of()], "")
        said = race(timed(ratio, noise=noise))
        record = database.best(problem_of(), DEVICE.fingerprint)
        assert record is not None and record.is_torch == (ratio < 1) and record.confirmed == (noise < 0.1)
        assert ("no record is confirmed" in said) == (noise > 0.1)
    assert "it has a record" in predictions(read_snapshot(), problem_of(), DEVICE)[1]


def test_nothing_is_measured_where_nothing_runs_or_is_timed(database: Database, tmp_path: Path) -> None:
    options = predicted()[problem_of()]
    with planted_tuner(DEVICE, database, cache=tmp_path) as tuner:
        tuner.kernels.is_feasible = lambda *_: False  # type: ignore[method-assign,assignment]
        with pytest.raises(MeasureError, match="was predicted but cannot run here"):
            measure(tuner, problem_of(), options)
    with (
        planted_tuner(find_device("model:h200"), database, cache=tmp_path) as tuner,
        pytest.raises(DeviceError, match="cannot be timed on model:h200; use cuda:N"),
    ):
        measure(tuner, problem_of(), options)
    assert database.records() == []


def test_what_has_a_record_meanwhile_is_left_alone(
    race: Callable[[Timed], str], database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    race(timed(1.07))
    monkeypatch.setattr(Tuner, "race", lambda *_, **__: pytest.fail("measured"))
    with measuring(DEVICE) as measure_unless_known:
        assert measure_unless_known(problem_of(), predicted()[problem_of()], 15.0) is None


@pytest.mark.slow
def test_kill_9_loses_nothing_that_is_stored(location: Path, tmp_path: Path, forks: Forks) -> None:
    """A process that is killed while it measures the second of two, which is predicted as before."""
    program = (
        "import os; from tests.dispatch.test_feedback import *\n"
        "def die(candidate, settings):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "measurers = [timed(0.96), Timed(die)]\n"
        f"with Database.open({str(location)!r}, create=True) as database, "
        f"planted_tuner(DEVICE, database, cache=Path({str(tmp_path)!r})) as tuner:\n"
        "    for number in (0, 1):\n"
        "        tuner.measurer_for = lambda problem: measurers[number]\n"
        "        measure(tuner, problem_of(number), predicted()[problem_of(number)])\n"
    )
    assert forks.run(program, env=environment()).returncode == -signal.SIGKILL
    first, second = (select(read_snapshot(), problem_of(number), DEVICE) for number in (0, 1))
    assert first.outcome == "hit" and first.options[0].candidate == TORCH_MM
    assert second.outcome == "predicted"


# The command


@pytest.fixture
def on_planted_gpu(monkeypatch: pytest.MonkeyPatch, location: Path, tmp_path: Path) -> None:
    def tuner(device, database, workers=None):  # type: ignore[no-untyped-def]
        made = planted_tuner(device, database, cache=tmp_path)
        made.measurer_for = lambda problem: timed(0.96)  # type: ignore[method-assign,assignment]
        return made

    monkeypatch.setattr("tunegemm.tuning.tuner.open_gpu", lambda spec: DEVICE)
    monkeypatch.setattr("tunegemm.tuning.tuner.Tuner", tuner)
    monkeypatch.setattr("torch.cuda.init", lambda: None)


@pytest.mark.usefixtures("on_planted_gpu")
def test_the_command_measures_each_and_says_why_others_are_not(location: Path, tmp_path: Path) -> None:
    shapes = [problem_of().shape, "512x512x512", "8x4096x4096x2"]
    arguments = ("verify", "--predicted", *(word for shape in shapes for word in ("--shape", shape)))
    for often, outcome in ((1, "lost, and torch.mm is the record"), (2, "it has a record, torch.mm")):
        lines = here(*arguments).stdout.splitlines()
        assert len(lines) == 3 and lines[0].startswith(f"{problem_of()}: ") and outcome in lines[0], often
        assert lines[1].startswith(
            "512x512x512 bf16 tn: not predicted: no record; predictions are for up to 128"
        )
        assert lines[2].startswith("8x4096x4096x2 bf16 tn: not predicted: no record")


@pytest.mark.usefixtures("on_planted_gpu")
def test_a_database_that_is_not_there_is_created_for_predictions_and_nothing_else(tmp_path: Path) -> None:
    new, shape = tmp_path / "new.sqlite", ("--shape", problem_of().shape)
    refused = here("verify", *shape, "--db", new, code=2).stderr
    assert refused == f"tunegemm: {new}: no such database; create=True, or `tunegemm tune`, creates it\n"
    assert not new.exists()
    assert "measured at 0.960: lost" in here("verify", "--predicted", *shape, "--db", new).stdout
    with Database.open(new) as database:
        (record,) = database.records()
    assert record.problem == problem_of() and record.is_torch


@pytest.mark.usefixtures("on_planted_gpu")
def test_the_products_of_a_program(location: Path, tmp_path: Path) -> None:
    problem = problem_of()
    path = tmp_path / "shapes.json"
    of_bf16 = {"layout": "tnt", "dtype_a": "bf16", "dtype_b": "bf16", "dtype_d": "bf16"}
    entries = [{"m": problem.m, "n": problem.n, "k": problem.k} | of_bf16, {"m": 0}]
    path.write_text(json.dumps(entries), encoding="utf-8")
    done = here("verify", "--predicted", "--from", path)
    assert len(done.stdout.splitlines()) == 1 and f"{problem}: " in done.stdout
    assert "measured at 0.960: lost" in done.stdout and done.stderr.startswith("left out: entry 2")


# In mode online


class Serving:
    """A process in mode online, whose planner serves CPU tensors, and a GPU that is idle when a test says."""

    def __init__(self, cache: Path, ratio: float, **how: Any) -> None:
        self.kernel, self.cache, self.measurer = Kernel(), cache, lambda: timed(ratio)
        self.idle, self.measured, self.tuned = threading.Semaphore(0), list[Problem](), list[Problem]()
        self.online = OnlineTuning(**{"wait": self.wait, "measuring": self.measuring, **how})
        self.dispatcher = dispatcher_of(find=lambda _: DEVICE, prepare=self.prepare, online=self.online)

    def prepare(self, record: Record, device: Device) -> Prepared:
        return TORCH if record.is_torch else Prepared(self.kernel, tma=True)

    def wait(self, device: Device) -> bool:
        return self.idle.acquire(timeout=60)

    @contextmanager
    def measuring(self, device: Device) -> Iterator[Measure]:
        with Database.open() as database, planted_tuner(DEVICE, database, cache=self.cache) as tuner:
            tuner.measurer_for = lambda problem: self.measurer()  # type: ignore[method-assign,assignment]

            def run(problem: Problem, options: Sequence[Offer], seconds: float) -> TuneResult:
                (self.measured if options else self.tuned).append(problem)
                if options:
                    return measure(tuner, problem, options)
                return tuner.race(problem, [hopper()])

            yield run

    def multiply(self, problem: Problem) -> bool:
        """Whether the kernel computed it."""
        before = len(self.kernel.calls)
        quietly(self.dispatcher.matmul, *zeros(problem))
        return len(self.kernel.calls) > before

    def rest(self) -> None:
        """The GPU is idle now; returns when nothing waits to be measured any more."""
        self.idle.release()
        until(lambda: self.online.is_idle)


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch, location: Path, tmp_path: Path) -> Callable[..., Serving]:
    monkeypatch.setenv("TUNEGEMM_MODE", "online")
    return functools.partial(Serving, tmp_path)


def test_online_serves_at_once_and_falls_back_when_it_was_measured_and_lost(
    online: Callable[..., Serving], database: Database
) -> None:
    serving, problem = online(0.96), problem_of()
    assert serving.multiply(problem) and serving.multiply(problem), "served before it is measured"
    assert serving.measured == serving.tuned == database.records() == []
    serving.rest()
    assert serving.measured == [problem] and serving.tuned == []
    assert not serving.multiply(problem), "this process falls back, too"
    record = database.best(problem, DEVICE.fingerprint)
    assert record is not None and record.is_torch and record.confirmed
    serving.dispatcher.planner.refresh()
    assert not serving.multiply(problem) and serving.measured == [problem]
    assert not online(1.2).multiply(problem)


def test_online_keeps_what_won(online: Callable[..., Serving], database: Database) -> None:
    serving, problem = online(1.07), problem_of()
    assert serving.multiply(problem)
    plans = dict(serving.dispatcher.planner.state.plans)
    serving.rest()
    assert serving.multiply(problem) and serving.dispatcher.planner.state.plans == plans
    record = database.best(problem, DEVICE.fingerprint)
    assert record is not None and not record.is_torch and record.confirmed
    after = online(1.07)
    assert after.multiply(problem) and after.online.is_idle, "a hit: nothing is to be measured"


def test_what_is_not_predicted_is_tuned_when_the_gpu_is_idle_and_served_from_then_on(
    online: Callable[..., Serving],
) -> None:
    serving = online(1.07)
    other = Problem(160, 256, 512)
    assert not serving.multiply(other) and not serving.multiply(other), "no call waits for it"
    assert serving.tuned == []
    serving.rest()
    assert serving.tuned == [other] and serving.multiply(other)


@pytest.mark.parametrize("mode", ["predict", "exact"])
def test_other_modes_measure_nothing(
    online: Callable[..., Serving], monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setenv("TUNEGEMM_MODE", mode)
    serving = online(0.96)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TunegemmWarning)
        serving.dispatcher.matmul(*zeros(problem_of()))
    assert serving.online.is_idle and bool(serving.kernel.calls) == (mode == "predict")


def failing(device: Device) -> Any:
    raise RuntimeError("the GPU went away\nand more")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"wait": lambda device: False}, "NVML does not say whether NVIDIA H200 is idle"),
        ({"wait": lambda device: True, "measuring": failing}, "online failed (the GPU went away)"),
    ],
)
def test_what_keeps_it_from_measuring_is_one_warning(location: Path, how: dict[str, Any], said: str) -> None:
    told: list[str] = []
    online = OnlineTuning(**how)
    online.later(problem_of(), DEVICE, predicted()[problem_of()], lambda _, warning: told.append(warning))
    until(lambda: online.is_idle)
    online.later(problem_of(), DEVICE, predicted()[problem_of()], lambda _, warning: told.append(warning))
    assert online.is_idle and len(told) == 1 and said in told[0]


@pytest.mark.parametrize("where", ["wait", "measure", "tell"])
def test_what_nobody_foresaw_costs_one_product_and_is_logged_once(
    location: Path, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread goes on with the next one."""
    failures, told = [KeyError("first"), KeyError("first")], list[Problem]()

    def fail(here: str) -> None:
        if here == where and failures:
            raise failures.pop()

    def wait(device: Device) -> bool:
        fail("wait")
        return True

    @contextmanager
    def measuring(device: Device) -> Iterator[Measure]:
        def run(problem: Problem, options: Sequence[Offer], seconds: float) -> None:
            fail("measure")

        yield run

    def tell(problem: Problem, _: TuneResult | None, warning: str) -> None:
        fail("tell")
        told.append(problem)

    online = OnlineTuning(wait=wait, measuring=measuring)
    problems = [problem_of(number) for number in range(3)]
    for problem in problems:
        online.later(problem, DEVICE, predicted()[problem], functools.partial(tell, problem))
    until(lambda: online.is_idle)
    assert told == problems[2:]
    assert len([one for one in caplog.records if "online: KeyError" in one.getMessage()]) == 1


def test_the_budget_is_that_of_tuning(
    online: Callable[..., Serving], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNEGEMM_ONLINE_BUDGET", "0")
    serving = online(0.96)
    told: list[str] = []
    for number in (0, 1):
        problem = problem_of(number)
        serving.online.later(problem, DEVICE, predicted()[problem], lambda _, warning: told.append(warning))
    serving.rest()
    assert serving.measured == [] and len(told) == 1 and "TUNEGEMM_ONLINE_BUDGET=SECONDS raises it" in told[0]


def test_a_forked_child_measures_nothing(online: Callable[..., Serving]) -> None:
    serving = online(0.96)
    child = os.fork()
    if child == 0:
        serving.online.later(problem_of(), DEVICE, predicted()[problem_of()], lambda *_: None)
        os._exit(0 if serving.online.is_idle else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.slow
def test_a_program_ends_while_it_is_measured(location: Path, tmp_path: Path, forks: Forks) -> None:
    """As any program does: at once, by itself, with what was stored before."""
    program = (
        "from tests.dispatch.test_feedback import *\n"
        "began, first = threading.Event(), timed(0.96)\n"
        "def hang(candidate, settings):\n"
        "    began.set()\n"
        "    threading.Event().wait()\n"
        f"serving, measurers = Serving(Path({str(tmp_path)!r}), 0.96), [first, Timed(hang)]\n"
        "serving.measurer = lambda: measurers.pop(0)\n"
        "for number in (0, 1):\n"
        "    assert serving.multiply(problem_of(number))\n"
        "serving.idle.release()\n"
        "assert began.wait(100)\n"
        "print('the end')\n"
    )
    done = forks.run(program, env=environment(TUNEGEMM_MODE="online"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "the end\n", "")
    first, second = (select(read_snapshot(), problem_of(number), DEVICE) for number in (0, 1))
    assert first.outcome == "hit" and first.options[0].is_torch and second.outcome == "predicted"


def test_idle_is_three_looks_in_turn_without_a_kernel() -> None:
    looks, slept = [0, 0, 7, 0, 0, 0, 99], list[float]()
    assert wait_until_idle(DEVICE, lambda: looks.pop(0), slept.append)
    assert looks == [99] and slept == [1.0] * 6
    assert not wait_until_idle(DEVICE, lambda: None, slept.append)


@pytest.mark.parametrize(
    ("takes_s", "given_s", "waits"),
    [
        (5.0, [15.0, 15.0, 10.0, 5.0], 2),  # two before the next look whether the GPU is idle
        (6.0, [15.0, 14.0, 8.0, 2.0], 4),
        (20.0, [15.0], 1),
    ],
)
def test_a_budget_is_spent_product_by_product(
    takes_s: float, given_s: list[float], waits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, given, waited, said = [0.0], list[float](), list[Device](), list[str]()
    all_wait = threading.Event()

    def measure(problem: Problem, options: Any, seconds: float) -> None:
        given.append(seconds)
        now[0] += takes_s

    def wait(device: Device) -> bool:
        waited.append(device)
        return all_wait.wait(20)

    def notify(result: Any, warning: str) -> None:
        said.append(warning)

    monkeypatch.setenv("TUNEGEMM_ONLINE_BUDGET", "20")
    monkeypatch.setattr(background, "time", SimpleNamespace(monotonic=lambda: now[0]))
    tuning = OnlineTuning(measuring=lambda device: nullcontext(measure), wait=wait)  # type: ignore[arg-type]
    for m in range(1, 9):
        tuning.later(Problem(m, 64, 64), DEVICE, (), notify)
    all_wait.set()
    until(lambda: tuning.is_idle)
    assert given == given_s and len(waited) == waits
    assert said[:-1] == [""] * len(given) and said[-1].startswith("the budget for online tuning is spent")


def test_several_wait_for_one_idle_moment(online: Callable[..., Serving]) -> None:
    serving = online(0.96)
    for number in (0, 1, 0):
        assert serving.multiply(problem_of(number))
    serving.rest()
    assert serving.measured == [problem_of(0), problem_of(1)]
    assert not serving.multiply(problem_of(0)) and not serving.multiply(problem_of(1))
