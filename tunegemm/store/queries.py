"""Narrow reads for reports: a few columns of the rows that a page shows, however many the file holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from sqlalchemy import Select, func, select

from tunegemm.store.codec import text
from tunegemm.store.database import Database
from tunegemm.store.frames import sound
from tunegemm.store.models import (
    CandidateRow,
    FailureRow,
    FingerprintRow,
    MeasurementRow,
    RecordRow,
)
from tunegemm.store.record import Record
from tunegemm.store.rows import (
    PROBLEM_COLUMNS,
    readable,
    record_decoder,
    records_query,
    where_fingerprint,
    where_problem,
)
from tunegemm.store.schema import FASTEST

if TYPE_CHECKING:
    import pandas


def latest_device(database: Database) -> str | None:
    """The device that was measured last; None in an empty database."""
    query = (
        select(FingerprintRow.device_name)
        .join(MeasurementRow, MeasurementRow.fingerprint_id == FingerprintRow.id)
        .order_by(MeasurementRow.id.desc())
        .limit(1)
    )
    with database.reading() as session:
        return session.scalar(query)


def device_names(database: Database) -> list[str]:
    """Every device that has a fingerprint here, sorted."""
    query = select(FingerprintRow.device_name).distinct().order_by(FingerprintRow.device_name)
    return [name for (name,) in database.read(query)]


def records(database: Database, device_name: str) -> list[Record]:
    """The records of one device with samples, of each problem the one measured last, smallest problem first.

    For times replayed from a recording, the time of the recording counts.
    """
    query = records_query(samples=True).where(FingerprintRow.device_name == device_name)
    query = query.order_by(None).order_by(MeasurementRow.created_at, MeasurementRow.id)
    record_of = record_decoder(database.layer, samples=True)

    def build(row: Sequence[Any]) -> Record:
        record = record_of(row)
        if not record.replayed:
            return record
        return replace(record, measured_at=datetime.fromisoformat(str(record.telemetry.get("recorded_at"))))

    latest = {record.problem: record for record in readable(database.read(query), build, "record")}
    return [latest[problem] for problem in sorted(latest)]


def trials(database: Database, record: Record, limit: int) -> list[Record]:
    """The last `limit` measurements of a record's problem under its fingerprint, oldest first."""
    query = where_problem(where_fingerprint(records_query(None), record.fingerprint), record.problem)
    query = query.order_by(None).order_by(MeasurementRow.id.desc()).limit(limit)
    return readable(reversed(database.read(query)), record_decoder(database.layer), "measurement")


def measurement_count(database: Database, device_name: str) -> int:
    """Measurements on a device; an index answers it."""
    count = select(func.count()).where(MeasurementRow.fingerprint_id.in_(_fingerprints(device_name)))
    with database.reading() as session:
        return session.scalars(count).one()


def _fingerprints(device_name: str) -> Select[Any]:
    return select(FingerprintRow.id).filter_by(device_name=device_name)


def failure_counts(database: Database, device_name: str) -> list[tuple[str, str, str, int]]:
    """Family, stage, reason and number of the failed candidates of a device, most first."""
    count = func.count().label("failures")
    query = (
        select(CandidateRow.family, FailureRow.stage, FailureRow.reason, count)
        .join(CandidateRow, CandidateRow.id == FailureRow.candidate_id)
        .where(FailureRow.fingerprint_id.in_(_fingerprints(device_name)))
        .group_by(CandidateRow.family, FailureRow.stage, FailureRow.reason)
        .order_by(count.desc(), FailureRow.stage, FailureRow.reason)
    )
    return readable(
        database.read(query), lambda row: (text(row[0]), text(row[1]), text(row[2]), int(row[3])), "failure"
    )


def latest_records(database: Database) -> pandas.DataFrame:
    """One row per problem and device name: the record chosen last there.

    Columns: the fields of the problem; device_name, family, label, candidate (digest), median_us,
    baseline_median_us, ratio, spread, baseline_spread, confirmed. Unreadable rows are left out.
    """
    import pandas

    place = func.row_number().over(
        partition_by=(RecordRow.problem_id, FingerprintRow.device_name),
        order_by=(RecordRow.chosen_at.desc(), RecordRow.id.desc()),
    )
    # Nothing but keys goes through the sorting: of 100,000 records that halves its time.
    ranked = (
        select(RecordRow.id, place.label("place"))
        .join(FingerprintRow, FingerprintRow.id == RecordRow.fingerprint_id)
        .where(RecordRow.goal == FASTEST)
        .subquery()
    )
    row = MeasurementRow
    best = records_query().with_only_columns(
        *(*PROBLEM_COLUMNS, FingerprintRow.device_name),
        *(CandidateRow.family, CandidateRow.label, CandidateRow.digest.label("candidate"), CandidateRow.json),
        *(row.median_us, row.baseline_median_us, row.ratio, row.spread, row.baseline_spread),
        RecordRow.confirmed,
    )
    best = best.join(ranked, ranked.c.id == RecordRow.id).where(ranked.c.place == 1).order_by(None)
    with database.reading_raw() as read:
        frame = pandas.DataFrame(read(best), columns=[column["name"] for column in best.column_descriptions])
    frame = sound(frame)
    frame["confirmed"] = frame["confirmed"].astype(bool)
    return frame
