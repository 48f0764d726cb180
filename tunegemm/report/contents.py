"""A report's contents: the records of one device with their samples, and the trials behind some of them.

They come from a tuning database or from a recording (`replay:NAME`). A page about a recording says so
wherever it shows times.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Literal

from tunegemm.describe.device import Device, Fingerprint
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.errors import TunegemmError
from tunegemm.generate import families
from tunegemm.measure.evidence import SCREEN
from tunegemm.measure.outcome import Failure, Measurement
from tunegemm.measure.statistics import NOISE_FLOOR, ratio_interval, winner
from tunegemm.model.rank import is_memory_bound
from tunegemm.report.leaderboard import VENDOR_FAMILY, known_device
from tunegemm.store.record import Record

if TYPE_CHECKING:
    from tunegemm.choose.snapshot import Snapshot
    from tunegemm.measure.replay import ReplayDevice
    from tunegemm.store import Database

Verdict = Literal["faster", "equal", "slower"]

#: Most shapes whose trials a page shows by default, and most trials read of one.
DETAILED, MOST_TRIALS = 12, 20_000


@dataclass(frozen=True)
class Winner:
    """The record of one problem, with its samples and what shows how certain it is."""

    record: Record
    low: float
    """Lower end of the 95 % interval of the ratio; with fewer than six rounds, of the whole range."""
    high: float
    percent_of_roofline: float | None

    @property
    def rounds(self) -> int:
        return len(self.record.samples_us)

    @property
    def verdict(self) -> Verdict:
        """Faster or slower than torch.mm, or equal if the noise or the interval does not decide."""
        ratio = self.record.ratio
        if math.log(max(ratio, 1 / ratio)) <= math.log1p(max(self.record.noise, NOISE_FLOOR)):
            return "equal"
        if self.low > 1:
            return "faster"
        return "slower" if self.high < 1 else "equal"

    @property
    def tflops(self) -> float:
        return self.record.problem.flops / self.record.median_us / 1e6

    @property
    def baseline_tflops(self) -> float:
        return self.record.problem.flops / self.record.baseline_median_us / 1e6


@dataclass(frozen=True)
class Details:
    """All trials of one problem."""

    winner: Winner
    trials: tuple[Record, ...]
    """Every measured candidate, oldest first."""
    sequence: tuple[Record, ...]
    """The order in which a search measured: `trials`, or for a recording a search that was replayed on it."""

    @property
    def problem(self) -> Problem:
        return self.winner.record.problem

    @property
    def tried(self) -> list[Record]:
        """The sequence without final races, whose ratios do not compare with those of a search."""
        return [trial for trial in self.sequence if trial.method == SCREEN]


@dataclass(frozen=True)
class FailureGroup:
    """Failed candidates that share a reason, apart from its numbers."""

    stage: str
    reason: str
    """The most frequent wording."""
    families: tuple[str, ...]
    count: int


@dataclass(frozen=True)
class Contents:
    """The contents of a page."""

    source: Literal["measured", "recorded"]
    location: str
    """The database, or the recording's name."""
    device: Device
    winners: tuple[Winner, ...]
    """One per problem, fastest relative to torch.mm first."""
    details: tuple[Details, ...]
    """The trials of some problems, in the order of `winners`."""
    measurements: int
    failures: tuple[FailureGroup, ...]
    """Most frequent first."""
    other_devices: tuple[str, ...] = ()
    """Other devices in the same database, which this page leaves out."""
    steady: Mapping[Problem, float] = field(default_factory=dict)
    """For a recording, whose kernels share one clock: the steady-state ratios of the records that have them.
    """

    @property
    def origin(self) -> str:
        """One sentence that says where the times come from."""
        if self.source == "recorded":
            return (
                f"Recorded on an {self.device.name} ({self.location}), where all kernels share one clock; "
                "nothing was measured here."
            )
        origins = [winner.record.origin for winner in self.winners if winner.record.origin]
        if not origins:
            return f"Measured on {self.device.name}."
        named = list(dict.fromkeys(origins))
        sources = ", ".join(named[:3]) + (f" and {len(named) - 3} more" if named[3:] else "")
        if len(origins) == len(self.winners):
            return f"Imported from {sources}; measured on another {self.device.name}."
        return f"Measured on {self.device.name}, but {len(origins)} records imported from {sources}."

    @property
    def days(self) -> str:
        """The day or days of the measurements."""
        days = sorted(winner.record.measured_at.date().isoformat() for winner in self.winners)
        return days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"

    def verdicts(self) -> Counter[Verdict]:
        return Counter(winner.verdict for winner in self.winners)

    def fingerprints(self) -> dict[Fingerprint, int]:
        """How many records were measured under each fingerprint."""
        return dict(Counter(winner.record.fingerprint for winner in self.winners).most_common())


