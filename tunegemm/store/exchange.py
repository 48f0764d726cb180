"""Moves rows between databases: dumps, checks and loads them.

A row is a plain JSON object (db/exchange.schema.json): a measurement, a failure, or a choice, which says
that a measurement became a record. `dump` writes rows, `load` reads them; files (one row a line) and merges
only transport them. `load` trusts no row: it checks each, names and skips the bad ones, and changes no stored
row. Only the choice of the record may change, by the evidence.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Select, select
from sqlalchemy.orm import Session

from tunegemm.describe.problem import Problem
from tunegemm.describe.stored import FIELDS, problem_of
from tunegemm.errors import BadValueError, DatabaseError, one_line
from tunegemm.files import read_bytes, replacing
from tunegemm.store import codec, publishing
from tunegemm.store.codec import BAD, Exported, Json
from tunegemm.store.connection import display, is_same, resolve
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
from tunegemm.store.rows import with_keys
from tunegemm.store.schema import FASTEST
from tunegemm.store.shipped import FORMAT as RECORDS_FORMAT
from tunegemm.untrusted import decoded, listed, members, printable, shown

Row = Json
T = TypeVar("T")

FORMAT = "tunegemm-database/1"

#: Rows per transaction while loading.
_BATCH = 500


@dataclass(frozen=True)
class Conflict:
    """Two records of one problem and fingerprint that name different kernels."""

    problem: Problem
    device_name: str
    kept: str
    """The label, or else the digest, of the candidate that is now the record."""
    other: str
    """The label or digest of the other candidate; its measurements are kept."""
    reason: str
    """The reason for the choice."""


@dataclass
class Report:
    """The result of a load."""

    added: int = 0
    """Measurements and failures that were new."""
    known: int = 0
    """Measurements and failures that the database already had."""
    skipped: list[str] = field(default_factory=list)
    """One line for each bad row: its number, its kind, and the error."""
    conflicts: list[Conflict] = field(default_factory=list)


def dump(database: Database) -> Iterator[Row | BadValueError]:
    """Every measurement, failure and choice, oldest first.

    Cells with impossible values keep them. A row yields an error if its candidate or fingerprint was altered,
    because elsewhere the altered row would pass as sound.
    """
    kernel, device = functools.cache(codec.decode_candidate), functools.cache(codec.decode_fingerprint)
    with database.reading() as session:
        for table in (MeasurementRow, FailureRow, ChoiceRow):
            result = MeasurementRow if table is ChoiceRow else table
            query: Select[*tuple[Any, ...]] = select(result, ProblemRow, FingerprintRow, CandidateRow)
            if table is ChoiceRow:
                query = query.add_columns(ChoiceRow).join_from(
                    ChoiceRow, MeasurementRow, MeasurementRow.id == ChoiceRow.measurement_id
                )
            results = with_keys(query, result).order_by(table.id)
            for row in session.execute(results.execution_options(yield_per=1000)):
                _, _, fingerprint, candidate, *_ = row
                try:
                    kernel(candidate.json, candidate.digest)
                    facts = (getattr(fingerprint, name) for name in codec.FINGERPRINT_FIELDS)
                    device(fingerprint.digest, *facts)
                except codec.UNREADABLE as error:
                    yield BadValueError(one_line(error))
                else:
                    choice = table is ChoiceRow
                    yield codec.encode_choice(row[4], *row[:4]) if choice else codec.encode_row(*row)


def sound(rows: Iterable[Row | BadValueError], skipped: list[str]) -> Iterator[Row]:
    """The loadable rows; adds a line to `skipped` for each other row."""
    kept: dict[str, Row] = {}
    for number_, row in enumerate(rows, 1):
        try:
            if isinstance(row, BadValueError):
                raise row
            if row["kind"] == "choice":
                codec.decode_choice(row, kept)
            else:
                codec.decode_exported(row)
                kept[row.get("id", "")] = {}
        except BAD as error:
            skipped.append(f"row {number_}{_name(row)}: {one_line(error)}")
        else:
            yield row


def of_shapes(rows: Iterable[Row], shapes: Collection[str]) -> Iterator[Row]:
    """The rows of problems with these shapes, and their choices; all rows if `shapes` is empty."""
    kept: set[str] = set()
    for row in rows:
        if not shapes or (
            row["measurement"] in kept
            if row["kind"] == "choice"
            else codec.decode_fields(Problem, row["problem"]).shape in shapes
        ):
            kept.add(row.get("id", ""))
            yield row


def load(database: Database, rows: Iterable[Row | BadValueError], *, origin: str) -> Report:
    """Add rows to a database. Loading the same rows twice changes nothing the second time.

    Each row stands alone: `load` adds it or names it in the report. An error among the rows stands for an
    unreadable row. origin: for the added rows that name none. A record with better evidence replaces the
    record of the same problem and fingerprint (`publishing.adopt`). Raises DatabaseError when the database
    cannot be written, and keeps the rows loaded so far.
    """
    report = Report()
    origin = printable(origin)
    measured: dict[str, Row] = {}
    choices: list[tuple[int, Row]] = []
    for batch in _batches(enumerate(rows, 1)):
        with database.writing() as connection, Session(connection) as session, session.begin():
            for position, row in batch:
                if isinstance(row, dict) and row.get("kind") == "choice":
                    choices.append((position, row))
                    continue
                try:
                    parsed = codec.decode_exported(row)
                except BAD as error:
                    report.skipped.append(f"row {position}{_name(row)}: {one_line(error)}")
                    continue
                keys, is_new = _insert(session, parsed, origin)
                report.added += is_new
                report.known += not is_new
                if parsed.id and "stage" not in parsed.cells:
                    measured[parsed.id] = keys
    _load_choices(database, choices, measured, report)
    return report


def _load_choices(
    database: Database, rows: list[tuple[int, Row]], measured: Mapping[str, Row], report: Report
) -> None:
    """Adds choices to the history of records; measured: the keys of measurements, by their names."""
    choices = []
    for position, row in rows:
        try:
            choices.append(codec.decode_choice(row, measured))
        except BAD as error:
            report.skipped.append(f"row {position} (choice): {one_line(error)}")
    of_pairs: dict[tuple[int, int, str], list[Row]] = {}
    for choice in sorted(choices, key=lambda choice: choice["chosen_at"]):
        pair = choice["problem_id"], choice["fingerprint_id"], choice["goal"]
        of_pairs.setdefault(pair, []).append(choice)
    for batch in _batches(of_pairs.values()):
        with database.writing() as connection, Session(connection) as session, session.begin():
            conflicts = [_choose(session, of_pair) for of_pair in batch]
        report.conflicts += [conflict for conflict in conflicts if conflict is not None]


def _batches(entries: Iterable[T]) -> Iterator[list[T]]:
    iterator = iter(entries)
    while batch := list(islice(iterator, _BATCH)):
        yield batch


def merge(sources: Sequence[str], into: str) -> Report:
    """Load several databases into one, which is created when missing.

    Raises DatabaseError, before writing anything, if a source cannot be read or is the target itself.
    """
    place = resolve(into)
    with ExitStack() as stack:
        opened = [stack.enter_context(Database.open(source, read_only=True)) for source in sources]
        if any(is_same(source.location, place) for source in opened):
            raise DatabaseError(f"{display(place)}: cannot be merged into itself; give another --into")
        total = Report()
        with Database.open(into, create=True) as target:
            for source in opened:
                report = load(target, dump(source), origin=source.name)
                total.added, total.known = total.added + report.added, total.known + report.known
                total.skipped += [f"{source.name}: {line}" for line in report.skipped]
                total.conflicts += report.conflicts
        return total


def _insert(session: Session, parsed: Exported, origin: str) -> tuple[Row, bool]:
    """The keys of the row, as of a measurement's choice, and whether it is new."""
    connection, cells = session.connection(), parsed.cells
    keys = publishing.row_keys(connection, *parsed.keys)
    table, alike = (FailureRow, "stage") if "stage" in cells else (MeasurementRow, "samples_us")
    identity = {**keys, "created_at": parsed.measured_at}
    identity |= {name: cells[name] for name in ("kernel_source", alike)}
    row_id = session.scalar(select(table.id).filter_by(**identity).limit(1))
    if is_new := row_id is None:
        if parsed.label:
            publishing.label_if_none(connection, keys["candidate_id"], parsed.label)
        cells = {**cells, "origin": cells["origin"] or origin}
        row_id = publishing.add(connection, keys, cells, at=parsed.measured_at)
    pair = {name: keys[name] for name in ("problem_id", "fingerprint_id")}
    return pair | {"measurement_id": row_id}, is_new


