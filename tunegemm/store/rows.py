"""Defines the columns that are read from the database; `codec` converts them to values.

A damaged row is a miss: only that row fails; it is left out and named in the log.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, TypeVar

from sqlalchemy import Select, and_, or_, select

from tunegemm.describe.device import Fingerprint
from tunegemm.describe.problem import Problem
from tunegemm.describe.stored import FIELDS, cells_of, problem_of
from tunegemm.generate import families
from tunegemm.generate.families import kernel_source_hash
from tunegemm.store import codec
from tunegemm.store.codec import FINGERPRINT_FIELDS, UNREADABLE, require
from tunegemm.store.models import (
    CandidateRow,
    ChoiceRow,
    FailureRow,
    FingerprintRow,
    MeasurementRow,
    ProblemRow,
    RecordRow,
)
from tunegemm.store.record import Record
from tunegemm.store.schema import FASTEST

Value = TypeVar("Value")

_log = logging.getLogger(__name__)

PROBLEM_COLUMNS = [getattr(ProblemRow, name) for name in FIELDS]
FINGERPRINT_COLUMNS = [FingerprintRow.digest, *(getattr(FingerprintRow, name) for name in FINGERPRINT_FIELDS)]
CANDIDATE_COLUMNS = [CandidateRow.json, CandidateRow.digest]

_row = MeasurementRow
#: Columns read of a measurement, by the names of `codec.decode_record`; samples only on request.
_CELLS: dict[str, Any] = {
    "label": CandidateRow.label,
    "measured_at": _row.created_at,
    **{
        name: getattr(_row, name)
        for name in (
            "median_us", "baseline_median_us", "ratio", "noise", "relative_error", "kernel_source", "method",
            "origin",
        )
    },
}  # fmt: skip
_SAMPLES: dict[str, Any] = {
    name: getattr(_row, name)
    for name in ("samples_us", "baseline_us", "telemetry", codec.THROTTLE, *codec.TELEMETRY_NUMBERS)
}


def records_query(
    chosen: type[RecordRow | ChoiceRow] | None = RecordRow, *, samples: bool = False
) -> Select[Any]:
    """The records, or all that ever were one (`ChoiceRow`), or every measurement (None); oldest first.

    samples: with samples and telemetry. `record_decoder` makes values of the rows.
    """
    link = chosen or RecordRow
    of_record = and_(
        RecordRow.measurement_id == _row.id,
        RecordRow.problem_id == _row.problem_id,
        RecordRow.fingerprint_id == _row.fingerprint_id,
        RecordRow.goal == FASTEST,
    )
    query = select(
        *PROBLEM_COLUMNS, *FINGERPRINT_COLUMNS, *CANDIDATE_COLUMNS, link.confirmed, link.chosen_at,
        *_CELLS.values(), *(_SAMPLES.values() if samples else ()),
    )  # fmt: skip
    if chosen is None:
        query = query.select_from(_row).outerjoin(RecordRow, of_record).order_by(_row.id)
    else:
        query = query.select_from(chosen).join(_row, _row.id == chosen.measurement_id)
        query = query.where(chosen.goal == FASTEST)
        query = query.order_by(*((ChoiceRow.chosen_at,) if chosen is ChoiceRow else ()), chosen.id)
    return with_keys(query, chosen or _row)


def with_keys(
    query: Select[*tuple[Any, ...]], row: type[MeasurementRow | FailureRow | RecordRow | ChoiceRow]
) -> Select[Any]:
    """The query with the problem and fingerprint of a row, and the candidate of it or its measurement."""
    result = FailureRow if row is FailureRow else _row
    query = query.join(ProblemRow, ProblemRow.id == row.problem_id)
    query = query.join(FingerprintRow, FingerprintRow.id == row.fingerprint_id)
    return query.join(CandidateRow, CandidateRow.id == result.candidate_id)


def record_decoder(layer: str, *, samples: bool = False) -> Callable[[Sequence[Any]], Record]:
    """A function that makes a `Record` of a row of `records_query`. Raises one of `UNREADABLE` if damaged."""
    # 100,000 records share few candidates and fewer fingerprints.
    fingerprint_of = functools.cache(codec.decode_fingerprint)
    candidate_of = functools.cache(codec.decode_candidate)
    names = ["confirmed", "chosen_at", *_CELLS, *(_SAMPLES if samples else ())]

    def decode(row: Sequence[Any]) -> Record:
        cells = iter(row)
        problem = problem_of(*islice(cells, len(PROBLEM_COLUMNS)))
        fingerprint = fingerprint_of(*islice(cells, len(FINGERPRINT_COLUMNS)))
        candidate = candidate_of(*islice(cells, len(CANDIDATE_COLUMNS)))
        return codec.decode_record(
            dict(zip(names, cells, strict=True)), problem, candidate, fingerprint, layer
        )

    return decode


def where_problem(query: Select[Any], problem: Problem) -> Select[Any]:
    """The query, for the rows of one problem."""
    require(problem, Problem, "problem")
    return query.where(
        *(column == cell for column, cell in zip(PROBLEM_COLUMNS, cells_of(problem), strict=True))
    )


def where_fingerprint(query: Select[Any], fingerprint: Fingerprint) -> Select[Any]:
    """The query, for the rows of one fingerprint."""
    require(fingerprint, Fingerprint, "fingerprint")
    return query.where(FingerprintRow.digest == fingerprint.digest)


def where_current(query: Select[Any]) -> Select[Any]:
    """The query, for failures of kernels whose sources are those of this program."""
    source = FailureRow.kernel_source
    current = (
        (CandidateRow.family == name) & (source == kernel_source_hash(name)) for name in families.NAMES
    )
    return query.where(or_(source == "", *current))


def readable(rows: Iterable[Any], build: Callable[[Any], Value], kind: str) -> list[Value]:
    """The results of `build` for readable rows; logs how many rows it could not read, and why."""
    values, skipped, reason = [], 0, ""
    for row in rows:
        try:
            values.append(build(row))
        except UNREADABLE as error:
            skipped, reason = skipped + 1, str(error)
    if skipped:
        _log.warning("skipped %d unreadable %s row(s); the last one: %s", skipped, kind, reason)
    return values
