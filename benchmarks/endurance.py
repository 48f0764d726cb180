"""Many tunings with planted faults, on recorded times: does each end right, or say why it does not?

    python -m benchmarks.endurance --count 1000

Each tunes a product of an H200's recorded sweeps into one database, by the code that tunes on a GPU; what is
planted is drawn by its seed: candidates that fail, that hang or end the measuring worker, a compiler that
refuses, aborts or is killed, a measuring worker that is lost for good, Ctrl-C, a budget that ends the search.
What was cut short is tuned once more without faults, from what the database kept. Then the record must be the
fastest that was measured, and none slower than torch.mm. At the end no process, file or descriptor is left
over, and memory has not grown. Writes results/cpu/endurance.json. No GPU is used.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from benchmarks.results import command_line
from tunegemm.compile.artifacts import ArtifactStore
from tunegemm.compile.pool import CompilePool
from tunegemm.compile.ptxas import Resources
from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.errors import MeasureError, TunegemmError
from tunegemm.generate.cublaslt import is_torch
from tunegemm.measure.outcome import Failure, Measurement, Outcome, Stage
from tunegemm.measure.replay import ReplayDevice, ReplayMeasurer, open_replay
from tunegemm.measure.settings import Job, RaceSettings
from tunegemm.store import Database
from tunegemm.tuning.progress import Progress, TuneResult
from tunegemm.tuning.run import speed
from tunegemm.tuning.tuner import Tuner

#: Of kernels, by their keys: what the planted compiler does to them.
_REFUSED, _ABORTS, _LEAST_KILLED = 0.05, 0.06, 0.065
_STAGES: tuple[Stage, ...] = ("load", "launch", "wrong", "timeout", "crash")
#: Faults that end a tuning early, of which each has one or none.
_ENDS = ("none", "none", "lost worker", "ctrl-c", "budget")
#: Tunings of one tuner, as of the products of one program.
_EACH = 50
#: A final race takes kernels as equal that are closer than that.
_TIE = 0.005
#: What torch.mm may lack at most of what was measured and keep the product (docs/decisions/0025).
_KEPT = 0.01


class _Planted:
    """A family whose objects take no time to compile."""

    def compile(self, key: Mapping[str, str | int | bool], out: Path) -> Resources:
        text = repr(sorted(key.items()))
        fate = random.Random(text).random()
        if fate < _REFUSED:
            raise ValueError("a tile that the compiler refuses")
        if fate < _ABORTS:
            os.abort()
        if fate < _LEAST_KILLED:
            os.kill(os.getpid(), signal.SIGKILL)
        out.write_bytes(text.encode())
        return Resources(128, 0, 1024, (), 0.0)


def get(name: str) -> _Planted:
    """The family of any name, for compile workers."""
    return _Planted()


def import_compiler() -> None:
    """There is none."""


class Faulty:
    """The measuring worker of a GPU, by recorded times and with faults of its own."""

    def __init__(self, replay: ReplayDevice, chance: random.Random, rate: float, lost_after: int) -> None:
        self._measurer, self._seed = ReplayMeasurer(replay), chance.random()
        self._rate, self._left = rate, lost_after

    def discover(self, problem: Problem) -> list[Candidate]:
        return self._measurer.discover(problem)

    def swept(self, problem: Problem) -> frozenset[Candidate]:
        return self._measurer.swept(problem)

    def measure(self, problem: Problem, jobs: Sequence[Job], settings: RaceSettings) -> Iterator[Outcome]:
        for job, outcome in zip(jobs, self._measurer.measure(problem, jobs, settings), strict=True):
            self._left -= 1
            if self._left == 0:
                raise MeasureError("the GPU has fallen off the bus")
            if isinstance(outcome, Measurement):
                # As measured here and now: what is replayed is stored nowhere.
                facts = {name: value for name, value in outcome.telemetry.items() if name != "source"}
                outcome = replace(outcome, telemetry=facts | {"recorded_at": None})
            fate = random.Random(f"{self._seed} {job.candidate.digest}")  # what fails fails again
            if not is_torch(job.candidate) and fate.random() < self._rate:
                outcome = Failure(job.candidate, fate.choice(_STAGES), "planted")
            yield outcome


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; 1 where a tuning ended wrong or something is left over."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.endurance", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first; each has the next one")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "cpu")
    options = parser.parse_args(arguments)
    found = endure(options.count, options.seed)
    found = {
        "command": command_line(sys.argv),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    } | found
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "endurance.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    return 1 if found["wrong"] or found["left_over"] else 0


def endure(count: int, seed: int = 0) -> dict[str, Any]:
    """Tunes so often; what became of it."""
    replay = open_replay("h200")
    device = replace(replay.device, spec="cuda:0")
    problems = replay.problems()
    ended: Counter[str] = Counter()
    wrong: list[str] = []
    regrets: list[float] = []
    me = psutil.Process()
    before: dict[str, int] = {}
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tunegemm-") as folder:
        cache = Path(folder, "objects")
        for first in range(0, count, _EACH):
            with _planted_tuner(device, cache) as tuner:
                for number in range(first, min(first + _EACH, count)):
                    chance = random.Random(seed + number)
                    problem, end = chance.choice(problems), chance.choice(_ENDS)
                    path = Path(folder, f"{number}.sqlite")
                    for attempt in ((end, chance.choice((0.0, 0.05, 0.3))), ("none", 0.0)):
                        with Database.open(path) as tuner.database:
                            how = _tune(problem, tuner, replay, chance, *attempt)
                            ended[how if isinstance(how, str) else "ended"] += 1
                            if isinstance(how, TuneResult):
                                wrong += [
                                    f"seed {seed + number}: {one}" for one in faults(how, tuner.database)
                                ]
                                regrets += _regret(how, replay)
                                ended["nothing found, and why"] += how.best is None
                                break
                    else:
                        wrong.append(f"seed {seed + number}: without faults it did not end either")
                    for left in path.parent.glob(f"{path.name}*"):
                        left.unlink()
            if not before and first + _EACH >= count / 4:  # caches are full by then
                before = _held(me)
        objects = ArtifactStore(cache)
        scratch = [file.name for file in objects.root.rglob("*") if file.name.startswith((".", "tmp"))]
    after = _held(me)
    left_over = [f"scratch file {name}" for name in scratch]
    left_over += [
        f"{name}: {before[name]}, then {after[name]}"
        for name in _HELD
        if after[name] > before[name] + _HELD[name]
    ]
    return {
        "tunings": count, "seconds": round(time.monotonic() - begun, 1), "ended": dict(ended), "wrong": wrong,
        "left_over": left_over, "held_after_a_quarter": before, "held_at_the_end": after,
        "regret_median": round(statistics.median(regrets), 5),
        "regret_90": round(sorted(regrets)[int(0.9 * (len(regrets) - 1))], 5),
    }  # fmt: skip


#: What this process holds, and by how much it may have grown.
_HELD = {"processes": 0, "descriptors": 2, "threads": 0, "rss_mb": 60}


def _held(me: psutil.Process) -> dict[str, int]:
    return {
        "processes": len(me.children(recursive=True)),
        "descriptors": me.num_fds(),
        "threads": me.num_threads(),
        "rss_mb": round(me.memory_info().rss / 2**20),
    }


@contextmanager
def _planted_tuner(device: Device, cache: Path) -> Iterator[Tuner]:
    with Tuner(device, cache=cache, workers=1) as tuner:
        tuner.pool.close()
        store = ArtifactStore(cache)
        with CompilePool(store, workers=1, families_module="benchmarks.endurance") as tuner.pool:
            tuner.ahead.pool = tuner.pool
            yield tuner


def _tune(
    problem: Problem, tuner: Tuner, replay: ReplayDevice, chance: random.Random, end: str, rate: float
) -> TuneResult | str:
    """One tuning: what it found, or in a few words how it ended."""
    left = after = chance.randint(1, 60)

    def on_progress(progress: Progress) -> None:
        nonlocal left
        left -= 1
        if end == "ctrl-c" and left == 0:
            raise KeyboardInterrupt

    lost_after = after if end == "lost worker" else 0
    measurer = Faulty(replay, chance, rate, lost_after)
    tuner.measurer_for = lambda problem: measurer  # type: ignore[method-assign]
    try:
        result = tuner.tune(problem, budget_seconds=0.2 if end == "budget" else None, on_progress=on_progress)
    except TunegemmError as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"[:100]
    return "interrupted" if result.interrupted else result


def faults(result: TuneResult, database: Database) -> Iterator[str]:
    """What is wrong with a tuning that ended."""
    sound = [o for o in result.outcomes if isinstance(o, Measurement) and speed(o) is not None]
    record = next(iter(database.records()), None)
    if result.best is None:
        if not result.note:
            yield "it found nothing, and does not say why"
        return
    best = max((one.ratio for one in sound), default=0.0)
    if result.best.ratio < (1 - (_KEPT if is_torch(result.best.candidate) else _TIE)) * best:
        yield f"the winner has {result.best.ratio:.4f}, {best:.4f} was measured"
    if result.best.ratio < 1 and not is_torch(result.best.candidate):
        yield f"the winner is slower than torch.mm: {result.best.ratio:.4f}"
    if record is None or record.candidate != result.best.candidate:
        yield f"the record is {record.label if record else 'none'}"


def _regret(result: TuneResult, replay: ReplayDevice) -> list[float]:
    """How much faster the sweep's fastest is than the winner, if there is one."""
    outcomes = replay.sweep(result.problem).outcomes.values()
    fastest = max(one.ratio for one in outcomes if isinstance(one, Measurement))
    return [fastest / result.best.ratio - 1] if result.best else []


if __name__ == "__main__":
    sys.exit(main())