def _is_known(session: Session, choice: Row) -> bool:
    """Whether the history already has a choice."""
    return session.scalar(select(ChoiceRow.id).filter_by(**choice).limit(1)) is not None


def _remember(session: Session, choice: Row) -> None:
    """Enters a choice into the history, once."""
    if not _is_known(session, choice):
        session.add(ChoiceRow(**choice))
        session.flush()


def _choose(session: Session, choices: list[Row]) -> Conflict | None:
    """Lets the last of another database's records compete with the one here (`publishing.adopt`)."""
    unknown = [choice for choice in choices if not _is_known(session, choice)]
    if not unknown:
        return None
    *earlier, choice = unknown
    for each in earlier:
        _remember(session, each)
    new = session.get_one(MeasurementRow, choice["measurement_id"])
    keys = {name: choice[name] for name in ("problem_id", "fingerprint_id")}
    find = select(RecordRow.measurement_id, RecordRow.confirmed).filter_by(**keys, goal=FASTEST)
    before = session.execute(find).one_or_none()
    if choice["goal"] == FASTEST:
        publishing.adopt(
            session.connection(), {**keys, "candidate_id": new.candidate_id}, new.id,
            confirmed=choice["confirmed"], at=choice["chosen_at"],
        )  # fmt: skip
    after = session.execute(find).one_or_none()
    _remember(session, choice)
    if before is None or after is None:
        return None
    was, now = (session.get(MeasurementRow, key) for key in (before.measurement_id, after.measurement_id))
    other = was if now is new else new
    if was is None or now is None or other is None or other.candidate_id == now.candidate_id:
        return None
    confirmed = {new.id: choice["confirmed"], was.id: before.confirmed, now.id: after.confirmed}
    kept, lost = (session.get_one(CandidateRow, row.candidate_id) for row in (now, other))
    problem = session.get_one(ProblemRow, new.problem_id)
    try:
        return Conflict(
            problem_of(*(getattr(problem, name) for name in FIELDS)),
            session.get_one(FingerprintRow, new.fingerprint_id).device_name,
            kept.label or kept.digest,
            lost.label or lost.digest,
            _why(now, other, confirmed[now.id], confirmed[other.id]),
        )
    except BAD:  # this database's row is damaged: nothing to compare with
        return None


