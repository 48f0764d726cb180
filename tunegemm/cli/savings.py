"""What tuning a program's products saves, as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from tunegemm.report.text import clean, significant

if TYPE_CHECKING:
    from tunegemm.tuning.program import TunedDemand

#: Entries of a file that are named when they cannot be tuned; the others are counted.
_NAMED = 5

_HEADINGS = ("product", "calls", "% of time", "torch us", "tuned us", "ratio", "saves", "effort")
#: What a narrow terminal goes without, in this order.
_DISPENSABLE = ("effort", "tuned us")


def progress_line(tuned: TunedDemand, done: int, of: int) -> str:
    """``[3/12] 512x6144x4096 bf16 tn x 640 · quick · 35.50 -> 33.90 us, 1.047 x torch.mm · ...``."""
    result = tuned.result
    assert result is not None
    parts = [f"[{done}/{of}] {tuned.demand.problem} x {tuned.demand.calls}", str(tuned.effort)]
    if tuned.after_us is not None:
        ratio = tuned.before_us / tuned.after_us
        before, after = significant(tuned.before_us), significant(tuned.after_us)
        parts.append(f"{before} -> {after} us, {ratio:.3f} x torch.mm")
        parts.append(f"saves {seconds(tuned.saving_s)}")
    else:
        parts.append(result.note or "nothing could be timed")
    return " · ".join([*parts, f"{result.seconds:.0f} s"])


def savings_table(demands: Sequence[TunedDemand], width: int = 160) -> Table:
    """Each product by what it saves, then by what it costs; those that the budget did not reach, too.

    width: of the terminal, in characters.
    """
    whole = sum(tuned.total_s for tuned in demands)
    columns: dict[str, list[str]] = {heading: [] for heading in _HEADINGS}
    for tuned in sorted(demands, key=lambda s: (-s.saving_s, -s.total_s, str(s.demand.problem))):
        after = tuned.after_us
        origin = "" if after is not None or tuned.demand.call_us is not None else "~"
        row = (
            clean(tuned.demand.problem),
            str(tuned.demand.calls),
            f"{100 * tuned.total_s / whole:.1f}" if whole else "",
            f"{origin}{significant(tuned.before_us)}" if tuned.before_us else "",
            significant(after) if after is not None else "",
            f"{tuned.before_us / after:.3f}" if after else "",
            seconds(tuned.saving_s) if after is not None else "",
            tuned.effort or "not reached",
        )
        for cells, cell in zip(columns.values(), row, strict=True):
            cells.append(cell)
    # Words may fold on a narrow terminal; a figure or a shape that is cut short is another.
    least = {
        heading: max(
            map(len, (*heading.split(), *(" ".join(cells).split() if heading == "product" else cells)))
        )
        for heading, cells in columns.items()
    }
    for heading in _DISPENSABLE:
        if sum(least.values()) + 3 * len(least) + 1 > width:
            del least[heading]
    table = Table(title="Products of the program", title_justify="left")
    for heading, fewest in least.items():
        if heading in ("product", "effort"):
            table.add_column(heading, min_width=fewest)
        else:
            table.add_column(heading, justify="right", width=fewest)
    for row in zip(*(columns[heading] for heading in least), strict=True):
        table.add_row(Text(row[0]), *row[1:])
    return table


def closing_lines(demands: Sequence[TunedDemand], refused: Sequence[str]) -> list[str]:
    """The sum, where the times come from, and what was left out."""
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
