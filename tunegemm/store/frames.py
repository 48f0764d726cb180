"""Tables for reports: every candidate with its best evidence, without damaged rows."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from sqlalchemy import Select

from tunegemm.describe.problem import Problem
from tunegemm.describe.stored import FIELDS, document_of, problem_of
from tunegemm.measure.evidence import evidence_of
from tunegemm.store.codec import FINGERPRINT_FIELDS, LEAST, MOST, decode_candidate, is_readable
from tunegemm.store.models import CandidateRow, MeasurementRow, ProblemRow, RecordRow
from tunegemm.store.rows import FINGERPRINT_COLUMNS, PROBLEM_COLUMNS, records_query, where_problem

if TYPE_CHECKING:
    import pandas

    from tunegemm.store.record import Record

_log = logging.getLogger(__name__)

_KEY = ["problem_id", "fingerprint", "candidate"]
#: Columns of a measurement, in the order of a frame; `created_at` is called `measured_at` there.
_FACTS = (
    "kernel_source", "origin", "method", "median_us", "baseline_median_us", "ratio", "spread",
    "baseline_spread", "noise", "relative_error", "sm_clock_mhz", "power_w", "temperature_c",
    "throttle_reasons", "registers", "spill_bytes", "smem_bytes", "warnings", "compile_seconds",
)  # fmt: skip
_TIMES = ("median_us", "baseline_median_us", "ratio")
_NUMBERS = ("spread", "baseline_spread", "noise", "relative_error")
_OPTIONAL = (
    "sm_clock_mhz", "power_w", "temperature_c", "registers", "spill_bytes", "smem_bytes", "compile_seconds",
)  # fmt: skip
_TEXTS = ("family", "label", "candidate", "device_name", "kernel_source", "origin", "method", "fingerprint")


def candidates_query(problem: Problem | None, family: str | None) -> Select[Any]:
    """Every measurement, or the measurements of a problem or family, with the record."""
    row = MeasurementRow
    query = records_query(None).with_only_columns(
        *(ProblemRow.id.label("problem_id"), *PROBLEM_COLUMNS),
        *(FINGERPRINT_COLUMNS[0].label("fingerprint"), *FINGERPRINT_COLUMNS[1:]),
        *(CandidateRow.digest.label("candidate"), CandidateRow.family, CandidateRow.label),
        CandidateRow.json,
        *(row.id.label("measurement_id"), *(getattr(row, name) for name in _FACTS)),
        *(row.created_at.label("measured_at"), RecordRow.confirmed),
    )
    if problem is not None:
        query = where_problem(query, problem)
    if family is not None:
        query = query.where(CandidateRow.family == family)
    return query


def best_of_each(frame: pandas.DataFrame) -> pandas.DataFrame:
    """The rows of `candidates_query`, one per problem, fingerprint and candidate (`Database.frame`)."""
    frame = sound(frame)
    frame["record"] = frame["confirmed"].notna()
    frame["confirmed"] = frame["confirmed"].eq(True)
    # Always show the confirmed record's row: dispatch launches it.
    frame = by_evidence(frame, "measurement_id", first="confirmed")
    # A candidate measured again stays the record, though its row now shows the later evidence.
    frame["record"] = frame.groupby(_KEY)["record"].transform("any") if len(frame) else frame["record"]
    frame = frame.drop_duplicates(_KEY, keep="last")
    hidden = ["problem_id", "measurement_id", "own", "level"]
    return frame.drop(columns=hidden).reset_index(drop=True)


def with_shipped(
    frame: pandas.DataFrame, records: Iterable[Record], problem: Problem | None, family: str | None
) -> pandas.DataFrame:
    """The rows of `best_of_each`, then the shipped records, which lack some columns."""
    import pandas

    wanted = (
        record
        for record in records
        if problem in (None, record.problem) and family in (None, record.candidate.family)
    )
    shipped = of_records(wanted).assign(record=True, origin="shipped").reindex(columns=frame.columns)
    parts = [part for part in (frame, shipped) if len(part)]
    return pandas.concat(parts, ignore_index=True) if parts else frame


def of_records(records: Iterable[Record]) -> pandas.DataFrame:
    """A row for each record, with the columns of `best_of_each` that shipped records have."""
    import pandas

    figures = (
        *_TIMES, "label", "kernel_source", "method", "noise", "relative_error", "measured_at", "confirmed"
    )  # fmt: skip
    rows = [
        document_of(record.problem)
        | record.fingerprint.asdict()
        | {name: getattr(record, name) for name in figures}
        | {"fingerprint": record.fingerprint.digest, "candidate": record.candidate.digest}
        | {"family": record.candidate.family}
        for record in records
    ]
    names = [*FIELDS, *FINGERPRINT_FIELDS, *figures, "fingerprint", "candidate", "family"]
    return pandas.DataFrame(rows, columns=names)


def by_evidence(frame: pandas.DataFrame, *last: str, first: str | None = None) -> pandas.DataFrame:
    """The rows sorted by evidence, the worst first, with the added columns `own` and `level`.

    Sorted by the column `first`, then whether it was measured here, the evidence, and the columns `last`.
    """
    confirmed = frame.get("confirmed", [False] * len(frame))
    pairs = list(zip(frame["method"], map(bool, confirmed), strict=True))
    levels = {pair: int(evidence_of(str(pair[0]), confirmed=pair[1])) for pair in {*pairs}}
    frame = frame.assign(own=frame["origin"].eq(""), level=[levels[pair] for pair in pairs])
    return frame.sort_values([*([first] if first else []), "own", "level", *last], kind="stable")


def sound(frame: pandas.DataFrame) -> pandas.DataFrame:
    """The rows whose cells are all possible values; logs the number of the others."""
    import pandas

    keep = pandas.Series(True, index=frame.index)
    for name in (*_TIMES, *_NUMBERS, *_OPTIONAL):
        if name not in frame:
            continue
        cells = frame[name].map(lambda cell: cell if isinstance(cell, int | float) else None).astype(float)
        cells = cells.where(cells.abs() < 1e300)
        if name in _TIMES:
            keep &= cells.between(LEAST, MOST)
        elif name in _NUMBERS:
            keep &= cells.notna()
        else:
            keep &= cells.notna() | frame[name].isna()
        frame[name] = cells
    for name in _TEXTS:
        if name in frame:
            keep &= frame[name].map(lambda cell: isinstance(cell, str)).astype(bool)
    if "measured_at" in frame:
        keep &= frame["measured_at"].notna()
    possible = functools.cache(functools.partial(is_readable, problem_of))
    problems = frame[list(FIELDS)].itertuples(index=False, name=None)
    keep &= pandas.Series([possible(*cells) for cells in problems], index=frame.index, dtype=bool)
    if "json" in frame:  # of few candidates are many rows
        whole = functools.cache(functools.partial(is_readable, decode_candidate))
        pairs = zip(frame["json"], frame["candidate"], strict=True)
        keep &= pandas.Series([whole(*pair) for pair in pairs], index=frame.index, dtype=bool)
        frame = frame.drop(columns="json")
    if not keep.all():
        _log.warning("skipped %d unreadable row(s) of a table", (~keep).sum())
    return frame[keep].copy()
