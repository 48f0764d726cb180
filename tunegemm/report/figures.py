"""The figures of the HTML report that have axes, as SVG; heat maps and bars are the template's tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Literal

from tunegemm.describe.device import Device
from tunegemm.report import analysis, svg
from tunegemm.report.evidence import Details, Trial, Verdict, Winner
from tunegemm.report.leaderboard import significant

SYMBOLS: Mapping[Verdict, str] = {"faster": "\u25b2", "equal": "\u25cb", "slower": "\u25bc"}
WORDS: Mapping[Verdict, str] = {
    "faster": "faster than torch.mm", "equal": "equal within the noise", "slower": "slower than torch.mm",
}  # fmt: skip

#: Above so many records, marks of the roofline are plain dots without names: some 20 bytes each.
NAMED_MARKS = 600
_LABELLED_MARKS = 16
#: Above so many trials a dot each would only blacken the figure: every n-th is drawn.
_MOST_DOTS = 1500
_FOREST = (216, 34)

#: Where a name may stand beside its mark, best first: anchor and offset.
_PLACES: tuple[tuple[Literal["start", "middle", "end"], int, int], ...] = (
    ("start", 11, 4), ("end", -11, 4), ("start", 8, 18), ("end", -8, 18), ("start", 8, -10), ("end", -8, -10),
    ("middle", 0, 24), ("middle", 0, -16),
)  # fmt: skip


def roofline(device: Device, winners: Sequence[Winner]) -> str:
    """Throughput over arithmetic intensity, under the device's peaks where those are known."""
    width, height, left, right, top, bottom = 980, 470, 62, 24, 18, 50
    intensities = [winner.problem.arithmetic_intensity for winner in winners]
    rates = [rate for winner in winners for rate in (winner.tflops, winner.baseline_tflops)]
    peak, memory = device.peak_tflops, device.bandwidth_gbps / 1000
    ridge = peak / memory if peak else max(intensities)
    x = svg.Scale(min(*intensities, ridge) / 1.7, max(*intensities, ridge) * 1.7, left, width - right, True)
    y = svg.Scale(min(rates) / 1.6, max(*rates, peak) * 1.25, height - bottom, top, True)
    parts = []
    for tick in analysis.log_ticks(y.low, y.high):
        parts += [svg.line(left, y(tick), width - right, y(tick), "grid"),
                  svg.text(left - 8, y(tick) + 4, f"{tick:g}", anchor="end")]  # fmt: skip
    for tick in analysis.log_ticks(x.low, x.high):
        parts += [svg.line(x(tick), top, x(tick), height - bottom, "grid"),
                  svg.text(x(tick), height - bottom + 18, f"{tick:g}", anchor="middle")]  # fmt: skip
    parts.append(
        svg.text((left + width - right) / 2, height - 8, "FLOP per byte of device memory", anchor="middle")
    )
    parts.append(svg.text(left, top - 6, "TFLOP/s"))
    taken: list[tuple[float, float, float, float]] = []
    if peak:
        start = max(x.low, y.low / memory)
        parts.append(
            svg.polyline([(x(start), y(start * memory)), (x(ridge), y(peak)), (x(x.high), y(peak))], "roof")
        )
        parts.append(
            svg.text(width - right, y(peak) - 7, f"{peak:g} TFLOP/s, tensor cores", kind="name", anchor="end")
        )
        taken.append((width - right - 190, y(peak) - 20, width - right, y(peak)))
        rise = (y(peak) - y(start * memory)) / (x(ridge) - x(start)) if ridge > start else 0
        at = start * (ridge / start) ** 0.45
        angle = math.degrees(math.atan(rise))
        parts.append(
            f'<text class="name" text-anchor="middle" transform="translate({x(at):g} {y(at * memory) - 9:g}) '
            f'rotate({angle:.1f})">{memory:g} TB/s, memory</text>'
        )
    marks = [(x(w.problem.arithmetic_intensity), y(w.tflops), w) for w in winners]
    if len(winners) > NAMED_MARKS:
        for verdict in SYMBOLS:
            parts.append(
                svg.dots(((px, py) for px, py, w in marks if w.verdict == verdict), f"dots whisker {verdict}")
            )
    else:
        for row, (px, _, winner) in enumerate(marks):
            by = y(winner.baseline_tflops)
            parts.append(f'<path class="base" data-row="{row}" d="M{px - 5:g} {by:g}h10"/>')
        for row, (px, py, winner) in enumerate(marks):
            told = _told(winner)
            parts.append(svg.verdict_mark(
                px, py, winner.verdict,
                f' data-row="{row}" data-tip="{escape(told)}" role="img" aria-label="{escape(told)}"',
            ))  # fmt: skip
        taken += [(px - 8, py - 8, px + 8, py + 8) for px, py, _ in marks]
        for row, (px, py, winner) in enumerate(marks[:_LABELLED_MARKS]):
            label = _label_beside(
                px, py, winner.problem.shape, taken, (left, top, width - right, height - bottom)
            )
            parts.append(label.replace("<text", f'<text data-row="{row}"', 1))
    known = (
        f"datasheet peaks {peak:g} TFLOP/s and {memory:g} TB/s" if peak else "peaks of this device unknown"
    )
    summary = (
        f"Roofline of {device.name}: {len(winners)} records, {known}. The table above lists every value."
    )
    return (
        f'<svg viewBox="0 0 {width} {height}" role="group" aria-label="{escape(summary)}" data-marks '
        f'style="min-width:640px" width="{width}" height="{height}">{"".join(parts)}</svg>'
    )


