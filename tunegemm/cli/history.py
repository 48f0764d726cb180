"""`tunegemm history`: all records of a shape over time, each compared with the one before."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer

from tunegemm.cli import options, printing
from tunegemm.cli.arguments import UsageError
from tunegemm.describe.command import tune_command
from tunegemm.describe.problem import Problem
from tunegemm.report.text import to_json


def history(
    problems: options.Problems,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document and nothing else.")
    ] = False,
    db: options.DatabaseLocation = None,
) -> None:
    """Print every record of a shape, oldest first, and whether it is slower than the previous one.

    Compares final races; reports faster or slower only beyond the noise.
    """
    from tunegemm.store import Database, Record
    from tunegemm.store.connection import resolve
    from tunegemm.store.history import Change, changes
    from tunegemm.store.shipped import read_shipped

    place = resolve(db)
    result: dict[Problem, list[Record]] = {}
    location = str(place)
    if db is not None or not isinstance(place, Path) or place.exists():
        with Database.open(db, read_only=True) as database:
            result = {problem: database.history(problem, samples=True) for problem in problems}
            location = database.name
    shipped = read_shipped()[0] if db is None else []  # shipped records have a history, too
    rows: list[tuple[Record, Change | None]] = []
    for problem in problems:
        if own := result.get(problem):
            rows += zip(own, changes(own), strict=True)
        elif known := [record for record in shipped if record.problem == problem]:
            rows += [(replace(item, chosen_at=item.measured_at), None) for item in known]
        else:
            command = tune_command(problem)
            raise UsageError(f"{location}: no record of {problem}; run `{command}` on a GPU first")
    if as_json:
        names = ("label", "median_us", "ratio", "confirmed", "kernel_source")
        documents = [
            {
                "problem": str(record.problem),
                "chosen_at": record.chosen_at.isoformat(),
                "candidate": record.candidate.digest,
                "fingerprint": record.fingerprint.digest,
                **{name: getattr(record, name) for name in names},
                "change": asdict(change) if change is not None else None,
            }
            for record, change in rows
        ]
        typer.echo(to_json(documents))
        return
    for problem, each in groupby(rows, key=lambda row: row[0].problem):
        printing.say(problem)
        for record, change in each:
            ratio = 1.0 if record.is_torch else record.ratio
            compared = "  shipped" if record.layer == "system" else f"  {change}" if change else ""
            printing.say(
                f"  {record.chosen_at:%Y-%m-%d %H:%M}  {record.median_us:9.2f} us"
                f"  {ratio:6.3f} of torch.mm  {'final race' if record.confirmed else 'search':10}"
                f"  {record.label}"
                f"  [{record.fingerprint.device_name}, {record.fingerprint.digest}]{compared}"
            )
