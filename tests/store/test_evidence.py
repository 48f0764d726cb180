"""Which measurement is the record: whatever was published in whatever order, evidence decides."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.store.test_database import DEVICE, FINGERPRINT, PROBLEM, measurement
from tests.support.stores import Store
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate.cublaslt import TORCH_MM
from tunegemm.generate.families import kernel_source_hash
from tunegemm.measure import evidence
from tunegemm.measure.evidence import (
    METHODS,
    QUALIFYING,
    RACE,
    SCREEN,
    STEADY_FINAL,
    Evidence,
    evidence_of,
    leaders,
)
from tunegemm.store import Database
from tunegemm.store.record import Record

A, B, C = (Candidate.make("cute_sm90", {"tile_m": size}) for size in (64, 128, 256))
LIBRARY = Candidate.make("cublaslt", {"algorithm": "cublaslt", "algo_id": 66})
CANDIDATES = (A, B, C, LIBRARY, TORCH_MM)
OLD = "0123456789abcdef"


@dataclasses.dataclass(frozen=True)
class Event:
    """One publication, or with the method ``confirm`` the end of a final race."""

    candidate: Candidate
    ratio: float
    method: str
    old_sources: bool = False
    is_stored: bool = False
    """Whether the newest measurement of the candidate is confirmed, by its id, where there is one."""

    @property
    def kernel_source(self) -> str:
        here = kernel_source_hash(self.candidate.family)
        return OLD if here and self.old_sources else here


RATIOS = st.integers(85, 120).map(lambda percent: percent / 100)
EVENTS = st.builds(
    Event,
    st.sampled_from(CANDIDATES),
    RATIOS,
    st.sampled_from([*METHODS, "confirm"]),
    st.sampled_from([False, False, False, True]),
    st.booleans(),
)


#: The id of each candidate's newest measurement, by database and problem.
_NEWEST: dict[tuple[str, Problem, Candidate], int] = {}


def publish(database: Database, event: Event, problem: Problem = PROBLEM) -> None:
    found = measurement(event.ratio, event.candidate)
    with mock.patch("tunegemm.store.codec.kernel_source_hash", lambda _: event.kernel_source):
        place = database.name, problem, event.candidate
        if event.method == "confirm":
            stored_as = _NEWEST.get(place) if event.is_stored else None
            _NEWEST[place] = database.confirm(problem, DEVICE, found, stored_as=stored_as)
        else:
            _NEWEST[place] = database.publish(problem, DEVICE, found, method=event.method)


Found = tuple[Candidate, float, bool]


def expected(events: Sequence[Event]) -> set[Found | None]:
    """What may be the record after these events, by going through all of them again at every step.

    Of candidates with equal evidence and ratio any may be it.
    """
    rows: list[Event] = []
    confirmed: int | None = None

    def level(i: int) -> Evidence:
        final = i == confirmed or rows[i].method == "confirm"
        return Evidence.FINAL if final else evidence_of(rows[i].method)

    def standing(i: int) -> tuple[bool, Evidence]:
        current = rows[i].kernel_source == kernel_source_hash(rows[i].candidate.family)
        return current or i == confirmed, level(i)

    def best(candidate: Candidate) -> int:
        return max((standing(i), i) for i, row in enumerate(rows) if row.candidate == candidate)[1]

    def eligible(candidate: Candidate) -> bool:
        return candidate == TORCH_MM or rows[best(candidate)].ratio >= 1

    tied: list[int] = []
    for event in events:
        newest = [i for i, row in enumerate(rows) if row.candidate == event.candidate]
        again = event.method == "confirm" and event.is_stored and newest
        if not again:
            rows.append(event)
        if event.method == "confirm":
            index = newest[-1] if again else len(rows) - 1
            event = rows[index]
            confirmed = index if event.ratio >= 1 or event.candidate == TORCH_MM else None
        if confirmed is not None and not eligible(rows[confirmed].candidate):
            confirmed = None
        bests = [best(c) for c in CANDIDATES if any(row.candidate == c for row in rows) and eligible(c)]
        top = max(((*standing(i), rows[i].ratio) for i in bests), default=None)
        tied = [i for i in bests if (*standing(i), rows[i].ratio) == top]
    if confirmed is not None:
        return {(rows[confirmed].candidate, rows[confirmed].ratio, True)}
    return {(rows[i].candidate, rows[i].ratio, False) for i in tied} or {None}


def found(database: Database, problem: Problem = PROBLEM) -> Found | None:
    record = database.best(problem, FINGERPRINT)
    return None if record is None else (record.candidate, round(record.ratio, 2), record.confirmed)


SEQUENCES = settings(deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def shared() -> Database:
    """One file for all sequences: each has a problem of its own."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Database.open(Path(folder) / "t.sqlite", create=True) as database,
    ):
        yield database


