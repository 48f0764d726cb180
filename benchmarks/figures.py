"""Draws the benchmarks' figures in one style, as files that depend on the rows only."""

from __future__ import annotations

import io
from collections.abc import Callable
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


def render(draw: Callable[[Rows], Figure], rows: Rows) -> bytes:
    """The figure as an SVG file. Raises TunegemmError where matplotlib is missing."""
    try:
        import matplotlib.style
    except ImportError:
        raise TunegemmError(
            "figures need matplotlib, which is not installed; pip install matplotlib"
        ) from None
    out = io.BytesIO()
    # Over matplotlib's defaults: a process may have changed them (Optuna's plots set a style and leave it).
    with matplotlib.style.context(["default", _STYLE]):
        draw(rows).savefig(out, format="svg", dpi=160, metadata={"Date": None})
    return out.getvalue()


def products(rows: Rows) -> Figure:
    """Speed of tunegemm and of the best cuBLASLt algorithm relative to torch.mm: the rows of peers.json."""
    from matplotlib.figure import Figure

    from benchmarks.tables.reading import ratios, shape_of

    result = sorted(((shape_of(row), ratios(row)) for row in rows), key=lambda item: item[1]["tunegemm"])
    figure = Figure((7.6, 0.2 * len(result) + 1.5))
    axes = figure.add_axes((0.21, 0.08, 0.75, 0.82))
    places = range(len(result))
    ours = [item["tunegemm"] for _, item in result]
    library = [item.get("cublaslt", float("nan")) for _, item in result]
    axes.axvline(1, color=INK, lw=1)
    axes.hlines(places, library, ours, color=LINE, lw=2)
    axes.plot(library, places, "D", color="#b98900", ms=4, label="best of cuBLASLt")
    axes.plot(ours, places, "o", color=FASTER, ms=5.5, label="tunegemm")
    axes.set_yticks(list(places), [shape for shape, _ in result], fontsize=8)
    axes.set(xlabel="speed relative to torch.mm", ylim=(-0.7, len(result) - 0.3))
    axes.grid(axis="x")
    axes.legend(frameon=False, loc="lower right", fontsize=9)
    figure.text(0.02, 0.965, "bf16 products, M x N x K, NVIDIA H200", weight="bold", fontsize=12, va="center")
    note = "All in one race per product, in steady state where the power cap binds."
    figure.text(0.02, 0.935, note, fontsize=9, color=MUTED, va="center")
    return figure


def first_uses(rows: Rows) -> Figure:
    """Predicted and measured gains of products served by prediction (first_use.json)."""
    from matplotlib.figure import Figure

    figure = Figure((7.6, 5.2))
    axes = figure.add_axes((0.1, 0.11, 0.86, 0.76))
    results = [row for row in rows if row["expected"]]
    low, high = 0.75, 1.6
    axes.plot((low, high), (low, high), color=LINE, lw=2)
    axes.axhline(1, color=INK, lw=1)
    axes.plot(
        [row["expected"] for row in results], [row["ratio"] for row in results], "o", color=FASTER, ms=3.5,
        alpha=0.6, mew=0, label=f"served: {len(results)}",
    )  # fmt: skip
    axes.set(
        xlim=(low, high), ylim=(low, high), xlabel="expected, times torch.mm",
        ylabel="measured, times torch.mm",
    )  # fmt: skip
    axes.grid()
    axes.legend(frameon=False, loc="upper left", fontsize=9)
    figure.text(0.02, 0.955, "Predicted and measured gain", weight="bold", fontsize=12, va="center")
    note = "Products that nobody tuned, by an installed package on their first calls."
    figure.text(0.02, 0.91, note, fontsize=9, color=MUTED, va="center")
    return figure
