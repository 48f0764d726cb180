"""Prints a tuning's result: a table and a verdict, a line, or a JSON document; for a program's products, the
savings.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tunegemm.cli import printing
from tunegemm.describe.served import seconds
from tunegemm.describe.stored import document_of
from tunegemm.report.text import counted, fitted, significant

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from tunegemm.describe.device import Device
    from tunegemm.describe.problem import Problem
    from tunegemm.describe.space import Candidate
    from tunegemm.measure.outcome import Outcome
    from tunegemm.tuning.program import TunedDemand
    from tunegemm.tuning.progress import TuneResult


def show(console: Console, result: TuneResult, top: int | None, where: str, budget_s: float | None) -> None:
    """Prints the table of one tuning, its failures, and how to use the winner.

    top: rows of the table; None for all. where: what stores the winner. budget_s: requested time limit.
    """
    table = candidates_table(result, top, console.width)
    if table.row_count:
        console.print(table)
    note = f"Note: {result.note}." if result.note and not result.predictions else ""
    over_s = result.seconds - (budget_s or result.seconds)
    if over_s > 1:
        note += f" {over_s:.0f} s over the budget: running compiles and the final race are not cut short."
    closing = [note.strip(), failure_line(result), verdict_line(result, where)]
    printing.say(*filter(None, [failure_line(result)] if result.interrupted else closing))


#: Where times are from, for the device's name.
_ORIGINS = {
    "measured": "Measured on {}.",
    "replayed": "Replayed from a recording of {}; nothing was measured here.",
    "modelled": "Ranked by a model of {}; nothing was timed, and a model only ranks.",
}


def candidates_table(result: TuneResult, top: int | None, width: int) -> Table:
    """What was measured or replayed; without that the model's order of the kernels that were compiled."""
    from tunegemm.tuning.progress import cells_of

    headings, *rows = cells_of(result)
    note = _ORIGINS[result.source].format(result.device.name)
    if not result.predictions:
        note += " Ratios of the final race come first; times are at the clock of the first row's race."
        note += (
            " = marks ties with the first: closer than the noise."
            if any("=" in row[0] for row in rows)
            else ""
        )
    if hidden := len(rows[top:]) if top is not None else 0:
        note += f" Rows not shown: {hidden}."
    title = f"{result.problem} on {result.device.name}"
    return fitted(title, headings, rows[:top], {"kernel": 36}, width=width, caption=note)


def each_failure(result: TuneResult) -> list[str]:
    """A line for each candidate that failed."""
    from tunegemm.measure.outcome import Failure

    failures = [outcome for outcome in result.outcomes if isinstance(outcome, Failure)]
    return [
        f"Failed: {result.label(failure.candidate)}: {failure.stage}: {failure.reason}"
        for failure in failures
    ]


def failure_line(result: TuneResult) -> str:
    """How many candidates failed at which stage, with the first reason of each; empty if none failed."""
    from tunegemm.measure.outcome import Failure

    failures = [outcome for outcome in result.outcomes if isinstance(outcome, Failure)]
    counts = Counter(failure.stage for failure in failures)
    reasons = {failure.stage: failure.reason for failure in reversed(failures)}
    parts = [f"{stage} {count} ({reasons[stage]})" for stage, count in counts.items()]
    return f"Failed: {'; '.join(parts)}" if parts else ""


