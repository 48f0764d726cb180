"""Records by problem, and which of them are near."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from tests.choose.test_neighbours import Row, kernel
from tunegemm.choose import invariance
from tunegemm.choose.snapshot import Snapshot
from tunegemm.describe.device import find_device
from tunegemm.describe.problem import Problem
from tunegemm.describe.stored import cells_of

DEVICE = find_device("model:h200")
EXTENTS = (32, 64, 256)
PROBLEMS = [Problem(m, n, k) for m, n, k in itertools.product(EXTENTS, repeat=3)]


class Lookup:
    """Further records, as of a file that is read by problem."""

    def __init__(self, *problems: Problem) -> None:
        self.records = [Row(problem, DEVICE.fingerprint, kernel()) for problem in problems]

    def __len__(self) -> int:
        return len(self.records)

    def problems(self) -> Any:
        return [cells_of(record.problem) for record in self.records]

    def find(self, problem: Problem) -> Any:
        return [record for record in self.records if record.problem == problem]


def snapshot_of(*problems: Problem, lookups: Any = ()) -> Snapshot:
    return Snapshot([Row(each, DEVICE.fingerprint, kernel()) for each in problems], lookups=lookups)


def test_records_of_lookups_count_and_are_found() -> None:
    few = snapshot_of(PROBLEMS[0], PROBLEMS[0], PROBLEMS[1])
    more = snapshot_of(PROBLEMS[0], lookups=[Lookup(*PROBLEMS[1:4]), Lookup(PROBLEMS[5])])
    assert (len(Snapshot()), len(few), len(more)) == (0, 3, 5)
    assert few.digest != more.digest
    for problem in PROBLEMS[1:4]:
        assert more.find(problem, DEVICE.fingerprint) is not None and more.extents(problem) == {32}
    assert more.find(PROBLEMS[4], DEVICE.fingerprint) is None
    assert more.why_not(PROBLEMS[4], DEVICE.fingerprint) == "no record"


@pytest.mark.parametrize("problem", [Problem(64, 64, 64), Problem(128, 256, 32)])
def test_around_a_problem_are_the_nearest_first(problem: Problem) -> None:
    snapshot = snapshot_of(*PROBLEMS, Problem(64, 64, 64, epilogue="relu"))

    def apart(other: Problem) -> float:
        pairs = zip((problem.m, problem.n, problem.k), (other.m, other.n, other.k), strict=True)
        return sum(abs(math.log2(one / two)) for one, two in pairs)

    found = list(snapshot.around(problem))
    assert set(found) == set(PROBLEMS)
    assert len(set(found)) == len(found) and list(map(apart, found)) == sorted(map(apart, found))


def test_kernels_of_other_rows_are_close_within_a_doubling() -> None:
    snapshot = snapshot_of(*(Problem(m, 64, 64) for m in (15, 16, 64, 65)), Problem(32, 128, 64))
    found = invariance.near_records(snapshot, Problem(32, 64, 64), DEVICE, everywhere=False)
    assert [(record.problem.m, close) for record, close in found] == [
        (16, True), (64, True), (65, False), (15, False)
    ]  # fmt: skip


@pytest.mark.parametrize("batch", [1, 3])
def test_kernels_of_products_that_differ_in_extents_come_last(batch: int) -> None:
    """Those of a batch, and of its entries alone, which the same kernels compute."""
    snapshot = snapshot_of(Problem(32, 64, 64, batch), Problem(32, 128, 64), Problem(32, 128, 64, 3))
    found = [
        (record.problem.batch, record.problem.n, close)
        for record, close in invariance.near_records(
            snapshot, Problem(32, 64, 64, batch), DEVICE, everywhere=True
        )
    ]
    own = [(batch, 64, True), (batch, 64, False), (batch, 128, False)]
    assert found == own + ([(1, 128, False)] if batch > 1 else [])
