"""Scales and marks for inline SVG. Colours are classes of `assets/page.css`, so that they follow the page."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from typing import Literal

from tunegemm.report.evidence import Verdict


@dataclass(frozen=True)
class Scale:
    """From values to pixels, linear or logarithmic."""

    low: float
    high: float
    start: float
    """Pixel of `low`."""
    stop: float
    """Pixel of `high`."""
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        if self.logarithmic:
            part = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return round(self.start + part * (self.stop - self.start), 1)

    def clamp(self, value: float) -> float:
        """The pixel of the value, or of the nearer end."""
        return self(min(max(value, self.low), self.high))


def text(
    x: float, y: float, words: str, *, kind: str = "", anchor: Literal["start", "middle", "end"] = "start"
) -> str:
    shown = f' class="{kind}"' if kind else ""
    place = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{x:g}" y="{y:g}"{shown}{place}>{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" class="{kind}"/>'


def polyline(points: Iterable[tuple[float, float]], kind: str) -> str:
    listed = " ".join(f"{x:g},{y:g}" for x, y in points)
    return f'<polyline points="{listed}" class="{kind}"/>'


def dots(points: Iterable[tuple[float, float]], kind: str = "dots") -> str:
    """Many round dots as one path: some 12 bytes each."""
    return f'<path class="{kind}" d="{"".join(f"M{x:g} {y:g}h0" for x, y in points)}"/>'


def diamonds(points: Iterable[tuple[float, float]], kind: str = "diamonds", reach: float = 4.5) -> str:
    drawn = (
        f"M{x:g} {y - reach:g}l{reach:g} {reach:g}-{reach:g} {reach:g}-{reach:g}-{reach:g}z"
        for x, y in points
    )
    return f'<path class="{kind}" d="{"".join(drawn)}"/>'


def squares(points: Iterable[tuple[float, float]], kind: str, reach: float = 3) -> str:
    side = 2 * reach
    drawn = (f"M{x - reach:g} {y - reach:g}h{side:g}v{side:g}h-{side:g}z" for x, y in points)
    return f'<path class="{kind}" d="{"".join(drawn)}"/>'


def verdict_mark(x: float, y: float, verdict: Verdict, attributes: str = "", reach: float = 5.5) -> str:
    """Shape and colour both tell the verdict: up, down, or a hollow circle for a tie."""
    kind = f'class="mark m-{verdict}"{attributes}'
    if verdict == "equal":
        return f'<circle cx="{x:g}" cy="{y:g}" r="{reach - 1:g}" {kind}/>'
    sign = -1 if verdict == "faster" else 1
    tip, foot = y + sign * reach, y - sign * reach * 0.75
    return f'<path d="M{x:g} {tip:g}L{x + reach:g} {foot:g}H{x - reach:g}z" {kind}/>'
