"""The messages between the measuring process and its parent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tunegemm.describe.problem import Problem
from tunegemm.measure.outcome import Outcome, Stage
from tunegemm.measure.settings import Job, RaceSettings


# To the child, after its device:
@dataclass(frozen=True)
class Measure:
    """A request: one `Result` per job, then `Done`."""

    problem: Problem
    jobs: tuple[Job, ...]
    settings: RaceSettings
    function: str = ""
    """Source of the user's function that is the problem's epilogue, which the measuring process lacks."""


@dataclass(frozen=True)
class Discover:
    """A request: `Done` with the candidates that the libraries name for a problem."""

    problem: Problem


def add_seconds(total: dict[str, float], more: Mapping[str, float]) -> None:
    """Add the seconds of phases to earlier ones."""
    for name, seconds in more.items():
        total[name] = total.get(name, 0.0) + seconds


# And to the parent:
@dataclass(frozen=True)
class Step:
    """About to do something that may not return."""

    job: int | None
    """Index in the jobs of the request; None if the step belongs to no candidate."""
    stage: Stage
    """The stage of a failure in this step, unless it is a hang or a crash."""
    device_seconds: float = 0.0
    """Expected device time of this step, beyond the usual."""


@dataclass(frozen=True)
class Result:
    """The outcome of a job."""

    job: int
    outcome: Outcome


@dataclass(frozen=True)
class Done:
    """A request is answered."""

    value: Any = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds of its phases."""


@dataclass(frozen=True)
class Broken:
    """The session ends: this process cannot use the device any more."""

    job: int | None
    """The job that broke it; None if the device cannot be used at all."""
    reason: str
    stage: Stage = "crash"
