"""`tunegemm history`: what was the record when."""

from __future__ import annotations

from typing import Annotated

import typer

from tunegemm.cli import options
from tunegemm.cli.options import UsageError
from tunegemm.describe.command import tune_command
from tunegemm.describe.problem import Problem
from tunegemm.report.text import to_json


def command(
    problems: list[Problem],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document and nothing else.")
    ] = False,
    db: options.DatabaseLocation = None,
) -> None:
    """Print every record that a shape ever had, oldest first."""
    from tunegemm.store import Database

    with Database.open(db, read_only=True) as database:
        found = {problem: database.history(problem) for problem in problems}
        location = database.name
    missing = [problem for problem, choices in found.items() if not choices]
    if missing:
        raise UsageError(
            f"{location}: no record of {missing[0]}; run `{tune_command(missing[0])}` on a GPU first"
        )
    if as_json:
        names = ("label", "median_us", "ratio", "confirmed", "kernel_source")
        documents = [
            {
                "problem": str(problem),
                "chosen_at": choice.chosen_at.isoformat(),
                "candidate": choice.candidate.digest,
                "fingerprint": choice.fingerprint.digest,
                **{name: getattr(choice, name) for name in names},
            }
            for problem, choices in found.items()
            for choice in choices
        ]
        typer.echo(to_json(documents))
        return
    for problem, choices in found.items():
        options.say(problem)
        for record in choices:
            options.say(
                f"  {record.chosen_at:%Y-%m-%d %H:%M}  {record.median_us:9.2f} us"
                f"  {record.ratio:6.3f} of torch.mm  {'final race' if record.confirmed else 'search':10}"
                f"  {record.label}  [{record.fingerprint.device_name}, {record.fingerprint.digest}]"
            )
