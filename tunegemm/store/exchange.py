"""Rows on their way from one database to another: out of the store, checked, and into it.

A row is a plain JSON object (db/exchange.schema.json): a measurement, a failure, or a choice, which says
that a measurement became a record. `dump` makes them, `load` takes them; files of any format and a merge
are only ways between. Nothing that comes in is trusted: each row is checked, a bad one is named and left
out, and nothing that is stored already is changed but, by the evidence, which measurement is the record.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from typing import Any, get_args

from sqlalchemy import Select, select
from sqlalchemy.orm import Session

from tunegemm.describe.device import Fingerprint
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.errors import DatabaseError
from tunegemm.generate.families import kernel_source_hash
from tunegemm.generate.ptxas import Resources
from tunegemm.measure.outcome import Failure, Measurement, Stage
from tunegemm.store import database as store
from tunegemm.store import publishing
from tunegemm.store.checks import (
    BAD,
    candidate_of,
    moment_of,
    number_of,
    one_line,
    text_of,
    times_of,
    typed,
)
from tunegemm.store.database import Database
from tunegemm.store.models import (
    CandidateRow,
    ChoiceRow,
    FailureRow,
    FingerprintRow,
    MeasurementRow,
    ProblemRow,
    RecordRow,
)
from tunegemm.store.schema import FASTEST

Row = dict[str, Any]

#: Rows per transaction while loading.
_BATCH = 500
_RESOURCES = tuple(field.name for field in dataclasses.fields(Resources))


@dataclass(frozen=True)
class Conflict:
    """Two records of one problem and fingerprint that name different kernels."""

    problem: Problem
    fingerprint: Fingerprint
    kept: Candidate
    """The record from now on."""
    other: Candidate
    """The one that is not; its measurements are kept."""
    labels: tuple[str, str]
    """Of `kept` and `other`."""
    reason: str
    """What settled it."""


@dataclass
class Report:
    """What a load did."""

    added: int = 0
    """Measurements and failures that were new."""
    known: int = 0
    """Those that the database had."""
    skipped: list[str] = field(default_factory=list)
    """One line for each bad row: its number, what it is, and what is wrong."""
    conflicts: list[Conflict] = field(default_factory=list)


def dump(database: Database, problem: Problem | None = None) -> Iterator[Row]:
    """Every measurement, failure and choice, oldest first; of one problem, if given. Without damaged ones."""
    with database._reading() as session:
        for result in (_measurements(session, problem), _failures(session, problem)):
            yield from result
        yield from _choices(session, problem)


def select_rows(
    rows: Iterable[Row],
    *,
    shapes: Collection[str] = (),
    dtype: str | None = None,
    layout: str | None = None,
    fingerprint: str | None = None,
) -> Iterator[Row]:
    """The rows of some problems and of one fingerprint (the start of its digest), with their choices."""
    kept: set[str] = set()
    for row in rows:
        if row["kind"] == "choice":
            if row["measurement"] in kept:
                yield row
            continue
        problem, facts = Problem(**row["problem"]), Fingerprint(**row["fingerprint"])
        if (
            (not shapes or problem.shape in shapes)
            and (dtype is None or problem.in_dtype == dtype)
            and (layout is None or problem.layout == layout.lower())
            and (fingerprint is None or facts.digest.startswith(fingerprint))
        ):
            kept.add(row.get("id", ""))
            yield row


def load(database: Database, rows: Iterable[Row], *, origin: str) -> Report:
    """Add rows to a database. Loading the same rows twice changes nothing the second time.

    origin: named by the added rows that name none. A record of the same problem and fingerprint is replaced
    where the new one has the better evidence: a final race before a screen, then more samples, then the
    later. Raises DatabaseError when the database cannot be written; what was loaded before is kept.
    """
    report = Report()
    measurement_ids: dict[str, int] = {}
    choices: list[tuple[int, Row]] = []
    numbered = enumerate(rows, 1)
    while batch := list(islice(numbered, _BATCH)):
        with database._writing() as connection, Session(connection) as session, session.begin():
            for number, row in batch:
                if isinstance(row, dict) and row.get("kind") == "choice":
                    choices.append((number, row))
                    continue
                try:
                    parsed = parse(row)
                except BAD as error:
                    report.skipped.append(f"row {number}{_name(row)}: {one_line(error)}")
                    continue
                key, is_new = _insert(session, parsed, origin)
                report.added += is_new
                report.known += not is_new
                if "id" in row and isinstance(parsed.outcome, Measurement):
                    measurement_ids[str(row["id"])] = key
    _load_choices(database, choices, measurement_ids, report)
    return report


def _load_choices(
    database: Database, rows: list[tuple[int, Row]], measurement_ids: Mapping[str, int], report: Report
) -> None:
    """The history of records; the last choice of each problem and fingerprint competes with the record."""
    choices = []
    for number, row in rows:
        try:
            choices.append(_parse_choice(row, measurement_ids))
        except BAD as error:
            report.skipped.append(f"row {number} (choice): {one_line(error)}")
    choices.sort(key=lambda choice: choice.chosen_at)
    pending = iter(choices)
    last: dict[tuple[int, int, str], _Choice] = {}
    while batch := list(islice(pending, _BATCH)):
        with database._writing() as connection, Session(connection) as session, session.begin():
            for choice in batch:
                measured = session.get_one(MeasurementRow, choice.measurement_id)
                if _remember(session, choice, measured):
                    last[measured.problem_id, measured.fingerprint_id, choice.policy] = choice
    pending = iter(last.values())
    while batch := list(islice(pending, _BATCH)):
        with database._writing() as connection, Session(connection) as session, session.begin():
            conflicts = [_choose(session, choice) for choice in batch]
        report.conflicts += [conflict for conflict in conflicts if conflict is not None]


def merge(sources: Sequence[str], into: str) -> Report:
    """Load several databases into one, which is created when missing.

    Raises DatabaseError when one cannot be read, before anything is written.
    """
    opened: list[Database] = []
    try:
        opened += [Database.open(source, read_only=True) for source in sources]
        total = Report()
        with Database.open(into) as target:
            for source in opened:
                if source.location == target.location:
                    raise DatabaseError(f"{target.name}: cannot be merged into itself; name another --into")
                report = load(target, dump(source), origin=source.name)
                total.added, total.known = total.added + report.added, total.known + report.known
                total.skipped += [f"{source.name}: {line}" for line in report.skipped]
                total.conflicts += report.conflicts
        return total
    finally:
        for database in opened:
            database.close()


@dataclass(frozen=True)
class Parsed:
    """A row that was checked."""

    problem: Problem
    fingerprint: Fingerprint
    outcome: Measurement | Failure
    resources: Resources | None
    label: str
    kernel_source: str
    origin: str
    policy: str
    measured_at: datetime


def parse(row: Any) -> Parsed:
    """A measurement or failure from its JSON object. Raises one of several errors for what is neither."""
    if not isinstance(row, dict) or row.get("kind") not in ("measurement", "failure"):
        raise ValueError("its kind is none of measurement, failure, choice")
    candidate = candidate_of(row["candidate"])
    outcome: Measurement | Failure
    if row["kind"] == "failure":
        if row["stage"] not in get_args(Stage):
            raise ValueError(f"stage {row['stage']!r} is not known")
        outcome = Failure(candidate, row["stage"], text_of(row, "reason"))
    else:
        evidence = row.get("evidence") or {}
        if not isinstance(evidence, dict):
            raise ValueError("its evidence is no object")
        if evidence.get("source") == "replayed":
            raise ValueError("its times are replayed, so never stored as measured")
        outcome = Measurement(
            candidate,
            times_of(row, "samples_us"),
            times_of(row, "baseline_us"),
            number_of(row, "relative_error"),
            number_of(row, "noise"),
            evidence,
        )
        store._measurement_values(outcome)
    resources = row.get("resources")
    return Parsed(
        typed(Problem, row["problem"]),
        typed(Fingerprint, row["fingerprint"]),
        outcome,
        None if resources is None else _resources(resources),
        text_of(row, "label", longest=200),
        text_of(row, "kernel_source", longest=16),
        text_of(row, "origin"),
        text_of(row, "policy", longest=16) or "screen",
        moment_of(row["measured_at"]),
    )


def _resources(data: Any) -> Resources:
    if not isinstance(data, dict) or set(data) != set(_RESOURCES):
        raise ValueError(f"its resources need exactly the fields {', '.join(_RESOURCES)}")
    counts = ("registers", "spill_bytes", "smem_bytes")
    if not all(type(data[name]) is int for name in counts) or not isinstance(data["warnings"], list):
        raise ValueError("its resources are no numbers")
    return Resources(**{**data, "warnings": tuple(map(str, data["warnings"]))})


@dataclass(frozen=True)
class _Choice:
    measurement_id: int
    policy: str
    settled: bool
    chosen_at: datetime


def _parse_choice(row: Row, measurement_ids: Mapping[str, int]) -> _Choice:
    reference = row["measurement"]
    if reference not in measurement_ids:
        raise ValueError(f"measurement {reference!r} is not among the rows that were taken")
    if type(row["settled"]) is not bool:
        raise ValueError(f"settled {row['settled']!r} is neither true nor false")
    policy = text_of(row, "policy", longest=32) or FASTEST
    return _Choice(measurement_ids[reference], policy, row["settled"], moment_of(row["chosen_at"]))


def _insert(session: Session, parsed: Parsed, origin: str) -> tuple[int, bool]:
    """The key of the row and whether it is new."""
    connection, outcome = session.connection(), parsed.outcome
    values = store._outcome_values(outcome, parsed.resources, parsed.policy)
    values |= {"kernel_source": parsed.kernel_source, "origin": parsed.origin or origin}
    keys = publishing.row_keys(
        connection, *store.key_values(parsed.problem, parsed.fingerprint, outcome.candidate, "")
    )
    table, alike, add = (
        (FailureRow, "stage", publishing.add_failure)
        if isinstance(outcome, Failure)
        else (MeasurementRow, "samples_us", publishing.add_measurement)
    )
    identity = {**keys, "kernel_source": parsed.kernel_source, "created_at": parsed.measured_at}
    identity[alike] = values[alike]
    found = session.scalar(select(table.id).filter_by(**identity).limit(1))
    if found is not None:
        return found, False
    if parsed.label:
        publishing.label_if_none(connection, keys["candidate_id"], parsed.label)
    return add(connection, keys, values, at=parsed.measured_at), True


def _remember(session: Session, choice: _Choice, row: MeasurementRow) -> bool:
    """Enter a choice into the history; False when it is there already."""
    values = _values(choice, row)
    if session.scalar(select(ChoiceRow.id).filter_by(**values).limit(1)) is not None:
        return False
    session.add(ChoiceRow(**values))
    session.flush()
    return True


def _values(choice: _Choice, row: MeasurementRow) -> dict[str, Any]:
    return {
        "problem_id": row.problem_id,
        "fingerprint_id": row.fingerprint_id,
        "policy": choice.policy,
        "measurement_id": row.id,
        "settled": choice.settled,
        "chosen_at": choice.chosen_at,
    }


def _choose(session: Session, choice: _Choice) -> Conflict | None:
    """Make it the record if there is none or its evidence is the better."""
    new, settled = session.get_one(MeasurementRow, choice.measurement_id), choice.settled
    values = _values(choice, new)
    key = {name: values[name] for name in ("problem_id", "fingerprint_id", "policy")}
    copied = {"candidate_id": new.candidate_id, "ratio": new.ratio, "kernel_source": new.kernel_source}
    record = session.scalar(select(RecordRow).filter_by(**key).with_for_update())
    if record is None:
        session.add(RecordRow(**values, **copied))
        session.flush()
        return None
    old = session.get_one(MeasurementRow, record.measurement_id)
    new_wins, reason = _compare(session, old, record.settled, new, settled)
    loser = old if new_wins else new
    if new_wins:
        for name, value in (values | copied).items():
            setattr(record, name, value)
    if old.candidate_id == new.candidate_id:
        return None
    candidates = {row.id: session.get_one(CandidateRow, row.candidate_id) for row in (old, new)}
    kept, other = candidates[new.id if new_wins else old.id], candidates[loser.id]
    problem, fingerprint = (
        session.get_one(ProblemRow, new.problem_id),
        session.get_one(FingerprintRow, new.fingerprint_id),
    )
    return Conflict(
        Problem(*(getattr(problem, name) for name in store._PROBLEM_FIELDS)),
        Fingerprint(*(getattr(fingerprint, name) for name in store._FINGERPRINT_FIELDS)),
        Candidate.from_json(kept.json),
        Candidate.from_json(other.json),
        (kept.label or kept.digest, other.label or other.digest),
        reason,
    )


def _compare(
    session: Session, old: MeasurementRow, old_settled: bool, new: MeasurementRow, new_settled: bool
) -> tuple[bool, str]:
    """Whether the new record is the better, and by what."""
    current = []
    for row in (old, new):
        family = session.get_one(CandidateRow, row.candidate_id).family
        current.append(row.kernel_source == kernel_source_hash(family))
    if current[0] != current[1]:
        return current[1], "the other is of older kernel sources; both stay in the history"
    if old_settled != new_settled:
        return new_settled, "it won a final race"
    counts = len(old.samples_us or ()), len(new.samples_us or ())
    if counts[0] != counts[1]:
        return counts[1] > counts[0], f"{max(counts)} samples, the other has {min(counts)}"
    return new.created_at > old.created_at, "as many samples, measured later"


def _measurements(session: Session, problem: Problem | None) -> Iterator[Row]:
    query = select(MeasurementRow, ProblemRow, FingerprintRow, CandidateRow).select_from(MeasurementRow)
    for row, shared in _joined(session, query, MeasurementRow, problem):
        evidence = dict(row.evidence or {})
        evidence |= {
            name: getattr(row, name)
            for name in (*store._EVIDENCE_NUMBERS, store._THROTTLE)
            if getattr(row, name) is not None
        }
        resources = {name: getattr(row, name) for name in _RESOURCES}
        full = {
            "kind": "measurement",
            **shared,
            "policy": row.policy,
            "samples_us": row.samples_us,
            "baseline_us": row.baseline_us,
            "relative_error": row.relative_error,
            "noise": row.noise,
            "evidence": evidence,
            "resources": None if resources["registers"] is None else resources,
        }
        yield full | {"id": _identity(full)}


def _failures(session: Session, problem: Problem | None) -> Iterator[Row]:
    query = select(FailureRow, ProblemRow, FingerprintRow, CandidateRow).select_from(FailureRow)
    for row, shared in _joined(session, query, FailureRow, problem):
        yield {"kind": "failure", **shared, "stage": row.stage, "reason": row.reason}


def _joined(session: Session, query: Any, table: Any, problem: Problem | None) -> Iterator[tuple[Any, Row]]:
    query = query.join(ProblemRow, ProblemRow.id == table.problem_id)
    query = query.join(FingerprintRow, FingerprintRow.id == table.fingerprint_id)
    query = query.join(CandidateRow, CandidateRow.id == table.candidate_id).order_by(table.id)
    if problem is not None:
        query = store._where_problem(query, problem)
    for row, problem_row, fingerprint_row, candidate_row in session.execute(
        query.execution_options(yield_per=1000)
    ):
        try:
            candidate = json.loads(candidate_row.json)
        except ValueError:
            continue
        if row.created_at is None:
            continue
        yield (
            row,
            {
                "problem": {name: getattr(problem_row, name) for name in store._PROBLEM_FIELDS},
                "fingerprint": {name: getattr(fingerprint_row, name) for name in store._FINGERPRINT_FIELDS},
                "candidate": candidate,
                "label": candidate_row.label,
                "kernel_source": row.kernel_source,
                "origin": row.origin,
                "measured_at": row.created_at.isoformat(timespec="microseconds"),
            },
        )


def _choices(session: Session, problem: Problem | None) -> Iterator[Row]:
    query: Select[*tuple[Any, ...]] = select(
        ChoiceRow.policy, ChoiceRow.settled, ChoiceRow.chosen_at, MeasurementRow,
        ProblemRow, FingerprintRow, CandidateRow,
    ).select_from(ChoiceRow)  # fmt: skip
    query = query.join(MeasurementRow, MeasurementRow.id == ChoiceRow.measurement_id)
    query = query.join(ProblemRow, ProblemRow.id == MeasurementRow.problem_id)
    query = query.join(FingerprintRow, FingerprintRow.id == MeasurementRow.fingerprint_id)
    query = query.join(CandidateRow, CandidateRow.id == MeasurementRow.candidate_id).order_by(ChoiceRow.id)
    if problem is not None:
        query = store._where_problem(query, problem)
    for policy, settled, chosen_at, row, problem_row, fingerprint_row, candidate_row in session.execute(
        query
    ):
        if chosen_at is None or row.created_at is None:
            continue
        try:
            candidate = json.loads(candidate_row.json)
        except ValueError:
            continue
        measured = {
            "problem": {name: getattr(problem_row, name) for name in store._PROBLEM_FIELDS},
            "fingerprint": {name: getattr(fingerprint_row, name) for name in store._FINGERPRINT_FIELDS},
            "candidate": candidate,
            "kernel_source": row.kernel_source,
            "measured_at": row.created_at.isoformat(timespec="microseconds"),
            "samples_us": row.samples_us,
        }
        yield {
            "kind": "choice",
            "measurement": _identity(measured),
            "policy": policy,
            "settled": bool(settled),
            "chosen_at": chosen_at.isoformat(timespec="microseconds"),
        }


def _identity(row: Row) -> str:
    """A measurement's name within an export: a hash of what tells it from every other."""
    names = ("problem", "fingerprint", "candidate", "kernel_source", "measured_at", "samples_us")
    text = json.dumps([row[name] for name in names], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _name(row: Any) -> str:
    """Whose row it is, as far as that can be told."""
    problem = row.get("problem") if isinstance(row, dict) else None
    if not isinstance(problem, dict):
        return ""
    extents = "x".join(str(problem.get(name)) for name in ("m", "n", "k"))
    return f" ({row.get('kind')} of {extents})"
