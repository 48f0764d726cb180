"""The child's side: measures jobs, and announces each step to the parent before taking it.

So the parent knows which job killed or hung this process. Nothing here survives a broken device: the session
reports the job that broke it and ends.
"""

from __future__ import annotations

import gc
import importlib
import math
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

from tunegemm.describe.device import Device
from tunegemm.describe.epilogue import define
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.errors import TunegemmError, one_line
from tunegemm.generate import families
from tunegemm.generate.cublaslt import TORCH_MM
from tunegemm.generate.launching import Launcher
from tunegemm.measure import groups
from tunegemm.measure import operands as data
from tunegemm.measure.backend import LONGEST_METERING, CudaBackend, metered_mj, warm_us
from tunegemm.measure.outcome import STEADY_MS, Failure, Measurement, Stage
from tunegemm.measure.race import Replay, race, steady_race
from tunegemm.measure.settings import Job, RaceSettings
from tunegemm.measure.statistics import aa_noise
from tunegemm.measure.worker import Broken, Discover, Done, Measure, Result, Step, add_seconds

#: Most products in one replay: more graph nodes cost more to instantiate than they gain in precision.
_MAX_PRODUCTS = 512

#: Slowest candidate, relative to the baseline, to wait for. Wrong guesses cost 2 to 25 times
#: (130 candidates on 16 shapes, H200, 2026-11-20).
_SLOWEST = 50

#: Settling time before steady-state timing, in addition to `RaceSettings.settle_ms`. A GPU that reaches its
#: power cap swings around it (docs/decisions/0023-turns-outlast-the-power-controller.md). In a group of four,
#: a kernel's first samples differ from its later ones by 2.6 % (standard deviation) 0.5 s after the GPU
#: reached the cap, by 1.2 % after 1.1 s, by 1.0 % after 1.7 s; the later ones differ among themselves by
#: 0.45 % (six products, H200, 2026-11-25). A longer time would slow every tuning.
SETTLE_STEADY_MS = 900.0

#: This soon after another interleave of the same problem, settling takes only `settle_again` of the time.
_WARM_S = 0.3

#: A candidate that takes more than this many times the baseline's time gets shorter replays.
_SLOW = 2


@dataclass
class Entry:
    """A job that passed its checks."""

    job: int
    candidate: Candidate
    replay: Replay
    relative_error: float
    products: int
    replay_seconds: float
    """Expected device time of one replay."""


@dataclass
class Bench:
    """Operand sets and references of one problem; kept between requests for the same one."""

    problem: Problem
    key: tuple[Any, ...]
    """The request: problem, seed and skews."""
    sets: list[list[data.Operands]]
    """The sets that a replay cycles through; for rows in groups one list per skew, which share memory."""
    references: list[tuple[Any, Any]]
    """The fp32 references of the first and last set of each list."""
    exact: data.Operands
    """A set with exact sums, which is checked but not timed."""
    exact_reference: Any
    raced_at: float = -math.inf
    """The end of its last race, by the monotonic clock."""
    throttled: bool = False
    """Whether the GPU had lowered its clocks by then."""


class Lost(Exception):
    """This process cannot go on."""

    def __init__(self, stage: Stage, reason: str) -> None:
        super().__init__(reason)
        self.stage = stage