def _told(winner: Winner) -> str:
    share = f", {winner.percent_of_roofline:.0f} % of the roofline" if winner.percent_of_roofline else ""
    return (
        f"{winner.problem}\n{winner.label}\n"
        f"{significant(winner.median_us)} \u00b5s, {winner.tflops:.0f} TFLOP/s{share}\n"
        f"{winner.ratio:.3f} \u00d7 torch.mm ({winner.low:.3f} to {winner.high:.3f}), {WORDS[winner.verdict]}"
    )


def _label_beside(
    x: float, y: float, words: str, taken: list[tuple[float, float, float, float]],
    frame: tuple[float, float, float, float],
) -> str:  # fmt: skip
    """The name of a mark where it covers neither marks nor names, or no name."""
    wide = 6.7 * len(words)
    for anchor, dx, dy in _PLACES:
        begin = x + dx - {"start": 0.0, "end": wide, "middle": wide / 2}[anchor]
        box = (begin, y + dy - 11, begin + wide, y + dy + 3)
        inside = box[0] > frame[0] and box[1] > frame[1] and box[2] < frame[2] and box[3] < frame[3]
        if inside and not any(
            box[0] < b[2] and b[0] < box[2] and box[1] < b[3] and b[1] < box[3] for b in taken
        ):
            taken.append(box)
            return svg.text(x + dx, y + dy, words, kind="name", anchor=anchor)
    return svg.text(x, y, "")


def forest_scale(winners: Sequence[Winner]) -> svg.Scale:
    """The common axis of all `forest` cells."""
    return svg.Scale(*analysis.ratio_limits(winners), 8, _FOREST[0] - 8, True)


def forest_axis(scale: svg.Scale) -> str:
    parts = []
    taken: list[float] = []
    for tick in (1.0, *analysis.linear_ticks(scale.low, scale.high, 6)):
        at = scale(tick)
        if any(abs(at - other) < 30 for other in taken):
            continue
        taken.append(at)
        parts.append(svg.text(at, 13, f"{tick:g}", anchor="middle"))
        parts.append(svg.line(at, 17, at, 22, "axis"))
    return f'<svg viewBox="0 0 {_FOREST[0]} 22" aria-hidden="true">{"".join(parts)}</svg>'


