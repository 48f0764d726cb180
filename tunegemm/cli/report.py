"""`tunegemm report` and `tunegemm plot`: the evidence as a page and as image files."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tunegemm.cli import options
from tunegemm.describe.command import command_line

if TYPE_CHECKING:
    from tunegemm.report.evidence import Evidence


class Kind(StrEnum):
    roofline = "roofline"
    speedup = "speedup"
    heatmap = "heatmap"
    convergence = "convergence"
    importance = "importance"


Shapes = Annotated[
    list[str] | None,
    typer.Option("--shape", metavar="MxNxK[xL]", help="Only these, with all their trials; may be repeated."),
]
Source = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="NAME",
        help="A device of the database, by its name or a part of it, or replay:h200 for the recorded one. "
        "Default: the device measured last.",
    ),
]


def report(
    context: typer.Context,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The page to write.")] = Path(
        "report.html"
    ),
    shape: Shapes = None,
    device: Source = None,
    details: Annotated[
        int, options.count_option("--details", "Shapes to show the search of, those measured last.")
    ] = 12,
    db: options.DatabaseLocation = None,
) -> None:
    """Write one self-contained HTML page: speed-ups, roofline, searches, failures, environment."""
    evidence = gather(db, device, shape, details)
    from tunegemm.report.html import report as render

    options.write_text(out, render(evidence, command=_command(context)))
    options.say(f"{out}: {len(evidence.winners)} shape(s). {evidence.origin}")


def plot(
    kind: Annotated[Kind, typer.Option("--kind", help="What to draw.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="A .png or .svg file.")],
    shape: Shapes = None,
    device: Source = None,
    db: options.DatabaseLocation = None,
) -> None:
    """Draw one figure of the report into an image file: roofline, speed-ups, or what is known of a shape."""
    single = kind in (Kind.heatmap, Kind.convergence, Kind.importance)
    if single and len(shape or ()) != 1:
        raise options.UsageError(f"--kind {kind.value} is of one shape: give one --shape MxNxK")
    evidence = gather(db, device, shape, 1 if single else 0)
    from tunegemm.report.charts import save

    save(kind.value, evidence, out)
    options.say(f"{out}: {kind.value}. {evidence.origin}")


def gather(db: str | None, device: str | None, shapes: list[str] | None, detailed: int) -> Evidence:
    """From the recording that `device` names, or else from the database."""
    wanted = options.parse_shapes(shapes)
    from tunegemm.report.evidence import from_database, from_recording

    if device is not None and device.startswith("replay:"):
        from tunegemm.measure.replay import open_replay

        return from_recording(open_replay(device), shapes=wanted, detailed=detailed)
    from tunegemm.store import Database

    with Database.open(db, read_only=True) as database:
        return from_database(database, device=device, shapes=wanted, detailed=detailed)


def _command(context: typer.Context) -> str:
    """The command line without a database's address, which may hold a password."""
    return command_line("report", {name: context.params.get(name) for name in ("shape", "device")})
