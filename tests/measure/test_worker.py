"""The worker with real processes on CPU tensors: attribution, respawn, and what is left behind."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from tests.support.waiting import until
from tunegemm.describe.device import find_device
from tunegemm.describe.epilogue import Epilogue, where
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.errors import DeviceError, MeasureError
from tunegemm.generate.cublaslt import TORCH_MM
from tunegemm.measure.outcome import STEADY_MS, Failure, Measurement
from tunegemm.measure.settings import Job, RaceSettings
from tunegemm.measure.worker import Child, MeasureWorker

BACKEND = "tests.support.planted.cpu_backend:CpuBackend"
PROBLEM = Problem(256, 192, 64)
QUICK = RaceSettings(rounds=4, min_replay_ms=0.05, race_after=4, race_margin=0.5)
STEADY = replace(QUICK, steady_ms=20.0, steady_groups=(2, 1, 1))


@Epilogue.custom
def kept(acc):  # type: ignore[no-untyped-def]
    return where(acc < 1e9, acc, 0.0)


def planted(what: str) -> Job:
    return Job(Candidate.make("planted", {"what": what}))


@pytest.fixture(scope="module")
def shared() -> Iterator[MeasureWorker]:
    """One for all tests: a worker outlives what its candidates do."""
    with MeasureWorker(find_device("model:h200"), timeout_s=1.5, backend=BACKEND) as worker:
        yield worker


@pytest.fixture
def worker(shared: MeasureWorker) -> MeasureWorker:
    return shared


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    return state != "Z"


def test_energy_is_metered_where_it_is_asked_for(worker: MeasureWorker) -> None:
    """The planted GPU draws 10 W: the energy of a product is 10 mJ for each millisecond of it."""
    jobs = [planted("good"), planted("slow"), planted("wrong")]
    settings = replace(QUICK, energy_ms=100.0, race_margin=1e3)
    good, slow = [
        outcome for outcome in worker.measure(PROBLEM, jobs, settings) if isinstance(outcome, Measurement)
    ]
    assert slow.telemetry["energy_mj"] == pytest.approx(10 * slow.median_us * 1e-3, rel=0.5)
    assert 0 < good.telemetry["energy_mj"] < slow.telemetry["energy_mj"]
    (plain,) = worker.measure(PROBLEM, [planted("good")], QUICK)
    assert isinstance(plain, Measurement) and "energy_mj" not in plain.telemetry


def test_measures_correct_candidates_and_names_each_failure(worker: MeasureWorker) -> None:
    failures = {
        "wrong": ("wrong", "relative error"), "unwritten": ("wrong", "NaN"),
        "one-element": ("wrong", "one element"), "outside": ("wrong", "outside"),
        "stale-pointers": ("wrong", "in a graph: output has NaN"),
        "load-error": ("load", "object is damaged second line"), "launch-error": ("launch", ""),
    }  # fmt: skip
    jobs = [planted(what) for what in ("good", *failures)] + [Job(TORCH_MM)]
    outcomes = {o.candidate: o for o in worker.measure(PROBLEM, jobs, QUICK)}
    assert set(outcomes) == {job.candidate for job in jobs}
    first_pid = worker.pid

    for what, (stage, reason) in failures.items():
        failure = outcomes[planted(what).candidate]
        assert isinstance(failure, Failure) and failure.stage == stage and reason in failure.reason, what
    for candidate in (planted("good").candidate, TORCH_MM):
        measured = outcomes[candidate]
        assert isinstance(measured, Measurement)
        assert len(measured.samples_us) == len(measured.baseline_us) == QUICK.rounds
        assert 1e-4 < measured.relative_error < 8e-3
        assert measured.noise >= 0
        assert measured.telemetry["operand_sets"] > 1
        assert measured.telemetry["rounds"] == QUICK.rounds
    assert worker.pid == first_pid, "no failure here needs a new process"


@pytest.mark.parametrize("jobs", [[Job(TORCH_MM)], [planted("good"), Job(TORCH_MM)]])
def test_torch_as_a_candidate_is_the_baselines_second_capture(worker: MeasureWorker, jobs: list[Job]) -> None:
    """No third replay of the same work: its ratio is that of torch.mm timed twice."""
    settings = replace(QUICK, rounds=9, race_after=9)
    for _ in range(2):
        outcomes = {o.candidate: o for o in worker.measure(PROBLEM, jobs, settings)}
        own = outcomes[TORCH_MM]
        assert isinstance(own, Measurement) and len(outcomes) == len(jobs)
        assert own.telemetry["interleaved"] == len(jobs)
        assert own.ratio == own.telemetry["aa_ratio"]
        assert 0 < own.relative_error < 8e-3, "it is checked as any other"
        if len(jobs) > 1:
            good = outcomes[jobs[0].candidate]
            assert isinstance(good, Measurement)
            assert good.baseline_us == own.baseline_us and good.samples_us != own.samples_us


#: What ends or hangs the measuring process, with the stage and the reason that it fails by.
KILLERS = {
    "illegal-address": ("crash", "signal 11"),
    "load-abort": ("crash", "signal 6"),
    "not-capturable": ("launch", "cannot be captured in a graph: operation not permitted"),
    "hang": ("timeout", "no answer within"),
    "hang-in-rounds": ("timeout", "no answer within"),
    "type-error": ("crash", "TypeError: a bug in a launcher"),
}


@pytest.mark.long
def test_each_killer_fails_alone_and_the_rest_is_measured(worker: MeasureWorker, thorough: bool) -> None:
    killers = {
        what: KILLERS[what] for what in (KILLERS if thorough else ("illegal-address", "hang-in-rounds"))
    }
    jobs = [planted("good"), *map(planted, killers), Job(TORCH_MM)]
    outcomes = [*worker.measure(PROBLEM, jobs, QUICK)]
    assert len(outcomes) == len(jobs)
    found = {o.candidate["what"]: o for o in outcomes if isinstance(o, Failure)}
    assert set(found) == set(killers)
    for what, (stage, reason) in killers.items():
        assert found[what].stage == stage, found[what]
        assert reason in found[what].reason
        assert "\n" not in found[what].reason
    measured = {o.candidate for o in outcomes if isinstance(o, Measurement)}
    assert measured == {planted("good").candidate, TORCH_MM}
    good = next(o for o in outcomes if isinstance(o, Measurement))
    assert good.telemetry["interleaved"] == 2


def test_a_replay_has_as_many_products_as_the_baselines(worker: MeasureWorker) -> None:
    """A launch that took the host long once made them fewer, and each bore more of a replay's beginning."""
    settings = RaceSettings(rounds=2, min_replay_ms=80, race_after=2, race_margin=9.0)
    jobs = [planted("good"), planted("slow-to-launch"), planted("slow")]
    for _ in range(4):  # beside other work on the core a replay may be slow indeed
        outcomes = worker.measure(Problem(256, 192, 640), jobs, settings)
        products = [o.telemetry["products_per_replay"] for o in outcomes if isinstance(o, Measurement)]
        if len(products) == 3 and products[0] == products[1] > products[2]:
            return
    pytest.fail(f"{products} products of the good one, of one that is slow to launch, and of a slow one")


