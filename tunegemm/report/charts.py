"""Draws the report's figures with matplotlib and puts them into the HTML page.

Colours are the variables of `assets/page.css`, so figures follow the page's dark and print styles. Each mark
of the roofline is an element of its own, which the page's script explains.
"""

from __future__ import annotations

import io
import math
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from tunegemm.report import analysis
from tunegemm.report.contents import Contents, Details, Verdict, Winner
from tunegemm.report.leaderboard import VENDOR_FAMILY
from tunegemm.report.text import clean, significant
from tunegemm.store.record import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SYMBOLS: Mapping[Verdict, str] = {"faster": "\u25b2", "equal": "\u25cb", "slower": "\u25bc"}
WORDS: Mapping[Verdict, str] = {
    "faster": "faster than torch.mm", "equal": "equal within the noise", "slower": "slower than torch.mm",
}  # fmt: skip

_INK, _MUTED, _LINE, _GROUND = "#16191d", "#565e68", "#e3e6ea", "#ffffff"
_COLOURS: Mapping[Verdict, str] = {"faster": "#1257b8", "equal": "#5d6570", "slower": "#a8420b"}
_MARKERS: Mapping[Verdict, str] = {"faster": "^", "equal": "o", "slower": "v"}
_STYLE: dict[Any, Any] = {
    "font.size": 10, "axes.edgecolor": _MUTED, "axes.labelcolor": _INK, "text.color": _INK,
    "xtick.color": _MUTED, "ytick.color": _MUTED, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "grid.color": _LINE, "grid.linewidth": 0.8, "axes.axisbelow": True,
    "axes.titlesize": 11, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "svg.fonttype": "none", "figure.facecolor": _GROUND,
    "axes.facecolor": _GROUND,
    "text.parse_math": False,  # a name from a database may hold $
}  # fmt: skip

#: The page's variables for the colours above.
_VARIABLES = {
    _INK: "ink", _MUTED: "muted", _LINE: "grid", _GROUND: "surface", "#000000": "ink",
    **{colour: verdict for verdict, colour in _COLOURS.items()},
}  # fmt: skip

#: Above this number of records, marks of the roofline are plain dots without tips: some 20 bytes each.
NAMED_MARKS = 600
#: Above this number of trials, a dot for each would only blacken the figure: every n-th is drawn.
_MOST_DOTS = 1500


def inline_roofline(contents: Contents) -> str:
    """The roofline as an SVG element. Each mark names its record and belongs to the record's row of the
    table."""
    device, winners = contents.device, contents.winners
    peaks = f"{device.peak_tflops:g} TFLOP/s and {device.bandwidth_gbps / 1000:g} TB/s"
    known = f"datasheet peaks {peaks}" if device.peak_tflops else "peaks of this device unknown"
    words = f"Roofline of {device.name}: {len(winners)} records, {known}. The table above lists every value."
    text = _inline(
        lambda figure: _roofline(figure, contents),
        words,
        'role="group" data-marks="" style="min-width:640px"',
    )

    def attributes(match: re.Match[str]) -> str:
        kind, row = match[1], int(match[2])
        if kind != "mark":
            return f'<g data-row="{row}"'
        tip = escape(_winner_tip(winners[row]))
        verdict = winners[row].verdict
        return f'<g class="mark m-{verdict}" data-row="{row}" data-tip="{tip}" role="img" aria-label="{tip}"'

    return re.sub(r'<g id="(mark|base)-(\d+)"', attributes, text)


def inline_convergence(details: Details) -> str:
    """The search of one shape as an SVG element; empty if only a race was measured."""
    tried = details.tried
    if not tried:
        return ""
    steps = analysis.best_so_far(tried)
    words = (
        f"{len(tried)} trials; the best so far rises from {steps[0][1]:.3f} to {steps[-1][1]:.3f} times "
        f"torch.mm, last at trial {steps[-1][0]}"
    )
    return _inline(lambda figure: _convergence(figure, details), words, 'role="img" style="min-width:440px"')


def heat_class(ratio: float) -> str:
    """One of seven steps around torch.mm; the cell also shows the number."""
    kinds = ("h-4", "h-3", "h-2", "h-1", "h1", "h2", "h3")
    return kinds[bisect_right((0.7, 0.85, 0.95, 1.0, 1.01, 1.03), ratio)]


