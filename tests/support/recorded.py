"""Databases for tests, filled through the real store from recorded measurements of an H200.

What is stored keeps its telemetry ``"source": "replayed"``, so that no report calls it measured here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate import families
from tunegemm.measure.outcome import Failure, Measurement
from tunegemm.measure.replay import open_replay
from tunegemm.measure.statistics import winner
from tunegemm.store import Database

#: One memory-bound and one compute-bound shape that were recorded.
SHAPES = ("128x7168x16384", "8448x9216x256")


def recorded_device() -> Device:
    """The recorded H200 under its own fingerprint, as if it were real: the store refuses others."""
    replay = open_replay("h200")
    sweep = replay.sweep(Problem.parse(SHAPES[0]))
    return dataclasses.replace(replay.device, fingerprint=sweep.fingerprint, spec="cuda:0")


def fill(path: Path, shapes: Sequence[str] = SHAPES, *, each: int = 60) -> Path:
    """The vendor's algorithms and `each` spread candidates of every shape, three failures, and a record."""
    replay, device = open_replay("h200"), recorded_device()
    with Database.open(path, create=True) as database:
        for shape in shapes:
            problem = Problem.parse(shape)
            outcomes = list(replay.sweep(problem).outcomes.values())
            own = [o for o in outcomes if o.candidate.family == "cute_sm90"]
            chosen = [o for o in outcomes if o.candidate.family == "cublaslt"] + own[:: len(own) // each][
                :each
            ]
            stored: dict[Candidate, int] = {}
            for outcome in chosen:
                label = families.get(outcome.candidate.family).label(outcome.candidate)
                stored[outcome.candidate] = database.publish(problem, device, outcome, label=label)
            best = winner(problem, [o for o in chosen if isinstance(o, Measurement)])
            label = families.get(best.candidate.family).label(best.candidate)
            database.confirm(problem, device, best, label=label, stored_as=stored[best.candidate])
            for number, outcome in enumerate(own[1:4]):
                reason = f"relative error {0.1 + number:.1f} > 0.01"
                database.publish(problem, device, Failure(outcome.candidate, "wrong", reason))
    return path
