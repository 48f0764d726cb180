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
from tunegemm.errors import BadValueError, DatabaseError
from tunegemm.generate.ptxas import Resources
from tunegemm.measure.outcome import Failure, Measurement, Stage
from tunegemm.store import publishing
from tunegemm.store.checks import BAD, candidate_of, check_roofline, one_line, times_of, typed
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
from tunegemm.store.record import FORMER_CONFIRMED
from tunegemm.store.rows import (
    FINGERPRINT_FIELDS,
    PROBLEM_FIELDS,
    TELEMETRY_NUMBERS,
    THROTTLE,
    key_values,
    outcome_values,
    where_problem,
)
from tunegemm.store.schema import FASTEST
from tunegemm.untrusted import decoded, line, listed, members, moment, number, printable, shown, tree, whole

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
    """What decided it."""


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
    """Every measurement, failure and choice, oldest first; of one problem, if given. Damaged ones, too."""
    with database._reading() as session:
        for result in (_measurements(session, problem), _failures(session, problem)):
            yield from result
        yield from _choices(session, problem)


def sound(rows: Iterable[Row], skipped: list[str]) -> Iterator[Row]:
    """The rows that could be loaded; a line for each other one is added to `skipped`."""
    kept: dict[str, int] = {}
    for number_, row in enumerate(rows, 1):
        try:
            if row["kind"] == "choice":
                _parse_choice(row, kept)
            else:
                parse(row)
                kept[row.get("id", "")] = number_
        except BAD as error:
            skipped.append(f"row {number_}{_name(row)}: {one_line(error)}")
        else:
            yield row


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


def load(database: Database, rows: Iterable[Row | BadValueError], *, origin: str) -> Report:
    """Add rows to a database. Loading the same rows twice changes nothing the second time.

    Each row stands alone: it is added, or named in the report. An error among the rows stands for one that
    could not be read. origin: named by the added rows that name none. A record of the same problem and
    fingerprint is replaced where the new one has the better evidence (`publishing.adopt`).
    Raises DatabaseError when the database cannot be written; what was loaded before is kept.
    """
    report = Report()
    origin = printable(origin)
    measurement_ids: dict[str, int] = {}
    choices: list[tuple[int, Row]] = []
    numbered = enumerate(rows, 1)
    while batch := list(islice(numbered, _BATCH)):
        with database._writing() as connection, Session(connection) as session, session.begin():
            for position, row in batch:
                if isinstance(row, dict) and row.get("kind") == "choice":
                    choices.append((position, row))
                    continue
                try:
                    parsed = parse(row)
                except BAD as error:
                    report.skipped.append(f"row {position}{_name(row)}: {one_line(error)}")
                    continue
                key, is_new = _insert(session, parsed, origin)
                report.added += is_new
                report.known += not is_new
                if parsed.id and isinstance(parsed.outcome, Measurement):
                    measurement_ids[parsed.id] = key
    _load_choices(database, choices, measurement_ids, report)
    return report


