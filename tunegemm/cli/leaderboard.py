"""`tunegemm leaderboard`: what the database knows of a shape, best first."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tunegemm.cli import options

if TYPE_CHECKING:
    from tunegemm.problem import Problem


class Format(StrEnum):
    table = "table"
    csv = "csv"
    json = "json"
    md = "md"


def command(
    shape: Annotated[
        list[str] | None,
        typer.Option("--shape", metavar="MxNxK[xL]", help="May be repeated. Default: every tuned shape."),
    ] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="Of A and B. Default: any.")] = None,
    out_dtype: Annotated[str | None, typer.Option("--out-dtype", help="Of D. Default: any.")] = None,
    layout: Annotated[str | None, typer.Option("--layout", help="tn, tt, nn or nt. Default: any.")] = None,
    format: Annotated[Format, typer.Option("--format", help="How to print.")] = Format.table,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write there, not to the terminal.")
    ] = None,
    db: options.DatabaseLocation = None,
    top: Annotated[int | None, options.count_option("--top", "Rows per problem. Default: all.")] = None,
) -> None:
    """Print measured candidates per problem, best first."""
    # The words are checked before anything heavy loads; where none is given, any will do.
    options.parse_problems(["1x1x1"], dtype or "bf16", out_dtype, layout or "tn")
    shapes = [options.parse_problems([text], dtype or "bf16", None, layout or "tn")[0].shape for text in shape or ()]
    from tunegemm.database import Database
    from tunegemm.problem import normalize_dtype

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
        for missing in [text for text in shapes or ["MxNxK"] if text not in found and (shapes or not found)]:
            limits = " ".join(word for word in (dtype, out_dtype, layout) if word)
            raise options.UsageError(
                f"{database.location}: no measurement of {missing}{' ' if limits else ''}{limits}; "
                f"run `tunegemm tune --shape {missing}` first"
            )
        text = _render(database, problems, format, top)
