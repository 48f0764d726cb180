"""What a tuning prints, in Python and in a notebook. Its figures are the tests'."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import tunegemm
from tunegemm import Candidate
from tunegemm.cli.results import candidates_table
from tunegemm.describe.device import find_device
from tunegemm.describe.problem import Problem
from tunegemm.errors import ProblemError, TunegemmError
from tunegemm.generate.cublaslt import TORCH_MM
from tunegemm.measure.outcome import Failure, Measurement
from tunegemm.tuning import tuner
from tunegemm.tuning.progress import Progress, TuneResult, bar, cells_of
from tunegemm.tuning.tuner import as_problem

OURS = Candidate.make("cute_sm90", {"tile_m": 64, "schedule": "pingpong"}, {"swizzle_size": 4})


def result(**changes: object) -> TuneResult:
    """A win by 1.2 over torch.mm, which was measured as a candidate, too, and a failure."""
    best = Measurement(OURS, (10.0,) * 8, (12.0,) * 8, 0.0, 0.002)
    mm = Measurement(TORCH_MM, (12.1,) * 8, (12.0,) * 8, 0.0, 0.002)
    failed = Failure(OURS.with_launch(swizzle_size=1), "launch", "no")
    facts: dict[str, object] = {
        "problem": Problem.parse("512x6144x4096"), "device": find_device("model:h200"), "source": "measured",
        "best": best, "outcomes": (mm, best, failed), "predictions": (), "seconds": 1.5, "compiled": 1,
        "labels": {OURS.digest: "pp64 <w4>", TORCH_MM.digest: "torch.mm"},
    }  # fmt: skip
    return TuneResult(**(facts | changes))  # type: ignore[arg-type]


def test_a_result_prints_as_a_short_table_and_its_winner_can_be_pasted() -> None:
    title, head, first, second, winner = str(result()).splitlines()
    assert title == "512x6144x4096 bf16 tn on NVIDIA H200, measured, 1.5 s"
    assert head.split() == ["x", "torch.mm", "us", "torch.mm", "us", "TFLOP/s", "kernel"]
    assert first.split() == ["1.200", "10.00", "12.00", "2577.0", "pp64", "<w4>"]
    assert second.split() == ["1.000", "12.00", "12.00", "2147.5", "torch.mm"]
    assert eval(winner, {"Candidate": Candidate}) == OURS
    assert repr(result()).count("\n") == 0 and "1.200 x torch.mm by pp64 <w4>" in repr(result())
    assert "no result" in repr(result(best=None, outcomes=()))


def test_the_winner_has_the_figures_that_it_is_reported_with() -> None:
    """Those of the rounds that did not choose it, in the table as in the verdict."""
    chosen = Measurement(OURS, (10.0,) * 8, (13.0,) * 8, 0.0, 0.002)
    (label, first), *_ = result(outcomes=(chosen,)).rows()
    assert label == "pp64 <w4>" and first.ratio == pytest.approx(1.2)
    assert "1.200" in str(result(outcomes=(chosen,))) and "1.300" not in str(result(outcomes=(chosen,)))


def test_times_are_at_the_clock_of_the_winners_race() -> None:
    """Another race ran at a higher clock, where the slower kernel took less time than the winner."""
    slower = Measurement(OURS.with_launch(swizzle_size=1), (9.0,) * 8, (9.9,) * 8, 0.0, 0.002)
    lines = str(result(outcomes=(*result().outcomes, slower))).splitlines()
    rows = [line.split()[:3] for line in lines[2:5]]
    assert rows == [["1.200", "10.00", "12.00"], ["1.100", "10.91", "12.00"], ["1.000", "12.00", "12.00"]]


def test_what_the_final_race_timed_comes_before_what_was_only_screened() -> None:
    """Ratios of a screen and of a race do not compare."""
    screened = Measurement(OURS.with_launch(swizzle_size=1), (8.0,) * 8, (12.0,) * 8, 0.0, 0.002)
    mm, best, _ = result().outcomes
    stages = ("screen", "screen", "final", "final")
    rows = result(outcomes=(screened, best, mm, best), stages=stages).rows()
    assert [measurement for _, measurement in rows] == [best, mm, screened]


def test_what_ties_with_the_winner_is_marked() -> None:
    """The winner is the cheapest of those that tie, and may be the slower one of the rounds shown."""
    best = Measurement(OURS, (10.0,) * 8, (12.0,) * 8, 0.0, 0.002)
    faster = Measurement(OURS.with_launch(swizzle_size=1), (9.98,) * 8, (12.0,) * 8, 0.0, 0.002)
    slower = Measurement(OURS.with_launch(swizzle_size=2), (10.5,) * 8, (12.0,) * 8, 0.0, 0.002)
    found = result(best=best, outcomes=(faster, slower, best), stages=("final",) * 3)
    assert [row[0] for row in cells_of(found)[1:]] == ["1.200", "1.202=", "1.143"]
    caption = str(candidates_table(found, None, 100).caption)
    assert "= marks ties" in caption
    assert "= marks ties" not in str(candidates_table(result(), None, 100).caption)


def test_in_a_notebook_it_is_a_table_in_which_nothing_is_markup() -> None:
    page = result(note="a <b>")._repr_html_()
    assert page.startswith("<table>") and "<td>1.200</td>" in page
    assert "pp64 &lt;w4&gt;" in page and "a &lt;b&gt;" in page


def test_a_candidate_is_made_again_by_what_it_prints() -> None:
    for one in (OURS, OURS.kernel, TORCH_MM):
        assert eval(repr(one), {"Candidate": Candidate}) == one
    operation = tunegemm.Operation(Problem.parse("64x64x64"), OURS, "model:h200")
    names = {"Operation": tunegemm.Operation, "Problem": Problem, "Candidate": Candidate}
    again = eval(repr(operation), names)
    assert (again.problem, again.candidate, again.device) == (
        operation.problem, operation.candidate, operation.device,
    )  # fmt: skip


def test_the_bar_tells_the_callback_too(capsys: pytest.CaptureFixture[str]) -> None:
    told: list[Progress] = []
    progress = Progress(
        Problem.parse("64x64x64"), "screen", 10, 2, 0, 1, 3, 4, {"launch": 1}, "pp", 1.0, 1.25, 2.0
    )
    with bar(told.append) as callback:
        callback(progress)
    assert told == [progress]
    assert "64x64x64 bf16 tn screen" in (said := capsys.readouterr().err) and "1.250 x torch.mm" in said


@pytest.mark.usefixtures("tuning_pool")
def test_tune_takes_extents_a_torch_device_and_names_the_nearest_keyword() -> None:
    import torch

    told: list[Progress] = []
    found = tunegemm.tune(
        (64, 64, 64), device="model:h200", trials=1, families=["skinny"], callback=told.append
    )
    assert found.problem == Problem.parse("64x64x64") and told
    assert {one.candidate.family for one in found.predictions} <= {"skinny"}
    with pytest.raises(TunegemmError, match="cpu"):
        tunegemm.tune((64, 64, 64), device=torch.device("cpu"))
    with pytest.raises(ProblemError, match=r"give a Problem, \(m, n, k\)"):
        tunegemm.tune((64, 64, "64"))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="has no argument 'budget'; did you mean budget_seconds"):
        tunegemm.tune("64x64x64", budget=3)  # type: ignore[call-arg]
    with pytest.raises(TunegemmError, match="did you mean epilogue"):
        tunegemm.explain(torch.ones(8, 8), torch.ones(8, 8), epilog="relu")  # type: ignore[call-arg]


def test_mm_is_torchs_where_nothing_is_tuned() -> None:
    import torch

    a = torch.arange(12.0).reshape(3, 4)
    assert torch.equal(tunegemm.mm(a, a.t()), torch.mm(a, a.t()))
    with pytest.raises(RuntimeError, match=r"2D|matrices|matrix"):
        tunegemm.mm(a[None], a.t())
    assert issubclass(tunegemm.TunegemmWarning, UserWarning)


def test_a_bar_moves_by_what_was_measured_and_is_drawn_anew_at_each_stage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[Any] = []

    class Bar:
        n = total = 0

        def __init__(self, **_: object) -> None:
            pass

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def set_description(self, text: str, refresh: bool) -> None:
            said.append(text)

        def set_postfix_str(self, text: str, refresh: bool) -> None:
            said.append(text)

        def update(self, count: int) -> None:
            self.n += count
            said.append((self.n, self.total))

        def refresh(self) -> None:
            said.append("drawn")

    monkeypatch.setattr("tqdm.auto.tqdm", Bar)
    problem = Problem.parse("64x64x64")

    def news(stage: str, measured: int, failed: int, planned: int, ratio: float | None = None) -> Any:
        return SimpleNamespace(
            problem=problem, stage=stage, measured=measured, failures={"load": failed}, planned=planned,
            best_ratio=ratio,
        )  # fmt: skip

    told: list[Any] = []
    with bar(told.append) as report:
        for each in (news("screen", 0, 0, 0), news("screen", 2, 1, 4, 1.25), news("final", 5, 1, 4, 1.25)):
            report(each)
    assert said == [
        f"{problem} screen", "", (0, 1), "drawn", f"{problem} screen", "best 1.250 x torch.mm", (3, 4),
        f"{problem} final", "best 1.250 x torch.mm", (4, 4), "drawn",
    ]  # fmt: skip
    assert [each.measured for each in told] == [0, 2, 5]
    with bar() as report:
        report(news("done", 1, 0, 1))


@pytest.mark.parametrize(
    ("given", "shape"),
    [((4, 5, 6), "4x5x6"), ([4, 5, 6, 7], "4x5x6x7"), ("4x5x6", "4x5x6"), (Problem(4, 5, 6), "4x5x6"),
     ((4, 5.0, 6), None), ({4, 5}, None), (4, None), ((True, 5, 6), None)],
)  # fmt: skip
def test_a_problem_by_its_extents(given: Any, shape: str | None) -> None:
    if shape is None:
        with pytest.raises(ProblemError, match="give a Problem, "):
            as_problem(given)
    else:
        assert as_problem(given).shape == shape


@pytest.mark.parametrize(
    ("spec", "gpus", "found"),
    [(None, 0, "replay:h200"), (None, 1, "cuda:0"), ("model:h200", 0, "model:h200"), (7, 0, None)],
)
def test_a_device_by_its_name_or_what_is_here(
    monkeypatch: pytest.MonkeyPatch, spec: Any, gpus: int, found: str | None
) -> None:
    monkeypatch.setattr(tuner, "cuda_device_count", lambda: gpus)
    monkeypatch.setattr(tuner, "find_device", lambda spec: spec)
    if found is None:
        with pytest.raises(TunegemmError, match=r"give a tunegemm\.Device"):
            tuner.open_device(spec)
        return
    device: Any = tuner.open_device(spec)
    assert getattr(device, "spec", device) == found
    for name in (None, "cuda:0", "cuda"):
        if gpus:
            assert tuner.open_gpu(name) == (name or "cuda:0")  # type: ignore[comparison-overlap]
        else:
            with pytest.raises(TunegemmError, match="no CUDA device here"):
                tuner.open_gpu(name)
    for name in ("replay:h200", "model:h200"):
        with pytest.raises(TunegemmError, match="measures nothing"):
            tuner.open_gpu(name)
