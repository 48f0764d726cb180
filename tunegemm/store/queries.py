"""Narrow reads for reports: a few columns of the rows that a page shows, however many the file holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any

from sqlalchemy import func, select

from tunegemm.describe.device import Fingerprint
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.store.database import Database, _readable
from tunegemm.store.lookup import checked_candidate
from tunegemm.store.models import (
    CandidateRow,
    FailureRow,
    FingerprintRow,
    MeasurementRow,
    ProblemRow,
    RecordRow,
)
from tunegemm.store.schema import FASTEST

_PROBLEM = [getattr(ProblemRow, field.name) for field in fields(Problem)]
_FINGERPRINT = [getattr(FingerprintRow, field.name) for field in fields(Fingerprint)]


@dataclass(frozen=True)
class RecordEvidence:
    """A record with the samples and telemetry of its measurement."""

    key: tuple[int, int]
    """Keys of its problem and fingerprint in this database, for `trials` and `failures`."""
    problem: Problem
    fingerprint: Fingerprint
    candidate: Candidate
    label: str
    samples_us: tuple[float, ...]
    baseline_us: tuple[float, ...]
    ratio: float
    noise: float
    settled: bool
    measured_at: datetime
    sm_clock_mhz: float | None
    power_w: float | None
    temperature_c: float | None
    throttle_reasons: tuple[str, ...]
    replayed: bool
    """Whether its evidence says that it was replayed from a recording."""
    origin: str
    """What it was imported or merged from; empty when it was measured into this database."""


@dataclass(frozen=True)
class TrialEvidence:
    """One measurement of a problem's history."""

    candidate: Candidate
    label: str
    policy: str
    median_us: float
    ratio: float


def latest_device(database: Database) -> str | None:
    """The device that was measured last; None in an empty database."""
    query = (
        select(FingerprintRow.device_name)
        .join(MeasurementRow, MeasurementRow.fingerprint_id == FingerprintRow.id)
        .order_by(MeasurementRow.id.desc())
        .limit(1)
    )
    with database._reading() as session:
        return session.scalar(query)


def device_names(database: Database) -> list[str]:
    """Every device that has a fingerprint here, sorted."""
    query = select(FingerprintRow.device_name).distinct().order_by(FingerprintRow.device_name)
    with database._reading() as session:
        return list(session.scalars(query))


def records(database: Database, device_name: str) -> list[RecordEvidence]:
    """The records of one device, of each problem the one measured last, smallest problem first."""
    row = MeasurementRow
    query = (
        select(
            *(RecordRow.problem_id, RecordRow.fingerprint_id, *_PROBLEM, *_FINGERPRINT),
            *(CandidateRow.json, CandidateRow.digest, CandidateRow.label, row.samples_us, row.baseline_us),
            *(row.ratio, row.noise, RecordRow.settled, row.created_at, row.sm_clock_mhz, row.power_w),
            *(row.temperature_c, row.throttle_reasons, row.evidence, row.origin),
        )
        .select_from(RecordRow)
        .join(row, row.id == RecordRow.measurement_id)
        .join(ProblemRow, ProblemRow.id == RecordRow.problem_id)
        .join(FingerprintRow, FingerprintRow.id == RecordRow.fingerprint_id)
        .join(CandidateRow, CandidateRow.id == row.candidate_id)
        .where(FingerprintRow.device_name == device_name, RecordRow.policy == FASTEST)
        .order_by(row.created_at, row.id)
    )
    with database._reading() as session:
        rows = session.execute(query).all()
    first, second = 2 + len(_PROBLEM), 2 + len(_PROBLEM) + len(_FINGERPRINT)

    def build(values: Sequence[Any]) -> RecordEvidence:
        (
            text,
            digest,
            label,
            samples,
            baseline,
            ratio,
            noise,
            settled,
            at,
            clock,
            power,
            heat,
            throttle,
            more,
            origin,
        ) = values[second:]
        if not samples or not baseline or len(samples) != len(baseline) or at is None:
            raise ValueError("its samples or its time are damaged")
        more = more if isinstance(more, dict) else {}
        if replayed := more.get("source") == "replayed":
            at = datetime.fromisoformat(str(more.get("recorded_at")))
        return RecordEvidence(
            (values[0], values[1]), Problem(*values[2:first]), Fingerprint(*values[first:second]),
            checked_candidate(text, digest), label, tuple(map(float, samples)), tuple(map(float, baseline)),
            float(ratio), float(noise), bool(settled), at, clock, power, heat, tuple(throttle or ()),
            replayed, str(origin or ""),
        )  # fmt: skip

    latest = {record.problem: record for record in _readable(rows, build, "record")}
    return [latest[problem] for problem in sorted(latest)]


def trials(database: Database, key: tuple[int, int], limit: int) -> list[TrialEvidence]:
    """The last `limit` measurements of a problem under a fingerprint, oldest first."""
    row = MeasurementRow
    query = (
        select(
            CandidateRow.json, CandidateRow.digest, CandidateRow.label, row.policy, row.median_us, row.ratio
        )
        .join(row, row.candidate_id == CandidateRow.id)
        .where(row.problem_id == key[0], row.fingerprint_id == key[1])
        .order_by(row.id.desc())
        .limit(limit)
    )
    with database._reading() as session:
        rows = session.execute(query).all()

    def build(values: Sequence[Any]) -> TrialEvidence:
        text, digest, label, policy, median_us, ratio = values
        return TrialEvidence(checked_candidate(text, digest), label, policy, float(median_us), float(ratio))

    return _readable(reversed(rows), build, "measurement")


def measurement_counts(database: Database, device_name: str) -> dict[tuple[int, int], int]:
    """Measurements per key of problem and fingerprint; an index answers it."""
    row = MeasurementRow
    query = (
        select(row.problem_id, row.fingerprint_id, func.count())
        .where(row.fingerprint_id.in_(select(FingerprintRow.id).filter_by(device_name=device_name)))
        .group_by(row.problem_id, row.fingerprint_id)
    )
    with database._reading() as session:
        return {(problem, fingerprint): count for problem, fingerprint, count in session.execute(query)}


def failure_counts(database: Database, device_name: str) -> list[tuple[str, str, str, int]]:
    """Family, stage, reason and number of the failed candidates of a device, most first."""
    count = func.count().label("failures")
    query = (
        select(CandidateRow.family, FailureRow.stage, FailureRow.reason, count)
        .join(CandidateRow, CandidateRow.id == FailureRow.candidate_id)
        .where(FailureRow.fingerprint_id.in_(select(FingerprintRow.id).filter_by(device_name=device_name)))
        .group_by(CandidateRow.family, FailureRow.stage, FailureRow.reason)
        .order_by(count.desc(), FailureRow.stage, FailureRow.reason)
    )
    with database._reading() as session:
        return [(family, stage, reason, count) for family, stage, reason, count in session.execute(query)]


def fingerprint_digests(database: Database) -> dict[str, str]:
    """The digest of every fingerprint, and its device's name."""
    query = select(FingerprintRow.digest, FingerprintRow.device_name).order_by(FingerprintRow.id)
    with database._reading() as session:
        return {row.digest: row.device_name for row in session.execute(query)}
