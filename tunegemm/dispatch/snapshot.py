"""An immutable copy of the database's records, as dispatch reads them: once, on the first call."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Protocol

from tunegemm.device import Fingerprint, kernel_source_hash
from tunegemm.problem import Problem
from tunegemm.space import Candidate


class Record(Protocol):
    """What dispatch needs of a stored record; `tunegemm.database.Record` has it."""

    @property
    def problem(self) -> Problem: ...

    @property
    def candidate(self) -> Candidate: ...

    @property
    def fingerprint(self) -> Fingerprint: ...

    @property
    def ratio(self) -> float: ...

    @property
    def kernel_source(self) -> str: ...


class Snapshot:
    """Records by problem. Never changes once built, so that any thread may read it without a lock."""

    def __init__(self, records: Iterable[Record] = ()) -> None:
        """Of several records of one problem and fingerprint the fastest relative to the baseline is kept."""
        best: dict[Problem, dict[Fingerprint, Record]] = defaultdict(dict)
        for record in records:
            known = best[record.problem].get(record.fingerprint)
            if known is None or record.ratio > known.ratio:
                best[record.problem][record.fingerprint] = record
        self._records: dict[Problem, dict[Fingerprint, Record]] = dict(best)

    def __len__(self) -> int:
        return sum(len(records) for records in self._records.values())

    def find(self, problem: Problem, fingerprint: Fingerprint) -> Record | None:
        """The record of the problem that was measured under this fingerprint, with these kernel sources."""
        record = self._records.get(problem, {}).get(fingerprint)
        return record if record is not None and _is_current(record) else None

    def why_not(self, problem: Problem, fingerprint: Fingerprint) -> str:
        """One clause on a miss: no record at all, or which facts make the nearest one foreign."""
        others = self._records.get(problem)
        if not others:
            return "no record"
        here = fingerprint.asdict()
        nearest = min(others, key=lambda other: sum(other.asdict()[name] != here[name] for name in here))
        there = nearest.asdict()
        if there == here:
            return "its record is of other kernel sources"
        changed = [name for name in here if there[name] != here[name]]
        facts = [f"{name} {there[name] or 'none'} (here {here[name] or 'none'})" for name in changed]
        return f"its record is of another {', '.join(facts)}"


def _is_current(record: Record) -> bool:
    return record.kernel_source == kernel_source_hash(record.candidate.family)


def read_snapshot() -> Snapshot:
    """The records of the default database. Raises DatabaseError when it cannot be read."""
    from tunegemm.database import Database  # SQLAlchemy loads here, on the first call, and never later

    with Database.open(read_only=True) as database:
        return Snapshot(database.records())
