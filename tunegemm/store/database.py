"""The store: publishes each outcome as it is measured, and reads records back for dispatch and reports.

Every publication is a short transaction of its own, so published rows survive any end of the process. Reading
skips unreadable rows and logs them: such a row is a miss.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

from sqlalchemy import URL, Connection, Engine, Executable, exists, select, text
from sqlalchemy.orm import Session

from tunegemm.compile.ptxas import Resources
from tunegemm.describe.device import Device, Fingerprint
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.describe.stored import problem_of
from tunegemm.errors import DatabaseError
from tunegemm.measure.evidence import FINAL, METHODS, SCREEN, STEADY_FINAL
from tunegemm.measure.outcome import Failure, Measurement
from tunegemm.store import codec, frames, migrations, publishing, rows
from tunegemm.store.connection import connect, display, migrating, resolve, translated, writer
from tunegemm.store.lookup import Lookup
from tunegemm.store.models import ChoiceRow, FailureRow, MeasurementRow, ProblemRow, RecordRow
from tunegemm.store.record import Record
from tunegemm.store.shipped import read_shipped
from tunegemm.untrusted import shown

if TYPE_CHECKING:
    import pandas


class Database:
    """One tuning database: a SQLite file, or a server by URL. A context manager.

    Create it with `Database.open`. Several processes may publish into one file at the same time. After a
    fork, open it again.
    """

    def __init__(
        self, location: Path | URL, engine: Engine, *, read_only: bool, layer: str = "", shipped: bool = False
    ) -> None:
        self.location = location
        """The file's path, or the server's URL."""
        self.read_only = read_only
        """Whether `publish` and `confirm` are rejected."""
        self.layer = layer
        """The layer that its records name."""
        self.shipped = shipped
        """Whether `frame` adds the shipped records: yes if opened without a location, as dispatch does."""
        self.engine = engine
        """SQLAlchemy's engine for the tables of `tunegemm.store.models`."""

    @classmethod
    def open(
        cls,
        location: str | Path | None = None,
        *,
        read_only: bool = False,
        create: bool = False,
        layer: str = "",
    ) -> Self:
        """Open by path or SQLAlchemy URL; None means the project's, else the user's (`store.layers`).

        Opening for writing migrates an older schema, from `tunegemm.store.schema.OLDEST_SCHEMA` on, and
        creates a missing file and its folder if `create` is set or no location is given. Opening read-only
        changes nothing and works in read-only folders. Raises DatabaseError for a file that is missing,
        unreadable, damaged, not a tuning database, or of an unknown schema.
        """
        place = resolve(location)
        may_be_missing = create or read_only or location is None  # `connect` refuses to read a missing one
        if isinstance(place, Path) and not (may_be_missing or os.path.lexists(place)):
            raise DatabaseError(f"{place}: no such database; create=True, or `tunegemm tune`, creates it")
        engine = connect(place, read_only=read_only)
        database = cls(place, engine, read_only=read_only, layer=layer, shipped=location is None)
        try:
            with translated(place):
                try:
                    if read_only:
                        with database.engine.begin() as connection:
                            migrations.require_current(connection)
                    else:
                        with migrating(database.engine) as connection:
                            migrations.upgrade(connection)
                except DatabaseError as error:
                    raise DatabaseError(f"{display(place)}: {error}") from None
        except BaseException:
            database.close()
            raise
        return database

    def __repr__(self) -> str:
        return f"<tunegemm.Database {self.name}{', read-only' * self.read_only}>"

    @property
    def name(self) -> str:
        """The location, for messages: a URL's password is hidden."""
        return display(self.location)

    def close(self) -> None:
        """Close the connections. Nothing is pending: publications are already committed."""
        self.engine.dispose()

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
        method: str = SCREEN,
    ) -> int:
        """Add one outcome to the history, committed on return. Returns its row's id.

        The evidence then chooses the record (`tunegemm.measure.evidence`). A confirmed record stays, unless
        its own candidate turns out slower than torch.mm. method: how the measurement was taken, one of
        `tunegemm.measure.evidence.METHODS`. Raises DatabaseError if the database cannot be written, if the
        device is not real, or if samples are not times.
        """
        codec.require(outcome, Measurement | Failure, "outcome")
        if not isinstance(method, str) or method not in METHODS:
            raise DatabaseError(f"method {shown(method)} is not known; use one of {', '.join(METHODS)}")
        values = codec.encode_outcome(outcome, resources, method)
        with self._publication(problem, device, outcome.candidate, label) as (connection, keys):
            row_id = publishing.add(connection, keys, values)
            if isinstance(outcome, Measurement):
                publishing.choose_if_better(connection, keys)
        return row_id

    def confirm(
        self,
        problem: Problem,
        device: Device,
        measurement: Measurement,
        *,
        resources: Resources | None = None,
        label: str = "",
        stored_as: int | None = None,
    ) -> int:
        """Make the final race's measurement of its winner the confirmed record. Returns the id of its row.

        stored_as: the id that `publish` returned, if it is stored already; otherwise it is published as a
        final race's. A winner slower than torch.mm is kept, and the evidence chooses the record. Raises as
        `publish`, and DatabaseError for an id that does not belong to the candidate here.
        """
        codec.require(measurement, Measurement, "measurement")
        codec.require(measurement.telemetry, Mapping, "telemetry")
        method = STEADY_FINAL if measurement.is_steady else FINAL
        values = codec.encode_outcome(measurement, resources, method)
        with self._publication(problem, device, measurement.candidate, label) as (connection, keys):
            if stored_as is None:
                row_id = publishing.add(connection, keys, values)
            else:
                row_id = publishing.require_measurement(connection, keys, stored_as)
            publishing.confirm(connection, keys, row_id)
        return row_id

    def best(self, problem: Problem, fingerprint: Fingerprint, *, samples: bool = False) -> Record | None:
        """The record of one problem under one fingerprint. samples: also read its samples."""
        records = self._records(problem=problem, fingerprint=fingerprint, samples=samples)
        return next(iter(records), None)

    def records(self, fingerprint: Fingerprint | None = None) -> list[Record]:
        """All records, or those under one fingerprint, in one query. Unreadable rows are left out."""
        return self._records(fingerprint=fingerprint)

    def lookup(self) -> Lookup:
        """All records in the form dispatch needs: fast to read, decoded one by one."""
        with self.reading_raw() as read:
            return Lookup(lambda query: read(text(query)), self.layer)

    def measurements(
        self, problem: Problem | None = None, fingerprint: Fingerprint | None = None
    ) -> list[Record]:
        """Every measurement with its samples, oldest first; for one problem or fingerprint, if given."""
        return self._records(None, problem=problem, fingerprint=fingerprint, samples=True)

    def history(self, problem: Problem, *, samples: bool = False) -> list[Record]:
        """The measurements that were the problem's records, under all fingerprints, in the order of choice.

        samples: also read their samples.
        """
        return self._records(ChoiceRow, problem=problem, samples=samples)

    def failures(self, problem: Problem, fingerprint: Fingerprint, *, current: bool = False) -> list[Failure]:
        """All failures of a problem, oldest first, so that a search need not repeat them.

        current: only those of kernels with this program's sources.
        """
        row = FailureRow
        columns = select(*rows.CANDIDATE_COLUMNS, row.stage, row.reason).select_from(row)
        query = rows.where_fingerprint(rows.with_keys(columns, row), fingerprint).order_by(row.id)
        query = rows.where_problem(rows.where_current(query) if current else query, problem)
        return rows.readable(self.read(query), codec.decode_failure, "failure")

    def problems(self) -> list[Problem]:
        """Every problem that has a measurement, smallest first."""
        measured = exists().where(MeasurementRow.problem_id == ProblemRow.id)
        stored = self.read(select(*rows.PROBLEM_COLUMNS).where(measured))
        return sorted(rows.readable(stored, lambda row: problem_of(*row), "problem"))

    def frame(self, problem: Problem | None = None, *, family: str | None = None) -> pandas.DataFrame:
        """One row per problem, fingerprint and candidate, with its best evidence.

        That is the confirmed record's measurement, else the best by `tunegemm.measure.evidence`. A database
        opened without a location adds the shipped records, with ``origin`` ``shipped``. Columns: the fields
        of the problem and of the fingerprint; ``fingerprint`` and ``candidate`` (digests), family, label;
        kernel_source, origin, method, median_us, baseline_median_us, ratio, spread, baseline_spread, noise,
        relative_error, sm_clock_mhz, power_w, temperature_c, throttle_reasons, registers, spill_bytes,
        smem_bytes, warnings, compile_seconds, measured_at (UTC); ``record`` and ``confirmed``: whether it is
        the record. Unreadable rows are left out.
        """
        import pandas

        query = frames.candidates_query(problem, family)
        names = [column["name"] for column in query.column_descriptions]
        own = frames.best_of_each(pandas.DataFrame(self.read(query), columns=names))
        if not self.shipped:
            return own
        return frames.with_shipped(own, read_shipped()[0], problem, family)

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """One transaction that writes: committed at its end, or rolled back if it raises.

        Raises DatabaseError for a database that was opened read-only, and for a driver's error.
        """
        if self.read_only:
            raise DatabaseError(f"{self.name}: opened read-only; open it for writing to publish")
        with translated(self.location), writer(self.engine).begin() as connection:
            yield connection

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """A session for queries over `tunegemm.store.models`. Raises DatabaseError for a driver's error."""
        with translated(self.location), Session(self.engine) as session:
            yield session

    @contextmanager
    def reading_raw(self) -> Iterator[Callable[[Executable], list[tuple[Any, ...]]]]:
        """A function that runs a query and returns the driver's rows, for reading many: SQLAlchemy's own rows
        take three times as long, and pandas takes twice as long to convert them. All queries see one state of
        the database. Cells are as stored: JSON and times are text. Raises as `reading`."""
        with translated(self.location), self.engine.begin() as connection:
            if connection.dialect.name == "postgresql":
                connection.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"))
            yield lambda query: cast(Any, connection.execute(query)).cursor.fetchall()

    def read(self, query: Executable) -> Sequence[Any]:
        """All rows of one query. Raises as `reading`."""
        with self.reading() as session:
            return session.execute(query).all()

    @contextmanager
    def _publication(
        self, problem: Problem, device: Device, candidate: Candidate, label: str
    ) -> Iterator[tuple[Connection, publishing.Values]]:
        """A transaction that writes, and the keys of the problem, fingerprint and candidate."""
        codec.require(problem, Problem, "problem")
        codec.require(device, Device, "device")
        if not device.is_real:
            raise DatabaseError(
                f"device {device.spec!r}: the store keeps only times measured here; tune on cuda:N"
            )
        values = codec.encode_keys(problem, device.fingerprint, candidate, label)
        with self.writing() as connection:
            yield connection, publishing.row_keys(connection, *values)

    def _records(
        self,
        chosen: type[RecordRow | ChoiceRow] | None = RecordRow,
        *,
        problem: Problem | None = None,
        fingerprint: Fingerprint | None = None,
        samples: bool = False,
    ) -> list[Record]:
        """The records of one problem or fingerprint, as `rows.records_query`."""
        query = rows.records_query(chosen, samples=samples)
        if problem is not None:
            query = rows.where_problem(query, problem)
        if fingerprint is not None:
            query = rows.where_fingerprint(query, fingerprint)
        kind = "measurement" if chosen is None else "record"
        return rows.readable(self.read(query), rows.record_decoder(self.layer, samples=samples), kind)
