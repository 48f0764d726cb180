"""What a report is made of: the records of one device with their samples, and the trials behind some of them.

It comes from a tuning database or from a recording (`replay:NAME`); the second says so wherever it is shown.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Literal

from tunegemm.describe.device import Device, Fingerprint
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.errors import TunegemmError
from tunegemm.generate import families
from tunegemm.measure.outcome import Failure, Measurement
from tunegemm.measure.statistics import NOISE_FLOOR, ratio_interval, winner
from tunegemm.report.leaderboard import VENDOR_FAMILY, known_device

if TYPE_CHECKING:
    from tunegemm.measure.replay import ReplayDevice
    from tunegemm.store import Database, Record

Verdict = Literal["faster", "equal", "slower"]

#: Most shapes whose trials a page shows unless told otherwise, and most trials read of one.
DETAILED, MOST_TRIALS = 12, 20_000


@dataclass(frozen=True)
class Winner:
    """The record of one problem, with what tells how sure it is."""

    problem: Problem
    candidate: Candidate
    label: str
    median_us: float
    baseline_median_us: float
    """torch.mm in the same interleave."""
    ratio: float
    """Speed relative to torch.mm."""
    low: float
    """Lower end of the 95 % interval of the ratio; under six rounds the whole range."""
    high: float
    noise: float
    rounds: int
    confirmed: bool
    """Whether it won a final race."""
    measured_at: datetime
    fingerprint: Fingerprint
    percent_of_roofline: float | None
    sm_clock_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    throttle_reasons: tuple[str, ...] = ()
    origin: str = ""
    """What it was imported or merged from; empty when it was measured into this database."""

    @property
    def verdict(self) -> Verdict:
        """Against torch.mm: equal where the noise or the interval does not decide."""
        if math.log(max(self.ratio, 1 / self.ratio)) <= math.log1p(max(self.noise, NOISE_FLOOR)):
            return "equal"
        if self.low > 1:
            return "faster"
        return "slower" if self.high < 1 else "equal"

    @property
    def dtypes(self) -> str:
        """Of inputs and output, as in a problem's name."""
        return self.problem.dtypes

    @property
    def tflops(self) -> float:
        return self.problem.flops / self.median_us / 1e6

    @property
    def baseline_tflops(self) -> float:
        return self.problem.flops / self.baseline_median_us / 1e6


@dataclass(frozen=True)
class Trial:
    """One measured candidate."""

    candidate: Candidate
    label: str
    ratio: float
    median_us: float
    stage: Literal["library", "search", "race"]
    """The vendor's algorithms, which are tried first; the search; the final race."""


@dataclass(frozen=True)
class Details:
    """Everything that was tried for one problem."""

    winner: Winner
    trials: tuple[Trial, ...]
    """Every measured candidate, oldest first."""
    sequence: tuple[Trial, ...]
    """The order in which a search measured: `trials`, or of a recording a search replayed on it."""

    @property
    def problem(self) -> Problem:
        return self.winner.problem


@dataclass(frozen=True)
class FailureGroup:
    """Failed candidates with one reason, numbers left out."""

    stage: str
    reason: str
    """The most frequent wording."""
    families: tuple[str, ...]
    count: int


@dataclass(frozen=True)
class Evidence:
    """A report's content."""

    source: Literal["measured", "recorded"]
    location: str
    """The database, or the recording's name."""
    device: Device
    winners: tuple[Winner, ...]
    """One per problem, fastest relative to torch.mm first."""
    details: tuple[Details, ...]
    """Of some problems, in the order of `winners`."""
    measurements: int
    failures: tuple[FailureGroup, ...]
    """Most frequent first."""
    other_devices: tuple[str, ...] = ()
    """Devices in the same database that are not in here."""

    @property
    def origin(self) -> str:
        """One sentence: where the times come from."""
        if self.source == "recorded":
            return f"Recorded on an {self.device.name} ({self.location}); nothing was measured here."
        origins = [winner.origin for winner in self.winners if winner.origin]
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
        days = sorted(winner.measured_at.date().isoformat() for winner in self.winners)
        return days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"

    @property
    def mean_ratio(self) -> float:
        """Geometric mean over all problems."""
        return math.exp(math.fsum(math.log(winner.ratio) for winner in self.winners) / len(self.winners))

    def verdicts(self) -> Counter[Verdict]:
        return Counter(winner.verdict for winner in self.winners)

    def fingerprints(self) -> dict[Fingerprint, int]:
        """How many of the records were measured under each."""
        return dict(Counter(winner.fingerprint for winner in self.winners).most_common())


