"""The best of every problem on every device, in two narrow queries however many measurements there are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import func, select

from tunegemm.store.database import Database
from tunegemm.store.frames import by_evidence, sound
from tunegemm.store.models import (
    CandidateRow,
    FingerprintRow,
    MeasurementRow,
    ProblemRow,
    RecordRow,
)
from tunegemm.store.rows import PROBLEM_COLUMNS
from tunegemm.store.schema import FASTEST

if TYPE_CHECKING:
    import pandas

_PAIR = ["problem_id", "fingerprint_id"]
#: What is read of the vendor's measurements.
_VENDOR = ("problem_id", "fingerprint_id", "candidate_id", "method", "origin", "ratio", "id")


def latest_records(database: Database, vendor: str) -> pandas.DataFrame:
    """One row per problem and device name: the record chosen last there, and the best of the vendor's family.

    Columns: the fields of the problem; device_name, family, label, candidate (digest), median_us,
    baseline_median_us, ratio, spread, baseline_spread, confirmed; vendor_label and vendor_ratio, missing
    where the vendor's family was not measured. Unreadable rows are left out.

    vendor: the family of its library.
    """
    import pandas

    newest = (
        func.row_number()
        .over(
            partition_by=(RecordRow.problem_id, FingerprintRow.device_name),
            order_by=(RecordRow.chosen_at.desc(), RecordRow.id.desc()),
        )
        .label("place")
    )
    # Nothing but keys goes through the sorting: of 100,000 records that halves its time.
    ranked = (
        select(RecordRow.id, newest)
        .join(FingerprintRow, FingerprintRow.id == RecordRow.fingerprint_id)
        .where(RecordRow.goal == FASTEST)
        .subquery()
    )
    row = MeasurementRow
    best = (
        select(*PROBLEM_COLUMNS, RecordRow.problem_id, RecordRow.fingerprint_id, FingerprintRow.device_name)
        .add_columns(CandidateRow.family, CandidateRow.label, CandidateRow.digest.label("candidate"))
        .add_columns(CandidateRow.json)
        .add_columns(row.median_us, row.baseline_median_us, row.ratio, row.spread, row.baseline_spread)
        .add_columns(RecordRow.confirmed)
        .select_from(ranked)
        .join(RecordRow, RecordRow.id == ranked.c.id)
        .join(FingerprintRow, FingerprintRow.id == RecordRow.fingerprint_id)
        .join(row, row.id == RecordRow.measurement_id)
        .join(ProblemRow, ProblemRow.id == RecordRow.problem_id)
        .join(CandidateRow, CandidateRow.id == row.candidate_id)
        .where(ranked.c.place == 1)
    )
    with database.reading_raw() as read:
        frame = pandas.DataFrame(read(best), columns=[column["name"] for column in best.column_descriptions])
        vendors = select(CandidateRow.id, CandidateRow.label)
        labels: dict[int, str] = dict(read(vendors.where(CandidateRow.family == vendor)))
        # All its columns are in one index, which starts with these: of a million rows only those are read.
        latest = (
            func.row_number()
            .over(
                partition_by=(row.candidate_id, row.fingerprint_id, row.problem_id, row.method),
                order_by=((row.origin == "").desc(), row.id.desc()),
            )
            .label("place")
        )
        ranked_vendor = (
            select(*(getattr(row, name) for name in _VENDOR), latest)
            .where(
                row.candidate_id.in_(labels), row.fingerprint_id.in_(set(frame["fingerprint_id"].tolist()))
            )
            .subquery()
        )
        compared = select(*(ranked_vendor.c[name] for name in _VENDOR)).where(ranked_vendor.c.place == 1)
        of_vendor = pandas.DataFrame(read(compared), columns=list(_VENDOR))
    frame = sound(frame)
    frame["confirmed"] = frame["confirmed"].astype(bool)
    return frame.merge(_best_of_vendor(of_vendor, labels), on=_PAIR, how="left").drop(columns=_PAIR)


def _best_of_vendor(rows: pandas.DataFrame, labels: dict[int, str]) -> pandas.DataFrame:
    """Per problem and fingerprint the vendor's best, each candidate by its best evidence."""
    rows = rows[
        rows["ratio"].map(lambda cell: isinstance(cell, int | float) and 0 < cell < 1e300).astype(bool)
    ]
    rows = by_evidence(rows, "id").drop_duplicates([*_PAIR, "candidate_id"], keep="last")
    rows = by_evidence(rows, "ratio").drop_duplicates(_PAIR, keep="last")
    return rows.assign(vendor_label=rows["candidate_id"].map(labels), vendor_ratio=rows["ratio"])[
        [*_PAIR, "vendor_label", "vendor_ratio"]
    ]
