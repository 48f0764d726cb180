"""What the history says: the leaders of a problem, and where a search may begin.

All of it reads values from a `Database`; there is no SQL here.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import TYPE_CHECKING

from tunegemm.describe.device import Fingerprint
from tunegemm.describe.problem import DTYPE_BYTES, Problem
from tunegemm.describe.space import Candidate
from tunegemm.measure import evidence
from tunegemm.store.record import Record
from tunegemm.store.validity import Grade, judge_stored

if TYPE_CHECKING:
    from tunegemm.store.database import Database

#: Candidates per toolchain that are raced again, or that a search begins with.
TOP = 5


def leaders(entries: Iterable[Record], top: int = TOP) -> list[Record]:
    """The best candidates of one problem, each by its best evidence. entries: oldest first."""
    return evidence.leaders(entries)[:top]


def seeds(database: Database, problem: Problem, fingerprint: Fingerprint, top: int = TOP) -> list[Candidate]:
    """The problem's leaders under other software or on other GPUs of the kind, the nearest ones first."""
    groups: dict[tuple[Grade, Fingerprint, str, str], list[Record]] = {}
    for entry in database.entries(problem):
        grade = judge_stored(entry, fingerprint).grade
        if grade in (Grade.SEED, Grade.VERIFY):
            key = grade, entry.fingerprint, entry.candidate.family, entry.kernel_source
            groups.setdefault(key, []).append(entry)
    nearest_first = sorted(
        groups.items(), key=lambda item: (item[0][0], item[1][-1].measured_at), reverse=True
    )
    return list(dict.fromkeys(e.candidate for _, group in nearest_first for e in leaders(group, top)))


def related(
    records: Iterable[Record], problem: Problem, fingerprint: Fingerprint, top: int = TOP
) -> list[Candidate]:
    """What records of any layer say of the same product, the most alike first: of the problem itself, then
    with another epilogue or output, then of another dtype of the same width. On GPUs of the architecture; on
    one of this name first, the latest first.

    What a product with an epilogue waits for is the product: fast tiles are fast with either.
    """
    found: list[tuple[tuple[bool | datetime, ...], Candidate]] = []
    for record in records:
        one, grade = record.problem, judge_stored(record, fingerprint).grade
        if _product(one) != _product(problem) or grade == Grade.FOREIGN:
            continue
        alike = one == problem, record.fingerprint.device_name == fingerprint.device_name
        found.append(((*alike, one.in_dtype == problem.in_dtype, record.measured_at), record.candidate))
    ordered = sorted(found, key=lambda pair: pair[0], reverse=True)
    return list(dict.fromkeys(candidate for _, candidate in ordered))[:top]


def _product(problem: Problem) -> tuple[int | str, ...]:
    """Which elements are multiplied with which, and how wide they are."""
    width = DTYPE_BYTES[problem.in_dtype]
    return problem.m, problem.n, problem.k, problem.batch, problem.a_major, problem.b_major, width