def from_database(
    database: Database,
    *,
    device: str | None = None,
    shapes: Sequence[str] = (),
    detailed: int = DETAILED,
) -> Evidence:
    """The evidence for one device of a database: all its records, and the trials of `detailed` problems.

    device: its stored name or a part of it; by default the device that was measured last. shapes: only these
    (``MxNxK``), all of them with their trials. Without it, the problems measured last have their trials.
    Raises TunegemmError, which names what there is, when nothing fits.
    """
    from tunegemm.store import queries
    from tunegemm.store.connection import display

    place = display(database.location)
    names = queries.device_names(database)
    name = queries.latest_device(database) if device is None else named_device(device, names)
    if name is None:
        raise TunegemmError(
            f"{place}: nothing measured yet; run `tunegemm tune --shape MxNxK` on a GPU, or look at the "
            "recorded one with `--device replay:h200`"
        )
    stored = queries.records(database, name)
    _check_shapes(shapes, [record.problem for record in stored], f"{place}: {name}")
    if shapes:
        stored = [record for record in stored if record.problem.shape in shapes]
    part = known_device(stored[0].fingerprint)
    winners = {record.problem: _winner_of(record, part) for record in stored}
    latest = sorted(stored, key=lambda record: record.measured_at, reverse=True)
    details = []
    for record in stored if shapes else latest[:detailed]:
        rows = queries.trials(database, record, MOST_TRIALS)
        trials = tuple(
            Trial(row.candidate, row.label or str(row.candidate), row.ratio, row.median_us,
                  _stage(row.candidate, row.policy))
            for row in rows
        )  # fmt: skip
        details.append(Details(winners[record.problem], trials, trials))
    return Evidence(
        "recorded" if any(record.replayed for record in stored) else "measured",
        place,
        part,
        _ordered(winners.values()),
        tuple(sorted(details, key=lambda one: -one.winner.ratio)),
        queries.measurement_count(database, name, shapes),
        _grouped(queries.failure_counts(database, name)),
        tuple(other for other in names if other != name),
    )


def from_recording(replay: ReplayDevice, *, shapes: Sequence[str] = (), detailed: int = DETAILED) -> Evidence:
    """The evidence of recorded sweeps; `shapes` and `detailed` as in `from_database`.

    There is no final race in a sweep: what stands for the record is the candidate that would win one, by the
    rule of `tunegemm.measure.statistics.winner`.
    """
    problems = replay.problems()
    _check_shapes(shapes, problems, replay.device.spec)
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
        best = _recorded_winner(problem, measured, sweep.fingerprint, sweep.recorded_at, replay.device)
        winners.append(best)
        if shapes or len(details) < detailed:
            trials = {m.candidate: _recorded_trial(m) for m in measured}
            order = _replayed_search(problem, trials, replay.device, best.candidate.family)
            details.append(Details(best, tuple(trials.values()), tuple(trials[c] for c in order)))
    return Evidence(
        "recorded",
        replay.device.spec,
        replay.device,
        _ordered(winners),
        tuple(sorted(details, key=lambda one: -one.winner.ratio)),
        count,
        _grouped([(*key, number) for key, number in failures.most_common()]),
    )


def named_device(text: str, names: Sequence[str]) -> str:
    """The device name that `text` is or is a part of. Raises TunegemmError unless it is one."""
    exact = [name for name in names if name.lower() == text.lower()]
    found = exact or [name for name in names if text.lower() in name.lower()]
    if len(found) != 1:
        problem = "names several" if found else "was never measured here"
        raise TunegemmError(f"device {text!r} {problem}; use one of {', '.join(found or names) or 'none'}")
    return found[0]