def trial_tip(trial: Record) -> str:
    return f"{clean(trial.label)}\n{trial.ratio:.3f} \u00d7 torch.mm, {significant(trial.median_us)} \u00b5s"


def _winner_tip(winner: Winner) -> str:
    share = f", {winner.percent_of_roofline:.0f} % of the roofline" if winner.percent_of_roofline else ""
    return (
        f"{clean(winner.record.problem)}\n{clean(winner.record.label)}\n"
        f"{significant(winner.record.median_us)} \u00b5s, {winner.tflops:.0f} TFLOP/s{share}\n"
        f"{winner.record.ratio:.3f} \u00d7 torch.mm ({winner.low:.3f} to {winner.high:.3f}), "
        f"{WORDS[winner.verdict]}"
    )


def _inline(draw: Callable[[Figure], None], words: str, attributes: str) -> str:
    """A figure as an SVG element of the page: the page's colours, short numbers, each id once."""
    import matplotlib.style
    from matplotlib.figure import Figure

    # Over matplotlib's defaults: a process may have changed them (Optuna's plots set a style and leave it).
    # Ids are hashes with a salt, so that those of two figures in one page differ.
    with matplotlib.style.context(["default", _STYLE, {"svg.hashsalt": words}]):
        figure, file = Figure(layout="constrained", dpi=72), io.StringIO()
        draw(figure)
        figure.savefig(
            file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
        )
    text = file.getvalue()
    body = re.sub(
        r"<metadata>.*?</metadata>|<!--.*?-->|<clipPath.*?</clipPath>",
        "",
        text[text.index("<svg") :],
        flags=re.S,
    )
    body = re.sub(
        r' clip-path="[^"]*"| (?:xmlns(?::\w+)?|version|width|height)="[^"]*"(?=[^<]*viewBox)', "", body
    )
    body = re.sub(r' xmlns(:\w+)?="[^"]*"', "", body).replace("xlink:href", "href")
    body = re.sub(r' id="(?!(mark|base)-|m[0-9a-f]{10}")[^"]*"', "", body)
    body = re.sub(r"<[^>]+>", lambda tag: re.sub(r"(\d\.\d)\d+", r"\1", tag[0]), body)
    body = re.sub(r" font-family: [^;]*;| transform=\"rotate\(-0 [^)]*\)\"", "", body)
    body = re.sub("|".join(_VARIABLES), lambda m: f"var(--{_VARIABLES[m[0]]})", body)
    body = re.sub(r">\s+<", "><", body)
    return body.replace("<svg", f'<svg aria-label="{escape(clean(words))}" {attributes}', 1)


def _roofline(figure: Figure, contents: Contents) -> None:
    """Throughput over arithmetic intensity, under the device's peaks where those are known."""
    figure.set_size_inches(9, 5)
    axes, device, winners = figure.add_subplot(), contents.device, contents.winners
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte of device memory", ylabel="TFLOP/s")
    axes.set_title(clean(f"Records of {device.name} under its roofline", 90))
    intensities = [winner.record.problem.arithmetic_intensity for winner in winners]
    rates = [rate for winner in winners for rate in (winner.tflops, winner.baseline_tflops)]
    peak, memory = device.peak_tflops, device.bandwidth_gbps / 1000
    ridge = peak / memory if peak else max(intensities)
    low, high = min(*intensities, ridge) / 1.7, max(*intensities, ridge) * 1.7
    axes.set(xlim=(low, high), ylim=(min(rates) / 1.6, max(*rates, peak) * 1.35))
    if peak:
        axes.plot([low, ridge, high], [low * memory, peak, peak], color=_INK, lw=2)
        beside: dict[str, Any] = {"textcoords": "offset points", "va": "center"}
        axes.annotate(f"{peak:g} TFLOP/s, tensor cores", (high, peak), (0, 9), ha="right", **beside)
        # Above the roof, where no mark can be: beside the slope if there is room.
        fits = math.log(0.85 * ridge / low) > 0.25 * math.log(high / low)
        place, offset, align = (
            ((0.85 * ridge, 0.85 * peak), (-8, 3), "right") if fits else ((low, peak), (4, 9), "left")
        )
        axes.annotate(f"{memory:g} TB/s, memory", place, offset, ha=align, **beside)
    if len(winners) > NAMED_MARKS:
        for verdict, colour in _COLOURS.items():
            results = [w for w in winners if w.verdict == verdict]
            _dots(axes, [(w.record.problem.arithmetic_intensity, w.tflops) for w in results], colour)
    else:
        for row, winner in enumerate(winners):
            x = winner.record.problem.arithmetic_intensity
            axes.plot(x, winner.baseline_tflops, "_", ms=9, color=_MUTED, gid=f"base-{row}")
        for row, winner in enumerate(winners):
            x, colour = winner.record.problem.arithmetic_intensity, _COLOURS[winner.verdict]
            axes.plot(
                x, winner.tflops, _MARKERS[winner.verdict], ms=7, color=colour,
                mfc=_GROUND if winner.verdict == "equal" else colour, mew=1.5, zorder=3, gid=f"mark-{row}",
            )  # fmt: skip
    _legend(axes, winners)
    from matplotlib.ticker import LogFormatter

    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(LogFormatter(labelOnlyBase=False))
        axis.set_minor_formatter(LogFormatter(labelOnlyBase=False, minor_thresholds=(2, 0.5)))