def _load_choices(
    database: Database, rows: list[tuple[int, Row]], measurement_ids: Mapping[str, int], report: Report
) -> None:
    """The history of records; the last choice of each problem and fingerprint competes with the record."""
    choices = []
    for position, row in rows:
        try:
            choices.append(_parse_choice(row, measurement_ids))
        except BAD as error:
            report.skipped.append(f"row {position} (choice): {one_line(error)}")
    choices.sort(key=lambda choice: choice.chosen_at)
    pending = iter(choices)
    last: dict[tuple[int, int, str], _Choice] = {}
    while batch := list(islice(pending, _BATCH)):
        with database._writing() as connection, Session(connection) as session, session.begin():
            for choice in batch:
                measured = session.get_one(MeasurementRow, choice.measurement_id)
                key = measured.problem_id, measured.fingerprint_id, choice.policy
                if _is_known(session, choice, measured):
                    continue
                if key in last:  # a later one competes
                    _remember(session, last[key])
                last[key] = choice
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

    id: str
    """What the choices of the same file call it; empty when they cannot."""
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
    """A measurement or failure from its JSON object. Raises BadValueError or another one of `BAD`."""
    if isinstance(row, BadValueError):
        raise row
    if not isinstance(row, dict) or row.get("kind") not in ("measurement", "failure"):
        raise BadValueError("its kind is not one of measurement, failure, choice")
    texts = {
        name: line(_given(row, name, ""), name, longest)
        for name, longest in {
            "id": 64,
            "label": 200,
            "kernel_source": 16,
            "origin": 4096,
            "policy": 16,
        }.items()
    }
    problem, fingerprint = typed(Problem, row.get("problem")), typed(Fingerprint, row.get("fingerprint"))
    return Parsed(
        **{**texts, "policy": texts["policy"] or "screen"},
        problem=problem,
        fingerprint=fingerprint,
        outcome=_outcome(row, problem, fingerprint),
        resources=None if row.get("resources") is None else _resources(row["resources"]),
        measured_at=moment(row.get("measured_at"), "measured_at"),
    )


def _given(row: Row, name: str, default: Any) -> Any:
    """A cell, or what stands for one that is missing or null; empty bytes of a damaged one are neither."""
    value = row.get(name)
    return default if value is None else value


def _outcome(row: Row, problem: Problem, fingerprint: Fingerprint) -> Measurement | Failure:
    candidate = candidate_of(row.get("candidate"))
    if row["kind"] == "failure":
        if row.get("stage") not in list(get_args(Stage)):
            raise BadValueError(f"stage {shown(row.get('stage'))} is not one of {', '.join(get_args(Stage))}")
        return Failure(candidate, row["stage"], line(_given(row, "reason", ""), "reason"))
    evidence = tree(_given(row, "evidence", {}), "evidence")
    if not isinstance(evidence, dict):
        raise BadValueError("its evidence is not an object")
    if evidence.get("source") == "replayed":
        raise BadValueError("its times are replayed, so never stored as measured")
    samples_us, baseline_us = times_of(row, "samples_us"), times_of(row, "baseline_us")
    if not samples_us or len(samples_us) != len(baseline_us):
        raise BadValueError(
            f"{len(samples_us)} samples and {len(baseline_us)} of the baseline; as many of both are needed"
        )
    error, noise = (number(row.get(name), name, 0, 1e6) for name in ("relative_error", "noise"))
    measurement = Measurement(candidate, samples_us, baseline_us, error, noise, evidence)
    check_roofline(problem, fingerprint, measurement.median_us, measurement.baseline_median_us)
    return measurement


def _resources(data: Any) -> Resources:
    data = members(data, "its resources", _RESOURCES)
    registers, spill_bytes, smem_bytes = (whole(data[name], name) for name in _RESOURCES[:3])
    warnings = tuple(line(entry, "a warning", 200) for entry in listed(data["warnings"], "warnings", 1000))
    seconds = number(data["compile_seconds"], "compile_seconds", 0, 1e7)
    return Resources(registers, spill_bytes, smem_bytes, warnings, seconds)


@dataclass(frozen=True)
class _Choice:
    measurement_id: int
    policy: str
    confirmed: bool
    chosen_at: datetime


def _parse_choice(row: Row, measurement_ids: Mapping[str, int]) -> _Choice:
    reference = line(row.get("measurement"), "measurement", 64)
    if reference not in measurement_ids:
        raise BadValueError(f"measurement {shown(reference)} is not among the rows that were taken")
    confirmed = row.get("confirmed", row.get(FORMER_CONFIRMED))
    if type(confirmed) is not bool:
        raise BadValueError(f"confirmed {shown(confirmed)} is neither true nor false")
    policy = line(_given(row, "policy", ""), "policy", 32) or FASTEST
    chosen_at = moment(row.get("chosen_at"), "chosen_at")
    return _Choice(measurement_ids[reference], policy, confirmed, chosen_at)


