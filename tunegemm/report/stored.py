"""Reads the rows of leaderboards, from one database or from all layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from tunegemm.describe.stored import FIELDS, document_of
from tunegemm.report.leaderboard import VENDOR_FAMILY
from tunegemm.store.layers import of_databases
from tunegemm.store.shipped import read_shipped

if TYPE_CHECKING:
    import pandas

    from tunegemm.store import Database, Record

_PLACE = [*FIELDS, "device_name"]


def of_all_layers(read: Callable[[Database], pandas.DataFrame]) -> tuple[pandas.DataFrame, list[str]]:
    """The result of `read` for each layer's database, with the shipped records; and one line for each layer
    that cannot be read.

    For each problem and device only the narrowest layer that has it counts, with all its rows. Otherwise the
    fingerprints of several layers would compete by date. read: `Database.frame` or
    `store.queries.latest_records`; shipped records fill the columns that are known for them.
    """
    import pandas

    records, warnings = read_shipped()
    frames = [_frame(records)]
    frames += of_databases(read, warnings)
    numbered = [frame.assign(_layer=number) for number, frame in enumerate(frames) if len(frame)]
    if not numbered:
        return frames[0], warnings
    together = pandas.concat(numbered, ignore_index=True)
    narrowest = together.groupby(_PLACE)["_layer"].transform("max")
    return together[together["_layer"] == narrowest].drop(columns="_layer"), warnings


def _frame(records: Iterable[Record]) -> pandas.DataFrame:
    """One row per problem and device, from the toolchain that was measured last; without what files lack."""
    import pandas

    names = ("label", "kernel_source", "median_us", "baseline_median_us", "ratio", "noise", "confirmed")
    rows: list[dict[str, Any]] = []
    for record in sorted(records, key=lambda record: record.measured_at):
        vendor = record.candidate.family == VENDOR_FAMILY
        rows.append(
            document_of(record.problem)
            | record.fingerprint.asdict()
            | {name: getattr(record, name) for name in (*names, "relative_error", "measured_at", "method")}
            | {"fingerprint": record.fingerprint.digest, "candidate": record.candidate.digest}
            | {"family": record.candidate.family, "origin": ""}
            | {"spread": math.nan, "baseline_spread": math.nan}
            | {"vendor_label": record.label if vendor else None}
            | {"vendor_ratio": record.ratio if vendor else math.nan}
        )
    columns = [*_PLACE, "family", "fingerprint"]
    frame = pandas.DataFrame(rows, columns=list(rows[0]) if rows else columns)
    return frame.drop_duplicates(_PLACE, keep="last")