def from_database(
    database: Database,
    *,
    device: str | None = None,
    shapes: Sequence[str] = (),
    detailed: int = DETAILED,
) -> Contents:
    """One device's page from a database: all its records, and the trials of `detailed` problems.

    device: its stored name or a part of it; by default the device measured last. shapes: only these
    (``MxNxK``), each with its trials. Without it, the problems measured last have their trials. Raises
    TunegemmError if nothing fits; the message names what there is.
    """
    from tunegemm.store import queries

    place, names = database.name, queries.device_names(database)
    name = queries.latest_device(database) if device is None else named_device(device, names)
    if name is None:
        raise TunegemmError(
            f"{place}: no measurements yet; run `tunegemm tune --shape MxNxK` on a GPU, or look at the "
            "recorded one with `--device replay:h200`"
        )
    stored = queries.records(database, name)
    check_shapes(shapes, [record.problem for record in stored], f"{place}: {name}")
    if shapes:
        stored = [record for record in stored if record.problem.shape in shapes]
    part = known_device(stored[0].fingerprint)
    winners = {record.problem: _winner(record, part) for record in stored}
    latest = sorted(stored, key=lambda record: record.measured_at, reverse=True)
    details = []
    for record in stored if shapes else latest[:detailed]:
        trials = tuple(map(_named, queries.trials(database, record, MOST_TRIALS)))
        details.append(Details(winners[record.problem], trials, trials))
    return Contents(
        "recorded" if any(record.replayed for record in stored) else "measured",
        place,
        part,
        tuple(sorted(winners.values(), key=_slowness)),
        tuple(sorted(details, key=lambda detail: _slowness(detail.winner))),
        sum(len(detail.trials) for detail in details)
        if shapes
        else queries.measurement_count(database, name),
        grouped(queries.failure_counts(database, name)),
        tuple(other for other in names if other != name),
    )


def from_recording(replay: ReplayDevice, *, shapes: Sequence[str] = (), detailed: int = DETAILED) -> Contents:
    """A page about recorded sweeps; `shapes` and `detailed` as in `from_database`.

    A sweep has no final race. In place of the record the page shows the candidate that would win one, by the
    rule of `tunegemm.measure.statistics.winner`.
    """
    from tunegemm.choose.snapshot import read_snapshot

    problems, snapshot = replay.problems(), read_snapshot()
    check_shapes(shapes, problems, replay.device.spec)
    details: list[Details] = []
    winners: list[Winner] = []
    failures, count = Counter[tuple[str, str, str]](), 0
    for problem in problems:
        if shapes and problem.shape not in shapes:
            continue
        sweep = replay.sweep(problem)
        measured = [outcome for outcome in sweep.outcomes.values() if isinstance(outcome, Measurement)]
        for outcome in sweep.outcomes.values():
            if isinstance(outcome, Failure):
                failures[outcome.candidate.family, outcome.stage, outcome.reason] += 1
        if not measured:
            continue
        count += len(measured)
        records = {
            measurement.candidate: _recorded(problem, measurement, sweep.fingerprint, sweep.recorded_at)
            for measurement in measured
        }
        best = _winner(records[winner(problem, measured).candidate], replay.device)
        winners.append(best)
        if shapes or len(details) < detailed:
            order = _replayed_search(problem, records, replay.device, best.record.candidate.family)
            details.append(Details(best, tuple(records.values()), tuple(records[c] for c in order)))
    return Contents(
        "recorded",
        replay.device.spec,
        replay.device,
        tuple(sorted(winners, key=_slowness)),
        tuple(sorted(details, key=lambda detail: _slowness(detail.winner))),
        count,
        grouped([(*key, number) for key, number in failures.most_common()]),
        steady={
            prediction.record.problem: record.ratio
            for prediction in winners
            if (record := steady_record(snapshot, prediction.record.problem, replay.device)) is not None
        },
    )


def steady_record(snapshot: Snapshot, problem: Problem, device: Device) -> Record | None:
    """The problem's record if its final race ran in steady state, which gives the gain that a program sees.

    Products that memory limits are raced at one shared clock, as in a recording.
    """
    record = snapshot.find(problem, device.fingerprint)
    return record if record is not None and record.confirmed and not is_memory_bound(problem) else None


