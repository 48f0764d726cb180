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
        import matplotlib
    except ImportError:
        raise TunegemmError(
            "figures need matplotlib, which is not installed; pip install 'tunegemm[plots]'"
        ) from None
    out = io.BytesIO()
    with matplotlib.rc_context(_STYLE):  # type: ignore[arg-type]
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
