"""Which kernel family wins where: a heat map of families.json, families x shapes.

    python -m benchmarks.families                                # draws docs/figures/families.svg
    python -m benchmarks.families --out families.png

families.json is what `benchmarks.peers --effort full` wrote of all families, under a name of its own: a run
that compares fewer of them leaves it. A cell is the speed of the family's best candidate relative to
torch.mm, in the interleave of its shape. Of the family `cublaslt` it is the best single algorithm; torch.mm
itself is the 1 that all are compared with.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import shapes
from tunegemm.errors import TunegemmError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "h200" / "families.json"
OUT = ROOT / "docs" / "figures" / "families.svg"

#: Kernel family -> its name among the providers of `benchmarks.peers`.
PROVIDER = {
    "cute_sm90": "tunegemm_cute",
    "gluon_wgmma": "gluon_wgmma",
    "triton_tma": "triton_tma",
    "cute_sm80": "cute_sm80",
    "skinny": "skinny",
    "cublaslt": "cublaslt",
}
CLASSES = ("Few rows: M up to 64", "M from 128 to 512", "M of 1024 and more", "Odd K, which TMA refuses")


@dataclass(frozen=True)
class Standing:
    """One shape and what each family reaches on it."""

    shape: str
    m: int
    n: int
    k: int
    kind: str
    """One of `CLASSES`."""
    ratios: Mapping[str, float]
    """Speed relative to torch.mm by family; without those that have no kernel for it."""
    noise: float
    """Of the interleave, as a part of a time."""

    @property
    def winners(self) -> tuple[str, ...]:
        """The fastest family, and those that are not slower than it by more than the noise."""
        best = max(self.ratios.values())
        order = sorted(self.ratios, key=lambda family: -self.ratios[family])
        return tuple(family for family in order if self.ratios[family] >= best / (1 + self.noise))


def standings(rows: list[dict[str, Any]]) -> list[Standing]:
    """The rows of a result of `benchmarks.peers` in the order of `CLASSES`, then of M, N and K."""
    odd = {shape.problem.shape for shape in shapes.load() if "odd" in shape.groups}
    found = []
    for row in rows:
        m, n, k = row["m"], row["n"], row["k"]
        shape = f"{m}x{n}x{k}"
        number = 3 if shape in odd else 0 if m <= 64 else 1 if m <= 512 else 2
        ratios = {
            family: row["providers"][name]["ratio"]
            for family, name in PROVIDER.items()
            if "ratio" in row["providers"].get(name, {})
        }
        if ratios:
            found.append(Standing(shape, m, n, k, CLASSES[number], ratios, row["noise"]))
    return sorted(found, key=lambda s: (CLASSES.index(s.kind), s.m, s.n, s.k))


def timed(found: list[Standing]) -> list[str]:
    """The families that were timed at all, in their order: one may be newer than the result."""
    return [family for family in PROVIDER if any(family in standing.ratios for standing in found)]


def draw(rows: list[dict[str, Any]]) -> Figure:
    """The heat map. Places are fixed by hand, so that the same rows give the same file everywhere."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    from benchmarks.figures import FASTER, INK, MUTED, SLOWER

    found = standings(rows)
    columns = timed(found)
    groups = [(kind, [s for s in found if s.kind == kind]) for kind in CLASSES]
    groups = [(kind, members) for kind, members in groups if members]
    lines = len(found) + 1.5 * len(groups)
    width, top, bottom, row_inches = 7.6, 0.85, 0.95, 0.235
    height = top + bottom + lines * row_inches
    figure = Figure((width, height))
    axes = figure.add_axes((1.85 / width, bottom / height, 5.45 / width, lines * row_inches / height))
    axes.set(xlim=(0, len(columns)), ylim=(lines, 0))
    axes.axis("off")

    limit = math.log(1.35)
    colours = LinearSegmentedColormap.from_list(
        "ratio", [SLOWER, "#e2a27b", "#f6f5f2", "#8fb4e6", FASTER], N=255
    )
    scale = Normalize(-limit, limit)
    for column, family in enumerate(columns):
        axes.text(column + 0.5, 0.9, family, ha="center", va="center", weight="bold", fontsize=9.5, color=INK)
    y = 0.0
    for kind, members in groups:
        y += 1.5
        axes.text(-0.06, y - 0.6, kind, ha="right", va="center", fontsize=9, color=MUTED, style="italic")
        for standing in members:
            axes.text(-0.06, y + 0.5, standing.shape, ha="right", va="center", fontsize=9, color=INK)
            for column, family in enumerate(columns):
                ratio = standing.ratios.get(family)
                middle = (column + 0.5, y + 0.5)
                if ratio is None:
                    axes.text(*middle, "·", ha="center", va="center", color=MUTED)
                    continue
                at = scale(min(max(math.log(ratio), -limit), limit))
                wins = family in standing.winners
                axes.add_patch(
                    Rectangle(
                        (column + 0.025, y + 0.06), 0.95, 0.88, facecolor=colours(at),
                        edgecolor=INK if wins else "none", linewidth=1.4,
                    )
                )  # fmt: skip
                axes.text(
                    *middle, f"{ratio:.2f}", ha="center", va="center", fontsize=9,
                    weight="bold" if wins else "normal", color="white" if abs(at - 0.5) > 0.33 else INK,
                )  # fmt: skip
            y += 1

    figure.text(
        0.3 / width, 1 - 0.3 / height, "Which kernel family wins where", weight="bold", fontsize=13,
        va="center", color=INK,
    )  # fmt: skip
    figure.text(
        0.3 / width, 1 - 0.62 / height, va="center", fontsize=9, color=MUTED,
        s="Speed of each family's best kernel relative to torch.mm, bf16, NVIDIA H200.\n"
        "Framed: the fastest, and what is within the noise of it.  Dot: no kernel for this shape.",
    )  # fmt: skip
    bar = figure.add_axes((1.85 / width, 0.52 / height, 5.45 / width, 0.13 / height))
    ticks = (0.75, 0.8, 0.9, 1.0, 1.1, 1.2, 1.35)
    colorbar = figure.colorbar(
        ScalarMappable(scale, colours), cax=bar, orientation="horizontal", extend="both",
        ticks=[math.log(tick) for tick in ticks],
    )  # fmt: skip
    colorbar.ax.set_xticklabels([f"{tick:g}" for tick in ticks], fontsize=8)
    colorbar.outline.set_visible(False)
    colorbar.set_label("slower  ←  times the speed of torch.mm  →  faster", fontsize=8, color=MUTED)
    return figure


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; 2 for bad input, with one line that says so."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.families", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="of benchmarks.peers")
    parser.add_argument("--out", type=Path, default=OUT, help="a .svg or .png file")
    options = parser.parse_args(arguments)
    from benchmarks.figures import save

    try:
        rows = json.loads(options.results.read_text())["rows"]
        save(draw, rows, options.out)
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"{options.results}: no readable result of benchmarks.peers: {error!r}", file=sys.stderr)
        return 2
    except TunegemmError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"written: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
