"""An immutable copy of the records of all layers. Dispatch reads it once, on the first call."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from tunegemm.describe.device import Fingerprint
from tunegemm.describe.problem import Problem
from tunegemm.describe.stored import cells_of
from tunegemm.generate.families import kernel_source_hash
from tunegemm.measure.evidence import rank
from tunegemm.store.layers import NARROWNESS, modified, read_lookups
from tunegemm.store.lookup import Lookup
from tunegemm.store.record import Record
from tunegemm.store.shipped import ShippedLookup
from tunegemm.store.validity import Grade, Judgement, judge_stored


class Snapshot:
    """Records by problem. Never changes once built, so any thread may read it without a lock."""

    def __init__(
        self,
        records: Iterable[Record] = (),
        *,
        lookups: Sequence[Lookup | ShippedLookup] = (),
        warnings: Sequence[str] = (),
        modified: Hashable = None,
    ) -> None:
        """lookups: further records, by problem. warnings: one line for each layer that could not be read.
        modified: the result of `tunegemm.store.layers.modified` before the layers were read."""
        by_problem: dict[Problem, list[Record]] = defaultdict(list)
        for record in records:
            by_problem[record.problem].append(record)
        self._records = dict(by_problem)
        self._lookups = tuple(lookups)
        self._judged: dict[tuple[Problem, Fingerprint], list[tuple[Judgement, Record]]] = {}
        self._usable: dict[tuple[Any, ...], list[Record]] = {}
        self.warnings = tuple(warnings)
        self.modified = modified

    def __len__(self) -> int:
        return sum(map(len, self._records.values())) + sum(map(len, self._lookups))

    @cached_property
    def _extents(self) -> dict[tuple[Any, ...], dict[tuple[int, int], set[int]]]:
        """The recorded m, by all attributes of a problem except its extents, and then by n and k.

        Built for the first product without a record: a program whose products are all recorded never needs
        it.
        """
        result: dict[tuple[Any, ...], dict[tuple[int, int], set[int]]] = {}
        lookups = (lookup.problems() for lookup in self._lookups)
        for m, n, k, *others in itertools.chain(map(cells_of, self._records), *lookups):
            result.setdefault(tuple(others), {}).setdefault((n, k), set()).add(m)
        return result

    @cached_property
    def digest(self) -> str:
        """A digest that changes with the records passed in, and with the number of records in `lookups`."""
        records = [
            (problem, record.candidate, record.ratio, record.kernel_source, record.fingerprint)
            for problem, result in self._records.items()
            for record in result
        ]
        return hashlib.sha256(repr((records, len(self))).encode()).hexdigest()

    def extents(self, problem: Problem) -> frozenset[int]:
        """The recorded m of this problem and of problems that differ from it in m alone."""
        _, n, k, *others = cells_of(problem)
        return frozenset(self._extents.get(tuple(others), {}).get((n, k), ()))

    def usable(self, problem: Problem, fingerprint: Fingerprint) -> list[Record]:
        """The records to launch for this problem and for problems that differ from it in m alone, by m.

        The lookup runs once for all problems that differ in m alone: a serving engine's steps have any number
        of rows.
        """
        key = (*cells_of(problem)[1:], fingerprint)
        if (known := self._usable.get(key)) is None:
            result = (self.find(replace(problem, m=m), fingerprint) for m in sorted(self.extents(problem)))
            known = self._usable[key] = [record for record in result if record is not None]
        return known

    def around(self, problem: Problem) -> Iterator[Problem]:
        """Recorded problems that differ in extents alone, the nearest first."""
        m, n, k, *others = cells_of(problem)
        groups = self._extents.get(tuple(others), {}).items()
        found = ((each, *group) for group, extents in groups for each in extents)

        def doublings(extents: tuple[int, int, int]) -> float:
            return sum(abs(math.log2(x / y)) for x, y in zip(extents, (m, n, k), strict=True))

        for other_m, other_n, other_k in sorted(found, key=doublings):
            yield replace(problem, m=other_m, n=other_n, k=other_k)

    def judged(self, problem: Problem, fingerprint: Fingerprint) -> list[tuple[Judgement, Record]]:
        """The problem's records, best first, with the judgement of each on a device with this fingerprint.

        A better grade comes first, then a narrower layer, then better evidence, then a faster record.
        """
        key = problem, fingerprint
        if (known := self._judged.get(key)) is not None:  # products come with any number of rows
            return known
        records = [*self._records.get(problem, ())]
        for lookup in self._lookups:
            records += lookup.find(problem)
        judged = [(judge_stored(record, fingerprint), record) for record in records]
        judged.sort(
            key=lambda pair: (pair[0].grade, NARROWNESS.get(pair[1].layer, 0), rank(pair[1])), reverse=True
        )
        if judged:
            self._judged[key] = judged
        return judged

    def find(self, problem: Problem, fingerprint: Fingerprint) -> Record | None:
        """The record to launch: the best record that may be used under this fingerprint."""
        judged = self.judged(problem, fingerprint)
        return judged[0][1] if judged and judged[0][0].usable else None

    def find_kernel(self, problem: Problem, fingerprint: Fingerprint) -> Record | None:
        """The record to launch, or else a record of another GPU whose kernel runs here unchanged.

        The times of such a record do not apply here, as an H200's do not on an H100.
        """
        for judgement, record in self.judged(problem, fingerprint):
            is_todays = record.kernel_source == kernel_source_hash(record.candidate.family)
            if judgement.usable or (judgement.grade == Grade.SEED and is_todays):
                return record
        return None

    def why_not(self, problem: Problem, fingerprint: Fingerprint) -> str:
        """Explain a miss in one clause: no record at all, or why the best one is foreign."""
        judged = self.judged(problem, fingerprint)
        return f"its record is foreign: {judged[0][0].reason}" if judged else "no record"


def read_snapshot() -> Snapshot:
    """Read the records of all layers. An unreadable layer becomes a warning; the rest is served."""
    before = modified()
    records, lookups, warnings = read_lookups()
    return Snapshot(records, lookups=lookups, warnings=warnings, modified=before)
