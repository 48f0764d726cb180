"""The rows that leaderboards of stored evidence are made of: of one database, or of all layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from tunegemm.describe.problem import Problem
from tunegemm.errors import TunegemmError
from tunegemm.measure.evidence import FINAL
from tunegemm.report.leaderboard import VENDOR_FAMILY
from tunegemm.store.layers import of_databases
from tunegemm.store.shipped import read_shipped

if TYPE_CHECKING:
    import pandas

    from tunegemm.store import Database, Record

_PROBLEM = [field.name for field in fields(Problem)]
_PLACE = [*_PROBLEM, "device_name"]

#: What a readable row has in these columns, where they are there: a time of 0.1 ns to 11 days, to begin with.
_RANGES = {
    "median_us": (1e-4, 1e12), "baseline_median_us": (1e-4, 1e12), "ratio": (1e-6, 1e6),
    "vendor_ratio": (1e-6, 1e6), "spread": (0, 1e6), "baseline_spread": (0, 1e6), "noise": (0, 1e6),
}  # fmt: skip
_OPTIONAL = {"vendor_ratio", "spread", "baseline_spread", "noise"}
_TEXTS = {"device_name", "family", "label", "candidate", "policy", "fingerprint"}


def of_all_layers(
    read: Callable[[Database], pandas.DataFrame], *, family: str | None = None
) -> tuple[pandas.DataFrame, list[str]]:
    """What `read` gives of each layer's database, and the shipped records; one line for each unread layer.

    Of a problem on a device only the narrowest layer that has it counts, with all its rows: fingerprints of
    several layers would otherwise compete by date. read: `Database.frame` or `tunegemm.store.leaders`, of
    which the shipped records have the columns that are known of them. family: only this one's.
    """
    import pandas

    records, warnings = read_shipped()
    frames = [_frame(record for record in records if family in (None, record.candidate.family))]
    frames += of_databases(read, warnings)
    numbered = [frame.assign(_layer=number) for number, frame in enumerate(frames) if len(frame)]
    if not numbered:
        return frames[0], warnings
    together = pandas.concat(numbered, ignore_index=True)
    narrowest = together.groupby(_PLACE)["_layer"].transform("max")
    return together[together["_layer"] == narrowest].drop(columns="_layer"), warnings


def readable(frame: pandas.DataFrame) -> tuple[pandas.DataFrame, int]:
    """The rows whose problem, names and figures can be what they say, and the number of the others.

    A database's cells may have been damaged, or written by another program.
    """
    import pandas

    def within(name: str) -> pandas.Series:
        column, (low, high) = frame[name], _RANGES[name]
        if column.dtype.kind not in "fiu":
            column = pandas.to_numeric(column.where(column.map(_is_number)), errors="coerce")
        return column.between(low, high) | (frame[name].isna() & (name in _OPTIONAL))

    problems = list(frame[_PROBLEM].itertuples(index=False, name=None))
    known = {values: _is_problem(values) for values in set(problems)}
    good = pandas.Series([known[values] for values in problems], index=frame.index, dtype=bool)
    numbers = [name for name in _RANGES if name in frame]
    for name in numbers:
        good &= within(name)
    for name in _TEXTS & set(frame):
        good &= frame[name].map(lambda value: isinstance(value, str)).astype(bool)
    if "measured_at" in frame:
        good &= frame["measured_at"].notna()
    kept = frame[good]
    return kept.astype(dict.fromkeys(numbers, float)), len(frame) - len(kept)


def problems_of(frame: pandas.DataFrame) -> list[Problem]:
    """The problems of the rows, smallest first."""
    return sorted(Problem(*row) for row in frame[_PROBLEM].drop_duplicates().itertuples(index=False))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_problem(values: tuple[Any, ...]) -> bool:
    try:
        Problem(*values)
    except (TunegemmError, TypeError, ValueError):
        return False
    return True


def _frame(records: Iterable[Record]) -> pandas.DataFrame:
    """One row per problem and device, from the toolchain that was measured last; without what files lack."""
    import pandas

    rows = []
    for record in sorted(records, key=lambda record: record.measured_at):
        vendor = record.candidate.family == VENDOR_FAMILY
        facts = asdict(record.problem) | record.fingerprint.asdict()
        names = ("label", "kernel_source", "median_us", "baseline_median_us", "ratio", "noise", "confirmed")
        facts |= {name: getattr(record, name) for name in (*names, "relative_error", "measured_at")}
        rows.append(
            facts
            | {
                "fingerprint": record.fingerprint.digest,
                "candidate": record.candidate.digest,
                "family": record.candidate.family,
                "policy": FINAL,
                "origin": "",
                "spread": math.nan,
                "baseline_spread": math.nan,
                "vendor_label": record.label if vendor else None,
                "vendor_ratio": record.ratio if vendor else math.nan,
            }
        )
    columns = [*_PLACE, "family", "fingerprint"]
    frame = pandas.DataFrame(rows, columns=list(rows[0]) if rows else columns)
    return frame.drop_duplicates(_PLACE, keep="last")