class Session:
    """Answers requests on one device until the pipe closes."""

    def __init__(self, device: Device, backend: CudaBackend, send: Callable[[Any], None]) -> None:
        self._device, self._backend, self._send = device, backend, send
        self._bench: Bench | None = None
        self._job: int | None = None
        self._seconds: dict[str, float] = {}
        """Seconds that the phases of a request took."""
        self._phase_began = time.monotonic()

    def discover(self, problem: Problem) -> list[Candidate]:
        """Return the candidates that the families' libraries name for a problem."""
        self.announce(None, "load")
        libraries = (family for family in map(families.get, families.NAMES) if not family.compiled)
        return [candidate for family in libraries for candidate in family.discover(problem, self._device)]

    def measure(self, request: Measure) -> None:
        """Send a Result for every job.

        Launchers and graphs go with the request; operands stay for the next request of the same problem.
        """
        problem, settings = request.problem, request.settings
        if request.function:
            define(request.function)
        self.announce(None, "load")
        bench = self._prepare(problem, settings.seed, settings.skews)
        self._end_phase("operands")
        baseline = self._backend.family(TORCH_MM.family).load(problem, TORCH_MM, self._device, None)
        product_us = [warm_us(self._backend, baseline, sets) for sets in bench.sets]
        passes = self.passes_of(product_us, bench, settings)
        captured = [
            [self._backend.capture(baseline, *each) for each in zip(bench.sets, passes, strict=True)]
            for _ in range(2)
        ]
        replays = list(map(_together, captured))
        for replay in replays:
            replay.start()
            replay.finish()
        self._end_phase("baseline")

        entries: list[Entry] = []
        for index, job in enumerate(request.jobs):
            outcome = self._admit(bench, index, job, settings, product_us)
            if isinstance(outcome, Failure):
                self._send(Result(index, outcome))
            else:
                entries.append(outcome)
        self._end_phase("checks")
        if not entries:
            return

        if time.monotonic() - bench.raced_at < _WARM_S:
            settings = replace(settings, settle_ms=settings.settle_ms * settings.settle_again)
        replay_seconds = self.replay_seconds_of(product_us, passes, bench)
        before, is_steady = self.settled(replays, settings, replay_seconds, bench.throttled)
        # torch.mm as a candidate is its second capture, which every race includes.
        raced = [entry for entry in entries if entry.candidate != TORCH_MM]
        timed: list[tuple[Replay, float]] = [(replay, replay_seconds) for replay in replays]
        timed += [(entry.replay, entry.replay_seconds) for entry in raced]
        # Two replays are in flight while clocks fall: each may take twice the planned time.
        in_flight_seconds = 2 * max(seconds for _, seconds in timed)
        in_flight_seconds += 4 * settings.steady_ms * 1e-3 if is_steady else 0.0

        def waiting_for(number: int) -> None:
            self.announce(raced[number - 2].job if number >= 2 else None, "launch", in_flight_seconds)

        if is_steady:
            samples = steady_race(timed, len(replays), settings, waiting_for)
        else:
            samples = race([replay for replay, _ in timed], len(replays), settings, waiting_for)
        self.announce(None, "launch", replay_seconds)
        after = self._telemetry_under(replays)
        bench.raced_at, bench.throttled = time.monotonic(), bool(after.get("throttle_reasons"))
        noise = aa_noise(samples[0], samples[1])
        common = {f"{name}_before": value for name, value in before.items()} | after
        common |= {
            "operand_sets": len(bench.sets[0]),
            "operand_bytes": len(bench.sets[0]) * problem.memory_bytes,
            "l2_bytes": self._device.l2_bytes,
            "interleaved": len(entries),
            "seed": settings.seed,
            "settle_ms": settings.settle_ms,
            STEADY_MS: round(settings.steady_ms / settings.steady_groups[-1]) if is_steady else 0.0,
            "aa_ratio": median(a / b for a, b in zip(samples[0], samples[1], strict=True)),
        }
        samples_of = dict(zip((entry.job for entry in raced), samples[2:], strict=True))
        most = max(map(len, samples))
        for entry in entries:
            own = samples_of.get(entry.job, samples[1])
            telemetry = common | {
                "rounds": len(own),
                "of_rounds": most,
                "products_per_replay": entry.products,
            }
            if problem.groups:
                replay = replays[1] if entry.candidate == TORCH_MM else entry.replay
                telemetry["skews"] = groups.ratios(replay, replays[0], settings.skews)
            if len(own) == most and (energy_mj := self.energy_mj_of(entry, settings)) is not None:
                telemetry["energy_mj"] = energy_mj
            measurement = Measurement(
                candidate=entry.candidate,
                samples_us=tuple(own),
                baseline_us=tuple(samples[0][: len(own)]),
                relative_error=entry.relative_error,
                noise=noise,
                telemetry=telemetry,
            )
            self._send(Result(entry.job, measurement))
        self._end_phase("races")

    def settled(
        self, replays: list[Replay], settings: RaceSettings, replay_seconds: float, throttled: bool
    ) -> tuple[dict[str, Any], bool]:
        """Keep the device busy until its clocks settle. Return its telemetry, and whether to time in steady
        state: if the settings request it and the device lowered its clocks.

        throttled: by the last race. After a pause to load kernels the device holds full clocks for a while:
        4096x4096x4096 was once raced interleaved and lost 4 % (H200, 2026-11-25).
        """

        def settle(settle_ms: float) -> dict[str, Any]:
            self.announce(None, "launch", settle_ms * 1e-3 + 2 * replay_seconds)
            keep_busy(replays, settle_ms)
            self.announce(None, "launch", replay_seconds)
            return self._telemetry_under(replays)

        reading = settle(settings.settle_ms)
        if not (settings.steady_ms and (throttled or reading.get("throttle_reasons"))):
            return reading, False
        # Read the telemetry again: earlier work may have lowered the clocks. 16x4096x4096 was once timed in
        # steady state right after 4096x4096x4096.
        reading = settle(SETTLE_STEADY_MS)
        return reading, bool(reading.get("throttle_reasons"))

    def _admit(
        self, bench: Bench, index: int, job: Job, settings: RaceSettings, baseline_us: list[float]
    ) -> Entry | Failure:
        """Load, check and capture one job."""
        candidate, problem = job.candidate, bench.problem
        self.announce(index, "load")
        try:
            launcher = self._backend.family(candidate.family).load(
                problem, candidate, self._device, job.artifact
            )
        except (TunegemmError, ValueError, RuntimeError) as error:
            return self.failed(candidate, "load", error)
        self.announce(index, "launch", device_seconds=_SLOWEST * sum(baseline_us) * 1e-6)
        try:
            return self._check_and_capture(bench, index, candidate, launcher, settings, baseline_us)
        except (TunegemmError, ValueError, RuntimeError) as error:
            return self.failed(candidate, "launch", error)

    def _check_and_capture(
        self,
        bench: Bench,
        index: int,
        candidate: Candidate,
        launcher: Launcher,
        settings: RaceSettings,
        baseline_us: list[float],
    ) -> Entry | Failure:
        # Poisoned, launched and compared: one set of each skew.
        limit = data.tolerance(bench.problem)
        worst = 0.0
        for sets, (wanted, _) in zip(bench.sets, bench.references, strict=True):
            data.restore(sets[0])
            self._backend.launch(launcher, sets[0])
            checked = _check(launcher, sets[0], wanted)
            if objection := checked.objection(limit):
                return Failure(candidate, "wrong", objection)
            worst = max(worst, checked.relative_error)
        # As many products as the baseline's replay, because starting a replay takes some 5 us, which its
        # products share (H200, 2026-11-22). Only slow candidates get fewer: they will drop out and should not
        # take long to do so.
        passes = self.passes_of(baseline_us, bench, settings)
        self.announce(index, "launch", _SLOWEST * self.replay_seconds_of(baseline_us, passes, bench))
        replay, own_us, again = self._capture(bench, launcher, passes)
        slow = [own > _SLOW * theirs for own, theirs in zip(own_us, baseline_us, strict=True)]
        choices = zip(slow, self.passes_of(own_us, bench, settings), passes, strict=True)
        if (fewer := [min(few, many) if is_slow else many for is_slow, few, many in choices]) != passes:
            passes = fewer
            replay, own_us, again = self._capture(bench, launcher, passes)
        # The second check runs the graph on other operands. It detects a launcher that keeps the first
        # pointers, and a kernel that fails only back to back with itself.
        for checked in again:
            if objection := checked.objection(limit):
                return Failure(candidate, "wrong", f"in a graph: {objection}")
            worst = max(worst, checked.relative_error)
        # The third check is exact: an omitted bit of a long k would vanish in the rounding of the others.
        self.announce(index, "launch", _SLOWEST * max(baseline_us) * 1e-6)
        data.restore(bench.exact)
        self._backend.launch(launcher, bench.exact)
        _take_result(launcher, bench.exact)
        if objection := data.exact_objection(bench.problem, bench.exact, bench.exact_reference):
            return Failure(candidate, "wrong", objection)
        seconds = self.replay_seconds_of(own_us, passes, bench)
        products = sum(each * len(sets) for each, sets in zip(passes, bench.sets, strict=True))
        return Entry(index, candidate, replay, worst, products, seconds)

    def _capture(
        self, bench: Bench, launcher: Launcher, passes: list[int]
    ) -> tuple[Replay, list[float], list[data.Check]]:
        """A replay; for each list of sets its microseconds per product in the first run, and the check of its
        last output.
        """
        replays, times, checks = [], [], []
        for sets, count, (_, wanted) in zip(bench.sets, passes, bench.references, strict=True):
            try:
                replay = self._backend.capture(launcher, sets, count)
            except RuntimeError as error:
                raise Lost("launch", f"cannot be captured in a graph: {one_line(error)}") from None
            replays.append(replay)
            data.restore(sets[-1])
            replay.start()
            times.append(replay.finish())
            checks.append(_check(launcher, sets[-1], wanted))
        return _together(replays), times, checks

    def _prepare(self, problem: Problem, seed: int, skews: tuple[str, ...]) -> Bench:
        """Operand sets and references; those of the last problem are freed first."""
        key = problem, seed, skews
        if self._bench is not None and self._bench.key == key:
            return self._bench
        self._bench = None
        gc.collect()  # frees the last problem's objects in cycles; 0.1 s with torch loaded
        self._backend.release()
        free_bytes = self._backend.free_bytes()
        count = data.count_sets(problem, self._device.l2_bytes, free_bytes)
        device = self._backend.torch_device
        sets = [data.make_operands(problem, device, seed * data.MAX_SETS + i) for i in range(count)]
        lists, exact_set = [sets], data.make_exact(problem, device, seed)
        if problem.groups:
            lists = groups.over_skews(problem, sets, self._device.l2_bytes, seed, skews)
            exact_set = groups.divided(problem, exact_set, groups.RAGGED, seed)
        references = []
        for each in lists:
            first = data.expected(problem, each[0])
            references.append((first, first if len(each) == 1 else data.expected(problem, each[-1])))
        self._bench = Bench(problem, key, lists, references, exact_set, data.expected(problem, exact_set))
        return self._bench

    def failed(self, candidate: Candidate, stage: Stage, error: Exception) -> Failure:
        if not self._backend.alive():
            raise Lost("crash", one_line(error)) from None
        return Failure(candidate, stage, one_line(error))

    def passes_of(self, product_us: list[float], bench: Bench, settings: RaceSettings) -> list[int]:
        """How often a replay cycles through each list of sets, for these times of a product."""
        return [
            max(
                1, min(math.ceil(settings.min_replay_ms * 1e3 / (us * len(sets))), _MAX_PRODUCTS // len(sets))
            )
            for us, sets in zip(product_us, bench.sets, strict=True)
        ]

    def replay_seconds_of(self, product_us: list[float], passes: list[int], bench: Bench) -> float:
        each = zip(product_us, passes, bench.sets, strict=True)
        return sum(us * count * len(sets) for us, count, sets in each) * 1e-6

    def _telemetry_under(self, replays: list[Replay]) -> dict[str, Any]:
        """Read the telemetry while the device works: an idle GPU shows other clocks."""
        for replay in replays:
            replay.start()
        reading = self._backend.telemetry()
        for replay in replays:
            replay.finish()
        return reading

    def energy_mj_of(self, entry: Entry, settings: RaceSettings) -> float | None:
        """The energy of one product; None if the device has no meter or the settings do not request it."""
        if not settings.energy_ms or self._backend.energy_mj() is None:
            return None
        self.announce(entry.job, "launch", LONGEST_METERING * settings.energy_ms * 1e-3)
        return metered_mj(self._backend, entry.replay, entry.products, settings.energy_ms)

    def _end_phase(self, name: str) -> None:
        now = time.monotonic()
        add_seconds(self._seconds, {name: now - self._phase_began})
        self._phase_began = now

    def announce(self, job: int | None, stage: Stage, device_seconds: float = 0.0) -> None:
        self._job = job
        self._send(Step(job, stage, device_seconds))

    def serve(self, requests: Callable[[], Any]) -> None:
        """Answer requests until the device is lost."""
        while True:
            request = requests()
            self._job = None
            self._seconds, self._phase_began = {}, time.monotonic()
            try:
                if isinstance(request, Measure):
                    self.measure(request)
                    self._send(Done(seconds=self._seconds))
                elif isinstance(request, Discover):
                    result = self.discover(request.problem)
                    self._end_phase("library")
                    self._send(Done(result, self._seconds))
            except Lost as error:
                self._send(Broken(self._job, str(error), error.stage))
                return
            except (TunegemmError, RuntimeError) as error:
                self._send(Broken(self._job, one_line(error)))
                return


def _together(replays: list[Replay]) -> Replay:
    return replays[0] if len(replays) == 1 else groups.OverSkews(replays)


def _check(launcher: Launcher, operands: data.Operands, wanted: Any) -> data.Check:
    _take_result(launcher, operands)
    return data.check(operands, wanted)


def _take_result(launcher: Launcher, operands: data.Operands) -> None:
    """Copies the result of a launcher that takes no output into the operands' output."""
    if (result := getattr(launcher, "result", None)) is not None:
        operands.out.copy_(result[: operands.out.shape[0]])


def keep_busy(replays: Sequence[Replay], for_ms: float) -> None:
    until = time.monotonic() + for_ms * 1e-3
    while time.monotonic() < until:
        for replay in replays:
            replay.start()
        for replay in replays:
            replay.finish()


def main(descriptor: int, backend_name: str) -> None:
    """Entry point of the child: serve the pipe at a file descriptor until it closes.

    backend_name: ``module:attribute`` of a class with the methods of CudaBackend.
    """
    gc.disable()  # until all is imported: collections would scan modules for 0.1 to 0.2 s
    connection = Connection(descriptor)
    opened: Future[Device] = Future()
    requests: queue.Queue[Any] = queue.Queue()

    def receive() -> None:
        # In its own thread, so that the process ends with its parent even if it hangs in a kernel.
        try:
            opened.set_result(connection.recv())
            while True:
                requests.put(connection.recv())
        except (EOFError, OSError):
            os._exit(0)

    threading.Thread(target=receive, daemon=True).start()
    module, _, attribute = backend_name.partition(":")
    kind: type[CudaBackend] = getattr(importlib.import_module(module), attribute)
    kind.prepare(opened.result)
    device = opened.result()
    backend = kind(device)
    try:
        backend.open(warm_up_s=0.0)  # each interleave waits for the clocks to settle
    except (TunegemmError, RuntimeError) as error:
        connection.send(Broken(None, one_line(error)))
        _leave()
    connection.send(Done())
    gc.freeze()  # each later collection would scan modules and the like for 0.2 s
    gc.enable()
    try:
        Session(device, backend, connection.send).serve(requests.get)
    except Exception:  # a bug: its last line is for the parent, which does not wait for the interpreter's end
        traceback.print_exc()
    _leave()


def _leave() -> None:
    """End the process without tearing down the device: if the device is lost, that can hang or abort."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
