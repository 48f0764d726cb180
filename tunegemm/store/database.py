"""The store: publish each outcome as it is measured, read records back for dispatch and reports.

Every publication is one short transaction of its own, so that what was published survives whatever ends
the process. Reading skips rows that cannot be understood, and says so in the log: such a row is a miss.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from sqlalchemy import URL, Connection, Engine, Executable, Select, exists, or_, select, text
from sqlalchemy.orm import Session

from tunegemm.describe.device import Device, Fingerprint, kernel_source_hash
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.errors import DatabaseError, TunegemmError
from tunegemm.generate import families
from tunegemm.generate.ptxas import Resources
from tunegemm.measure.evidence import FINAL, SCREEN, STEADY_FINAL, evidence_of
from tunegemm.measure.outcome import Failure, Measurement
from tunegemm.store import migrations, publishing
from tunegemm.store.connection import connect, display, migrating, resolve, translated, writer
from tunegemm.store.lookup import Lookup, checked_candidate, read_lookup
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
from tunegemm.store.record import Choice, Entry, Record
from tunegemm.store.schema import FASTEST

if TYPE_CHECKING:
    import pandas

Value = TypeVar("Value")

_log = logging.getLogger(__name__)

_PROBLEM_FIELDS = tuple(field.name for field in dataclasses.fields(Problem))
_FINGERPRINT_FIELDS = tuple(field.name for field in dataclasses.fields(Fingerprint))
_PROBLEM_COLUMNS = [getattr(ProblemRow, name) for name in _PROBLEM_FIELDS]
_FINGERPRINT_COLUMNS = [getattr(FingerprintRow, name) for name in _FINGERPRINT_FIELDS]

#: Evidence that has columns of its own; the rest of it is kept as JSON.
_EVIDENCE_NUMBERS = ("sm_clock_mhz", "power_w", "temperature_c")
_THROTTLE = "throttle_reasons"

#: What `_measurement` is made of.
_MEASUREMENT_COLUMNS: list[Any] = [
    *(CandidateRow.json, CandidateRow.digest, MeasurementRow.samples_us, MeasurementRow.baseline_us),
    *(MeasurementRow.relative_error, MeasurementRow.noise, MeasurementRow.evidence),
    *(MeasurementRow.throttle_reasons, *(getattr(MeasurementRow, name) for name in _EVIDENCE_NUMBERS)),
]

#: What a stored row that cannot be understood raises while its values are built.
_UNREADABLE = (TunegemmError, TypeError, ValueError)


class Database:
    """One tuning database: a SQLite file, or a server by its URL. A context manager.

    Made by `Database.open`. Several processes may publish into one file at a time. After a fork, open anew.
    """

    def __init__(self, location: Path | URL, engine: Engine, *, read_only: bool, layer: str = "") -> None:
        self.location = location
        """The file's path, or the server's URL."""
        self.read_only = read_only
        """Whether `publish` and `settle` are refused."""
        self.layer = layer
        """What its records name as their layer."""
        self._engine = engine

    @classmethod
    def open(cls, location: str | Path | None = None, *, read_only: bool = False, layer: str = "") -> Self:
        """Open by path or SQLAlchemy URL; None means the project's or else the user's (`store.layers`).

        For writing, a missing file and its folder are created and an older schema is migrated. Read-only
        opening changes nothing, and works in a folder that cannot be written to. Raises DatabaseError for
        a file that is missing (read-only), unreadable, damaged, no tuning database, or of a newer schema.
        """
        place = resolve(location)
        database = cls(place, connect(place, read_only=read_only), read_only=read_only, layer=layer)
        try:
            with translated(place):
                try:
                    if read_only:
                        with database._engine.begin() as connection:
                            migrations.require_current(connection)
                    else:
                        with migrating(database._engine) as connection:
                            migrations.upgrade(connection)
                except DatabaseError as error:
                    raise DatabaseError(f"{display(place)}: {error}") from None
        except BaseException:
            database.close()
            raise
        return database

    @property
    def name(self) -> str:
        """The location, for messages: a URL's password is hidden."""
        return display(self.location)

    def close(self) -> None:
        """Close the connections. Nothing is pending: every publication was already committed."""
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def publish(
        self,
        problem: Problem,
        device: Device,
        outcome: Measurement | Failure,
        *,
        resources: Resources | None = None,
        label: str = "",
        policy: str = SCREEN,
    ) -> None:
        """Add one outcome to the history; on return it is committed.

        The record is then chosen by the evidence (`tunegemm.measure.evidence`): a confirmed one stays, unless
        its own candidate turns out slower than torch.mm. policy: how a measurement was taken, one of
        `tunegemm.measure.evidence.POLICIES`. Raises DatabaseError when it cannot be written, for a device
        that is not real, and for samples that are not times.
        """
        values = _outcome_values(outcome, resources, policy)
        with self._publication(problem, device, outcome.candidate, label) as (connection, keys):
            if isinstance(outcome, Failure):
                publishing.add_failure(connection, keys, values)
            else:
                publishing.add_measurement(connection, keys, values)
                publishing.choose_if_better(connection, keys)

    def settle(
        self,
        problem: Problem,
        device: Device,
        measurement: Measurement,
        *,
        resources: Resources | None = None,
        label: str = "",
    ) -> None:
        """Make the final race's measurement of its winner the record, confirmed. Raises as `publish`.

        It is published as of a final race, unless the candidate's newest measurement has the very same
        samples. Where it is slower than torch.mm it is kept, and the record is chosen by the evidence.
        """
        policy = STEADY_FINAL if measurement.alone else FINAL
        values = _outcome_values(measurement, resources, policy)
        with self._publication(problem, device, measurement.candidate, label) as (connection, keys):
            row_id = publishing.find_measurement(connection, keys, values)
            if row_id is None:
                row_id = publishing.add_measurement(connection, keys, values)
            publishing.confirm(connection, keys, row_id)

    def best(self, problem: Problem, fingerprint: Fingerprint) -> Record | None:
        """The record of one problem under one fingerprint."""
        query = _where_problem(_where_fingerprint(_records_query(), fingerprint), problem)
        return next(iter(self._read_records(query)), None)

    def records(self, fingerprint: Fingerprint | None = None) -> list[Record]:
        """All records, or those under one fingerprint, in one query. Unreadable rows are left out."""
        query = _records_query()
        if fingerprint is not None:
            query = _where_fingerprint(query, fingerprint)
        return self._read_records(query)

    def lookup(self) -> Lookup:
        """All records for dispatch, which wants them soon, and few of them."""
        with self._raw_reading() as read:
            return read_lookup(lambda query: read(text(query)), self.layer)

    def measurements(
        self, problem: Problem, fingerprint: Fingerprint, *, current: bool = False
    ) -> list[Measurement]:
        """All measurements of a problem, oldest first, for example to seed a search.

        current: only of kernels whose sources are those of this program.
        """
        row = MeasurementRow
        query = (
            select(
                *_MEASUREMENT_COLUMNS,
            )
            .select_from(row)
            .order_by(row.id)
        )
        query = _where_current(query, row) if current else query
        return self._read_history(query, problem, fingerprint, _measurement, "measurement")

    def failures(self, problem: Problem, fingerprint: Fingerprint, *, current: bool = False) -> list[Failure]:
        """All failures of a problem, oldest first: what a search need not try again. current: see above."""
        query = (
            select(CandidateRow.json, CandidateRow.digest, FailureRow.stage, FailureRow.reason)
            .select_from(FailureRow)
            .order_by(FailureRow.id)
        )
        query = _where_current(query, FailureRow) if current else query
        return self._read_history(query, problem, fingerprint, _failure, "failure")

    def entries(self, problem: Problem | None = None) -> list[Entry]:
        """Every measurement of a problem, or of all, with its provenance; oldest first."""
        row = MeasurementRow
        query = (
            select(
                *_PROBLEM_COLUMNS,
                *_FINGERPRINT_COLUMNS,
                *(row.kernel_source, CandidateRow.label, row.policy, row.created_at, row.origin),
                RecordRow.settled,
                *_MEASUREMENT_COLUMNS,
            )
            .select_from(row)
            .join(ProblemRow, ProblemRow.id == row.problem_id)
            .join(FingerprintRow, FingerprintRow.id == row.fingerprint_id)
            .join(CandidateRow, CandidateRow.id == row.candidate_id)
            .outerjoin(
                RecordRow,
                (RecordRow.problem_id == row.problem_id)
                & (RecordRow.fingerprint_id == row.fingerprint_id)
                & (RecordRow.policy == FASTEST)
                & (RecordRow.measurement_id == row.id),
            )
            .order_by(row.id)
        )
        if problem is not None:
            query = _where_problem(query, problem)
        with self._reading() as session:
            rows = session.execute(query).all()
        fingerprint_of = functools.cache(Fingerprint)
        first, second = len(_PROBLEM_FIELDS), len(_PROBLEM_FIELDS) + len(_FINGERPRINT_FIELDS)

        def build(row: Sequence[Any]) -> Entry:
            kernel_source, label, policy, measured_at, origin, settled, *measured = row[second:]
            return Entry(
                Problem(*row[:first]), fingerprint_of(*row[first:second]), kernel_source, label, policy,
                _measurement(measured), _known(measured_at), origin, bool(settled),
            )  # fmt: skip

        return _readable(rows, build, "measurement")

    def history(self, problem: Problem) -> list[Choice]:
        """Which measurements were the problem's records, under all fingerprints; oldest first."""
        query = (
            _records_query(ChoiceRow)
            .add_columns(ChoiceRow.chosen_at)
            .order_by(None)
            .order_by(ChoiceRow.chosen_at, ChoiceRow.id)
        )
        with self._reading() as session:
            rows = session.execute(_where_problem(query, problem)).all()
        build = self._record_builder()
        return _readable(rows, lambda row: Choice(_known(row[-1]), build(row[:-1])), "choice")

    def problems(self) -> list[Problem]:
        """Every problem that has a measurement, smallest first."""
        measured = exists().where(MeasurementRow.problem_id == ProblemRow.id)
        query = select(*_PROBLEM_COLUMNS).where(measured)
        with self._reading() as session:
            rows = session.execute(query).all()
        return sorted(_readable(rows, lambda row: Problem(*row), "problem"))

    def frame(
        self,
        problem: Problem | None = None,
        *,
        device_name: str | None = None,
        family: str | None = None,
        fingerprint: Fingerprint | None = None,
    ) -> pandas.DataFrame:
        """One row per problem, fingerprint and candidate, with the best evidence for it.

        That is the settled record's measurement, or its latest of a final race (any policy but
        ``screen``), or else its latest one. Columns: the fields of the problem
        and of the fingerprint; ``fingerprint`` (its digest), ``candidate`` (its digest), family, label;
        kernel_source, origin, policy, median_us, baseline_median_us, ratio, spread, baseline_spread, noise,
        relative_error,
        sm_clock_mhz, power_w, temperature_c, throttle_reasons, registers, spill_bytes, smem_bytes, warnings,
        compile_seconds, measured_at (UTC); ``record`` and ``settled``: whether it is the record.
        """
        import pandas

        row = MeasurementRow
        query = (
            select(
                *(ProblemRow.id.label("problem_id"), *_PROBLEM_COLUMNS),
                *(FingerprintRow.digest.label("fingerprint"), *_FINGERPRINT_COLUMNS),
                *(CandidateRow.digest.label("candidate"), CandidateRow.family, CandidateRow.label),
                *(
                    row.id.label("measurement_id"),
                    row.kernel_source,
                    row.origin,
                    row.policy,
                    row.median_us,
                    row.baseline_median_us,
                    row.ratio,
                ),
                *(
                    row.spread,
                    row.baseline_spread,
                    row.noise,
                    row.relative_error,
                    row.sm_clock_mhz,
                    row.power_w,
                ),
                *(row.temperature_c, row.throttle_reasons, row.registers, row.spill_bytes, row.smem_bytes),
                *(row.warnings, row.compile_seconds, row.created_at.label("measured_at")),
                *(RecordRow.measurement_id.label("record_measurement_id"), RecordRow.settled),
            )
            .select_from(row)
            .join(ProblemRow, ProblemRow.id == row.problem_id)
            .join(FingerprintRow, FingerprintRow.id == row.fingerprint_id)
            .join(CandidateRow, CandidateRow.id == row.candidate_id)
            .outerjoin(
                RecordRow,
                (RecordRow.problem_id == row.problem_id)
                & (RecordRow.fingerprint_id == row.fingerprint_id)
                & (RecordRow.policy == FASTEST),
            )
            .order_by(row.id)
        )
        if problem is not None:
            query = _where_problem(query, problem)
        if device_name is not None:
            query = query.where(FingerprintRow.device_name == device_name)
        if family is not None:
            query = query.where(CandidateRow.family == family)
        if fingerprint is not None:
            query = _where_fingerprint(query, fingerprint)
        with self._reading() as session:
            result = session.execute(query)
            frame = pandas.DataFrame(result.all(), columns=list(result.keys()))
        is_record = frame["measurement_id"] == frame["record_measurement_id"]
        frame["record"] = is_record
        frame["settled"] = is_record & frame["settled"].eq(True)
        frame["_local"] = frame["origin"].eq("")
        frame["_evidence"] = [
            evidence_of(policy, confirmed=confirmed)
            for policy, confirmed in zip(frame["policy"], frame["settled"], strict=True)
        ]
        frame = frame.sort_values(["_local", "settled", "_evidence", "measurement_id"], kind="stable")
        key = ["problem_id", "fingerprint", "candidate"]
        # A candidate measured again stays the record, though its row now shows the later evidence.
        frame["record"] = frame.groupby(key)["record"].transform("any") if len(frame) else frame["record"]
        frame = frame.drop_duplicates(key, keep="last")
        frame = frame.drop(
            columns=["problem_id", "measurement_id", "record_measurement_id", "_local", "_evidence"]
        )
        return frame.reset_index(drop=True)

    @contextmanager
    def _publication(
        self, problem: Problem, device: Device, candidate: Candidate, label: str
    ) -> Iterator[tuple[Connection, publishing.Values]]:
        """A transaction that writes, and the keys of the problem, fingerprint and candidate."""
        if not device.is_real:
            raise DatabaseError(
                f"device {device.spec!r}: its times are not measured here, so never stored; tune on cuda:N"
            )
        values = key_values(problem, device.fingerprint, candidate, label)
        with self._writing() as connection:
            yield connection, publishing.row_keys(connection, *values)

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        if self.read_only:
            raise DatabaseError(f"{display(self.location)}: opened read-only; open it for writing to publish")
        with translated(self.location), writer(self._engine).begin() as connection:
            yield connection

    @contextmanager
    def _reading(self) -> Iterator[Session]:
        with translated(self.location), Session(self._engine) as session:
            yield session

    @contextmanager
    def _raw_reading(self) -> Iterator[Callable[[Executable], list[tuple[Any, ...]]]]:
        """What runs a query and gives its rows as the driver does, for reading many: SQLAlchemy's own take
        three times as long, and pandas twice as long to convert. All queries see one state of the database.
        """
        with translated(self.location), self._engine.begin() as connection:
            if connection.dialect.name == "postgresql":
                connection.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"))
            yield lambda query: cast(Any, connection.execute(query)).cursor.fetchall()

    def _read_records(self, query: Select[Any]) -> list[Record]:
        with self._reading() as session:
            rows = session.execute(query).all()
        return _readable(rows, self._record_builder(), "record")

    def _record_builder(self) -> Callable[[Sequence[Any]], Record]:
        # 100,000 records share few candidates and fewer fingerprints.
        fingerprint_of = functools.cache(Fingerprint)
        candidate_of = functools.cache(checked_candidate)
        first, second = len(_PROBLEM_FIELDS), len(_PROBLEM_FIELDS) + len(_FINGERPRINT_FIELDS)

        def build(row: Sequence[Any]) -> Record:
            text, digest, label, *numbers, kernel_source, settled, measured_at = row[second:]
            median_us, baseline_median_us, ratio, noise, relative_error = map(float, numbers)
            return Record(
                Problem(*row[:first]), candidate_of(text, digest), fingerprint_of(*row[first:second]), label,
                median_us, baseline_median_us, ratio, noise, relative_error, bool(settled),
                _known(measured_at), kernel_source, self.layer,
            )  # fmt: skip

        return build

    def _read_history(
        self,
        query: Select[*tuple[Any, ...]],
        problem: Problem,
        fingerprint: Fingerprint,
        build: Callable[[Sequence[Any]], Value],
        kind: str,
    ) -> list[Value]:
        query = query.join(CandidateRow).join(ProblemRow).join(FingerprintRow)
        with self._reading() as session:
            rows = session.execute(_where_problem(_where_fingerprint(query, fingerprint), problem)).all()
        return _readable(rows, build, kind)


