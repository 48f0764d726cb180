"""`tunegemm leaderboard`: what the database knows of a shape, best first."""

from __future__ import annotations

import json
from dataclasses import astuple, fields
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tunegemm.cli import options

if TYPE_CHECKING:
    from tunegemm.report.leaderboard import Leaderboard


class Format(StrEnum):
    table = "table"
    csv = "csv"
    json = "json"
    md = "md"


def command(
    shape: Annotated[
        list[str] | None,
        typer.Option("--shape", metavar="MxNxK[xL]", help="May be repeated. Default: the best of each."),
    ] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="Of A and B. Default: any.")] = None,
    out_dtype: Annotated[str | None, typer.Option("--out-dtype", help="Of D. Default: any.")] = None,
    layout: Annotated[str | None, typer.Option("--layout", help="tn, tt, nn or nt. Default: any.")] = None,
    format: Annotated[Format, typer.Option("--format", help="How to print.")] = Format.table,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write there, not to the terminal.")
    ] = None,
    db: options.DatabaseLocation = None,
    top: Annotated[int | None, options.count_option("--top", "Rows per shape. Default: all.")] = None,
) -> None:
    """Print a shape's measured candidates, or the best of every shape."""
    # The words are checked before anything heavy loads; where none is given, any will do.
    options.parse_problems(["1x1x1"], dtype or "bf16", out_dtype, layout or "tn")
    shapes = [
        options.parse_problems([text], dtype or "bf16", None, layout or "tn")[0].shape for text in shape or ()
    ]
    from tunegemm.database import Database
    from tunegemm.database.connection import display
    from tunegemm.problem import Problem, normalize_dtype

    def wanted(problem: Problem) -> bool:
        return (
            (not shapes or problem.shape in shapes)
            and (dtype is None or problem.in_dtype == normalize_dtype(dtype))
            and (out_dtype is None or problem.out_dtype == normalize_dtype(out_dtype))
            and (layout is None or problem.layout == layout.lower())
        )

    with Database.open(db, read_only=True) as database:
        problems = [problem for problem in database.problems() if wanted(problem)]
        found = {problem.shape for problem in problems}
        missing = [text for text in shapes if text not in found] or ([] if found else ["MxNxK"])
        if missing:
            words = " ".join([missing[0], *filter(None, (dtype, out_dtype, layout))])
            raise options.UsageError(
                f"{display(database.location)}: no measurement of {words}; "
                f"run `tunegemm tune --shape {missing[0]}` first"
            )
        from tunegemm.report.leaderboard import VENDOR_FAMILY, Leaderboard

        if shapes:
            boards = [Leaderboard.from_frame(problem, database.frame(problem)) for problem in problems]
        else:
            from tunegemm.database.leaders import leaders

            frame = leaders(database, VENDOR_FAMILY)
            names = [field.name for field in fields(Problem)]
            kept = {astuple(problem) for problem in problems}
            rows = [values in kept for values in frame[names].itertuples(index=False, name=None)]
            boards = [Leaderboard.best_of_all(frame[rows])]
    console = options.stdout_console()
    if format is Format.table and out is None and console.is_terminal:
        for board in boards:
            console.print(board.table(top, width=console.width))
        return
    text = _render(boards, format, top)
    if out is None:
        typer.echo(text, nl=False)
    else:
        options.write_text(out, text)


def _render(boards: list[Leaderboard], format: Format, top: int | None) -> str:
    """One document for all boards: JSON a list, CSV under one header."""
    if format is Format.json:
        return json.dumps([board.as_dict(top) for board in boards], indent=2, ensure_ascii=False) + "\n"
    texts = [board.render(format.value, top) for board in boards]
    if format is Format.csv:
        return "".join([texts[0], *(text.partition("\n")[2] for text in texts[1:])])
    return "\n".join(texts)
