"""The report's figures as image files, drawn by matplotlib: for papers, slides and READMEs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunegemm.errors import TunegemmError
from tunegemm.files import replacing
from tunegemm.report import analysis
from tunegemm.report.evidence import Details, Evidence, Verdict, Winner

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK, _MUTED, _LINE = "#16191d", "#565e68", "#e3e6ea"
_COLOURS: Mapping[Verdict, str] = {"faster": "#1257b8", "equal": "#5d6570", "slower": "#a8420b"}
_MARKERS: Mapping[Verdict, str] = {"faster": "^", "equal": "o", "slower": "v"}
_STYLE = {
    "font.size": 10, "axes.edgecolor": _MUTED, "axes.labelcolor": _INK, "text.color": _INK,
    "xtick.color": _MUTED, "ytick.color": _MUTED, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": _LINE, "grid.linewidth": 0.8, "axes.axisbelow": True, "axes.titlesize": 11,
    "axes.titleweight": "bold", "axes.titlelocation": "left", "svg.hashsalt": "tunegemm",
    "svg.fonttype": "none",
    "figure.facecolor": "white",
}  # fmt: skip

_LABELLED = 24


def save(kind: str, evidence: Evidence, out: Path) -> None:
    """Draws one figure into a .png or .svg file; the same evidence gives the same file.

    Kinds: see `KINDS`; those of one shape take the first of `Evidence.details`. Raises TunegemmError for
    another ending, where matplotlib is missing, and where there is nothing to draw.
    """
    if out.suffix.lower() not in (".png", ".svg"):
        raise TunegemmError(f"{out}: plots are .png or .svg; name such a file with --out")
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise TunegemmError(
            "plots need matplotlib, which is not installed; pip install 'tunegemm[plots]'"
        ) from None
    with matplotlib.rc_context(_STYLE):  # type: ignore[arg-type]
        figure = Figure(layout="constrained")
        KINDS[kind](figure, evidence)
        note = f"{evidence.origin} {evidence.days}."
        figure.supxlabel(note, fontsize=8, color=_MUTED, x=0.01, ha="left")
        metadata: dict[str, Any] = (
            {"Date": None} if out.suffix.lower() == ".svg" else {"Software": "tunegemm"}
        )
        try:
            with replacing(out) as part:
                figure.savefig(part, dpi=160, metadata=metadata)
        except OSError as error:
            raise TunegemmError(f"{out}: {error.strerror}; choose another --out") from None


def _roofline(figure: Figure, evidence: Evidence) -> None:
    figure.set_size_inches(9, 5)
    axes, device = figure.add_subplot(), evidence.device
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte of device memory", ylabel="TFLOP/s")
    axes.set_title(f"Records of {device.name} under its roofline")
    intensities = [winner.problem.arithmetic_intensity for winner in evidence.winners]
    if device.peak_tflops:
        memory = device.bandwidth_gbps / 1000
        ridge = device.peak_tflops / memory
        low, high = min(*intensities, ridge) / 1.7, max(*intensities, ridge) * 1.7
        axes.plot(
            [low, ridge, high], [low * memory, device.peak_tflops, device.peak_tflops], color=_INK, lw=2
        )
        axes.annotate(f"{device.peak_tflops:g} TFLOP/s, tensor cores", (high, device.peak_tflops), (0, 5),
                      textcoords="offset points", ha="right")  # fmt: skip
        middle = (low * ridge) ** 0.5
        axes.annotate(f"{memory:g} TB/s, memory", (middle, middle * memory), (-6, 6),
                      textcoords="offset points", ha="right")  # fmt: skip
    axes.scatter(intensities, [winner.baseline_tflops for winner in evidence.winners], marker="_", s=60,
                 color=_MUTED, label="torch.mm")  # fmt: skip
    for verdict, found in _by_verdict(evidence).items():
        axes.scatter(
            [winner.problem.arithmetic_intensity for winner in found], [winner.tflops for winner in found],
            marker=_MARKERS[verdict], s=42, facecolor="white" if verdict == "equal" else _COLOURS[verdict],
            edgecolor=_COLOURS[verdict], linewidth=1.5, label=_words(verdict), zorder=3,
        )  # fmt: skip
    if len(evidence.winners) <= _LABELLED:
        for winner in evidence.winners:
            axes.annotate(winner.problem.shape, (winner.problem.arithmetic_intensity, winner.tflops), (7, -3),
                          textcoords="offset points", fontsize=8)  # fmt: skip
    from matplotlib.ticker import LogFormatter

    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(LogFormatter(labelOnlyBase=False))
        axis.set_minor_formatter(LogFormatter(labelOnlyBase=False, minor_thresholds=(2, 0.5)))
    axes.legend(frameon=False, loc="lower right")


def _speedup(figure: Figure, evidence: Evidence) -> None:
    winners = evidence.winners
    figure.set_size_inches(8, max(2.6, 1.5 + 0.3 * len(winners)))
    axes = figure.add_subplot()
    axes.set_title(f"Speed relative to torch.mm on {evidence.device.name}")
    axes.set(
        xscale="log",
        xlabel="times the speed of torch.mm, with 95 % intervals",
        ylim=(len(winners) - 0.4, -0.6),
    )
    for row, winner in enumerate(winners):
        noise = max(winner.noise, 0.003)
        axes.barh(row, 1 + noise - 1 / (1 + noise), left=1 / (1 + noise), height=0.9, color=_LINE, zorder=1)
        colour = _COLOURS[winner.verdict]
        axes.plot([winner.low, winner.high], [row, row], color=colour, lw=2, zorder=2)
        axes.plot(winner.ratio, row, _MARKERS[winner.verdict], color=colour, ms=7, zorder=3,
                  mfc="white" if winner.verdict == "equal" else colour)  # fmt: skip
    axes.axvline(1, color=_INK, lw=1.2, zorder=1.5)
    axes.set_yticks(range(len(winners)), [str(winner.problem) for winner in winners])
    axes.grid(axis="y", visible=False)
    low, high = analysis.ratio_limits(winners)
    axes.set_xlim(low, high)
    _plain_ticks(axes, analysis.linear_ticks(low, high, 7))


def _plain_ticks(axes: Axes, ticks: list[float]) -> None:
    from matplotlib.ticker import NullLocator

    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])


def _convergence(figure: Figure, evidence: Evidence) -> None:
    details = _one(evidence)
    figure.set_size_inches(7.5, 4.2)
    axes = figure.add_subplot()
    axes.set_title(f"Search on {details.problem}")
    axes.set(xlabel="trial", ylabel="speed relative to torch.mm")
    tried = [trial for trial in details.sequence if trial.stage != "race"]
    for stage, marker, words in (("search", ".", "trial"), ("library", "s", "the vendor's algorithm")):
        points = [(number, trial.ratio) for number, trial in enumerate(tried, 1) if trial.stage == stage]
        if points:
            fill = "white" if marker == "s" else _MUTED
            axes.plot(*zip(*points, strict=True), marker, color=_MUTED, mfc=fill, ms=5, label=words)
    steps = [*analysis.best_so_far(tried)]
    steps.append((len(tried), steps[-1][1]))
    axes.step(*zip(*steps, strict=True), where="post", color=_COLOURS["faster"], lw=2, label="best so far")
    axes.axhline(1, color=_INK, lw=1.2)
    axes.set_ylim(bottom=max(0.0, min(0.97, 0.35 * steps[-1][1])))
    axes.legend(frameon=False, loc="lower right")


def _heat_map(figure: Figure, evidence: Evidence) -> None:
    from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm

    details = _one(evidence)
    grids = analysis.tile_grids(details.trials)
    if not grids:
        raise TunegemmError(
            f"{details.problem}: no candidate with a tile was measured; tune with more --trials"
        )
    figure.set_size_inches(9.5, 1.2 + 2.3 * len(grids))
    colours = LinearSegmentedColormap.from_list("tunegemm", ["#e2a585", "#ffffff", "#7ea6df"])
    for number, grid in enumerate(grids, 1):
        axes = figure.add_subplot(len(grids), 1, number)
        axes.set_title(f"{details.problem}: {grid.title}")
        values = [
            [grid.best[m, n].ratio if (m, n) in grid.best else float("nan") for n in grid.tile_n]
            for m in grid.tile_m
        ]
        axes.imshow(values, cmap=colours, norm=TwoSlopeNorm(1.0, 0.5, 1.15), aspect="auto")
        for row, line in enumerate(values):
            for column, value in enumerate(line):
                if value == value:  # a NaN, where no such tile was tried, differs from itself
                    axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=8)
        axes.set_xticks(range(len(grid.tile_n)), [str(n) for n in grid.tile_n])
        axes.set_yticks(range(len(grid.tile_m)), [str(m) for m in grid.tile_m])
        axes.set(xlabel="tile_n" if number == len(grids) else "", ylabel="tile_m")
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)


def _importance(figure: Figure, evidence: Evidence) -> None:
    details = _one(evidence)
    found = analysis.importances(details.trials)
    if not found:
        raise TunegemmError(f"{details.problem}: too few candidates were measured; tune with more --trials")
    groups = [
        (f"{family}, {words}", shares, hatch)
        for family, one in found.items()
        for words, shares, hatch in (("compile time", one.compile, ""), ("launch", one.launch, "////"))
        if shares
    ]
    figure.set_size_inches(7, 1 + sum(0.5 + 0.28 * len(shares) for _, shares, _ in groups))
    heights = [len(shares) + 1 for _, shares, _ in groups]
    for axes, (title, shares, hatch) in zip(
        figure.subplots(len(groups), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0], groups,
        strict=True,
    ):  # fmt: skip
        axes.barh(list(shares), [100 * share for share in shares.values()], height=0.6, hatch=hatch,
                  color="white" if hatch else _COLOURS["faster"], edgecolor=_COLOURS["faster"])  # fmt: skip
        axes.invert_yaxis()
        axes.set(xlim=(0, 100), title=f"{details.problem}: {title}")
        axes.grid(axis="y", visible=False)
    axes.set_xlabel("importance, % (PED-ANOVA)")


def _one(evidence: Evidence) -> Details:
    if not evidence.details or not evidence.details[0].trials:
        raise TunegemmError("there are no trials to draw; run `tunegemm tune` first")
    return evidence.details[0]


def _by_verdict(evidence: Evidence) -> dict[Verdict, list[Winner]]:
    found: dict[Verdict, list[Winner]] = {}
    for winner in evidence.winners:
        found.setdefault(winner.verdict, []).append(winner)
    return found


def _words(verdict: Verdict) -> str:
    return "equal within the noise" if verdict == "equal" else f"{verdict} than torch.mm"


#: What draws each kind.
KINDS: Mapping[str, Callable[[Figure, Evidence], None]] = {
    "roofline": _roofline, "speedup": _speedup, "heatmap": _heat_map, "convergence": _convergence,
    "importance": _importance,
}  # fmt: skip

#: Those that are of one shape.
OF_ONE_SHAPE = ("heatmap", "convergence", "importance")