def test_the_device_works_before_it_is_timed(worker: MeasureWorker) -> None:
    """A screen right after another one of the same problem finds it at work already."""
    settings = replace(QUICK, settle_ms=400, settle_again=0.25)
    problem = replace(PROBLEM, n=PROBLEM.n + 64)
    [_] = worker.measure(PROBLEM, [planted("good")], QUICK)
    began = time.monotonic()
    [settled] = worker.measure(problem, [planted("good")], settings)
    assert time.monotonic() - began >= 0.4
    assert isinstance(settled, Measurement) and settled.telemetry["settle_ms"] == 400

    def is_short() -> bool:
        [again] = worker.measure(problem, [planted("good")], settings)
        return isinstance(again, Measurement) and again.telemetry["settle_ms"] == 100

    until(is_short)  # a busy host comes back too late at times
    [final] = worker.measure(problem, [planted("good")], replace(settings, settle_again=1.0))
    assert isinstance(final, Measurement) and final.telemetry["settle_ms"] == 400


def test_a_gpu_that_lowers_its_clocks_is_timed_in_steady_state() -> None:
    backend = "tests.support.planted.cpu_backend:ThrottledBackend"
    with MeasureWorker(find_device("model:h200"), timeout_s=1.5, backend=backend) as throttled:
        outcomes = [*throttled.measure(PROBLEM, [planted("good"), Job(TORCH_MM)], STEADY)]
        plain = [*throttled.measure(PROBLEM, [planted("good")], QUICK)]
    for outcome in outcomes:
        assert isinstance(outcome, Measurement)
        assert outcome.telemetry[STEADY_MS] == 20.0
        assert outcome.telemetry["rounds"] == len(outcome.samples_us) == 2, "it alone is left beside torch.mm"
    assert [o.telemetry[STEADY_MS] for o in plain if isinstance(o, Measurement)] == [0.0], (
        "none were asked for"
    )


