"""The replay device: recorded sweeps of a real GPU stand in for measuring on a machine that has none.

A folder ``db/sweeps/NAME/`` is the device ``replay:NAME``: `device.json` says what it is, and `sweeps` has
the other files' format. What is replayed says so in its telemetry, and is never
stored or shown as measured here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.errors import DeviceError
from tunegemm.measure.outcome import Outcome
from tunegemm.measure.settings import Job
from tunegemm.measure.sweeps import SUFFIX, Sweep, problem_of, read_device, read_sweep, sweep_path
from tunegemm.resources import data_path


@dataclass(frozen=True)
class ReplayDevice:
    """A recorded device. Sweeps are read when first asked for."""

    name: str
    """As in ``replay:NAME``."""
    device: Device
    folder: Path
    _sweeps: dict[Problem, Sweep] = field(default_factory=dict, repr=False, compare=False)

    def problems(self) -> list[Problem]:
        """The recorded problems, sorted; from the files' names, nothing is read."""
        return sorted(problem_of(path) for path in self.folder.glob(f"*{SUFFIX}"))

    def sweep(self, problem: Problem) -> Sweep:
        """The sweep of one problem.

        Raises DeviceError when that problem was not recorded, or when its file cannot be read.
        """
        if problem not in self._sweeps:
            path = sweep_path(self.folder, problem)
            if not path.exists():
                known = ", ".join(str(p) for p in self.problems()) or "none"
                raise DeviceError(f"{problem} was not recorded on {self.device.spec}; recorded: {known}")
            self._sweeps[problem] = read_sweep(path, problem)
        return self._sweeps[problem]

    def swept(self, problem: Problem) -> list[Candidate]:
        """The candidates with a recorded outcome, in a fixed order: all that a search may ask for."""
        return list(self.sweep(problem).outcomes)


class ReplayMeasurer:
    """Answers like the measuring worker, out of a recorded sweep."""

    def __init__(self, replay: ReplayDevice) -> None:
        self.replay = replay

    def measure(self, problem: Problem, jobs: Iterable[Job], settings: object = None) -> Iterator[Outcome]:
        """The recorded outcome of each job, with ``{"source": "replayed", "recorded_at": ...}`` as telemetry.

        `settings` have no effect: the rounds were run when the sweep was recorded. Raises DeviceError for a
        candidate that was not recorded; a search is to be restricted to `ReplayDevice.swept`.
        """
        sweep = self.replay.sweep(problem)
        for job in jobs:
            if job.candidate not in sweep.outcomes:
                raise DeviceError(
                    f"{job.candidate} was not recorded on {self.replay.device.spec} for {problem}; "
                    f"ask for the {len(sweep.outcomes)} recorded candidates only"
                )
            yield sweep.outcomes[job.candidate]

    def discover(self, problem: Problem) -> list[Candidate]:
        """The recorded candidates of vendor libraries: those that are not compiled from a tile shape."""
        return [c for c in self.replay.swept(problem) if "tile_m" not in c.params]

    def swept(self, problem: Problem) -> frozenset[Candidate]:
        """All that can be asked for of a problem; empty for one that was not recorded."""
        return frozenset(self.replay.swept(problem) if problem in self.replay.problems() else ())


def replay_names(root: Path | None = None) -> list[str]:
    """Names of the recorded devices under `root` (default: the shipped db/sweeps/)."""
    root = _root(root)
    return sorted(path.parent.name for path in root.glob("*/device.json")) if root else []


def open_replay(name: str, *, root: Path | None = None) -> ReplayDevice:
    """The recorded device of that name; ``replay:`` in front is allowed.

    Raises DeviceError for an unknown name, listing the known ones, and for an unreadable device.json.
    """
    name = name.removeprefix("replay:")
    known = replay_names(root)
    if name not in known:
        listed = f"recorded: {', '.join(known)}" if known else "none is recorded; use model:h200"
        raise DeviceError(f"device 'replay:{name}': no such recording; {listed}")
    folder = _root(root) / name  # type: ignore[operator]
    return ReplayDevice(name, read_device(folder / "device.json", f"replay:{name}"), folder)


def _root(root: Path | None) -> Path | None:
    if root is not None:
        return root
    try:
        return data_path("db", "sweeps")
    except FileNotFoundError:
        return None
