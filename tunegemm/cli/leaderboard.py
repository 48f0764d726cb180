"""`tunegemm leaderboard`: the stored results of a shape, best first."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tunegemm.cli import arguments, options, printing
from tunegemm.cli.options import count_option, option
from tunegemm.describe.command import tune_command
from tunegemm.describe.problem import DTYPE_BYTES, LAYOUTS, OUTPUT_DTYPES, Problem
from tunegemm.describe.stored import FIELDS, cells_of
from tunegemm.files import write_text
from tunegemm.report.text import to_json

if TYPE_CHECKING:
    import pandas

    from tunegemm.report.leaderboard import Leaderboard


Format = Literal["table", "csv", "json", "md"]
Sort = Literal["problem", "ratio", "time"]


def command(
    shape: options.SomeShapes = None,
    dtype: Annotated[
        str | None, option("DTYPE", "Element type of A and B. Default: any.", values=OUTPUT_DTYPES)
    ] = None,
    out_dtype: Annotated[
        str | None, option("DTYPE", "Element type of D. Default: any.", values=DTYPE_BYTES)
    ] = None,
    layout: Annotated[str | None, option("LAYOUT", "tn, tt, nn or nt. Default: any.", values=LAYOUTS)] = None,
    families: options.Families = None,
    device: Annotated[
        str | None,
        option(
            "NAME",
            "A GPU's name or a part of it, or all. Default: this machine's GPU, or the one with most rows.",
        ),
    ] = None,
    sort: Annotated[
        Sort, typer.Option(help="Order of the shapes: problem, ratio (largest first), or time.")
    ] = "problem",
    limit: Annotated[int | None, count_option("Maximum number of rows. Default: all.")] = None,
    format: Annotated[Format, typer.Option(help="How to print.")] = "table",
    out: Annotated[Path | None, option("FILE", "Write to this file instead of the terminal.")] = None,
    db: options.OneDatabase = None,
    top: Annotated[int | None, count_option("Maximum number of rows per shape. Default: all.")] = None,
) -> None:
    """Print a shape's measured candidates, or the best of every shape."""
    wanted = arguments.problem_filter(shape, dtype, layout, out_dtype)
    shapes = arguments.parse_shapes(shape)
    names = arguments.parse_families(families)
    if sort != "problem" and shapes:
        raise arguments.UsageError(
            f"--sort {sort} with --shape: a shape's kernels are always sorted by evidence; leave out --sort"
        )
    from tunegemm.report.leaderboard import Leaderboard, of_all_layers, problems_of
    from tunegemm.store import Database
    from tunegemm.store.queries import latest_records

    # From a large database, read only the best of every shape.
    narrow = not shapes and names is None

    def read(database: Database) -> pandas.DataFrame:
        if narrow:
            return latest_records(database)
        chosen = [problem for problem in database.problems() if wanted(problem)]
        return database.frame(chosen[0] if len(chosen) == 1 else None)

    with printing.working("reading the measurements"):
        if db is None:
            frame, warnings = of_all_layers(read)
            place = "the layers of this folder"
        else:
            with Database.open(db, read_only=True) as database:
                frame, warnings, place = read(database), [], database.name
    printing.say(*(f"tunegemm: {warning}" for warning in warnings), err=True)
    if names is not None:
        frame = frame[frame["family"].isin(names)]
    measured = problems_of(frame)
    problems = [problem for problem in measured if wanted(problem)]
    missing = [text for text in shapes if text not in {problem.shape for problem in problems}]
    if missing or not problems:
        command = "tunegemm tune --shape MxNxK"
        if missing:
            first = missing[0]
            problem = Problem.parse(first, dtype=dtype or "bf16", out_dtype=out_dtype, layout=layout or "tn")
            command = tune_command(problem, families=families)
        words = [*missing[:1], *filter(None, (dtype, out_dtype, layout, families))]
        raise arguments.UsageError(
            f"{place}: {what_lacks(words, measured, families)}; run `{command}` on a GPU first"
        )
    kept = set(map(cells_of, problems))
    frame = frame[[values in kept for values in frame[list(FIELDS)].itertuples(index=False, name=None)]]
    frame, others = _of_device(frame, device)
    problems = problems_of(frame)
    if narrow:
        boards = [Leaderboard.best_of_all(frame)]
    elif shapes:
        boards = [Leaderboard.from_frame(problem, frame) for problem in problems]
    else:
        boards = [Leaderboard.summary(frame)]
    boards = [board.sorted_by(sort).limited(limit) for board in boards]
    if others:
        boards[-1] = replace(boards[-1], note=f"{boards[-1].note} {others}")
    if format == "table" and out is None:
        console = printing.stdout_console()
        console.print(*(board.table(top, width=console.width) for board in boards), sep="\n")
        return
    text = _render(boards, format, top)
    if out is None:
        typer.echo(text, nl=False)
    else:
        write_text(out, text, arguments.UsageError)


def _of_device(frame: pandas.DataFrame, device: str | None) -> tuple[pandas.DataFrame, str]:
    """The rows of one GPU, or all rows if requested, and a sentence about the hidden ones."""
    from tunegemm.report.contents import named_device

    counts = {str(name): int(count) for name, count in frame["device_name"].value_counts().items()}
    if device == "all" or (device is None and len(counts) < 2):
        return frame, ""
    if device is not None:
        name, others = named_device(device, sorted(counts)), ""
    else:
        from tunegemm.describe.device import cuda_device_count, find_device

        here = find_device("cuda:0").name if cuda_device_count() else ""
        name = here if here in counts else max(counts, key=counts.__getitem__)
        others = f"Not shown: {', '.join(sorted(counts.keys() - {name}))}; name one with --device, or all."
    return frame[frame["device_name"] == name], others


def what_lacks(words: list[str], measured: list[Problem], families: str | None) -> str:
    """The reason for an empty leaderboard."""
    if not measured:
        return f"no measurements{f' with {families}' if families else ''} yet"
    some = ", ".join(map(str, measured[:5])) + (f" and {len(measured) - 5} more" if measured[5:] else "")
    return f"no measurement of {' '.join(words)}; the database has {some}"


def _render(boards: list[Leaderboard], format: Format, top: int | None) -> str:
    """One document for all boards: JSON a list, CSV under one header."""
    if format == "json":
        return to_json([board.as_dict(top) for board in boards]) + "\n"
    if format == "csv":
        texts = [board.csv(top) for board in boards]
        return "".join([texts[0], *(text.partition("\n")[2] for text in texts[1:])])
    return "\n".join(board.markdown(top) if format == "md" else board.plain(top) for board in boards)
