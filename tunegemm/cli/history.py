"""`tunegemm history`: what was the record when, and whether it is slower than the one before."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tunegemm.cli import options, printing
from tunegemm.cli.arguments import UsageError
from tunegemm.describe.command import tune_command
from tunegemm.describe.problem import Problem
from tunegemm.report.text import to_json

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]


def history(
    problems: options.Problems,
    as_json: AsJson = False,
    db: options.DatabaseLocation = None,
) -> None:
    """Print every record that a shape ever had, oldest first, and whether it is slower than the one before.

    Compares final races; says faster or slower only where they differ by more than the noise.
    """
    from tunegemm.store import Database, Record
    from tunegemm.store.connection import resolve
    from tunegemm.store.history import changes
    from tunegemm.store.shipped import read_shipped

    place = resolve(db)
    found: dict[Problem, list[Record]] = {problem: [] for problem in problems}
    if db is None and isinstance(place, Path) and not place.exists():  # what ships has a history, too
        location = str(place)
    else:
        with Database.open(db, read_only=True) as database:
            found = {problem: database.history(problem, samples=True) for problem in problems}
            location = database.name
    missing = [problem for problem, choices in found.items() if not choices]
    shipped = [one for one in read_shipped()[0] if one.problem in missing] if db is None else []
    missing = [problem for problem in missing if problem not in {one.problem for one in shipped}]
    for one in () if as_json else shipped:
        printing.say(one.problem)
        printing.say(
            f"  {one.measured_at:%Y-%m-%d %H:%M}  {one.median_us:9.2f} us  {one.ratio:6.3f} of torch.mm  "
            f"{'final race' if one.confirmed else 'search':10}  {one.label}  "
            f"[{one.fingerprint.device_name}, {one.fingerprint.digest}]  shipped"
        )
    found = {problem: choices for problem, choices in found.items() if choices or problem in missing}
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
                "change": asdict(change) if change is not None else None,
            }
            for problem, choices in found.items()
            for choice, change in zip(choices, changes(choices), strict=True)
        ]
        documents += [
            {
                "problem": str(one.problem),
                "chosen_at": one.measured_at.isoformat(),
                "candidate": one.candidate.digest,
                "fingerprint": one.fingerprint.digest,
                **{name: getattr(one, name) for name in names},
                "change": None,
            }
            for one in shipped
        ]
        typer.echo(to_json(documents))
        return
    for problem, choices in found.items():
        printing.say(problem)
        for record, change in zip(choices, changes(choices), strict=True):
            compared = f"  {change}" if change is not None else ""
            printing.say(
                f"  {record.chosen_at:%Y-%m-%d %H:%M}  {record.median_us:9.2f} us"
                f"  {record.ratio:6.3f} of torch.mm  {'final race' if record.confirmed else 'search':10}"
                f"  {record.label}  [{record.fingerprint.device_name}, {record.fingerprint.digest}]{compared}"
            )
