"""Rows of the database as values: which columns are read is said here once, and what is damaged is a miss.

A cell may hold anything: SQLite keeps text in columns of numbers, and files are edited by hand. What cannot
be understood, or is not a possible value of its column, fails for its own row alone, which is left out and
named in the log.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from numbers import Real
from types import UnionType
from typing import Any, TypeVar, get_args

from sqlalchemy import Select, and_, or_, select

from tunegemm.compile.ptxas import Resources
from tunegemm.describe.device import Fingerprint
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.errors import DatabaseError
from tunegemm.generate import families
from tunegemm.generate.families import kernel_source_hash
from tunegemm.measure.outcome import Failure, Measurement, Stage
from tunegemm.store.checks import LONGEST_US, SHORTEST_US
from tunegemm.store.lookup import UNREADABLE, checked_candidate, checked_fingerprint
from tunegemm.store.models import (
    CandidateRow,
    ChoiceRow,
    FailureRow,
    FingerprintRow,
    MeasurementRow,
    ProblemRow,
    RecordRow,
    plain,
)
from tunegemm.store.record import UNKNOWN_TIME, Record
from tunegemm.store.schema import FASTEST
from tunegemm.untrusted import printable, shown

Value = TypeVar("Value")

_log = logging.getLogger(__name__)

PROBLEM_FIELDS = tuple(field.name for field in dataclasses.fields(Problem))
FINGERPRINT_FIELDS = tuple(field.name for field in dataclasses.fields(Fingerprint))
PROBLEM_COLUMNS = [getattr(ProblemRow, name) for name in PROBLEM_FIELDS]
FINGERPRINT_COLUMNS = [FingerprintRow.digest, *(getattr(FingerprintRow, name) for name in FINGERPRINT_FIELDS)]
CANDIDATE_COLUMNS = [CandidateRow.json, CandidateRow.digest]

#: Telemetry that has columns of its own; the rest of it is kept as JSON.
TELEMETRY_NUMBERS = ("sm_clock_mhz", "power_w", "temperature_c")
THROTTLE = "throttle_reasons"

_row = MeasurementRow
_NUMBERS = [_row.median_us, _row.baseline_median_us, _row.ratio, _row.noise, _row.relative_error]
_FACTS = [CandidateRow.label, _row.kernel_source, _row.method, _row.origin, _row.created_at]
_SAMPLES: list[Any] = [_row.samples_us, _row.baseline_us, _row.telemetry, _row.throttle_reasons]
_SAMPLES += [getattr(_row, name) for name in TELEMETRY_NUMBERS]


def records_query(
    chosen: type[RecordRow | ChoiceRow] | None = RecordRow, *, samples: bool = False
) -> Select[Any]:
    """The records, or all that ever were one (`ChoiceRow`), or every measurement (None); oldest first.

    samples: with samples and telemetry. `record_builder` makes values of the rows.
    """
    link = chosen or RecordRow
    of_record = and_(
        RecordRow.measurement_id == _row.id,
        RecordRow.problem_id == _row.problem_id,
        RecordRow.fingerprint_id == _row.fingerprint_id,
        RecordRow.goal == FASTEST,
    )
    query = select(
        *PROBLEM_COLUMNS, *FINGERPRINT_COLUMNS, *CANDIDATE_COLUMNS, *_NUMBERS, *_FACTS, link.confirmed,
        link.chosen_at, *(_SAMPLES if samples else ()),
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


def failure(row: Sequence[Any]) -> Failure:
    """The failure of a row: columns of its candidate, the stage and the reason."""
    json, digest, stage, reason = row
    if stage not in get_args(Stage):
        raise ValueError(f"stage {stage!r:.40} is not known")
    return Failure(checked_candidate(json, digest), stage, text(reason))


def record_builder(layer: str, *, samples: bool = False) -> Callable[[Sequence[Any]], Record]:
    """What makes a `Record` of a row of `records_query`. It raises one of `UNREADABLE` for a damaged one."""
    # 100,000 records share few candidates and fewer fingerprints.
    fingerprint_of = functools.cache(checked_fingerprint)
    candidate_of = functools.cache(checked_candidate)
    first, second = len(PROBLEM_COLUMNS), len(PROBLEM_COLUMNS) + len(FINGERPRINT_COLUMNS)

    def build(row: Sequence[Any]) -> Record:
        json, digest, median_us, baseline_us, ratio, noise, error, *facts = row[second:]
        label, kernel_source, method, origin, measured_at, confirmed, chosen_at, *more = facts
        if confirmed is not None:  # and not a measurement that is no record
            known(chosen_at)
        return Record(
            problem=Problem(*row[:first]),
            candidate=candidate_of(json, digest),
            fingerprint=fingerprint_of(*row[first:second]),
            label=text(label),
            median_us=positive(median_us),
            baseline_median_us=positive(baseline_us),
            ratio=positive(ratio),
            noise=number(noise),
            relative_error=number(error),
            confirmed=flag(confirmed),
            measured_at=known(measured_at),
            kernel_source=text(kernel_source),
            layer=layer,
            method=text(method),
            origin=text(origin),
            chosen_at=chosen_at or UNKNOWN_TIME,
            **(_samples(more) if samples else {}),
        )

    return build


def _samples(cells: Sequence[Any]) -> dict[str, Any]:
    samples, baseline, telemetry, throttle, *numbers = cells
    lists = isinstance(samples, list) and isinstance(baseline, list)
    if not lists or not samples or len(samples) != len(baseline):
        raise ValueError("its samples are incomplete")
    if not isinstance(telemetry, dict | None):
        raise ValueError("its evidence is not an object")
    if not isinstance(throttle, list | None):
        raise ValueError("its throttle reasons are not a list")
    named = zip(TELEMETRY_NUMBERS, numbers, strict=True)
    further: dict[str, Any] = {name: number(value) for name, value in named if value is not None}
    if throttle is not None:
        further[THROTTLE] = tuple(map(text, throttle))
    return {
        "samples_us": tuple(map(positive, samples)),
        "baseline_us": tuple(map(positive, baseline)),
        "telemetry": {**(telemetry or {}), **further},
    }


def require(value: object, kind: type | UnionType, name: str) -> None:
    """Raises DatabaseError for an argument of another type."""
    if not isinstance(value, kind):
        wanted = getattr(kind, "__name__", kind)
        raise DatabaseError(f"{name} {shown(value)}: its type is {type(value).__name__}; give a {wanted}")


def where_problem(query: Select[Any], problem: Problem) -> Select[Any]:
    """The query, for the rows of one problem."""
    require(problem, Problem, "problem")
    return query.where(*(getattr(ProblemRow, name) == getattr(problem, name) for name in PROBLEM_FIELDS))


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
    """What `build` makes of the rows it can read; the log says how many it could not, and why."""
    values, skipped, reason = [], 0, ""
    for row in rows:
        try:
            values.append(build(row))
        except UNREADABLE as error:
            skipped, reason = skipped + 1, str(error)
    if skipped:
        _log.warning("skipped %d unreadable %s row(s); the last one: %s", skipped, kind, reason)
    return values


def number(cell: Any) -> float:
    """A finite number. Raises ValueError."""
    if not isinstance(cell, int | float) or not math.isfinite(cell):
        raise ValueError(f"{cell!r:.40} is not a number")
    return float(cell)


def positive(cell: Any) -> float:
    """A finite number above zero. Raises ValueError."""
    if not number(cell) > 0:
        raise ValueError(f"{cell!r:.40} is not positive")
    return float(cell)


def text(cell: Any) -> str:
    """Text. Raises ValueError."""
    if not isinstance(cell, str):
        raise ValueError(f"{cell!r:.40} is not text")
    return cell


def flag(cell: Any) -> bool:
    """True or false; a row that is not there is false. Raises ValueError."""
    if cell not in (True, False, None):
        raise ValueError(f"{cell!r:.40} is neither true nor false")
    return bool(cell)


def known(moment: datetime | None) -> datetime:
    """A moment that could be read. Raises ValueError."""
    if moment is None:
        raise ValueError("its time is not an ISO 8601 time")
    return moment


def key_values(
    problem: Problem, fingerprint: Fingerprint, candidate: Candidate, label: str
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The columns of the three rows that a result refers to."""
    require(label, str, "label")
    text, label = candidate.to_json(), printable(label, 200)
    row = {"digest": candidate.digest, "family": candidate.family, "json": text, "label": label}
    return dataclasses.asdict(problem), {"digest": fingerprint.digest, **fingerprint.asdict()}, row


