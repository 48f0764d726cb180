"""Which problem gets the next part of the budget."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import pytest

from tunegemm.cli.results import savings_table
from tunegemm.describe.device import find_device
from tunegemm.describe.problem import Problem
from tunegemm.describe.workload import Demand
from tunegemm.generate.cublaslt import TORCH_MM
from tunegemm.measure.outcome import Measurement
from tunegemm.tuning import program as spending
from tunegemm.tuning.cluster import Seat
from tunegemm.tuning.program import by_headroom, spend
from tunegemm.tuning.progress import Request, TuneResult

H200 = find_device("model:h200")
BIG, SMALL = Problem(8192, 8192, 8192), Problem(16, 4096, 4096)


def measured(baseline_us: float, median_us: float) -> Measurement:
    return Measurement(TORCH_MM, (median_us,) * 3, (baseline_us,) * 3, 0.0, 0.0)


@dataclass
class Scripted:
    """Answers as a tuner would; each tuning takes 10 s of a clock of its own."""

    ratios: dict[Problem, float]
    clock: list[float]
    asked: list[tuple[Problem, str, float | None]] = field(default_factory=list)
    interrupted_at: int = -1

    def tune_all(self, requests: Iterable[Request], on_progress: object = None) -> Iterator[TuneResult]:
        for request in requests:
            self.asked.append((request.problem, request.effort, request.budget_seconds))
            self.clock[0] += 10
            best = measured(100.0, 100.0 / self.ratios[request.problem])
            stop = len(self.asked) == self.interrupted_at
            yield TuneResult(
                request.problem, H200, "measured", best, (best,), (), {}, 10.0, 0, interrupted=stop
            )
            if stop:
                return


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    now = [0.0]
    monkeypatch.setattr(spending.time, "monotonic", lambda: now[0])
    yield now


def test_headroom_orders_not_calls_or_time_alone() -> None:
    floor = H200.roofline_us(BIG)
    at_its_roofline = Demand(BIG, 1000, floor)
    slow = Demand(SMALL, 10, 30.0)
    assert [s.demand for s in by_headroom([at_its_roofline, slow], H200)] == [slow, at_its_roofline]
    assert [s.demand.problem for s in by_headroom([Demand(SMALL, 10), Demand(BIG, 10)], H200)] == [BIG, SMALL]
    many = Demand(SMALL, 100_000)
    assert by_headroom([many, Demand(BIG, 10)], H200)[0].demand == many


@pytest.mark.parametrize("width", [72, 80, 140])
def test_a_narrow_table_of_savings_cuts_no_shape_and_no_figure(width: int) -> None:
    from rich.console import Console

    many = Demand(Problem.parse("4096x28672x4096", dtype="fp8_e4m3", epilogue="scale_rowwise"), 51_000)
    table = savings_table(by_headroom([many, Demand(Problem(16, 16, 16), 5)], H200), width)
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(table)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= width
    for whole in ("4096x28672x4096", "51000", "100.0", "~0.0004571"):
        assert whole in text


def test_quick_for_all_then_full_where_most_is_left(clock: list[float]) -> None:
    tuner = Scripted({BIG: 1.05, SMALL: 1.5}, clock)
    plan = by_headroom([Demand(BIG, 1, 2000.0), Demand(SMALL, 100, 100.0)], H200)
    told = list(spend(tuner, plan, budget_seconds=35))
    assert tuner.asked == [
        (SMALL, "quick", 35.0), (BIG, "quick", 25.0), (SMALL, "full", 15.0), (BIG, "full", 5.0),
    ]  # fmt: skip
    assert [s.effort for s in told] == ["quick", "quick", "full", "full"]
    assert told[0].saving_s == pytest.approx(100 * (100 - 100 / 1.5) * 1e-6)
    tuner.asked.clear()
    list(spend(tuner, plan, budget_seconds=15))
    assert [effort for _, effort, _ in tuner.asked] == ["quick", "quick"]


def test_without_a_budget_one_pass(clock: list[float]) -> None:
    tuner = Scripted({BIG: 1.0, SMALL: 1.0}, clock)
    plan = by_headroom([Demand(BIG, 1), Demand(SMALL, 1)], H200)
    list(spend(tuner, plan))
    list(spend(tuner, plan, effort="exhaustive", budget_seconds=100))
    assert [effort for _, effort, _ in tuner.asked] == ["quick", "quick", "exhaustive", "exhaustive"]
    assert tuner.asked[0][2] is None


def test_ctrl_c_ends_it(clock: list[float]) -> None:
    tuner = Scripted({BIG: 1.0, SMALL: 1.0}, clock, interrupted_at=1)
    plan = by_headroom([Demand(BIG, 1), Demand(SMALL, 1)], H200)
    assert len(list(spend(tuner, plan, budget_seconds=100))) == 1


def test_a_winner_within_the_noise_saves_nothing_not_less(clock: list[float]) -> None:
    tuner = Scripted({BIG: 0.99}, clock)
    (tuned,) = spend(tuner, by_headroom([Demand(BIG, 5)], H200))
    assert tuned.saving_s == 0.0


@pytest.mark.parametrize(("deadline", "left_s"), [(math.inf, 20.0), (50.0, 5.0), (45.0, None)])
def test_only_a_shared_budget_passes_while_a_request_waits_for_its_gpu(
    clock: list[float], deadline: float, left_s: float | None
) -> None:
    seat = Seat(None, Request(SMALL, budget_seconds=20.0, deadline=deadline))
    clock[0] = 45.0
    taken = seat.take()
    assert (taken and taken.budget_seconds) == left_s
    assert seat.take() is None
