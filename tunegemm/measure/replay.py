"""The replay device: recorded sweeps of a real GPU replace measurements on a machine without one.

The folder ``db/sweeps/NAME/`` is the device ``replay:NAME``. Its `device.json` describes the device, and each
other file, ``MxNxK-DTYPE-LAYOUT.json.xz``, has every outcome of one problem (db/sweeps/README.md; `fit.sweep`
records them). The telemetry of replayed outcomes marks them as such; they are never stored or shown as
measured here.
"""

from __future__ import annotations

import json
import lzma
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from tunegemm.describe.architectures import ARCHITECTURES
from tunegemm.describe.device import Device, Fingerprint
from tunegemm.describe.problem import DTYPE_BYTES, Problem, default_out_dtype
from tunegemm.describe.space import Candidate, Value
from tunegemm.errors import DeviceError, ProblemError, one_line
from tunegemm.measure.outcome import Failure, Measurement, Outcome, Stage
from tunegemm.measure.settings import Job
from tunegemm.resources import data_path

FORMAT = 3
SUFFIX = ".json.xz"
_DTYPES = "|".join(DTYPE_BYTES)
_STEM = re.compile(
    rf"(?P<shape>[\dx]+)-(?P<dtype>{_DTYPES})(?:_(?P<out_dtype>{_DTYPES}))?-(?P<layout>[nt]{{2}})(?P<out_m>-outm)?"
    r"(?:-align(?P<alignment>\d+))?(?:-(?P<accumulation>two_level))?"
)
#: Errors from reading a damaged or foreign file: no xz, truncated, no JSON, a missing or misshapen column.
_UNREADABLE = (OSError, lzma.LZMAError, EOFError, ValueError, KeyError, TypeError, AttributeError, IndexError)


@dataclass(frozen=True)
class Sweep:
    """Every recorded outcome of one problem on one device."""

    outcomes: Mapping[Candidate, Outcome]
    recorded_at: str
    """ISO 8601 date and time of the recording, with zone."""
    fingerprint: Fingerprint
    """Driver and package versions of the recording."""


def read_device(path: Path, spec: str) -> Device:
    """The recorded device. Raises DeviceError if the file cannot be read as a device."""
    try:
        data = json.loads(path.read_text())
        architecture = ARCHITECTURES[tuple(data.pop("capability"))]
        fingerprint = Fingerprint(**data.pop("fingerprint"))
        return Device(spec=spec, architecture=architecture, fingerprint=fingerprint, **data)
    except _UNREADABLE as error:
        why = one_line(f"{type(error).__name__}: {error}", 120)
        raise DeviceError(f"{path}: not a readable device ({why}); restore it") from None


# Columns: `candidates` per family and parameter (which compresses a hundredfold), `interleaves` with the data
# that rival measurements share, then one row per outcome that points into both.


def _from_columns(data: Mapping[str, Any], recorded_at: str) -> dict[Candidate, Outcome]:
    candidates: list[Candidate] = []
    for columns in data["candidates"]:
        count = columns["count"]
        family = columns["family"]
        tables = [_rows(columns[table], count) for table in ("compile", "launch")]
        for compile_params, launch_params in zip(*tables, strict=True):
            candidates.append(Candidate.make(family, compile_params, launch_params))
    outcomes: dict[int, Outcome] = {}
    for row, interleave, samples, error, telemetry in _zip_columns(
        data["measured"], "row", "interleave", "samples_us", "relative_error", "evidence"
    ):
        shared = data["interleaves"][interleave]
        if len(samples) != len(shared["baseline_us"]) or not samples or min(samples) <= 0:
            raise ValueError(f"row {row} has {len(samples)} samples, its baseline a different number")
        outcomes[row] = Measurement(
            candidates[row], tuple(samples), tuple(shared["baseline_us"]), error, shared["noise"],
            telemetry | {"source": "replayed", "recorded_at": recorded_at},
        )  # fmt: skip
    for row, stage, reason in _zip_columns(data["failed"], "row", "stage", "reason"):
        if stage not in get_args(Stage):
            raise ValueError(f"row {row} failed at the unknown stage {stage!r}")
        outcomes[row] = Failure(candidates[row], stage, reason)
    if sorted(outcomes) != list(range(len(candidates))):
        raise ValueError(f"{len(outcomes)} outcomes of {len(candidates)} candidates")
    if len(set(candidates)) != len(candidates):
        raise ValueError("a candidate has two rows")
    return {candidates[row]: outcomes[row] for row in range(len(candidates))}


def _rows(columns: Mapping[str, list[Value]], count: int) -> list[dict[str, Value]]:
    if any(len(values) != count for values in columns.values()):
        raise ValueError(f"parameter columns of unequal length, not {count}")
    return [{name: values[i] for name, values in columns.items()} for i in range(count)]


def _zip_columns(columns: Mapping[str, list[Any]], *names: str) -> Iterator[tuple[Any, ...]]:
    return zip(*(columns[name] for name in names), strict=True)


def read_sweep(path: Path, problem: Problem) -> Sweep:
    """The sweep of one problem. Raises DeviceError if the file cannot be read as a sweep."""
    try:
        data = json.loads(lzma.decompress(path.read_bytes()))
        if data["format"] != FORMAT:
            raise ValueError(f"format {data['format']}, not {FORMAT}")
        if data["problem"] != stem(problem):
            raise ValueError(f"it is the sweep of {data['problem']}")
        at = data["recorded_at"]
        return Sweep(_from_columns(data, at), at, Fingerprint(**data["fingerprint"]))
    except _UNREADABLE as error:
        why = one_line(f"{type(error).__name__}: {error}", 120)
        raise DeviceError(f"{path}: not a readable sweep ({why}); restore or delete it") from None


