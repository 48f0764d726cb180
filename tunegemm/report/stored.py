"""Reads the rows of leaderboards, from one database or from all layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from tunegemm.describe.stored import FIELDS
from tunegemm.report.leaderboard import VENDOR_FAMILY
from tunegemm.store.frames import of_records
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
    frame = of_records(sorted(records, key=lambda record: record.measured_at))
    vendor = frame["family"] == VENDOR_FAMILY
    return frame.assign(
        origin="",
        spread=math.nan,
        baseline_spread=math.nan,
        vendor_label=frame["label"].where(vendor),
        vendor_ratio=frame["ratio"].where(vendor),
    ).drop_duplicates(_PLACE, keep="last")
