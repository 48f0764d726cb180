"""How the benchmarks' figures are drawn: one style, and files that are the same for the same rows."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunegemm.errors import TunegemmError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Rows = list[dict[str, Any]]

INK, MUTED, LINE, SLOWER, FASTER = "#16191d", "#565e68", "#e3e6ea", "#a8420b", "#1257b8"
# Opaque: readable on a dark page too.
_STYLE = {
    "font.size": 10, "axes.edgecolor": MUTED, "axes.labelcolor": INK, "text.color": INK, "xtick.color": MUTED,
    "ytick.color": MUTED, "axes.spines.top": False, "axes.spines.right": False, "grid.color": LINE,
    "axes.axisbelow": True, "svg.hashsalt": "tunegemm", "svg.fonttype": "none", "figure.facecolor": "white",
}  # fmt: skip


def render(draw: Callable[[Rows], Figure], rows: Rows, kind: str) -> bytes:
    """The figure as a file of that kind, `svg` or `png`. Raises TunegemmError where matplotlib is missing."""
    try:
        import matplotlib.style
    except ImportError:
        raise TunegemmError(
            "figures need matplotlib, which is not installed; pip install matplotlib"
        ) from None
    out = io.BytesIO()
    # Over matplotlib's defaults: a process may have changed them (Optuna's plots set a style and leave it).
    with matplotlib.style.context(["default", _STYLE]):
        metadata: dict[str, Any] = {"Date": None} if kind == "svg" else {"Software": "tunegemm"}
        draw(rows).savefig(out, format=kind, dpi=160, metadata=metadata)
    return out.getvalue()


def save(draw: Callable[[Rows], Figure], rows: Rows, out: Path) -> None:
    """Writes the figure. Raises TunegemmError for an ending other than .svg and .png."""
    kind = out.suffix.lower().removeprefix(".")
    if kind not in ("svg", "png"):
        raise TunegemmError(f"{out}: figures are .svg or .png; name such a file with --out")
    content = render(draw, rows, kind)
    try:
        out.write_bytes(content)
    except OSError as error:
        raise TunegemmError(f"{out}: {error.strerror}; choose another --out") from None


def sweep_over_k(rows: Rows) -> Figure:
    """TFLOP/s, and speed relative to cuBLAS, over K: the rows of seed-004.json."""
    from matplotlib.figure import Figure

    lines = (
        ("tunegemm_cute", "our best of 20", FASTER, "-", 2.2),
        ("pp128x128x64", "the article's kernel", "#4b9c8e", "--", 1.6),
        ("cublaslt", "best of cuBLASLt", "#b98900", "-.", 1.6),
        ("torch", "cuBLAS (torch.mm)", SLOWER, "-", 1.6),
    )
    ks = [row["k"] for row in rows]
    figure = Figure((7.6, 5.8))
    upper = figure.add_axes((0.09, 0.42, 0.68, 0.45))
    lower = figure.add_axes((0.09, 0.095, 0.68, 0.26), sharex=upper)
    for name, label, colour, style, width in lines:
        for axes, column in ((upper, "tflops"), (lower, "ratio")):
            values = [row["providers"][name][column] for row in rows]
            axes.plot(ks, values, style, color=colour, lw=width, label=label)
    upper.set_ylabel("TFLOP/s")
    upper.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0, fontsize=9)
    upper.tick_params(labelbottom=False)
    lower.set(xlabel="K", ylabel="times cuBLAS", xlim=(0, 2100), xticks=range(0, 2049, 256))
    for axes in (upper, lower):
        axes.grid()
    figure.text(0.02, 0.96, "8448 x 9216 x K, bf16, NVIDIA H200", weight="bold", fontsize=13, va="center")
    figure.text(0.02, 0.915, "All four in one interleave per K.", fontsize=9, color=MUTED, va="center")
    return figure


def products(rows: Rows) -> Figure:
    """Speed of tunegemm and of the best cuBLASLt algorithm relative to torch.mm: the rows of peers.json."""
    from matplotlib.figure import Figure

    from benchmarks.tables.reading import ratios, shape_of

    found = sorted(((shape_of(row), ratios(row)) for row in rows), key=lambda item: item[1]["tunegemm"])
    figure = Figure((7.6, 0.2 * len(found) + 1.5))
    axes = figure.add_axes((0.21, 0.08, 0.75, 0.82))
    places = range(len(found))
    ours = [one["tunegemm"] for _, one in found]
    library = [one.get("cublaslt", float("nan")) for _, one in found]
    axes.axvline(1, color=INK, lw=1)
    axes.hlines(places, library, ours, color=LINE, lw=2)
    axes.plot(library, places, "D", color="#b98900", ms=4, label="best of cuBLASLt")
    axes.plot(ours, places, "o", color=FASTER, ms=5.5, label="tunegemm")
    axes.set_yticks(list(places), [shape for shape, _ in found], fontsize=8)
    axes.set(xlabel="speed relative to torch.mm", ylim=(-0.7, len(found) - 0.3))
    axes.grid(axis="x")
    axes.legend(frameon=False, loc="lower right", fontsize=9)
    figure.text(0.02, 0.965, "bf16 products, M x N x K, NVIDIA H200", weight="bold", fontsize=12, va="center")
    figure.text(
        0.02, 0.935, "All in one race per product, in steady state where the power cap binds.",
        fontsize=9, color=MUTED, va="center",
    )  # fmt: skip
    return figure


def first_uses(rows: Rows) -> Figure:
    """What was expected of products that were served by prediction, and what they got (first_use.json)."""
    found = [
        {"torch_known": True, "served": True, "expected": row["expected"], "got": row["ratio"]}
        for row in rows
        if row["expected"]
    ]
    return predicted(found, "Products that nobody tuned, by an installed package on their first calls.")


def predicted(rows: Rows, said: str = "") -> Figure:
    """What the selector expected of products that it had not seen, and what they got (selector.json).

    said: the line below the title.
    """
    from matplotlib.figure import Figure

    figure = Figure((7.6, 5.2))
    axes = figure.add_axes((0.1, 0.11, 0.86, 0.76))
    found = [row for row in rows if row["torch_known"]]
    low, high = 0.75, 1.6
    axes.plot((low, high), (low, high), color=LINE, lw=2)
    axes.axhline(1, color=INK, lw=1)
    for served, color, label in ((False, MUTED, "left to torch"), (True, FASTER, "served")):
        if not (mine := [row for row in found if row["served"] is served]):
            continue
        axes.plot(
            [row["expected"] for row in mine], [row["got"] for row in mine], "o", color=color, ms=3.5,
            alpha=0.6, mew=0, label=f"{label}: {len(mine)}",
        )  # fmt: skip
    axes.set(
        xlim=(low, high),
        ylim=(low, high),
        xlabel="expected, times torch.mm",
        ylabel="measured, times torch.mm",
    )
    axes.grid()
    axes.legend(frameon=False, loc="upper left", fontsize=9)
    figure.text(0.02, 0.955, "Predicted and measured gain", weight="bold", fontsize=12, va="center")
    figure.text(
        0.02, 0.91, said or "The launch chosen for each product, by a model that had not seen its N and K.",
        fontsize=9, color=MUTED, va="center",
    )  # fmt: skip
    return figure
