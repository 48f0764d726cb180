"""One publication as few prepared statements: writers to one SQLite file take turns, so each must be brief.

All publications insert in one order (problem, fingerprint, candidate, one row each) and last lock the problem
to choose the record, so that two publications on a server never deadlock.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, Select, Table, bindparam, delete, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite

from tunegemm.describe.space import Candidate
from tunegemm.errors import DatabaseError, TunegemmError
from tunegemm.generate.cublaslt import TORCH_MM, is_torch
from tunegemm.generate.families import kernel_source_hash
from tunegemm.measure.evidence import Evidence, best_of_each, choose, evidence_of, may_be_record, rank
from tunegemm.store.models import Base
from tunegemm.store.schema import FASTEST
from tunegemm.untrusted import shown

Values = Mapping[str, Any]

_FINGERPRINTS, _PROBLEMS, _CANDIDATES, _MEASUREMENTS, _FAILURES, _RECORDS, _CHOICES = (
    Base.metadata.tables[name]
    for name in ("fingerprints", "problems", "candidates", "measurements", "failures", "records", "choices")
)


def _find(table: Table, *names: str) -> Select[Any]:
    """The row with those values, each under its column's name."""
    return select(table).where(*(table.c[name] == bindparam(name) for name in names))


_FIND_PROBLEM = _find(_PROBLEMS, *(column.name for column in _PROBLEMS.columns if column.name != "id"))
_FIND_FINGERPRINT = _find(_FINGERPRINTS, "digest")
_FIND_CANDIDATE = _find(_CANDIDATES, "digest")
_RELABEL = (
    update(_CANDIDATES).where(_CANDIDATES.c.id == bindparam("key")).values(label=bindparam("new_label"))
)
_LOCK = (
    select(_PROBLEMS.c.id).where(_PROBLEMS.c.id == bindparam("problem_id")).with_for_update(key_share=True)
)
_FIND_RECORD = _find(_RECORDS, "problem_id", "fingerprint_id", "policy")
_PAIR = [_MEASUREMENTS.c[name] == bindparam(name) for name in ("problem_id", "fingerprint_id")]
_OWN = [*_PAIR, _MEASUREMENTS.c.candidate_id == bindparam("candidate_id")]
_FIND_OWN = select(_MEASUREMENTS.c.id).where(*_OWN, _MEASUREMENTS.c.id == bindparam("key"))
#: Compared results, oldest first: all under a fingerprint, one candidate's, one row.
_RESULTS = (
    select(
        *(
            _MEASUREMENTS.c[name]
            for name in ("id", "candidate_id", "policy", "ratio", "kernel_source", "origin")
        ),
        *(_CANDIDATES.c[name] for name in ("family", "json")),
    )
    .join_from(_MEASUREMENTS, _CANDIDATES, _CANDIDATES.c.id == _MEASUREMENTS.c.candidate_id)
    .order_by(_MEASUREMENTS.c.id)
)
_OF_PAIR, _OF_CANDIDATE = _RESULTS.where(*_PAIR), _RESULTS.where(*_OWN)
_OF_MEASUREMENT = _RESULTS.where(_MEASUREMENTS.c.id == bindparam("key"))
_CHOOSE = update(_RECORDS).where(_RECORDS.c.id == bindparam("key"))
_FORGET = delete(_RECORDS).where(_RECORDS.c.id == bindparam("key"))


def row_keys(connection: Connection, problem: Values, fingerprint: Values, candidate: Values) -> Values:
    """The keys of a result's problem, fingerprint and candidate; adds missing rows.

    A label that is not empty replaces the candidate's label.
    """
    keys = {
        "problem_id": _row(connection, _FIND_PROBLEM, _PROBLEMS, problem).id,
        "fingerprint_id": _row(connection, _FIND_FINGERPRINT, _FINGERPRINTS, fingerprint).id,
    }
    row = _row(connection, _FIND_CANDIDATE, _CANDIDATES, candidate)
    if candidate["label"] and candidate["label"] != row.label:
        connection.execute(_RELABEL, {"key": row.id, "new_label": candidate["label"]})
    return keys | {"candidate_id": row.id}


def label_if_none(connection: Connection, candidate_id: int, label: str) -> None:
    """Gives a candidate a label, unless it has one."""
    connection.execute(_RELABEL.where(_CANDIDATES.c.label == ""), {"key": candidate_id, "new_label": label})


def add(connection: Connection, keys: Values, values: Values, *, at: datetime | None = None) -> int:
    """The key of a new measurement or failure. at: when it was published; now, if None."""
    table = _FAILURES if "stage" in values else _MEASUREMENTS
    row = {**keys, **values, "created_at": at or datetime.now(UTC)}
    added = connection.execute(insert(table), row).inserted_primary_key
    assert added is not None
    return int(added[0])


def require_measurement(connection: Connection, keys: Values, measurement_id: int) -> int:
    """The id, if it is a measurement's with these keys. Raises DatabaseError otherwise."""
    if connection.execute(_FIND_OWN, {**keys, "key": measurement_id}).one_or_none() is None:
        raise DatabaseError(
            f"measurement {shown(measurement_id)} does not belong to this candidate, problem and device; "
            "give the id that `publish` returned"
        )
    return measurement_id


@dataclass(frozen=True)
class Compared:
    """One stored measurement as `tunegemm.measure.evidence` compares it."""

    candidate: int
    measurement_id: int
    ratio: float
    evidence: Evidence
    method: str
    kernel_source: str
    is_foreign: bool
    is_outdated: bool
    is_torch: bool