def _insert(session: Session, parsed: Parsed, origin: str) -> tuple[int, bool]:
    """The key of the row and whether it is new."""
    connection, outcome = session.connection(), parsed.outcome
    values = outcome_values(outcome, parsed.resources, parsed.policy)
    values |= {"kernel_source": parsed.kernel_source, "origin": parsed.origin or origin}
    keys = publishing.row_keys(
        connection, *key_values(parsed.problem, parsed.fingerprint, outcome.candidate, "")
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


def _is_known(session: Session, choice: _Choice, row: MeasurementRow) -> bool:
    """Whether a choice is in the history already."""
    found = select(ChoiceRow.id).filter_by(**_values(choice, row)).limit(1)
    return session.scalar(found) is not None


def _remember(session: Session, choice: _Choice) -> None:
    """Enters a choice into the history, once."""
    row = session.get_one(MeasurementRow, choice.measurement_id)
    if not _is_known(session, choice, row):
        session.add(ChoiceRow(**_values(choice, row)))
        session.flush()


def _values(choice: _Choice, row: MeasurementRow) -> dict[str, Any]:
    return {
        "problem_id": row.problem_id,
        "fingerprint_id": row.fingerprint_id,
        "policy": choice.policy,
        "measurement_id": row.id,
        "confirmed": choice.confirmed,
        "chosen_at": choice.chosen_at,
    }


def _choose(session: Session, choice: _Choice) -> Conflict | None:
    """Lets another database's record compete with the one here (`publishing.adopt`)."""
    new = session.get_one(MeasurementRow, choice.measurement_id)
    pair = {"problem_id": new.problem_id, "fingerprint_id": new.fingerprint_id}
    find = select(RecordRow.measurement_id, RecordRow.confirmed).filter_by(**pair, policy=FASTEST)
    before = session.execute(find).one_or_none()
    if choice.policy == FASTEST:
        publishing.adopt(
            session.connection(), {**pair, "candidate_id": new.candidate_id}, new.id,
            confirmed=choice.confirmed, at=choice.chosen_at,
        )  # fmt: skip
    after = session.execute(find).one_or_none()
    _remember(session, choice)
    if before is None or after is None:
        return None
    was, now = (session.get(MeasurementRow, key) for key in (before.measurement_id, after.measurement_id))
    other = was if now is new else new
    if was is None or now is None or other is None or other.candidate_id == now.candidate_id:
        return None
    confirmed = {new.id: choice.confirmed, was.id: before.confirmed, now.id: after.confirmed}
    kept, lost = (session.get_one(CandidateRow, row.candidate_id) for row in (now, other))
    problem, fingerprint = (
        session.get_one(ProblemRow, new.problem_id),
        session.get_one(FingerprintRow, new.fingerprint_id),
    )
    try:
        return Conflict(
            Problem(*(getattr(problem, name) for name in PROBLEM_FIELDS)),
            Fingerprint(*(getattr(fingerprint, name) for name in FINGERPRINT_FIELDS)),
            Candidate.from_json(kept.json),
            Candidate.from_json(lost.json),
            (kept.label or kept.digest, lost.label or lost.digest),
            _why(now, other, confirmed[now.id], confirmed[other.id]),
        )
    except BAD:  # a damaged row of this database, against which there is nothing to compare
        return None


def _why(kept: MeasurementRow, other: MeasurementRow, kept_confirmed: bool, other_confirmed: bool) -> str:
    """What decided between two results, in words; `tunegemm.measure.evidence` decides."""
    if bool(kept.origin) != bool(other.origin):
        return "it was measured here, the other was brought"
    if kept_confirmed != other_confirmed:
        return "it won a final race"
    if kept.ratio == other.ratio:
        return "as good, and the record before"
    return "its ratio is the higher" if kept.ratio > other.ratio else "its evidence is the better"


def _measurements(session: Session, problem: Problem | None) -> Iterator[Row]:
    query = select(MeasurementRow, ProblemRow, FingerprintRow, CandidateRow).select_from(MeasurementRow)
    for row, shared in _joined(session, query, MeasurementRow, problem):
        evidence = row.evidence if row.evidence is not None else {}
        if isinstance(evidence, dict):
            evidence = evidence | {
                name: getattr(row, name)
                for name in (*TELEMETRY_NUMBERS, THROTTLE)
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
        reason = printable(row.reason) if isinstance(row.reason, str) else row.reason
        yield {"kind": "failure", **shared, "stage": row.stage, "reason": reason}


def _joined(session: Session, query: Any, table: Any, problem: Problem | None) -> Iterator[tuple[Any, Row]]:
    query = query.join(ProblemRow, ProblemRow.id == table.problem_id)
    query = query.join(FingerprintRow, FingerprintRow.id == table.fingerprint_id)
    query = query.join(CandidateRow, CandidateRow.id == table.candidate_id).order_by(table.id)
    if problem is not None:
        query = where_problem(query, problem)
    for row, problem_row, fingerprint_row, candidate_row in session.execute(
        query.execution_options(yield_per=1000)
    ):
        yield (
            row,
            {
                **_shared(row, problem_row, fingerprint_row, candidate_row),
                "label": candidate_row.label,
                "origin": row.origin,
            },
        )


def _shared(row: Any, problem: Any, fingerprint: Any, candidate: Any) -> Row:
    try:
        parameters = decoded(candidate.json)
    except (BadValueError, TypeError):
        parameters = None
    return {
        "problem": {name: getattr(problem, name) for name in PROBLEM_FIELDS},
        "fingerprint": {name: getattr(fingerprint, name) for name in FINGERPRINT_FIELDS},
        "candidate": parameters,
        "kernel_source": row.kernel_source,
        "measured_at": _iso(row.created_at),
    }


def _iso(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat(timespec="microseconds")


def _choices(session: Session, problem: Problem | None) -> Iterator[Row]:
    query: Select[*tuple[Any, ...]] = select(
        ChoiceRow.policy, ChoiceRow.confirmed, ChoiceRow.chosen_at, MeasurementRow,
        ProblemRow, FingerprintRow, CandidateRow,
    ).select_from(ChoiceRow)  # fmt: skip
    query = query.join(MeasurementRow, MeasurementRow.id == ChoiceRow.measurement_id)
    query = query.join(ProblemRow, ProblemRow.id == MeasurementRow.problem_id)
    query = query.join(FingerprintRow, FingerprintRow.id == MeasurementRow.fingerprint_id)
    query = query.join(CandidateRow, CandidateRow.id == MeasurementRow.candidate_id).order_by(ChoiceRow.id)
    if problem is not None:
        query = where_problem(query, problem)
    for policy, confirmed, chosen_at, row, problem_row, fingerprint_row, candidate_row in session.execute(
        query
    ):
        shared = _shared(row, problem_row, fingerprint_row, candidate_row)
        yield {
            "kind": "choice",
            "measurement": _identity(shared | {"samples_us": row.samples_us}),
            "policy": policy,
            "confirmed": bool(confirmed),
            "chosen_at": _iso(chosen_at),
        }


def _identity(row: Row) -> str:
    """A measurement's name within an export: a hash of what tells it from every other."""
    names = ("problem", "fingerprint", "candidate", "kernel_source", "measured_at", "samples_us")
    text = json.dumps([row[name] for name in names], sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _name(row: Any) -> str:
    """Whose row it is, as far as that can be told."""
    problem = row.get("problem") if isinstance(row, dict) else None
    if not isinstance(problem, dict):
        return ""
    extents = "x".join(shown(problem.get(name)) for name in ("m", "n", "k"))
    return f" ({shown(row.get('kind'))[1:-1]} of {extents})"