def _legend(axes: Axes, winners: Sequence[Winner]) -> None:
    """Names the marks of the verdicts that occur, and of torch.mm."""
    handles = [
        axes.plot([], [], _MARKERS[verdict], ms=7, color=colour, label=WORDS[verdict],
                  mfc=_GROUND if verdict == "equal" else colour)[0]
        for verdict, colour in _COLOURS.items() if any(winner.verdict == verdict for winner in winners)
    ]  # fmt: skip
    if len(winners) <= NAMED_MARKS:
        handles += axes.plot([], [], "_", ms=9, color=_MUTED, label="torch.mm")
    axes.legend(handles=handles, frameon=False, loc="lower right")


def _dots(axes: Axes, points: Sequence[tuple[float, float]], colour: str) -> None:
    """Many round dots as one path."""
    if points:
        from matplotlib.patches import PathPatch
        from matplotlib.path import Path as Line

        ends = [end for point in points for end in (point, point)]
        codes = [Line.MOVETO, Line.LINETO] * len(points)
        line = Line(ends, codes)
        line.should_simplify = False  # which would leave out lines of no length
        dots = PathPatch(line, lw=3.5, edgecolor=colour, fill=False, capstyle="round", alpha=0.75)
        axes.add_patch(dots)


def _convergence(figure: Figure, details: Details) -> None:
    """Every trial in order, and the best so far; the record's own ratio where a later race gave another."""
    tried = details.tried
    figure.set_size_inches(6.4, 4)
    axes = figure.add_subplot()
    axes.set_title(clean(f"Search on {details.problem}", 80))
    axes.set(xlabel="trial", ylabel="speed relative to torch.mm", xlim=(0, len(tried) * 1.03 + 1))
    steps = analysis.best_so_far(tried)
    best, record = steps[-1][1], details.winner.record.ratio
    low = max(0.0, min(0.97, max(0.35 * best, min(trial.ratio for trial in tried))) - 0.02)
    axes.set_ylim(low, max(best, record, 1.0) * 1.03)
    every = -(-len(tried) // _MOST_DOTS)
    shown = [(n, t) for n, t in enumerate(tried, 1) if t.ratio >= low]
    library = [(n, t.ratio) for n, t in shown if t.candidate.family == VENDOR_FAMILY]
    own = [(n, t.ratio) for n, t in shown if t.candidate.family != VENDOR_FAMILY]
    _dots(axes, [(n, ratio) for n, ratio in own if n % every == 0], _MUTED)
    axes.plot([], [], ".", color=_MUTED, label="trial")
    if library:
        axes.plot(
            *zip(*library, strict=True), "s", color=_MUTED, mfc=_GROUND, ms=5, label="the vendor's algorithm"
        )
    steps.append((len(tried), best))
    axes.step(*zip(*steps, strict=True), where="post", color=_COLOURS["faster"], lw=2, label="best so far")
    axes.axhline(1, color=_INK, lw=1.2)
    if analysis.gap(details):
        axes.axhline(record, color=_INK, lw=1.2, ls=(0, (5, 4)), label=f"the record, {record:.3f}")
    if (below := len(tried) - len(shown)) > 0:
        axes.text(0.01, 0.02, f"{below} slower trials are below this figure", color=_MUTED, fontsize=8,
                  transform=axes.transAxes)  # fmt: skip
    axes.legend(frameon=False, loc="lower right")