def choose_if_better(connection: Connection, keys: Values) -> None:
    """Updates the record after a measurement of a candidate was added.

    A confirmed record yields only to another final race (`confirm`), or if the best evidence for its own
    candidate says that torch.mm is faster. Reads only the candidate's rows and the record, unless the record
    itself got worse: then it looks for the best of all results.
    """
    record, known = _record(connection, keys)
    confirmed_id = record.measurement_id if record is not None and record.confirmed else None
    own = next(iter(best_of_each(_compared(connection, _OF_CANDIDATE, keys, confirmed_id))), None)
    may = own is not None and may_be_record(own)
    best: Compared | None
    if known is not None and own is not None and known.candidate != own.candidate:
        protected = confirmed_id is not None and known.is_foreign <= own.is_foreign
        best = own if may and not protected and rank(own) > rank(known) else known
    elif record is None:
        best = own if may else None
    elif known is not None and own is not None and may and (confirmed_id or rank(own) >= rank(known)):
        best = known if confirmed_id else own
    else:
        best = choose(_compared(connection, _OF_PAIR, keys, confirmed_id))
    confirmed = best is not None and best.measurement_id == confirmed_id
    _replace(connection, keys, record, best, confirmed=confirmed)


def confirm(connection: Connection, keys: Values, measurement_id: int) -> None:
    """Makes the measurement that won a final race here the record, whatever the record was.

    If torch.mm is faster, the evidence chooses the record, which is then unconfirmed.
    """
    record, _ = _record(connection, keys)
    (won,) = _compared(connection, _OF_MEASUREMENT, {"key": measurement_id}, measurement_id)
    if may_be_record(won):
        _replace(connection, keys, record, won, confirmed=True)
    else:
        best = choose(_compared(connection, _OF_PAIR, keys, None))
        _replace(connection, keys, record, best, confirmed=False)


def adopt(
    connection: Connection, keys: Values, measurement_id: int, *, confirmed: bool, at: datetime | None = None
) -> None:
    """Lets another database's record compete with the record here.

    For imported and merged rows, which have an origin. The record here yields only if it was measured
    elsewhere and the other has better evidence, or the same and a higher ratio. confirmed: it won a final
    race there. at: when it became the record there; None: now. A row measured here is chosen as after a
    publication.
    """
    record, known = _record(connection, keys)
    confirmed_id = record.measurement_id if record is not None and record.confirmed else None
    claimed = measurement_id if confirmed else confirmed_id
    new = next(_compared(connection, _OF_MEASUREMENT, {"key": measurement_id}, claimed), None)
    own = next(iter(best_of_each(_compared(connection, _OF_CANDIDATE, keys, claimed))), None)
    if new is None or own is None or not new.is_foreign or not confirmed or not may_be_record(own):
        choose_if_better(connection, keys)
    elif own.measurement_id == measurement_id and (
        known is None or rank(new) > rank(known) or (confirmed_id is None and rank(new) >= rank(known))
    ):
        _replace(connection, keys, record, new, confirmed=True, at=at)


def _record(connection: Connection, keys: Values) -> tuple[Any, Compared | None]:
    """The record of a problem and fingerprint, if there is one, and its measurement, unless it is damaged.

    On a server the problem's row is locked first: nobody else chooses before this transaction ends, and the
    choice sees every measurement published before.
    """
    connection.execute(_LOCK, keys)
    record = connection.execute(_FIND_RECORD, {**keys, "policy": FASTEST}).one_or_none()
    if record is None:
        return None, None
    confirmed_id = record.measurement_id if record.confirmed else None
    result = _compared(connection, _OF_MEASUREMENT, {"key": record.measurement_id}, confirmed_id)
    return record, next(result, None)


def _compared(
    connection: Connection, query: Select[Any], values: Values, confirmed_id: int | None
) -> Iterator[Compared]:
    """The stored results of a query, without damaged ones."""
    for key, candidate, method, ratio, source, origin, family, text in connection.execute(query, values):
        confirmed = key == confirmed_id
        if isinstance(ratio, int | float) and 0 < ratio < math.inf:
            yield Compared(
                candidate, key, float(ratio), evidence_of(str(method), confirmed=confirmed), str(method),
                source,
                is_foreign=origin != "",
                is_outdated=not confirmed and source != kernel_source_hash(family),
                is_torch=_is_torch(family, text),
            )  # fmt: skip


def _is_torch(family: str, text: str) -> bool:
    try:
        return family == TORCH_MM.family and is_torch(Candidate.from_json(text))
    except TunegemmError:
        return False


def _replace(
    connection: Connection,
    keys: Values,
    record: Any,
    best: Compared | None,
    *,
    confirmed: bool,
    at: datetime | None = None,
) -> None:
    """Makes a result the record; None removes the record, so that dispatch launches torch.mm."""
    if best is None:
        if record is not None:
            connection.execute(_FORGET, {"key": record.id})
        return
    if record is not None and (record.measurement_id, record.confirmed) == (best.measurement_id, confirmed):
        return
    row = {
        **keys, "policy": FASTEST, "candidate_id": best.candidate, "measurement_id": best.measurement_id,
        "ratio": best.ratio, "kernel_source": best.kernel_source, "measured_by": best.method,
        "confirmed": confirmed, "chosen_at": at or datetime.now(UTC),
    }  # fmt: skip
    if record is None:
        connection.execute(insert(_RECORDS), row)
    else:
        connection.execute(_CHOOSE, {"key": record.id, **row})
    history = {column.name: row[column.name] for column in _CHOICES.columns if column.name != "id"}
    connection.execute(insert(_CHOICES), history)


def _row(connection: Connection, find: Select[Any], table: Table, values: Values) -> Any:
    """The row that a query selects; adds it if missing."""
    row = connection.execute(find, values).one_or_none()
    if row is None:  # another writer may add it at the same time
        dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
        connection.execute(dialect.insert(table).on_conflict_do_nothing(), values)
        row = connection.execute(find, values).one()
    return row
