"""The best of every problem on every device, in two narrow queries however many measurements there are."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from sqlalchemy import case, func, select

from tunegemm.describe.problem import Problem
from tunegemm.store.database import Database
from tunegemm.store.models import (
    CandidateRow,
    FingerprintRow,
    MeasurementRow,
    ProblemRow,
    RecordRow,
)
from tunegemm.store.record import ALONE
from tunegemm.store.schema import FASTEST

if TYPE_CHECKING:
    import pandas

_PROBLEM_COLUMNS = [getattr(ProblemRow, field.name) for field in fields(Problem)]
_PAIR = ["problem_id", "fingerprint_id"]


def leaders(database: Database, family: str, *, device_name: str | None = None) -> pandas.DataFrame:
    """One row per problem and device name: the record chosen last there, and the best of the vendor's family.

    Columns: the fields of the problem; device_name, family, label, candidate (digest), median_us,
    baseline_median_us, ratio, spread, baseline_spread, settled; vendor_label and vendor_ratio, missing where
    the vendor's family was not measured. Its final races count, or else its screening.

    family: the vendor's. device_name: only this device.
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
        .where(RecordRow.policy == FASTEST)
        .subquery()
    )
    row = MeasurementRow
    best = (
        select(*_PROBLEM_COLUMNS, RecordRow.problem_id, RecordRow.fingerprint_id, FingerprintRow.device_name)
        .add_columns(CandidateRow.family, CandidateRow.label, CandidateRow.digest.label("candidate"))
        .add_columns(row.median_us, row.baseline_median_us, row.ratio, row.spread, row.baseline_spread)
        .add_columns(RecordRow.settled)
        .select_from(ranked)
        .join(RecordRow, RecordRow.id == ranked.c.id)
        .join(FingerprintRow, FingerprintRow.id == RecordRow.fingerprint_id)
        .join(row, row.id == RecordRow.measurement_id)
        .join(ProblemRow, ProblemRow.id == RecordRow.problem_id)
        .join(CandidateRow, CandidateRow.id == row.candidate_id)
        .where(ranked.c.place == 1)
    )
    if device_name is not None:
        best = best.where(FingerprintRow.device_name == device_name)
    with database._raw_reading() as read:
        frame = pandas.DataFrame(read(best), columns=[column.key for column in best.selected_columns])
        vendors = select(CandidateRow.id, CandidateRow.label)
        labels: dict[int, str] = dict(read(vendors.where(CandidateRow.family == family)))
        # The best evidence that there is, as `Entry.rank` has it.
        alone = func.max(case((row.policy.in_(ALONE), row.ratio)))
        raced = func.max(case((row.policy != "screen", row.ratio)))
        # All its columns are in one index, which starts with these: of a million rows only those are read.
        compared = (
            select(row.problem_id, row.fingerprint_id, row.candidate_id)
            .add_columns(func.coalesce(alone, raced, func.max(row.ratio)), alone.is_not(None))
            .where(
                row.candidate_id.in_(labels), row.fingerprint_id.in_(set(frame["fingerprint_id"].tolist()))
            )
            .group_by(row.problem_id, row.fingerprint_id, row.candidate_id)
        )
        vendor = pandas.DataFrame(
            read(compared), columns=[*_PAIR, "vendor_label", "vendor_ratio", "vendor_alone"]
        )
    frame["settled"] = frame["settled"].astype(bool)
    # What had the chip to itself is not outdone by a ratio at shared clocks.
    vendor = vendor.sort_values(["vendor_alone", "vendor_ratio"], kind="stable")
    vendor = vendor.drop_duplicates(_PAIR, keep="last").drop(columns="vendor_alone")
    vendor["vendor_label"] = vendor["vendor_label"].map(labels)
    return frame.merge(vendor, on=_PAIR, how="left").drop(columns=_PAIR)