def named_device(text: str, names: Sequence[str]) -> str:
    """The device whose name is `text` or contains it. Raises TunegemmError unless there is exactly one."""
    if not names:
        raise TunegemmError(
            f"device {text!r} was never measured here, nor was any other; run `tunegemm tune` on a GPU"
        )
    if not text:
        raise TunegemmError(f"device '' is not a name; use one of {', '.join(names)}")
    exact = [name for name in names if name.lower() == text.lower()]
    matches = exact or [name for name in names if text.lower() in name.lower()]
    if len(matches) != 1:
        problem = "names several" if matches else "was never measured here"
        raise TunegemmError(f"device {text!r} {problem}; use one of {', '.join(matches or names)}")
    return matches[0]


def check_shapes(shapes: Sequence[str], problems: Sequence[Problem], where: str) -> None:
    known = {problem.shape for problem in problems}
    for shape in shapes:
        if shape not in known:
            some = sorted(known)[:8]
            raise TunegemmError(
                f"{where} has no record of {shape}; it has {', '.join(some)}"
                + (f" and {len(known) - len(some)} more" if len(known) > len(some) else "")
            )
    if not known:
        raise TunegemmError(f"{where} has no record; run `tunegemm tune --shape MxNxK` on a GPU first")


def _slowness(winner: Winner) -> float:
    return -winner.record.ratio


def _winner(record: Record, device: Device) -> Winner:
    low, high = ratio_interval(record.measurement)
    floor_us = device.roofline_us(record.problem)
    return Winner(_named(record), low, high, 100 * floor_us / record.median_us if floor_us else None)


def _named(record: Record) -> Record:
    return record if record.label else replace(record, label=str(record.candidate))


def _recorded(problem: Problem, measurement: Measurement, fingerprint: Fingerprint, at: str) -> Record:
    candidate = measurement.candidate
    return Record(
        problem, candidate, fingerprint, families.get(candidate.family).label(candidate),
        measurement.median_us, measurement.baseline_median_us,
        measurement.ratio, measurement.noise, measurement.relative_error,
        method=SCREEN, measured_at=datetime.fromisoformat(at), samples_us=measurement.samples_us,
        baseline_us=measurement.baseline_us, telemetry=measurement.telemetry,
    )  # fmt: skip


def _replayed_search(
    problem: Problem, trials: Mapping[Candidate, Record], device: Device, family: str
) -> list[Candidate]:
    """What `tunegemm tune` with its default effort asks for when only these candidates are allowed, in order.

    The search is over one family: the winner's, or the most frequent where the vendor's algorithm won.
    """
    from tunegemm.model import rank as model
    from tunegemm.search import Search, first_of_each_kernel
    from tunegemm.search.efforts import EFFORTS

    library = [candidate for candidate in trials if candidate.family == VENDOR_FAMILY]
    own = Counter(candidate.family for candidate in trials if candidate.family != VENDOR_FAMILY)
    if not own:
        return library
    family = own.most_common(1)[0][0] if family == VENDOR_FAMILY else family
    candidates = [candidate for candidate in trials if candidate.family == family]
    ranked = first_of_each_kernel(p.candidate for p in model.rank(problem, candidates, device))
    values = {
        name: tuple(dict.fromkeys(candidate[name] for candidate in candidates))
        for name, _ in candidates[0].launch_params
    }
    plan = EFFORTS["quick"].plan
    search = Search(ranked, values, plan, allowed=trials.__contains__)
    while batch := search.ask():
        for candidate in batch:
            search.tell(candidate, trials[candidate].ratio)
    return [*library, *search.asked]


_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+(?:\.\d+)?")


def grouped(rows: Iterable[tuple[str, str, str, int]]) -> tuple[FailureGroup, ...]:
    """Rows of (family, stage, reason, count), most first; reasons that differ in numbers are put together."""
    groups: dict[tuple[str, str], FailureGroup] = {}
    for family, stage, reason, count in rows:
        key = (stage, _NUMBER.sub("#", reason))
        old = groups.get(key, FailureGroup(stage, reason, (), 0))
        named = tuple(dict.fromkeys((*old.families, family)))
        groups[key] = replace(old, families=named, count=old.count + count)
    return tuple(sorted(groups.values(), key=lambda group: (-group.count, group.stage, group.reason)))
