"""Rows in groups as they are measured: divisions, checks that see a neighbour's rows, times over skews."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.measure.test_worker import BACKEND, QUICK
from tunegemm.describe.device import find_device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.errors import ProblemError
from tunegemm.generate.cublaslt import TORCH_MM
from tunegemm.measure import groups
from tunegemm.measure import operands as data
from tunegemm.measure.groups import RAGGED, OverSkews, divide, divided, over_skews
from tunegemm.measure.outcome import Failure, Measurement, Outcome
from tunegemm.measure.settings import SKEWS, Job
from tunegemm.measure.worker import MeasureWorker

PROBLEM = Problem.parse("96x64x128", groups=5)
CPU = torch.device("cpu")


@pytest.mark.parametrize("rows", [1, 7, 96, 40_000])
@pytest.mark.parametrize("skew", SKEWS)
def test_all_rows_are_divided(skew: str, rows: int) -> None:
    sizes = divide(5, rows, skew, seed=3)
    assert len(sizes) == 5 and sum(sizes) == rows and min(sizes) >= 0
    assert sizes == divide(5, rows, skew, seed=3)


def test_up_to_16384_rows_are_drawn_and_more_are_divided_by_their_shares() -> None:
    shares = [size / 2**30 for size in divide(8, 2**30, "typical", seed=3)]

    def most_off(rows: int) -> float:
        off = [size - rows * share for size, share in zip(divide(8, rows, "typical", 3), shares, strict=True)]
        return max(map(abs, sorted(off)[:-1]))  # the largest group has what rounding leaves

    assert most_off(1 << 14) > 8 > 1 > most_off((1 << 14) + 1)


@pytest.mark.parametrize(
    ("rows", "typical", "ragged"),
    [
        (17, [5, 8, 4, 0, 0], [6, 0, 9, 0, 0]),
        (16384, [2072, 8512, 5706, 72, 22], [3907, 0, 10305, 124, 0]),
        (16385, [2094, 8462, 5734, 67, 28], [3907, 0, 10306, 124, 0]),
    ],
)
def test_divisions_are_the_same_every_time(rows: int, typical: list[int], ragged: list[int]) -> None:
    """Kernels were chosen by these."""
    more = [rows // 5 + (group < rows % 5) for group in range(5)]
    found = {skew: divide(5, rows, skew, 7) for skew in (*SKEWS, RAGGED)}
    assert found == {"uniform": more, "typical": typical, "one_hot": [0, 0, rows, 0, 0], RAGGED: ragged}
    assert divide(5, 17, "uniform", 0) == [4, 4, 3, 3, 3]


def test_sets_of_one_hot_group_go_from_group_to_group() -> None:
    sets = [data.make_operands(PROBLEM, CPU, 0)]
    lists = over_skews(PROBLEM, sets, l2_bytes=64 * 128 * 2, seed=0)
    assert [len(each) for each in lists] == [1, 1, 3]
    ends = [one.fused[0].tolist() for one in lists[2]]
    assert len(set(map(tuple, ends))) == 3
    again = [divided(PROBLEM, sets[0], SKEWS[2], seed).fused[0].tolist() for seed in range(3)]
    assert ends == again, "seeds count upwards from the given one"
    assert all(one.out.data_ptr() == sets[0].out.data_ptr() for each in lists for one in each)


def loop(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, ends: torch.Tensor, spill: int = 0) -> None:
    """Each group by itself; spill: rows that it writes beyond its end."""
    first = 0
    for group, end in enumerate(ends.tolist()):
        last = end + spill
        rows = out.as_strided(
            (last - first, out.shape[1]), out.stride(), out.storage_offset() + first * out.stride(0)
        )
        if last > first:
            source = torch.cat([a[first:last], a[: max(0, last - len(a))]])
            rows.copy_(source.float() @ b[group].float())
        first = end


def checks(operands: data.Operands, spill: int) -> str | None:
    data.restore(operands)
    loop(*operands.arguments, spill=spill)
    return data.check(operands, data.expected(PROBLEM, operands)).objection(data.tolerance(PROBLEM))


@pytest.mark.parametrize("skew", [*SKEWS, RAGGED])
def test_a_right_product_passes_and_one_that_writes_behind_the_last_group_does_not(skew: str) -> None:
    operands = divided(PROBLEM, data.make_operands(PROBLEM, CPU, 0), skew, 0)
    assert checks(operands, 0) is None
    assert checks(operands, 1) == "wrote outside its output"


def test_exact_sums_show_a_k_that_is_left_out() -> None:
    operands = divided(PROBLEM, data.make_exact(PROBLEM, CPU, 0), RAGGED, 0)
    wanted = data.expected(PROBLEM, operands)
    data.restore(operands)
    loop(*operands.arguments)
    assert data.exact_objection(PROBLEM, operands, wanted) is None
    loop(operands.a[:, :-2], operands.b[:, :-2], operands.out, *operands.fused)
    assert "the kernel omits part of k" in str(data.exact_objection(PROBLEM, operands, wanted))


class Fixed:
    """A replay of a known time."""

    def __init__(self, us: float) -> None:
        self.us = us

    def start(self, untimed: int = 0, timed: int = 1) -> None: ...

    def finish(self) -> float:
        return self.us


def test_the_time_over_skews_is_the_geometric_mean_and_each_ratio_is_told() -> None:
    own, baseline = (
        OverSkews([Fixed(1.0), Fixed(2.0), Fixed(4.0)]),
        OverSkews([Fixed(2.0), Fixed(3.0), Fixed(2.0)]),
    )
    for replay in (own, baseline):
        replay.start()
    assert own.finish() == pytest.approx(2.0) and baseline.finish() == pytest.approx(math.cbrt(12))
    assert groups.ratios(own, baseline) == {"uniform": 2.0, "typical": 1.5, "one_hot": 0.5}


@pytest.fixture(scope="module")
def worker() -> Iterator[MeasureWorker]:
    with MeasureWorker(find_device("model:h200"), timeout_s=20, backend=BACKEND) as worker:
        yield worker


def planted(what: str) -> Candidate:
    return Candidate.make("planted", {"what": what})


def test_a_worker_times_over_skews_and_finds_what_writes_a_neighbours_rows(worker: MeasureWorker) -> None:
    whats = ("groups", "groups-neighbour", "groups-behind", "groups-first-offsets")
    jobs = [Job(planted(what)) for what in whats] + [Job(TORCH_MM)]
    found: dict[Candidate, Outcome] = {o.candidate: o for o in worker.measure(PROBLEM, jobs, QUICK)}
    for candidate in (planted("groups"), TORCH_MM):
        measured = found[candidate]
        assert isinstance(measured, Measurement), measured
        skews: Any = measured.telemetry["skews"]
        assert list(skews) == list(SKEWS) and all(ratio > 0 for ratio in skews.values())
        assert 1e-4 < measured.relative_error < 8e-3
    reasons = {what: str(getattr(found[planted(what)], "reason", "")) for what in whats[1:]}
    assert all(isinstance(found[planted(what)], Failure) for what in whats[1:]), reasons
    assert "relative error" in reasons["groups-neighbour"]
    assert reasons["groups-behind"] == "wrote outside its output"
    assert "relative error" in reasons["groups-first-offsets"] or "NaN" in reasons["groups-first-offsets"]


@pytest.mark.parametrize(
    "kind", [{"gate": "swiglu"}, {"gate": "geglu"}, {"dtype": "fp16"}, {"b_major": "n"}], ids=str
)
def test_a_worker_measures_every_kind(worker: MeasureWorker, kind: dict[str, str]) -> None:
    """Beside what torch does: of fp16 a product of each group, which sees how many rows it has."""
    problem = Problem.of_groups(96, 64, 128, 5, **kind)
    jobs = [Job(planted("groups")), Job(TORCH_MM), Job(planted("groups-neighbour"))]
    ours, torchs, wrong = worker.measure(problem, jobs, QUICK)
    if isinstance(ours, Failure):
        ours, torchs, wrong = torchs, wrong, ours
    assert isinstance(ours, Measurement) and isinstance(torchs, Measurement), (ours, torchs)
    assert isinstance(wrong, Failure) and wrong.stage == "wrong"


def test_some_skews_are_timed_where_they_are_named(worker: MeasureWorker) -> None:
    settings = replace(QUICK, skews=("uniform", "one_hot"))
    for found in worker.measure(PROBLEM, [Job(planted("groups")), Job(TORCH_MM)], settings):
        assert isinstance(found, Measurement) and list(found.telemetry["skews"]) == ["uniform", "one_hot"]
        assert groups.measured_skews(found.telemetry) == settings.skews
    assert groups.measured_skews({}) == SKEWS


def test_skews_are_checked_and_have_one_order() -> None:
    assert groups.checked_skews(["one_hot", "uniform"]) == ("uniform", "one_hot")
    for names, said in (
        (["hot"], "'hot' is not known; use some of uniform, typical, one_hot"),
        ([], "no skews"),
    ):
        with pytest.raises(ProblemError, match=said):
            groups.checked_skews(names)


def test_scales_are_of_rows_and_of_each_groups_columns() -> None:
    problem = Problem.of_groups(96, 64, 128, 5, dtype="fp8_e4m3")
    operands = divided(problem, data.make_operands(problem, CPU, 0), RAGGED, 0)
    ends, scale_a, scale_b = operands.fused
    wanted = data.expected(problem, operands)
    group = next(index for index, end in enumerate(ends.tolist()) if end > 3)
    row = (operands.a[3].float() @ operands.b[group].float()) * scale_a[3] * scale_b[group]
    torch.testing.assert_close(wanted[3], row)
    assert operands.out.dtype == torch.bfloat16 and len(wanted) == ends[-1] == len(operands.out)