def verdict_line(result: TuneResult, where: str) -> str:
    """The winner, its margin, and the kernel that `matmul` calls from now on; empty if nothing was tried."""
    from tunegemm.choose.selection import WAITS
    from tunegemm.generate.cublaslt import is_torch
    from tunegemm.tuning.run import measured_kernels

    problem, best, seconds = result.problem, result.best, f"{result.seconds:.1f} s"
    torchs, ours = problem.torch_call, problem.our_call if problem.groups else "matmul(a, b)"
    if best is None and not result.predictions:
        if not result.outcomes:
            return ""
        return f"No candidate for {problem} could be used, after {seconds}: see `tunegemm doctor`."
    if best is None:
        first = result.predictions[0].candidate
        return (
            f"{problem}: {result.label(first)} is first (a model's ranking, no measurement; nothing stored). "
            f"{seconds}, {counted(result.compiled, 'kernel')} compiled.{record_line(result)}"
        )
    if problem.groups and not measured_kernels(result.outcomes):
        return f"{problem}: no kernel was measured, so nothing changes; give a larger --budget. {seconds}."
    if problem.groups and is_torch(best.candidate) and problem.in_dtype in WAITS:
        why = f"{torchs} per group is the fastest, or ties with the best kernel"
        return (
            f"{problem}: {why}; nothing changes, because torch's call also waits for the device. {seconds}."
        )
    if is_torch(best.candidate):
        won = f"{torchs} is the fastest, or ties with the best kernel"
    else:
        times = f"{significant(best.median_us)} us, {torchs} {significant(best.baseline_median_us)} us"
        won = f"{result.label(best.candidate)} wins, {best.ratio:.3f} x {torchs}"
        won += f" ({times})" if best.baseline_us else ""
        won += ", which is within the noise" if best.ratio < 1 + best.noise else ""
    if result.source == "measured":
        calls = f"calls {torchs}" if is_torch(best.candidate) else "uses this kernel"
        use = f"tunegemm.{ours} now {calls} for {problem} (from {where})"
        return f"{problem}: {won}; {use}. {seconds}, {counted(result.compiled, 'kernel')} compiled."
    lead = steady_line(result)
    won = f"In this replay, where all kernels share one clock, {won}" if lead else won
    return (
        f"{problem}: {lead}{won}; replayed, not measured here; nothing stored. "
        f"{seconds}, {counted(result.compiled, 'kernel')} compiled."
    )


def steady_line(result: TuneResult) -> str:
    """The record of a replayed product, if its final race ran in steady state; else empty.

    A recorded sweep has times at one shared clock. What a program gains is the steady figure.
    """
    from tunegemm.choose.snapshot import read_snapshot
    from tunegemm.report.contents import steady_record

    if (record := steady_record(read_snapshot(), result.problem, result.device)) is None:
        return ""
    return (
        f"{record.ratio:.3f} x {result.problem.torch_call} in steady state, each kernel at its own clocks "
        f"(final race of {record.measured_at:%Y-%m-%d}: {record.label}, {significant(record.median_us)} us). "
    )


def record_line(result: TuneResult) -> str:
    """The stored record of a product that a model ranks; empty if there is none."""
    from tunegemm.choose.snapshot import read_snapshot

    if (record := read_snapshot().find(result.problem, result.device.fingerprint)) is None:
        return ""
    faster = f"{record.ratio:.3f} x {result.problem.torch_call} by {record.label}"
    return f" Its record on {result.device.name}: {record.label if record.is_torch else faster}."


def interruption(results: Sequence[TuneResult]) -> str:
    """The results that interrupted tunings kept."""
    from tunegemm.measure.outcome import Measurement

    measured = {
        (result.problem, outcome.candidate)
        for result in results
        for outcome in result.outcomes
        if isinstance(outcome, Measurement) and result.source == "measured"
    }
    return f"Interrupted: {counted(len(measured), 'measured candidate')} kept."


def document(result: TuneResult) -> dict[str, Any]:
    """One tuning as JSON: the best result, every outcome, and the source of the times."""
    from tunegemm.measure.outcome import Measurement

    def named(candidate: Candidate) -> dict[str, Any]:
        facts = {"candidate": json.loads(candidate.to_json()), "digest": candidate.digest}
        return {"label": result.label(candidate)} | facts

    def outcome_document(outcome: Outcome) -> dict[str, Any]:
        if isinstance(outcome, Measurement):
            return named(outcome.candidate) | measurement_figures(outcome, result.problem, result.device)
        return named(outcome.candidate) | {"failed": outcome.stage, "reason": outcome.reason}

    names = ("source", "seconds", "compiled", "interrupted", "note")
    return {name: getattr(result, name) for name in names} | {
        "problem": document_of(result.problem),
        "shape": result.problem.shape,
        "device": result.device.spec,
        "device_name": result.device.name,
        "best": outcome_document(result.best) if result.best is not None else None,
        "predictions": [
            named(prediction.candidate) | {"predicted_us": prediction.total_us, "bound": prediction.bound}
            for prediction in result.predictions
        ],
        "outcomes": [
            outcome_document(outcome) | {"tuning_stage": stage}
            for outcome, stage in itertools.zip_longest(result.outcomes, result.stages)
        ],
    }