def forest(winner: Winner, scale: svg.Scale) -> str:
    """One speed-up with its interval; the band is the noise around 1."""
    middle = _FOREST[1] / 2
    noise = max(winner.noise, 0.003)
    band = scale.clamp(1 / (1 + noise)), scale.clamp(1 + noise)
    low, high, at = scale.clamp(winner.low), scale.clamp(winner.high), scale.clamp(winner.ratio)
    ends = f"M{low:g} {middle - 4:g}v8M{high:g} {middle - 4:g}v8"
    return (
        f'<svg viewBox="0 0 {_FOREST[0]} {_FOREST[1]}" aria-hidden="true">'
        f'<rect x="{band[0]:g}" width="{max(band[1] - band[0], 1):g}" height="{_FOREST[1]}" class="tie"/>'
        f"{svg.line(scale(1), 0, scale(1), _FOREST[1], 'unity')}"
        f'<path class="whisker {winner.verdict}" d="M{low:g} {middle:g}H{high:g}{ends}"/>'
        f"{svg.verdict_mark(at, middle, winner.verdict)}</svg>"
    )


def convergence(details: Details) -> str:
    """Every trial in order, and the best so far."""
    width, height, left, right, top, bottom = 520, 300, 46, 12, 20, 44
    tried = [trial for trial in details.sequence if trial.stage != "race"]
    raced = [trial for trial in details.sequence if trial.stage == "race"]
    steps = analysis.best_so_far(tried)
    best = steps[-1][1]
    low = max(0.35 * best, min(trial.ratio for trial in tried))
    low = min(low, 0.97)
    x = svg.Scale(0, len(tried) * 1.02 + len(raced) * 0 + 1, left, width - right - (18 if raced else 0))
    y = svg.Scale(low - 0.02, max(best, *(t.ratio for t in raced), 1.0) * 1.03, height - bottom, top)
    parts = []
    for tick in analysis.linear_ticks(y.low, y.high, 6):
        parts += [svg.line(left, y(tick), width - right, y(tick), "grid"),
                  svg.text(left - 7, y(tick) + 4, f"{tick:g}", anchor="end")]  # fmt: skip
    for tick in analysis.linear_ticks(0, len(tried), 6):
        if tick:
            parts.append(svg.text(x(tick), height - bottom + 18, f"{tick:.0f}", anchor="middle"))
    parts.append(svg.line(left, height - bottom, width - right, height - bottom, "axis"))
    parts.append(svg.line(left, y(1), width - right, y(1), "unity"))
    parts.append(svg.text(width - right, y(1) + 15, "torch.mm", anchor="end"))
    parts.append(svg.text((left + width - right) / 2, height - 8, "trial", anchor="middle"))
    parts.append(svg.text(left, top - 8, "speed relative to torch.mm"))
    step = max(1, math.ceil(len(tried) / _MOST_DOTS))
    numbered = list(enumerate(tried, 1))
    shown = [(n, t) for n, t in numbered if n % step == 0 and t.ratio >= low and t.stage == "search"]
    below = sum(trial.ratio < low for trial in tried)
    parts.append(svg.dots((x(n), y(t.ratio)) for n, t in shown))
    library = [(x(n), y.clamp(t.ratio)) for n, t in numbered if t.stage == "library" and t.ratio >= low]
    parts.append(svg.squares(library, "diamonds"))
    path: list[tuple[float, float]] = []
    for number, ratio in steps:
        if path:
            path.append((x(number), path[-1][1]))
        path.append((x(number), y.clamp(ratio)))
    path.append((x(len(tried)), path[-1][1]))
    parts.append(svg.polyline(path, "best"))
    if raced:
        at = width - right - 9
        parts.append(svg.diamonds((at, y.clamp(trial.ratio)) for trial in raced))
    told = (
        f"{len(tried)} trials; the best so far rises from {steps[0][1]:.3f} to {best:.3f} times torch.mm, "
        f"last at trial {steps[-1][0]}"
    )
    if below:
        parts.append(svg.text(left + 6, height - bottom - 7, f"{below} slower trials are below this figure"))
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(told)}" width="{width}" '
        f'height="{height}">{"".join(parts)}</svg>'
    )


def heat_class(ratio: float) -> str:
    """One of eight steps around torch.mm; the number stands in the cell as well."""
    for limit, kind in ((1.03, "h3"), (1.01, "h2"), (1.0, "h1"), (0.95, "h-1"), (0.85, "h-2"), (0.7, "h-3")):
        if ratio >= limit:
            return kind
    return "h-4"


def trial_told(trial: Trial) -> str:
    return f"{trial.label}\n{trial.ratio:.3f} \u00d7 torch.mm, {significant(trial.median_us)} \u00b5s"
