"""Finds the damaged rows of a database. Reading skips them; `tunegemm doctor` lists them."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import median
from typing import Any

from sqlalchemy import select

from tunegemm.describe.device import Fingerprint
from tunegemm.describe.stored import FIELDS, problem_of
from tunegemm.errors import one_line
from tunegemm.measure.evidence import METHODS
from tunegemm.store import codec
from tunegemm.store.database import Database
from tunegemm.store.models import Base


def damaged_rows(database: Database) -> list[str]:
    """One line for each damaged row: its table, its key and the error. Reads every row."""
    damaged: list[str] = []
    owners: dict[Any, tuple[Any, Any]] = {}

    def examine(table: str, check: Callable[[Any], object]) -> None:
        with database.reading() as session:
            for row in session.execute(select(Base.metadata.tables[table])):
                try:
                    check(row)
                except (*codec.BAD, OverflowError) as error:
                    damaged.append(f"{table} {row.id}: {one_line(error)}")

    def measurement(row: Any) -> None:
        owners[row.id] = row.problem_id, row.fingerprint_id
        _check(row, codec.times, "samples_us", "baseline_us")
        _check(row, codec.positive, "median_us", "baseline_median_us", "ratio")
        _check(row, codec.finite, "noise")
        _check(row, codec.not_negative, "relative_error")
        _check(row, codec.known, "created_at")
        if len(row.samples_us) != len(row.baseline_us):
            raise ValueError("samples_us and baseline_us are from different rounds")
        if not math.isclose(row.median_us, median(row.samples_us), rel_tol=1e-6):
            raise ValueError(f"median_us {row.median_us!r} is not the median of its samples")
        if not isinstance(row.evidence, dict | None):
            raise ValueError("evidence is not an object")
        if row.policy not in METHODS:
            raise ValueError(f"policy {row.policy!r} is not known")

    def failed(row: Any) -> None:
        _check(row, codec.text, "stage", "reason")
        _check(row, codec.known, "created_at")

    def choice(row: Any) -> None:
        if owners.get(row.measurement_id) != (row.problem_id, row.fingerprint_id):
            raise ValueError(f"measurement {row.measurement_id!r} belongs to another problem or fingerprint")
        _check(row, codec.known, "chosen_at")

    examine("problems", lambda row: problem_of(*(getattr(row, name) for name in FIELDS)))
    examine("fingerprints", _fingerprint)
    examine("candidates", lambda row: codec.decode_candidate(row.json, row.digest))
    examine("measurements", measurement)
    examine("failures", failed)
    examine("records", choice)
    examine("choices", choice)
    return damaged


def _check(row: Any, check: Callable[[Any], object], *names: str) -> None:
    """Raises ValueError, naming the column, for a cell that a check rejects."""
    for name in names:
        try:
            check(getattr(row, name))
        except ValueError as error:
            raise ValueError(f"{name} {error}") from None


def _fingerprint(row: Any) -> None:
    facts = {name: getattr(row, name) for name in codec.FINGERPRINT_FIELDS}
    if codec.decode_fields(Fingerprint, facts).digest != row.digest:
        raise ValueError(f"its digest is not {row.digest!r}")
