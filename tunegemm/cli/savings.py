"""What tuning a program's products saves, as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from tunegemm.report.text import clean, significant

if TYPE_CHECKING:
    from tunegemm.tuning.program import Standing

#: Entries of a file that are named when they cannot be tuned; the others are counted.
_NAMED = 5


def progress_line(standing: Standing, done: int, of: int) -> str:
    """``[3/12] 512x6144x4096 bf16 tn x 640 · quick · 35.50 -> 33.90 us, 1.047 x torch.mm · ...``."""
    result = standing.result
    assert result is not None
    parts = [f"[{done}/{of}] {standing.demand.problem} x {standing.demand.calls}", str(standing.effort)]
    if standing.after_us is not None:
        ratio = standing.before_us / standing.after_us
        before, after = significant(standing.before_us), significant(standing.after_us)
        parts.append(f"{before} -> {after} us, {ratio:.3f} x torch.mm")
        parts.append(f"saves {seconds(standing.saving_s)}")
    else:
        parts.append(result.note or "nothing could be timed")
    return " · ".join([*parts, f"{result.seconds:.0f} s"])


def savings_table(standings: Sequence[Standing]) -> Table:
    """Each product by what it saves, then by what it costs; those that the budget did not reach, too."""
    whole = sum(standing.total_s for standing in standings)
    table = Table(title="Products of the program", title_justify="left")
    for heading in ("product", "calls", "% of time", "torch us", "tuned us", "ratio", "saves", "effort"):
        table.add_column(heading, justify="left" if heading in ("product", "effort") else "right")
    for standing in sorted(standings, key=lambda s: (-s.saving_s, -s.total_s, str(s.demand.problem))):
        after = standing.after_us
        origin = "" if after is not None or standing.demand.call_us is not None else "~"
        table.add_row(
            Text(clean(standing.demand.problem)),
            str(standing.demand.calls),
            f"{100 * standing.total_s / whole:.1f}" if whole else "",
            f"{origin}{significant(standing.before_us)}" if standing.before_us else "",
            significant(after) if after is not None else "",
            f"{standing.before_us / after:.3f}" if after else "",
            seconds(standing.saving_s) if after is not None else "",
            standing.effort or "not reached",
        )
    return table


def closing_lines(standings: Sequence[Standing], refused: Sequence[str]) -> list[str]:
    """The sum, where the times come from, and what was left out."""
    lines = []
    timed = [standing for standing in standings if standing.after_us is not None]
    whole, saved = sum(s.total_s for s in standings), sum(s.saving_s for s in timed)
    if timed:
        where = {s.result.source for s in timed if s.result is not None}
        origin = "replayed, not measured here; nothing stored" if where == {"replayed"} else "measured here"
        lines.append(
            f"Expected saving: {seconds(saved)} of {seconds(whole)} that torch needs for these products "
            f"({100 * saved / whole:.1f} %); times {origin}."
        )
    if any(s.after_us is None and s.demand.call_us is None for s in standings):
        lines.append("~ estimated from the roofline, for want of a time on a GPU.")
    lines += [f"Left out: {reason}" for reason in refused[:_NAMED]]
    if len(refused) > _NAMED:
        lines.append(f"Left out: {len(refused) - _NAMED} more.")
    return lines


def seconds(value: float) -> str:
    """A time in the unit that suits it."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms")):
        if value >= factor:
            return f"{value / factor:.2f} {unit}"
    return f"{value * 1e6:.1f} us"