def _known(moment: datetime | None) -> datetime:
    if moment is None:
        raise ValueError("its time is no ISO 8601 time")
    return moment


def key_values(
    problem: Problem, fingerprint: Fingerprint, candidate: Candidate, label: str
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The columns of the three rows that a result refers to."""
    text = candidate.to_json()
    row = {"digest": candidate.digest, "family": candidate.family, "json": text, "label": label}
    return dataclasses.asdict(problem), fingerprint_values(fingerprint), row


def fingerprint_values(fingerprint: Fingerprint) -> dict[str, Any]:
    """The columns of a fingerprint's row."""
    return {"digest": fingerprint.digest, **fingerprint.asdict()}


def _records_query(chosen: type[RecordRow | ChoiceRow] = RecordRow) -> Select[Any]:
    row = MeasurementRow
    return (
        select(
            *_PROBLEM_COLUMNS,
            *_FINGERPRINT_COLUMNS,
            *(CandidateRow.json, CandidateRow.digest, CandidateRow.label),
            *(row.median_us, row.baseline_median_us, row.ratio, row.noise, row.relative_error),
            *(row.kernel_source, chosen.settled, row.created_at),
        )
        .select_from(chosen)
        .join(row, row.id == chosen.measurement_id)
        .join(ProblemRow, ProblemRow.id == chosen.problem_id)
        .join(FingerprintRow, FingerprintRow.id == chosen.fingerprint_id)
        .join(CandidateRow, CandidateRow.id == row.candidate_id)
        .where(chosen.policy == FASTEST)
        .order_by(chosen.id)
    )


def _where_problem(query: Select[*tuple[Any, ...]], problem: Problem) -> Select[*tuple[Any, ...]]:
    return query.where(
        *(
            column == getattr(problem, name)
            for name, column in zip(_PROBLEM_FIELDS, _PROBLEM_COLUMNS, strict=True)
        )
    )


def _where_fingerprint(query: Select[*tuple[Any, ...]], fingerprint: Fingerprint) -> Select[*tuple[Any, ...]]:
    return query.where(FingerprintRow.digest == fingerprint.digest)


def _where_current(
    query: Select[*tuple[Any, ...]], row: type[MeasurementRow | FailureRow]
) -> Select[*tuple[Any, ...]]:
    """Only outcomes of this program's kernel sources. A library's kernels have none: their hash is empty."""
    sources = {name: kernel_source_hash(name) for name in families.NAMES}
    return query.where(
        or_(
            row.kernel_source == "",
            *(
                (CandidateRow.family == name) & (row.kernel_source == source)
                for name, source in sources.items()
            ),
        )
    )


def _readable(rows: Iterable[Any], build: Callable[[Any], Value], kind: str) -> list[Value]:
    """What `build` makes of the rows it can read; the log says how many it could not, and why."""
    values, skipped, reason = [], 0, ""
    for row in rows:
        try:
            values.append(build(row))
        except _UNREADABLE as error:
            skipped, reason = skipped + 1, str(error)
    if skipped:
        _log.warning("skipped %d unreadable %s row(s); the last one: %s", skipped, kind, reason)
    return values


def _measurement(row: Sequence[Any]) -> Measurement:
    text, digest, samples, baseline, relative_error, noise, evidence, throttle, *numbers = row
    if not samples or not baseline or len(samples) != len(baseline):
        raise ValueError("its samples are incomplete")
    further = dict(zip(_EVIDENCE_NUMBERS, numbers, strict=True)) | {
        _THROTTLE: None if throttle is None else tuple(throttle)
    }
    return Measurement(
        checked_candidate(text, digest),
        tuple(map(float, samples)),
        tuple(map(float, baseline)),
        float(relative_error),
        float(noise),
        dict(evidence or {}) | {name: value for name, value in further.items() if value is not None},
    )


def _failure(row: Sequence[Any]) -> Failure:
    text, digest, stage, reason = row
    return Failure(checked_candidate(text, digest), stage, reason)


def _outcome_values(
    outcome: Measurement | Failure, resources: Resources | None, policy: str
) -> dict[str, Any]:
    """The columns of the row, without its keys and time."""
    made = {"kernel_source": kernel_source_hash(outcome.candidate.family), "origin": ""}
    if isinstance(outcome, Failure):
        # What a crashed process last printed may hold NUL, which PostgreSQL's text may not.
        return {**made, "stage": outcome.stage, "reason": outcome.reason.replace("\0", "")}
    found = {} if resources is None else dataclasses.asdict(resources)
    return {**made, "policy": policy, **_measurement_values(outcome), **found}


def _measurement_values(measurement: Measurement) -> dict[str, Any]:
    """The columns of a measurement. Raises DatabaseError for what can be no measurement."""
    samples, baseline = measurement.samples_us, measurement.baseline_us
    if not samples or len(samples) != len(baseline):
        raise DatabaseError(
            f"{len(samples)} samples and {len(baseline)} of the baseline; as many of both are needed"
        )
    if not all(math.isfinite(time) and time > 0 for time in samples + baseline):
        raise DatabaseError(
            f"samples of {measurement.candidate} are not all positive times; measure it again"
        )
    if not math.isfinite(measurement.relative_error) or not math.isfinite(measurement.noise):
        raise DatabaseError(
            f"relative error or noise of {measurement.candidate} is not finite; measure it again"
        )
    evidence = plain(dict(measurement.evidence))
    columns: dict[str, Any] = {}
    for name in _EVIDENCE_NUMBERS:
        number = isinstance(evidence.get(name), int | float)
        columns[name] = evidence.pop(name) if number else None
    listed = isinstance(evidence.get(_THROTTLE), list)
    columns[_THROTTLE] = evidence.pop(_THROTTLE) if listed else None
    return columns | {
        "samples_us": samples,
        "baseline_us": baseline,
        "median_us": measurement.median_us,
        "baseline_median_us": measurement.baseline_median_us,
        "ratio": measurement.ratio,
        "spread": measurement.spread,
        "baseline_spread": dataclasses.replace(measurement, samples_us=baseline).spread,
        "noise": float(measurement.noise),
        "relative_error": float(measurement.relative_error),
        "evidence": evidence,
    }
