"""Which kernel serves rows in groups: a record of as many groups, N and K, and about as many rows."""

from __future__ import annotations

import math

from tunegemm.choose.snapshot import Snapshot
from tunegemm.describe.device import Fingerprint
from tunegemm.describe.problem import Problem
from tunegemm.measure.evidence import may_be_record
from tunegemm.model.grouped import chosen
from tunegemm.store.record import Record

#: Dtypes of which torch's call waits for the device, which no time of its products shows and no graph allows.
WAITS = ("fp16",)


def bucket(rows: int) -> int:
    """Numbers of rows that share records: those up to the same power of two."""
    return (rows - 1).bit_length()


def recorded(
    snapshot: Snapshot, problem: Problem, fingerprint: Fingerprint, *, near: bool = True
) -> Record | None:
    """The record of a grouped product, of torch's kernel, too; None where there is none to go by.

    near: whether it may be of other rows of the same `bucket`, of which the nearest number counts.
    Torch's counts where it won a race, not for want of others.
    """
    usable = [
        record
        for record in snapshot.usable(problem, fingerprint)
        if may_be_record(record)
        and (not record.is_torch or (record.confirmed and problem.in_dtype not in WAITS))
        and (record.problem.m == problem.m or (near and bucket(record.problem.m) == bucket(problem.m)))
    ]
    return min(usable, key=lambda record: abs(math.log(record.problem.m / problem.m)), default=None)


def without_record(
    problem: Problem, gpu: str, why_not: str = "no record", *, ordered: bool = False
) -> tuple[str, bool]:
    """What computes a grouped product that has no record on a GPU of a name, in one clause, and whether it is
    a kernel of ours: by the table that ships. why_not: no record, or what is wrong with it. ordered: as
    `tunegemm.model.grouped.choose` has it.
    """
    choice = chosen(problem, gpu, ordered=ordered)
    if choice is None:
        return f"{why_not}, and no kernel that ships is known to be faster", False
    return f"{choice.label}, which db/grouped.toml names for such groups; {why_not}", True