@pytest.mark.slow
def test_a_cap_that_was_other_works_is_forgotten() -> None:
    backend = "tests.support.planted.cpu_backend:RecoveringBackend"
    with MeasureWorker(find_device("model:h200"), timeout_s=1.5, backend=backend) as recovering:
        (outcome,) = recovering.measure(PROBLEM, [planted("good")], STEADY)
    assert isinstance(outcome, Measurement) and outcome.telemetry[STEADY_MS] == 0.0
    assert outcome.telemetry["throttle_reasons_before"] == []


@pytest.mark.slow
def test_a_pause_does_not_hide_a_cap() -> None:
    """Full clocks are held for a while after one: what the problem's last race ended at counts."""
    backend = "tests.support.planted.cpu_backend:RestedBackend"
    with MeasureWorker(find_device("model:h200"), timeout_s=1.5, backend=backend) as rested:
        job = planted("good")
        first, last = (
            one for settings in (QUICK, STEADY) for one in rested.measure(PROBLEM, [job], settings)
        )
    assert isinstance(first, Measurement) and isinstance(last, Measurement)
    assert first.telemetry["throttle_reasons"] and first.telemetry[STEADY_MS] == 0.0
    assert last.telemetry[STEADY_MS] == 20.0


def test_an_abandoned_request_does_not_leak_into_the_next(worker: MeasureWorker) -> None:
    """Which is of a user's epilogue: a new child, which has seen nothing, knows it."""
    stream = worker.measure(PROBLEM, [planted("wrong"), planted("good")], QUICK)
    assert isinstance(next(stream), Failure)
    stream.close()
    assert worker.pid is None
    problem = Problem(32, 48, 64, epilogue=str(kept))
    (outcome,) = worker.measure(problem, [planted("good")], QUICK)
    assert isinstance(outcome, Measurement)


def test_a_worker_says_what_its_phases_took(worker: MeasureWorker) -> None:
    worker.discover(PROBLEM)
    before = dict(worker.seconds)
    [*worker.measure(PROBLEM, [planted("good")], QUICK)]
    assert 0 < before["start"] < 60
    assert set(worker.seconds) >= {"start", "operands", "baseline", "checks", "races"}
    assert all(worker.seconds[phase] > before.get(phase, 0.0) for phase in ("checks", "races"))
    assert worker.seconds["start"] == before["start"]


def test_discover_names_torch_mm_where_no_library_can_be_asked(worker: MeasureWorker) -> None:
    assert worker.discover(PROBLEM) == [TORCH_MM]