def measurement_figures(measurement: Any, problem: Problem, device: Device) -> dict[str, float | None]:
    """The figures of one measurement; None or NaN for those that a replay or a model lacks."""
    floor = device.roofline_us(problem)
    names = ("median_us", "baseline_median_us", "ratio", "spread", "relative_error", "noise")
    figures = {name: getattr(measurement, name) for name in names}
    if not measurement.baseline_us:
        figures |= {"baseline_median_us": None, "ratio": None}
    figures["tflops"] = problem.flops / measurement.median_us * 1e-6
    return figures | {"percent_of_roofline": 100 * floor / measurement.median_us if floor else None}


#: Rejected entries of a file to name; the others are only counted.
_NAMED = 5

_HEADINGS = ("product", "calls", "% of time", "torch us", "tuned us", "ratio", "saves", "effort")
#: Columns that a narrow terminal omits, in this order.
_DISPENSABLE = ("effort", "tuned us")


def progress_line(tuned: TunedDemand, done: int, of: int) -> str:
    """``[3/12] 512x6144x4096 bf16 tn x 640 · quick · 35.50 -> 33.90 us, 1.047 x torch.mm · ...``."""
    result = tuned.result
    assert result is not None
    parts = [f"[{done}/{of}] {tuned.demand.problem} x {tuned.demand.calls}", str(tuned.effort)]
    if tuned.after_us is not None:
        ratio = tuned.before_us / tuned.after_us
        before, after = significant(tuned.before_us), significant(tuned.after_us)
        parts.append(f"{before} -> {after} us, {ratio:.3f} x {result.problem.torch_call}")
        parts.append(f"saves {seconds(tuned.saving_s)}")
    else:
        parts.append(result.note or "nothing could be timed")
    return " · ".join([*parts, f"{result.seconds:.0f} s"])


def savings_table(demands: Sequence[TunedDemand], width: int = 160) -> Table:
    """Each product by its saving, then by its cost, including those that the budget did not reach.

    width: of the terminal, in characters.
    """
    whole = sum(tuned.total_s for tuned in demands)
    rows = []
    for tuned in sorted(demands, key=lambda s: (-s.saving_s, -s.total_s, str(s.demand.problem))):
        after = tuned.after_us
        origin = "" if after is not None or tuned.demand.call_us is not None else "~"
        row = (
            str(tuned.demand.problem),
            str(tuned.demand.calls),
            f"{100 * tuned.total_s / whole:.1f}" if whole else "",
            f"{origin}{significant(tuned.before_us)}" if tuned.before_us else "",
            significant(after) if after is not None else "",
            f"{tuned.before_us / after:.3f}" if after else "",
            seconds(tuned.saving_s) if after is not None else "",
            tuned.effort or "not reached",
        )
        rows.append(row)
    words = {"product": max((len(word) for row in rows for word in row[0].split()), default=0), "effort": 999}
    return fitted("Products of the program", _HEADINGS, rows, words, dispensable=_DISPENSABLE, width=width)


def closing_lines(demands: Sequence[TunedDemand], refused: Sequence[str]) -> list[str]:
    """The total, the source of the times, and the skipped entries."""
    lines = []
    timed = [tuned for tuned in demands if tuned.after_us is not None]
    whole, saved = sum(s.total_s for s in demands), sum(s.saving_s for s in timed)
    if timed:
        where = {s.result.source for s in timed if s.result is not None}
        origin = "replayed, not measured here; nothing stored" if where == {"replayed"} else "measured here"
        lines.append(
            f"Expected saving: {seconds(saved)} of {seconds(whole)} that torch needs for these products "
            f"({100 * saved / whole:.1f} %); times {origin}."
        )
    if any(s.after_us is None and s.demand.call_us is None for s in demands):
        lines.append("~ estimated from the roofline: no GPU timed it.")
    return lines + left_out(refused)


def left_out(reasons: Sequence[str]) -> list[str]:
    """A line for each of the first entries of a file that cannot be tuned, and one for the others."""
    lines = [f"Left out: {reason}" for reason in reasons[:_NAMED]]
    return lines + [f"Left out: {len(reasons) - _NAMED} more."] * (len(reasons) > _NAMED)