def outcome_values(
    outcome: Measurement | Failure, resources: Resources | None, method: str
) -> dict[str, Any]:
    """The columns of the row, without its keys and time."""
    require(outcome.candidate, Candidate, "candidate")
    made = {"kernel_source": kernel_source_hash(outcome.candidate.family), "origin": ""}
    if isinstance(outcome, Failure):
        if outcome.stage not in get_args(Stage):
            raise DatabaseError(f"stage {shown(outcome.stage)}: use one of {', '.join(get_args(Stage))}")
        # What a crashed process last printed may hold NUL and bytes that are no letters.
        reason = str(outcome.reason).replace("\0", "").encode("utf-8", "replace").decode()
        return {**made, "stage": outcome.stage, "reason": reason}
    if resources is not None:
        require(resources, Resources, "resources")
    found = {} if resources is None else dataclasses.asdict(resources)
    return {**made, "policy": method, **measurement_values(outcome), **found}


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


def measurement_values(measurement: Measurement) -> dict[str, Any]:
    """The columns of a measurement. Raises DatabaseError for what can be no measurement."""
    samples, baseline = measurement.samples_us, measurement.baseline_us
    if not samples or len(samples) != len(baseline):
        raise DatabaseError(
            f"{len(samples)} samples and {len(baseline)} of the baseline; as many of both are needed"
        )
    if not all(_is_number(time) and SHORTEST_US <= time <= LONGEST_US for time in (*samples, *baseline)):
        raise DatabaseError(
            f"samples of {measurement.candidate} are not all positive times, from {SHORTEST_US:g} to "
            f"{LONGEST_US:g} us; measure it again"
        )
    if not _is_number(measurement.relative_error) or not _is_number(measurement.noise):
        raise DatabaseError(
            f"relative error or noise of {measurement.candidate} is not finite; measure it again"
        )
    require(measurement.telemetry, Mapping, "telemetry")
    telemetry = plain(dict(measurement.telemetry))
    columns: dict[str, Any] = {}
    for name, kind in (*((name, int | float) for name in TELEMETRY_NUMBERS), (THROTTLE, list)):
        columns[name] = telemetry.pop(name) if isinstance(telemetry.get(name), kind) else None
    names = ("samples_us", "baseline_us", "median_us", "baseline_median_us", "ratio", "spread")
    return columns | {
        **{name: getattr(measurement, name) for name in names},
        "baseline_spread": dataclasses.replace(measurement, samples_us=baseline).spread,
        "noise": float(measurement.noise),
        "relative_error": float(measurement.relative_error),
        "evidence": telemetry,
    }
