"""What a page says of its records, by their values."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from tunegemm.describe.device import find_device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.errors import TunegemmError
from tunegemm.report.contents import (
    Contents,
    FailureGroup,
    Winner,
    check_shapes,
    grouped,
    named_device,
    steady_record,
)
from tunegemm.store.record import Record

DEVICE = find_device("model:h200")
PROBLEM = Problem(512, 512, 512)
RECORD = Record(
    PROBLEM, Candidate.make("cute_sm90", {"tile_m": 1}), DEVICE.fingerprint, "a", 10.0, 20.0, noise=0.02
)


@pytest.mark.parametrize(
    ("ratio", "low", "high", "verdict"),
    [(1.5, 1.4, 1.6, "faster"), (1.5, 1.0, 1.6, "equal"), (1.019, 1.01, 1.03, "equal"),
     (0.7, 0.6, 0.8, "slower"), (0.7, 0.6, 1.0, "equal"), (0.985, 0.98, 0.99, "equal")],
)  # fmt: skip
def test_noise_and_interval_decide(ratio: float, low: float, high: float, verdict: str) -> None:
    winner = Winner(replace(RECORD, ratio=ratio), low, high, None)
    assert winner.verdict == verdict
    assert winner.tflops == 2 * winner.baseline_tflops == pytest.approx(2 * 512**3 / 10.0 / 1e6)


def contents(*origins: str, source: str = "measured") -> Contents:
    winners = tuple(
        Winner(replace(RECORD, origin=origin, measured_at=datetime(2026, 1, 9 - day, tzinfo=UTC)), 1, 1, None)
        for day, origin in enumerate(origins)
    )
    return Contents(source, "a.sqlite", DEVICE, winners, (), 0, ())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("origins", "says"),
    [(["", ""], "Measured on NVIDIA H200."),
     (["x", "x"], "Imported from x; measured on another NVIDIA H200."),
     (["x", ""], "Measured on NVIDIA H200, but 1 records imported from x."),
     (["x", "y", "z"], "Imported from x, y, z; measured on another NVIDIA H200."),
     (["v", "x", "y", "z"], "Imported from v, x, y and 1 more; measured on another NVIDIA H200.")],
)  # fmt: skip
def test_where_times_come_from(origins: list[str], says: str) -> None:
    assert contents(*origins).origin == says
    assert "nothing was measured here" in contents(*origins, source="recorded").origin


def test_days_are_one_or_the_first_and_the_last() -> None:
    assert contents("").days == "2026-01-09"
    assert contents("", "", "").days == "2026-01-07 to 2026-01-09"


@pytest.mark.parametrize(
    ("confirmed", "rows", "found"), [(True, 512, True), (False, 512, False), (True, 16, False)]
)
def test_a_final_race_in_steady_state_is_what_programs_see(confirmed: bool, rows: int, found: bool) -> None:
    record = replace(RECORD, problem=replace(PROBLEM, m=rows), confirmed=confirmed)
    for kept, expected in ((record, record if found else None), (None, None)):
        snapshot: Any = SimpleNamespace(find=lambda *_, kept=kept: kept)
        assert steady_record(snapshot, record.problem, DEVICE) is expected


def test_a_device_is_named_by_a_part_that_only_it_has() -> None:
    names = ["NVIDIA H100", "NVIDIA H100 NVL", "NVIDIA H200"]
    assert named_device("h200", names) == names[2] and named_device("nvidia h100", names) == names[0]
    for text, says in {
        "h100 ": "'h100 ' was never|NVL", "H1": "names several; use one of NVIDIA H100, NVIDIA H100 NVL$",
        "A100": "was never measured here; use one of NVIDIA H100, NVIDIA H100 NVL, NVIDIA H200$",
        "": "is not a name",
    }.items():  # fmt: skip
        if text == "h100 ":
            assert named_device(text, names) == names[1]
            continue
        with pytest.raises(TunegemmError, match=says):
            named_device(text, names)


@pytest.mark.parametrize("count", [8, 9])
def test_eight_shapes_are_named(count: int) -> None:
    problems = [Problem(8 * (1 + number), 8, 8) for number in range(count)]
    check_shapes(["8x8x8"], problems, "here")
    with pytest.raises(TunegemmError, match="here has no record of 9x9x9; it has ") as raised:
        check_shapes(["9x9x9"], problems, "here")
    assert str(raised.value).count("x8x8") == 8
    assert str(raised.value).endswith(" and 1 more") == (count == 9)
    with pytest.raises(TunegemmError, match="here has no record; run"):
        check_shapes([], [], "here")


def test_failures_that_differ_in_numbers_are_one_group() -> None:
    rows = [("a", "load", "needs 5 B", 2), ("b", "load", "needs 7.5 B", 3), ("a", "load", "no", 5),
            ("a", "launch", "needs 5 B", 9)]  # fmt: skip
    assert grouped(rows) == (
        FailureGroup("launch", "needs 5 B", ("a",), 9),
        FailureGroup("load", "needs 5 B", ("a", "b"), 5),
        FailureGroup("load", "no", ("a",), 5),
    )