def test_a_device_that_cannot_be_used_is_one_error() -> None:
    device = find_device("model:h200")
    with pytest.raises(DeviceError, match=r"model:h200.*cuda:N"):
        MeasureWorker(device)
    with (
        MeasureWorker(device, backend="tests.support.planted.broken_backend:BrokenBackend") as worker,
        pytest.raises(MeasureError, match="model:h200: no CUDA-capable device"),
    ):
        [*worker.measure(PROBLEM, [planted("good")], QUICK)]


@pytest.mark.slow
def test_a_child_that_was_started_before_its_device_was_known() -> None:
    """It is the worker's first one; another is started only when it is gone."""
    device = find_device("model:h200")
    with Child(BACKEND) as early, MeasureWorker(device, backend=BACKEND, child=early) as worker:
        assert worker.discover(PROBLEM) == [TORCH_MM]
        assert worker.pid == early.process.pid
        worker.close()
        assert not alive(early.process.pid)
        assert worker.discover(PROBLEM) == [TORCH_MM] and worker.pid != early.process.pid
    with Child(BACKEND) as unused, MeasureWorker(device, backend=BACKEND, child=unused):
        pass
    assert not alive(unused.process.pid)
    with (
        Child("tests.support.planted.cpu_backend:NoSuchBackend") as broken,
        MeasureWorker(device, backend=BACKEND, child=broken) as worker,
        pytest.raises(MeasureError, match=r"ended with exit code 1.*NoSuchBackend"),
    ):
        broken.process.wait(60)
        worker.discover(PROBLEM)


@pytest.mark.parametrize(
    ("code", "output", "words"),
    [(0, b"", "ended with exit code 0"), (1, b"first\n last \n\n", "ended with exit code 1: last"),
     (-9, b"first\xff", "killed by signal 9: first\ufffd"),
     (2, b"x" * 5000 + b"\nend", "ended with exit code 2: end")],
)  # fmt: skip
def test_the_last_words_of_a_child(code: int, output: bytes, words: str) -> None:
    ended = SimpleNamespace(process=SimpleNamespace(wait=lambda timeout: code), _output=io.BytesIO(output))
    assert Child.last_words(cast(Child, ended)) == words


def test_close_ends_the_child(worker: MeasureWorker) -> None:
    worker.discover(PROBLEM)
    pid = worker.pid
    assert pid is not None and alive(pid)
    worker.close()
    assert not alive(pid)


PARENT = """
from tests.measure.test_worker import *
with MeasureWorker(find_device("model:h200"), timeout_s=300, backend=BACKEND) as worker:
    [*worker.measure(PROBLEM, [planted("hang")], QUICK)]
"""


@pytest.mark.parametrize("how", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL])
def test_no_child_outlives_its_parent(how: signal.Signals, tmp_path: Path) -> None:
    """Ctrl-C, and a killed parent, while a kernel hangs."""
    pid_file = tmp_path / "pid"
    environment = os.environ | {"PLANTED_PID_FILE": str(pid_file), "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        env=environment,
        stderr=subprocess.PIPE,
        # A shell's background job, as a CI run may be, ignores SIGINT and hands that on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    until(pid_file.with_suffix(".hangs").exists)
    child = int(pid_file.read_text())
    assert alive(child)
    parent.send_signal(how)
    _, errors = parent.communicate(timeout=20)
    until(lambda: not alive(child), seconds=10)
    if how == signal.SIGINT:
        assert b"KeyboardInterrupt" in errors


def test_slow_candidates_drop_out_with_the_samples_they_have(worker: MeasureWorker) -> None:
    settings = RaceSettings(rounds=8, min_replay_ms=0.05, race_after=2, race_margin=0.5)
    outcomes = {o.candidate: o for o in worker.measure(PROBLEM, [planted("good"), planted("slow")], settings)}
    slow = outcomes[planted("slow").candidate]
    assert isinstance(slow, Measurement)
    assert 2 <= len(slow.samples_us) == len(slow.baseline_us) <= 4
    assert slow.ratio < 0.5
