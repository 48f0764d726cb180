"""The records of one database for dispatch: read as narrow rows, decoded on demand."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tunegemm.describe.device import Fingerprint
from tunegemm.describe.problem import Problem
from tunegemm.describe.stored import FIELDS, cells_of
from tunegemm.store.codec import UNREADABLE, decode_candidate, decode_fingerprint, decode_record
from tunegemm.store.record import Record
from tunegemm.store.schema import FASTEST, SCHEMA_VERSION, VERSION_TABLE
from tunegemm.store.waiting import left_s

#: How long a lock is waited for.
_BUSY_S = 5.0

#: Columns of each record, besides its keys.
_CELLS = ("ratio", "kernel_source", "method", "confirmed", "relative_error")

_log = logging.getLogger(__name__)


class Lookup:
    """Records by problem. Never changes once built.

    100,000 rows of five columns take a tenth of a second to read; as `Record`s they would take over a second,
    and a program needs only a few.
    """

    def __init__(self, read: Callable[[str], Iterable[Sequence[Any]]], layer: str) -> None:
        """read: runs a query on the database and returns its rows, all from one state."""
        facts = ", ".join(field.name for field in fields(Fingerprint))
        self._layer = layer
        self._keys = {
            tuple(cells): key for key, *cells in read(f"SELECT id, {', '.join(FIELDS)} FROM problems")
        }
        self._records: dict[int, list[tuple[Any, ...]]] = {}
        words: dict[str, str] = {}  # interned: there are few
        for problem, fingerprint, candidate, ratio, source, method, *more in read(
            "SELECT r.problem_id, r.fingerprint_id, r.candidate_id, r.ratio, r.kernel_source, r.measured_by, "
            "r.confirmed, m.relative_error "
            "FROM records r LEFT JOIN measurements m ON m.id = r.measurement_id "
            f"WHERE r.policy = '{FASTEST}'"
        ):
            texts = words.setdefault(source, source), words.setdefault(method, method)
            self._records.setdefault(problem, []).append((fingerprint, candidate, ratio, *texts, *more))
        self._fingerprints = {
            key: cells for key, *cells in read(f"SELECT id, digest, {facts} FROM fingerprints")
        }
        self._candidates = {
            key: cells
            for key, *cells in read(
                "SELECT id, json, digest FROM candidates WHERE id IN (SELECT candidate_id FROM records)"
            )
        }

    def __len__(self) -> int:
        return sum(map(len, self._records.values()))

    def problems(self) -> list[tuple[Any, ...]]:
        """The fields of every problem that has a record."""
        return [fields for fields, key in self._keys.items() if key in self._records]

    def find(self, problem: Problem) -> list[Record]:
        """The problem's records under all fingerprints. Skips and logs an unreadable record."""
        results = []
        key = self._keys.get(cells_of(problem), 0)
        for fingerprint, candidate, *cells in self._records.get(key, ()):
            try:
                results.append(
                    decode_record(
                        dict(zip(_CELLS, cells, strict=True)),
                        problem,
                        decode_candidate(*self._candidates[candidate]),
                        decode_fingerprint(*self._fingerprints[fingerprint]),
                        self._layer,
                    )
                )
            except UNREADABLE as error:
                _log.warning("skipped an unreadable record of %s: %s", problem, error)
        return results


def read_file(location: str | Path, layer: str) -> Lookup | None:
    """Reads a SQLite file without SQLAlchemy, whose import takes a fifth of a second.

    None for anything unusual: an older schema, damage, a lock, or an unreadable write-ahead log.
    `tunegemm.store.Database` reads some of these files, and explains the error for the others.
    """
    import sqlite3  # some milliseconds, where a user has no database

    try:
        path = Path(location).expanduser()
        if not path.is_file():  # opening a pipe would block for ever
            return None
        name = f"file:{quote(os.fsencode(path))}?mode=ro"
        with closing(sqlite3.connect(name, uri=True, timeout=left_s(_BUSY_S))) as connection:
            connection.execute("BEGIN")  # all queries see one state of the database
            versions = connection.execute(f"SELECT version_num FROM {VERSION_TABLE}").fetchall()
            if versions != [(SCHEMA_VERSION,)]:
                return None
            return Lookup(lambda query: connection.execute(query).fetchall(), layer)
    except (sqlite3.Error, OSError, RuntimeError, ValueError, TypeError):
        return None