_COUNT = iter(range(1, 1 << 30))


class TestSequences:
    @SEQUENCES
    @given(st.lists(EVENTS, max_size=14))
    # The three measurements that once left a kernel slower than torch.mm the record.
    @example([Event(A, 1.05, SCREEN), Event(A, 0.98, QUALIFYING), Event(B, 1.03, QUALIFYING)])
    # A record that got worse yields to the next; a confirmed one to a final race that it loses to torch.
    @example(
        [Event(A, 1.1, RACE), Event(B, 1.04, SCREEN), Event(C, 1.07, SCREEN), Event(A, 0.99, QUALIFYING)]
    )
    @example(
        [
            Event(TORCH_MM, 0.99, STEADY_FINAL), Event(A, 1.05, "confirm"), Event(A, 0.97, QUALIFYING),
            Event(B, 1.20, QUALIFYING), Event(A, 0.98, STEADY_FINAL),
        ]
    )  # fmt: skip
    @example(
        [Event(A, 0.98, "confirm"), Event(TORCH_MM, 0.97, SCREEN)]
    )  # the winner of a race, but no record
    def test_the_record_is_what_going_through_everything_says(
        self, shared: Database, events: list[Event]
    ) -> None:
        problem = dataclasses.replace(PROBLEM, m=next(_COUNT))
        for number, event in enumerate(events, 1):
            publish(shared, event, problem)
            assert found(shared, problem) in expected(events[:number])

    @pytest.mark.slow
    @SEQUENCES
    @given(st.lists(EVENTS, max_size=14))
    @example([Event(A, 0.85, SCREEN), Event(B, 1.0, SCREEN), Event(A, 1.0, SCREEN)])  # a tie
    def test_no_record_is_slower_than_torch_by_its_best_evidence(
        self, shared: Database, events: list[Event]
    ) -> None:
        problem = dataclasses.replace(PROBLEM, m=next(_COUNT))
        for event in events:
            publish(shared, dataclasses.replace(event, old_sources=False), problem)
        record, best = found(shared, problem), evidence.best_of_each(shared.measurements(problem))
        allowed = {one.candidate for one in best if one.ratio >= 1 or one.candidate == TORCH_MM}
        assert (record is None) == (not allowed)
        assert record is None or record[0] in allowed
        first = [e for e in leaders(shared.measurements(problem)) if e.candidate in allowed]
        tied = [e.candidate for e in first if evidence.rank(e) == evidence.rank(first[0])]
        assert record is None or record[2] or record[0] in tied

    @pytest.mark.slow
    @SEQUENCES
    @given(st.data())
    def test_the_order_of_different_candidates_does_not_matter(
        self, shared: Database, data: st.DataObject
    ) -> None:
        method = data.draw(st.sampled_from(METHODS))
        ratios = data.draw(st.lists(RATIOS, min_size=len(CANDIDATES), max_size=len(CANDIDATES), unique=True))
        events = [Event(c, ratio, method) for c, ratio in zip(CANDIDATES, ratios, strict=True)]
        records = []
        for order in (events, data.draw(st.permutations(events))):
            problem = dataclasses.replace(PROBLEM, m=next(_COUNT))
            for event in order:
                publish(shared, event, problem)
            records.append(found(shared, problem))
        assert records[0] == records[1]


class TestChoice(Store):
    def test_a_tie_leaves_the_record_with_its_newest_measurement(self, database: Database) -> None:
        """Whichever candidate ties with it, however often, and whichever came first."""
        publish(database, Event(B, 1.01, RACE))
        for number, candidate in enumerate((A, B, A, B, A)):
            publish(database, Event(candidate, 1.05, RACE))
            assert found(database) == (A, 1.05, False), number
            record = database.best(PROBLEM, FINGERPRINT)
            newest = max(one.measured_at for one in database.measurements(PROBLEM) if one.candidate == A)
            assert record is not None and record.measured_at == newest

    def test_random_sequences(self, database: Database) -> None:
        @settings(SEQUENCES, max_examples=15)
        @given(st.lists(EVENTS, max_size=8))
        def check(events: list[Event]) -> None:
            problem = dataclasses.replace(PROBLEM, m=next(_COUNT))
            for event in events:
                publish(database, event, problem)
            assert found(database, problem) in expected(events)

        check()


def test_a_record_with_an_origin_came_from_elsewhere() -> None:
    own = Record(PROBLEM, A, FINGERPRINT)
    assert (own.is_foreign, dataclasses.replace(own, origin="a file").is_foreign) == (False, True)