def _why(kept: MeasurementRow, other: MeasurementRow, kept_confirmed: bool, other_confirmed: bool) -> str:
    """The reason for the choice between two results, in words; `tunegemm.measure.evidence` decides."""
    if bool(kept.origin) != bool(other.origin):
        return "it was measured here, the other imported"
    if kept_confirmed != other_confirmed:
        return "it won a final race"
    if kept.ratio == other.ratio:
        return "equally good, and already the record"
    return "its ratio is higher" if kept.ratio > other.ratio else "its evidence is better"


def _name(row: Any) -> str:
    """The row's subject, as far as it can be read."""
    problem = row.get("problem") if isinstance(row, dict) else None
    if not isinstance(problem, dict):
        return ""
    extents = "x".join(shown(problem.get(name)) for name in ("m", "n", "k"))
    return f" ({shown(row.get('kind'))[1:-1]} of {extents})"


# Files (db/exchange.schema.json)


def write(rows: Iterable[Row], path: Path) -> None:
    """Write rows to a file. Raises DatabaseError when it cannot be written; then it is as it was."""
    with replacing(path, DatabaseError) as part, part.open("w", encoding="utf-8") as file:
        file.write(f'{{"format": "{FORMAT}", "rows": [')
        for number, row in enumerate(rows):
            file.write(("," if number else "") + "\n" + json.dumps(row, sort_keys=True, allow_nan=False))
        file.write("\n]}\n")


def read(path: Path) -> Iterator[Row | BadValueError]:
    """The rows of a file, unchecked; for an unreadable row the error, so that the other rows survive.

    Raises DatabaseError before the first row if the file is not an export.
    """
    # Bytes that are not UTF-8 stay in their row, which is then rejected.
    text = read_bytes(path, DatabaseError).decode("utf-8-sig", "surrogateescape")
    try:
        yield from _rows_of(text)
    except BadValueError as error:
        raise DatabaseError(
            f"{path}: not an export ({error}); give a file from `tunegemm db export --out`"
        ) from None


_HEAD = re.compile(r'\s*\{\s*"format"\s*:\s*"([^"]*)"\s*,\s*"rows"\s*:\s*\[')
_BETWEEN = re.compile(r"[\s,]*")
_TAIL = re.compile(r"\]\s*\}?\s*\Z")
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[][{}]', re.DOTALL)


def _rows_of(text: str) -> Iterator[Row | BadValueError]:
    head = _HEAD.match(text)
    if head is None or head[1] != FORMAT:  # another order of members, or another format
        data = decoded(text)
        if isinstance(data, dict) and data.get("format") == RECORDS_FORMAT:
            raise BadValueError(
                "it is a file of shipped records, which lack the samples that an import checks"
            )
        data = members(data, "the file", ("format", "rows"))
        if data["format"] != FORMAT:
            raise BadValueError(f"format {shown(data['format'])}, not {FORMAT}")
        yield from listed(data["rows"], "rows", len(text))
        return
    decode, at = json.JSONDecoder().raw_decode, head.end()
    while (at := _BETWEEN.match(text, at).end()) < len(text):  # type: ignore[union-attr]
        if _TAIL.match(text, at):
            return
        try:
            row, at = decode(text, at)
        except (ValueError, RecursionError):
            end = _end(text, at)
            try:
                yield decoded(text[at:end])
            except BadValueError as error:
                yield error
            at = end
        else:
            yield row
    yield BadValueError("the file ends within this row")


def _end(text: str, start: int) -> int:
    """Where a value that cannot be decoded ends: at its closing bracket, or before the next line's row."""
    next_row = text.find("\n{", start + 1)
    stop, depth = len(text) if next_row < 0 else next_row, 0
    for token in _TOKEN.finditer(text, start, stop):
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(token[0], 0)
        if depth <= 0 and token[0][0] != '"':
            return token.end()
    return stop