def sweep_path(folder: Path, problem: Problem) -> Path:
    """The file of a problem's sweep."""
    return folder / (stem(problem) + SUFFIX)


def stem(problem: Problem) -> str:
    """The name of a problem's file without its suffix; `problem_of` parses it."""
    out = "" if problem.out_dtype == default_out_dtype(problem.in_dtype) else f"_{problem.out_dtype}"
    major = "-outm" if problem.out_major == "m" else ""
    packed = problem.alignment == problem.packed_alignment
    alignment = "" if packed else f"-align{problem.alignment}"
    accumulation = "" if problem.accumulation == "fast" else f"-{problem.accumulation}"
    return f"{problem.shape}-{problem.in_dtype}{out}-{problem.layout}{major}{alignment}{accumulation}"


def problem_of(path: Path) -> Problem:
    """The problem that a sweep's file name denotes. Raises DeviceError if it is not a sweep's name."""
    match = _STEM.fullmatch(path.name.removesuffix(SUFFIX))
    try:
        if match is None:
            raise ProblemError("its name is not MxNxK-DTYPE-LAYOUT")
        problem = Problem.parse(
            match["shape"], dtype=match["dtype"], out_dtype=match["out_dtype"], layout=match["layout"],
            alignment=int(match["alignment"]) if match["alignment"] else None,
            accumulation=match["accumulation"] or "fast",
        )  # fmt: skip
        return replace(problem, out_major="m") if match["out_m"] else problem
    except ProblemError as error:
        raise DeviceError(f"{path}: not a sweep: {error}") from None


@dataclass(frozen=True)
class ReplayDevice:
    """A recorded device, with the methods of the measuring worker. It reads each sweep on first use."""

    name: str
    """As in ``replay:NAME``."""
    device: Device
    folder: Path
    seconds: dict[str, float] = field(default_factory=dict, repr=False, compare=False)
    """Always empty: a replay waits for nothing."""
    _sweeps: dict[Problem, Sweep] = field(default_factory=dict, repr=False, compare=False)

    def problems(self) -> list[Problem]:
        """The recorded problems, sorted; taken from file names, without reading the files."""
        return sorted(problem_of(path) for path in self.folder.glob(f"*{SUFFIX}"))

    def sweep(self, problem: Problem) -> Sweep:
        """The sweep of one problem.

        Raises DeviceError if the problem was not recorded or its file cannot be read.
        """
        if problem not in self._sweeps:
            path = sweep_path(self.folder, problem)
            if not path.exists():
                known = ", ".join(str(p) for p in self.problems()) or "none"
                raise DeviceError(f"{problem} was not recorded on {self.device.spec}; recorded: {known}")
            self._sweeps[problem] = read_sweep(path, problem)
        return self._sweeps[problem]

    def swept(self, problem: Problem) -> frozenset[Candidate]:
        """All candidates that a search may measure for a problem; empty if it was not recorded."""
        return frozenset(self.sweep(problem).outcomes if problem in self.problems() else ())

    def measure(self, problem: Problem, jobs: Iterable[Job], settings: object = None) -> Iterator[Outcome]:
        """The recorded outcome of each job, with ``{"source": "replayed", "recorded_at": ...}`` as telemetry.

        `settings` have no effect: the rounds were run when the sweep was recorded. Raises DeviceError if a
        candidate was not recorded; restrict a search to `swept`.
        """
        sweep = self.sweep(problem)
        for job in jobs:
            if job.candidate not in sweep.outcomes:
                raise DeviceError(
                    f"{job.candidate} was not recorded on {self.device.spec} for {problem}; "
                    f"that recording has {len(sweep.outcomes):,} others; measure it on a GPU"
                )
            yield sweep.outcomes[job.candidate]

    def fastest_first(self, problem: Problem, family: str) -> list[Candidate]:
        """The measured candidates of a family, the highest ratio first."""
        results = [o for o in self.sweep(problem).outcomes.values() if isinstance(o, Measurement)]
        of_family = (result for result in results if result.candidate.family == family)
        return [measurement.candidate for measurement in sorted(of_family, key=lambda each: -each.ratio)]

    def discover(self, problem: Problem) -> list[Candidate]:
        """The recorded candidates of vendor libraries: those without a tile shape."""
        return [c for c in self.sweep(problem).outcomes if "tile_m" not in c.params]


def replay_names(root: Path | None = None) -> list[str]:
    """Names of the recorded devices under `root` (default: the shipped db/sweeps/)."""
    try:
        return sorted(path.parent.name for path in (root or _shipped()).glob("*/device.json"))
    except FileNotFoundError:  # without the package's data
        return []


def open_replay(name: str, *, root: Path | None = None) -> ReplayDevice:
    """The recorded device of that name, with or without the prefix ``replay:``.

    Raises DeviceError if the name is unknown, with a list of the known names, or device.json is unreadable.
    """
    name = name.removeprefix("replay:")
    known = replay_names(root)
    if name not in known:
        listed = f"recorded: {', '.join(known)}" if known else "there are no recordings; use model:h200"
        raise DeviceError(f"device 'replay:{name}': no such recording; {listed}")
    folder = (root or _shipped()) / name
    return ReplayDevice(name, read_device(folder / "device.json", f"replay:{name}"), folder)


def _shipped() -> Path:
    return data_path("db", "sweeps")
