"""`tunegemm doctor`: is everything here that tuning needs?"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from tunegemm.cli import options, printing
from tunegemm.report.text import to_json

_COLOURS = {"ok": "green", "note": "yellow", "fail": "red"}


def command(
    db: options.DatabaseLocation = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check everything that tuning needs; exit 1 if something is missing."""
    from tunegemm.report.doctor import examine

    with printing.working("looking at packages, devices and files"):
        checks = examine(db)
    if as_json:
        typer.echo(to_json([asdict(check) for check in checks]))
    else:
        wide = max(len(check.name) for check in checks)
        for check in checks:  # no table: its columns would cut a path in two
            detail = check.detail + (f" -> {check.remedy}" if check.remedy else "")
            text, colour = f"  {check.name:{wide}}  {detail}", _COLOURS[check.status]
            printing.say(text, hang=wide + 8, lead=f"{check.status:4}", colour=colour)
    if any(check.status == "fail" for check in checks):
        raise typer.Exit(1)
