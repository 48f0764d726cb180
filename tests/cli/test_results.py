"""What a tuning's end says, in whole lines."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from tests.tuning.test_progress import OURS, result
from tunegemm.cli import results
from tunegemm.cli.tune import show
from tunegemm.cli.tune_options import Output
from tunegemm.describe.problem import Problem
from tunegemm.describe.workload import Demand
from tunegemm.generate.cublaslt import TORCH_MM
from tunegemm.measure.outcome import Failure, Measurement
from tunegemm.tuning.program import TunedDemand
from tunegemm.tuning.tuner import open_device

PROBLEM = Problem.parse("512x6144x4096")
LOST = Measurement(TORCH_MM, (10.0,) * 8, (10.0,) * 8, 0.0, 0.0)


def test_seconds_have_the_unit_that_suits() -> None:
    times = (0.0, 0.9994e-3, 1e-3, 0.999, 1.0, 90.0)
    assert list(map(results.seconds, times)) == [
        "0.0 us", "999.4 us", "1.00 ms", "999.00 ms", "1.00 s", "90.00 s"
    ]  # fmt: skip


def test_failures_are_counted_by_stage_with_the_first_reason() -> None:
    failures = tuple(
        Failure(OURS.with_launch(swizzle_size=number), stage, reason)  # type: ignore[arg-type]
        for number, (stage, reason) in enumerate((("launch", "a"), ("compile", "b"), ("launch", "c")))
    )
    found = result(outcomes=(LOST, *failures))
    assert results.failure_line(found) == "Failed: launch 2 (a); compile 1 (b)"
    assert len(results.each_failure(found)) == 3 and results.each_failure(found)[1].endswith(": compile: b")
    assert results.failure_line(result(outcomes=(LOST,))) == ""


def test_a_quiet_line_without_a_winner_has_the_reason_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    session: Any = SimpleNamespace(output=Output(quiet=True), database=None)
    show(session, result(best=None, outcomes=(Failure(OURS, "compile", "no ptxas"),)))
    said = capsys.readouterr()
    assert said.err == "tunegemm: Failed: compile 1 (no ptxas)\n" and said.out.count("\n") == 1
    show(session, result())
    assert not capsys.readouterr().err, "there is a winner"


def test_what_a_model_ranks_has_the_figure_of_its_record(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("TUNEGEMM_DB", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, str(tmp_path) if name == "XDG_DATA_HOME" else "")
    ranked = SimpleNamespace(candidate=OURS, total_us=9.0)

    def said(shape: str) -> str:
        changes: dict[str, Any] = {"problem": Problem.parse(shape), "best": None, "predictions": (ranked,)}
        changes["device"] = open_device("replay:h200")
        return results.verdict_line(result(**changes), "").partition("compiled.")[2]

    faster = " Its record on NVIDIA H200: 1.101 x torch.mm by co256x192x64 s3 c1x2 e64 rm w8 gpc all."
    assert said("1024x6144x4096") == faster
    assert said("1024x4096x14336") == " Its record on NVIDIA H200: torch.mm."
    assert said("1000x1000x1000") == ""


def test_verdicts_of_what_was_not_measured() -> None:
    def verdict(**changes: Any) -> str:
        return results.verdict_line(result(**changes), "t.sqlite")

    assert verdict(best=None, outcomes=()) == ""
    assert verdict(best=None) == (
        "No candidate for 512x6144x4096 bf16 tn could be used, after 1.5 s: see `tunegemm doctor`."
    )
    ranked = SimpleNamespace(candidate=OURS, total_us=9.0)
    assert verdict(best=None, predictions=(ranked,), compiled=2) == (
        "512x6144x4096 bf16 tn: pp64 <w4> is first (a model's ranking, no measurement; nothing stored). "
        "1.5 s, 2 kernels compiled."
    )
    groups = Problem.parse("512x512x512", groups=4)
    assert verdict(problem=groups, best=LOST, outcomes=(LOST,)) == (
        f"{groups}: no kernel was measured, so nothing changes; give a larger --budget. 1.5 s."
    )
    at_noise = Measurement(OURS, (10.0,) * 8, (12.5,) * 8, 0.0, 0.25)
    assert "within the noise" not in verdict(best=at_noise)
    assert "within the noise" in verdict(best=replace(at_noise, noise=0.26))


@pytest.mark.parametrize(
    ("took_s", "budget_s", "said"),
    [(1.5, None, ""), (11.0, 10.0, ""), (11.5, 10.0, "2 s over the budget: "), (9.0, 10.0, "")],
)
def test_a_tuning_over_its_budget_says_so(
    took_s: float, budget_s: float | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    console = Console(file=io.StringIO(), width=120)
    results.show(console, result(seconds=took_s, note="it was short"), None, "t.sqlite", budget_s)
    first, failed, verdict = capsys.readouterr().out.splitlines()
    assert first.startswith("Note: it was short.") and (said in first if said else first.endswith("short."))
    assert failed == "Failed: launch 1 (no)" and verdict.startswith("512x6144x4096 bf16 tn: pp64 <w4> wins")
    results.show(console, result(interrupted=True), None, "t.sqlite", None)
    assert capsys.readouterr().out == "Failed: launch 1 (no)\n"
    results.show(console, result(outcomes=(LOST,)), None, "t.sqlite", None)
    assert capsys.readouterr().out.count("\n") == 1


def test_the_table_of_a_tuning_says_where_its_times_are_from_and_what_it_leaves_out() -> None:
    measured = results.candidates_table(result(), 1, 120)
    assert cells(measured) == [["1.200"], ["10.00"], ["12.00"], ["2577.0"], ["pp64 <w4>"]]
    said = "Measured on NVIDIA H200. Ratios of the final race come first; "
    assert str(measured.caption).startswith(said) and str(measured.caption).endswith(" Rows not shown: 1.")
    replayed = results.candidates_table(result(source="replayed"), None, 120)
    assert replayed.row_count == 2 and "not shown" not in str(replayed.caption)
    assert str(replayed.caption).startswith("Replayed from a recording of NVIDIA H200; nothing was measured")
    ranked = SimpleNamespace(candidate=OURS, total_us=9.0)
    modelled = results.candidates_table(result(source="modelled", predictions=(ranked,)), 9, 120)
    assert cells(modelled) == [["9.00"], ["pp64 <w4>"]], "no figure that could pass for a measurement"
    assert str(modelled.caption) == (
        "Ranked by a model of NVIDIA H200; nothing was timed, and a model only ranks."
    )
    assert results.candidates_table(result(best=None, outcomes=()), 9, 120).row_count == 0


def test_figures_of_a_measurement_in_json() -> None:
    device = result().device
    found = results.measurement_figures(LOST, PROBLEM, device)
    assert found["tflops"] == pytest.approx(2 * 512 * 6144 * 4096 / 10e-6 / 1e12)
    assert found["percent_of_roofline"] == pytest.approx(100 * device.roofline_us(PROBLEM) / 10)
    assert (found["ratio"], found["baseline_median_us"]) == (1.0, 10.0)
    unknown = replace(device, peak_tflops=0.0)
    assert results.measurement_figures(LOST, PROBLEM, unknown)["percent_of_roofline"] is None


def tuned(calls: int, us: float | None = None, **changes: Any) -> TunedDemand:
    facts: dict[str, Any] = {"floor_us": 8.0, "effort": "quick", "result": result()} | changes
    return TunedDemand(Demand(facts.pop("problem", PROBLEM), calls, us), **facts)


def cells(table: Any) -> list[list[str]]:
    return [[str(cell) for cell in column.cells] for column in table.columns]


def test_a_programs_products_by_what_they_save() -> None:
    other, small = Problem.parse("64x64x64"), Problem.parse("8x8x8")
    waiting = tuned(10, 20.0, problem=other, effort=None, result=None)
    guessed = tuned(1, problem=small, effort=None, result=None)
    demands = [guessed, waiting, tuned(100)]
    table = cells(results.savings_table(demands))
    assert table[0] == ["512x6144x4096 bf16 tn", "64x64x64 bf16 tn", "8x8x8 bf16 tn"]
    assert table[1] == ["100", "10", "1"]
    whole = sum(each.total_s for each in demands)
    assert table[2] == [f"{100 * each.total_s / whole:.1f}" for each in (demands[2], waiting, guessed)]
    assert table[3][:2] == ["12.00", "20.00"] and table[3][2].startswith("~")
    assert table[4:] == [
        ["10.00", "", ""], ["1.200", "", ""], ["200.0 us", "", ""], ["quick", "not reached", "not reached"]
    ]  # fmt: skip
    lines = results.closing_lines(demands, [f"reason {number}" for number in range(6)])
    saved = f"{100 * 200e-6 / whole:.1f} %"
    assert lines[0].startswith("Expected saving: 200.0 us of 1.4") and saved in lines[0]
    assert lines[0].endswith("times measured here.")
    assert lines[1] == "~ estimated from the roofline: no GPU timed it."
    assert lines[2:] == [*(f"Left out: reason {number}" for number in range(5)), "Left out: 1 more."]
    replayed = results.closing_lines([tuned(100, result=result(source="replayed"))], ["x"] * 5)
    assert replayed[0].endswith("times replayed, not measured here; nothing stored.")
    assert replayed[1:] == ["Left out: x"] * 5
    assert results.closing_lines([waiting], []) == []


def test_a_line_for_each_product_of_a_program() -> None:
    assert results.progress_line(tuned(640), 3, 12) == (
        "[3/12] 512x6144x4096 bf16 tn x 640 · quick · 12.00 -> 10.00 us, 1.200 x torch.mm · "
        "saves 1.28 ms · 2 s"
    )
    for note, said in (("", "nothing could be timed"), ("no GPU", "no GPU")):
        line = results.progress_line(tuned(2, result=result(best=None, note=note)), 1, 1)
        assert line == f"[1/1] 512x6144x4096 bf16 tn x 2 · quick · {said} · 2 s"
