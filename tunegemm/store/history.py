"""Reads the history: starting points for a search, and how each record compares with its predecessor.

The functions take values from a `Database`; there is no SQL here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Literal

from tunegemm.describe.device import Fingerprint
from tunegemm.describe.problem import DTYPE_BYTES, Problem
from tunegemm.describe.space import Candidate
from tunegemm.measure.evidence import STEADY_METHODS, Evidence, leaders
from tunegemm.measure.statistics import NOISE_FLOOR, median_interval, ratio_interval
from tunegemm.store.record import Record
from tunegemm.store.validity import Grade, judge_stored

if TYPE_CHECKING:
    from tunegemm.store.database import Database

#: Candidates per toolchain that are raced again or start a search.
TOP = 5

Verdict = Literal["faster", "slower", "same"]


def seeds(database: Database, problem: Problem, fingerprint: Fingerprint) -> list[Candidate]:
    """The problem's leaders under other software or on other GPUs of the kind, nearest first."""
    groups: dict[tuple[Grade, Fingerprint, str, str], list[Record]] = {}
    for entry in database.measurements(problem):
        grade = judge_stored(entry, fingerprint).grade
        if grade in (Grade.SEED, Grade.VERIFY):
            key = grade, entry.fingerprint, entry.candidate.family, entry.kernel_source
            groups.setdefault(key, []).append(entry)
    nearest_first = sorted(
        groups.items(), key=lambda item: (item[0][0], item[1][-1].measured_at), reverse=True
    )
    return list(dict.fromkeys(e.candidate for _, group in nearest_first for e in leaders(group)[:TOP]))


def related(records: Iterable[Record], problem: Problem, fingerprint: Fingerprint) -> list[Candidate]:
    """Candidates that were records of the same product in any layer, most similar first: the problem itself,
    then another epilogue or output, then another dtype of the same width. GPUs of the same architecture
    count; those of the same name come first, newest first.

    The product dominates a fused product's time, so tiles that are fast for one epilogue are fast for others.
    """
    results: list[tuple[tuple[bool | datetime, ...], Candidate]] = []
    for record in records:
        item, grade = record.problem, judge_stored(record, fingerprint).grade
        if _product(item) != _product(problem) or grade == Grade.FOREIGN:
            continue
        alike = item == problem, record.fingerprint.device_name == fingerprint.device_name
        results.append(((*alike, item.in_dtype == problem.in_dtype, record.measured_at), record.candidate))
    ordered = sorted(results, key=lambda pair: pair[0], reverse=True)
    return list(dict.fromkeys(candidate for _, candidate in ordered))[:TOP]


def _product(problem: Problem) -> tuple[int | str, ...]:
    """The fields that determine which elements are multiplied, and their widths."""
    extents = problem.m, problem.n, problem.k, problem.batch, problem.groups
    return *extents, problem.a_major, problem.b_major, DTYPE_BYTES[problem.in_dtype]


@dataclass(frozen=True)
class Change:
    """Comparison of a problem's record with the previous record."""

    verdict: Verdict
    change: float
    """Relative change in time: +0.03 is 3 % slower. A change by ratio assumes an unchanged torch.mm."""
    by: Literal["ratio", "time"]
    """The compared figure: the ratio to torch.mm if both used the same library, else the time itself."""

    def __str__(self) -> str:
        return f"{self.verdict} ({100 * self.change:+.1f} % by {self.by})"


def compare(before: Record, after: Record) -> Change:
    """Calls a record faster or slower only if the medians' 95 % intervals differ by more than the noise."""
    old, new = before.measurement, after.measurement
    noise = max(old.noise, new.noise, NOISE_FLOOR)
    by: Literal["ratio", "time"]
    if all(getattr(before.fingerprint, n) == getattr(after.fingerprint, n) for n in ("torch", "cuda")):
        # torch.mm ran in the same rounds: clocks and temperature affected it as they affected the kernel.
        by, change = "ratio", old.ratio / new.ratio - 1
        (old_low, old_high), (new_low, new_high) = ratio_interval(old), ratio_interval(new)
    else:
        by, change = "time", new.median_us / old.median_us - 1
        (old_low, old_high), (new_low, new_high) = map(median_interval, (old.samples_us, new.samples_us))
    apart = new_high < old_low or old_high < new_low
    verdict: Verdict = "same"
    if apart and abs(change) > noise:
        verdict = "slower" if change > 0 else "faster"
    return Change(verdict, change, by)


def changes(records: Iterable[Record]) -> list[Change | None]:
    """Compares each of a problem's records, with samples and oldest first, with the previous record on the
    same kind of device; None if there is no previous record.

    Only final races have enough samples for a verdict, and interleaved timing does not compare with
    steady-state timing.
    """
    latest: dict[tuple[object, ...], Record] = {}
    result: list[Change | None] = []
    for record in records:
        fingerprint = record.fingerprint
        key = fingerprint.device_name, fingerprint.mig, fingerprint.sm_budget, record.method in STEADY_METHODS
        before = latest.get(key)
        is_final = record.evidence is Evidence.FINAL
        result.append(compare(before, record) if is_final and before is not None else None)
        if is_final:
            latest[key] = record
    return result
