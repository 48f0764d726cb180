"""Which rows of a database cannot be what they say: reading leaves them out, `tunegemm doctor` names them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from statistics import median
from typing import Any, cast

from sqlalchemy import Table, select

from tunegemm.describe.device import Fingerprint
from tunegemm.describe.problem import Problem
from tunegemm.measure.evidence import POLICIES
from tunegemm.store.checks import BAD, one_line, typed
from tunegemm.store.database import Database
from tunegemm.store.lookup import checked_candidate
from tunegemm.store.models import (
    Base,
    CandidateRow,
    ChoiceRow,
    FailureRow,
    FingerprintRow,
    MeasurementRow,
    ProblemRow,
    RecordRow,
)


def damaged_rows(database: Database) -> list[str]:
    """One line for each: its table, its key and what is wrong. Reads every row."""
    found: list[str] = []
    owners: dict[Any, tuple[Any, Any]] = {}

    def examine(model: type[Base], check: Callable[[Any], None]) -> None:
        table = cast(Table, model.__table__)
        with database._reading() as session:
            for row in session.execute(select(table)):
                try:
                    check(row)
                except (*BAD, OverflowError) as error:
                    found.append(f"{table.name} {row.id}: {one_line(error)}")

    def measurement(row: Any) -> None:
        owners[row.id] = row.problem_id, row.fingerprint_id
        for name in ("samples_us", "baseline_us"):
            times = getattr(row, name)
            if not isinstance(times, list) or not times or not all(map(_is_time, times)):
                raise ValueError(f"{name} are not times")
        if len(row.samples_us) != len(row.baseline_us):
            raise ValueError("samples_us and baseline_us are not of the same rounds")
        for name in ("median_us", "baseline_median_us", "ratio"):
            if not _is_time(getattr(row, name)):
                raise ValueError(f"{name} {getattr(row, name)!r} is not a positive number")
        if not math.isclose(row.median_us, median(row.samples_us), rel_tol=1e-6):
            raise ValueError(f"median_us {row.median_us!r} is not the median of its samples")
        for name in ("noise", "relative_error"):
            if not isinstance(getattr(row, name), int | float) or not math.isfinite(getattr(row, name)):
                raise ValueError(f"{name} {getattr(row, name)!r} is not a number")
        if row.evidence is not None and not isinstance(row.evidence, dict):
            raise ValueError("evidence is not an object")
        if row.policy not in POLICIES:
            raise ValueError(f"policy {row.policy!r} is not known")
        _moment(row.created_at)

    def choice(row: Any) -> None:
        if owners.get(row.measurement_id) != (row.problem_id, row.fingerprint_id):
            raise ValueError(f"measurement {row.measurement_id!r} is not of its problem and fingerprint")
        _moment(row.chosen_at)

    examine(ProblemRow, lambda row: _discard(Problem(*(getattr(row, f.name) for f in fields(Problem)))))
    examine(FingerprintRow, _fingerprint)
    examine(CandidateRow, lambda row: _discard(checked_candidate(row.json, row.digest)))
    examine(MeasurementRow, measurement)
    examine(FailureRow, _failure)
    examine(RecordRow, choice)
    examine(ChoiceRow, choice)
    return found


def _discard(_: object) -> None:
    pass


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _moment(value: Any) -> None:
    if value is None:
        raise ValueError("its time is not a moment")


def _fingerprint(row: Any) -> None:
    facts = {field.name: getattr(row, field.name) for field in fields(Fingerprint)}
    if typed(Fingerprint, facts).digest != row.digest:
        raise ValueError(f"its digest is not {row.digest!r}")


def _failure(row: Any) -> None:
    if not isinstance(row.stage, str) or not isinstance(row.reason, str):
        raise ValueError("its stage or reason is not text")
    _moment(row.created_at)
