"""One publication as few prepared statements: writers to one SQLite file take turns, so each must be brief.

The tables are locked in one order, problem, fingerprint, candidate, record, and one row of each, so that
no two publications on a server can wait for each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, cast

from sqlalchemy import Connection, Select, Table, bindparam, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite

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
from tunegemm.store.schema import FASTEST

Values = Mapping[str, Any]


def _table(model: type[Base]) -> Table:
    return cast(Table, model.__table__)


_FINGERPRINTS, _PROBLEMS, _CANDIDATES = map(_table, (FingerprintRow, ProblemRow, CandidateRow))
_MEASUREMENTS, _FAILURES = map(_table, (MeasurementRow, FailureRow))
_RECORDS, _CHOICES = map(_table, (RecordRow, ChoiceRow))


def _find(table: Table, *names: str) -> Select[Any]:
    """The row of those values, each under its column's name."""
    return select(table).where(*(table.c[name] == bindparam(name) for name in names))


_PROBLEM_NAMES = [column.name for column in _PROBLEMS.columns if column.name != "id"]
_FIND_PROBLEM = _find(_PROBLEMS, *_PROBLEM_NAMES)
_FIND_FINGERPRINT = _find(_FINGERPRINTS, "digest")
_FIND_CANDIDATE = _find(_CANDIDATES, "digest")
_RELABEL = (
    update(_CANDIDATES).where(_CANDIDATES.c.id == bindparam("key")).values(label=bindparam("new_label"))
)
_FIND_RECORD = _find(_RECORDS, "problem_id", "fingerprint_id", "policy").with_for_update()
_FAMILIES = select(_CANDIDATES.c.family).where(_CANDIDATES.c.id.in_([bindparam("one"), bindparam("other")]))
_FIND_SAME = (
    select(_MEASUREMENTS.c.id)
    .where(
        *(
            _MEASUREMENTS.c[name] == bindparam(name)
            for name in ("problem_id", "fingerprint_id", "candidate_id", "samples_us", "baseline_us")
        )
    )
    .order_by(_MEASUREMENTS.c.id.desc())
    .limit(1)
)
_CHOOSE = update(_RECORDS).where(_RECORDS.c.id == bindparam("key"))


def row_keys(connection: Connection, problem: Values, fingerprint: Values, candidate: Values) -> Values:
    """The keys of a result's problem, fingerprint and candidate, whose rows are added when missing.

    A candidate's label, when not empty, replaces the one it has.
    """
    keys = {
        "problem_id": problem_key(connection, problem),
        "fingerprint_id": fingerprint_key(connection, fingerprint),
    }
    row = _row(connection, _FIND_CANDIDATE, _CANDIDATES, candidate)
    if candidate["label"] and candidate["label"] != row.label:
        connection.execute(_RELABEL, {"key": row.id, "new_label": candidate["label"]})
    return keys | {"candidate_id": row.id}


def problem_key(connection: Connection, problem: Values) -> int:
    """The key of a problem's row, which is added when missing."""
    return int(_row(connection, _FIND_PROBLEM, _PROBLEMS, problem).id)


def fingerprint_key(connection: Connection, fingerprint: Values) -> int:
    """The key of a fingerprint's row, which is added when missing."""
    return int(_row(connection, _FIND_FINGERPRINT, _FINGERPRINTS, fingerprint).id)


def insert_missing(connection: Connection, table: Table) -> Any:
    """An INSERT that leaves rows alone that are there already, as another writer may have added them."""
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    return dialect.insert(table).on_conflict_do_nothing()


def label_if_none(connection: Connection, candidate_id: int, label: str) -> None:
    """Gives a candidate a label, unless it has one."""
    connection.execute(_RELABEL.where(_CANDIDATES.c.label == ""), {"key": candidate_id, "new_label": label})


def add_failure(connection: Connection, keys: Values, values: Values, *, at: datetime | None = None) -> int:
    """The new row's key. at: when it was published; now, if None."""
    return _add(connection, _FAILURES, {**keys, **values, "created_at": at or datetime.now(UTC)})


def add_measurement(
    connection: Connection, keys: Values, values: Values, *, at: datetime | None = None
) -> int:
    """As `add_failure`."""
    return _add(connection, _MEASUREMENTS, {**keys, **values, "created_at": at or datetime.now(UTC)})


def _add(connection: Connection, table: Table, row: Values) -> int:
    added = connection.execute(insert(table), row).inserted_primary_key
    assert added is not None
    return int(added[0])


def find_measurement(connection: Connection, keys: Values, values: Values) -> int | None:
    """The newest measurement of the very same samples."""
    return connection.scalar(_FIND_SAME, {**keys, **values})


def choose_if_better(connection: Connection, keys: Values, measurement_id: int, values: Values) -> None:
    """Makes a measurement the record, unless a final race has settled that or the record is as fast.

    One of other kernel sources than the record's, in the same family, shows that the record is outdated.
    """
    record = _record(connection, keys, measurement_id, values, settled=False)
    if not record.settled and (
        values["ratio"] > record.ratio
        or (
            values["kernel_source"] != record.kernel_source
            and _same_family(connection, keys["candidate_id"], record.candidate_id)
        )
    ):
        _choose(connection, record, keys, measurement_id, values, settled=False)


def settle(connection: Connection, keys: Values, measurement_id: int, values: Values) -> None:
    """Makes a measurement the record, whatever the record was."""
    record = _record(connection, keys, measurement_id, values, settled=True)
    _choose(connection, record, keys, measurement_id, values, settled=True)


def _record(
    connection: Connection, keys: Values, measurement_id: int, values: Values, *, settled: bool
) -> Any:
    """The record of a problem and fingerprint, locked; it is made of the measurement when missing."""
    first = _record_values(keys, measurement_id, values, settled=settled)
    known = connection.execute(_FIND_RECORD, first).one_or_none()
    if known is not None:
        return known
    row = _row(connection, _FIND_RECORD, _RECORDS, first)
    if row.measurement_id == measurement_id:  # and not that of another writer at this moment
        _remember(connection, first)
    return row


def _choose(
    connection: Connection, record: Any, keys: Values, measurement_id: int, values: Values, *, settled: bool
) -> None:
    if (record.measurement_id, record.settled) == (measurement_id, settled):
        return
    row = _record_values(keys, measurement_id, values, settled=settled)
    connection.execute(_CHOOSE, {"key": record.id, **row})
    _remember(connection, row)


def _record_values(keys: Values, measurement_id: int, values: Values, *, settled: bool) -> Values:
    return {
        **keys, "policy": FASTEST, "measurement_id": measurement_id, "ratio": values["ratio"],
        "kernel_source": values["kernel_source"], "settled": settled, "chosen_at": datetime.now(UTC),
    }  # fmt: skip


def _remember(connection: Connection, record: Values) -> None:
    row = {column.name: record[column.name] for column in _CHOICES.columns if column.name != "id"}
    connection.execute(insert(_CHOICES), row)


def _same_family(connection: Connection, one: int, other: int) -> bool:
    return len(set(connection.scalars(_FAMILIES, {"one": one, "other": other}))) == 1


def _row(connection: Connection, find: Select[Any], table: Table, values: Values) -> Any:
    """The row that a query finds, which is added when missing."""
    row = connection.execute(find, values).one_or_none()
    if row is None:
        connection.execute(insert_missing(connection, table), values)
        row = connection.execute(find, values).one()
    return row