def _check_shapes(shapes: Sequence[str], problems: Sequence[Problem], where: str) -> None:
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


def _ordered(winners: Iterable[Winner]) -> tuple[Winner, ...]:
    return tuple(sorted(winners, key=lambda winner: -winner.ratio))


def _winner_of(record: Record, part: Device) -> Winner:
    told = record.telemetry
    return _winner(
        record.problem, record.measurement, record.label, record.fingerprint, record.measured_at, part,
        confirmed=record.confirmed, sm_clock_mhz=told.get("sm_clock_mhz"), power_w=told.get("power_w"),
        temperature_c=told.get("temperature_c"), throttle_reasons=tuple(told.get("throttle_reasons") or ()),
        origin=record.origin,
    )  # fmt: skip


def _winner(
    problem: Problem, measurement: Measurement, label: str, fingerprint: Fingerprint, at: datetime,
    device: Device, *, confirmed: bool, sm_clock_mhz: float | None, power_w: float | None,
    temperature_c: float | None, throttle_reasons: tuple[str, ...], origin: str = "",
) -> Winner:  # fmt: skip
    low, high = ratio_interval(measurement)
    floor_us = device.roofline_us(problem)
    return Winner(
        problem, measurement.candidate, label or str(measurement.candidate), measurement.median_us,
        measurement.baseline_median_us, measurement.ratio, low, high, measurement.noise,
        len(measurement.samples_us), confirmed, at, fingerprint,
        100 * floor_us / measurement.median_us if floor_us else None,
        sm_clock_mhz, power_w, temperature_c, throttle_reasons, origin,
    )  # fmt: skip


def _recorded_winner(
    problem: Problem, measured: Sequence[Measurement], fingerprint: Fingerprint, at: str, device: Device
) -> Winner:
    best = winner(problem, measured)
    told = best.evidence
    return _winner(
        problem, best, _label(best.candidate), fingerprint, datetime.fromisoformat(at), device,
        confirmed=False, sm_clock_mhz=told.get("sm_clock_mhz"), power_w=told.get("power_w"),
        temperature_c=told.get("temperature_c"), throttle_reasons=tuple(told.get("throttle_reasons") or ()),
    )  # fmt: skip


def _recorded_trial(measurement: Measurement) -> Trial:
    candidate = measurement.candidate
    stage: Literal["library", "search"] = "library" if candidate.family == VENDOR_FAMILY else "search"
    return Trial(candidate, _label(candidate), measurement.ratio, measurement.median_us, stage)


def _label(candidate: Candidate) -> str:
    return families.get(candidate.family).label(candidate)


def _stage(candidate: Candidate, policy: str) -> Literal["library", "search", "race"]:
    if policy != "screen":
        return "race"
    return "library" if candidate.family == VENDOR_FAMILY else "search"


def _replayed_search(
    problem: Problem, trials: Mapping[Candidate, Trial], device: Device, family: str
) -> list[Candidate]:
    """What `tunegemm tune` with its default effort asks for when only these candidates are allowed, in order.

    The search is over one family: the winner's, or the most frequent where the vendor's algorithm won.
    """
    from tunegemm.generate import model
    from tunegemm.search import Search, first_of_each_kernel

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
    search = Search(ranked, values, allowed=trials.__contains__, library=library)
    while batch := search.ask():
        for candidate in batch:
            search.tell(candidate, trials[candidate].ratio)
    return list(search.asked)


_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+(?:\.\d+)?")


def _grouped(rows: Iterable[tuple[str, str, str, int]]) -> tuple[FailureGroup, ...]:
    """Rows of (family, stage, reason, count), most first; reasons that differ in numbers are put together."""
    groups: dict[tuple[str, str], FailureGroup] = {}
    for family, stage, reason, count in rows:
        key = (stage, _NUMBER.sub("#", reason))
        old = groups.get(key, FailureGroup(stage, reason, (), 0))
        named = tuple(dict.fromkeys((*old.families, family)))
        groups[key] = replace(old, families=named, count=old.count + count)
    return tuple(sorted(groups.values(), key=lambda group: (-group.count, group.stage, group.reason)))
