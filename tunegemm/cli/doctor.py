"""`tunegemm doctor`: is everything here that tuning needs?"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from tunegemm.cli import options, printing
from tunegemm.report.text import clean, to_json


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
        from rich.table import Table
        from rich.text import Text

        colours = {"ok": "green", "note": "yellow", "fail": "red"}
        table = Table.grid(padding=(0, 2))
        for check in checks:
            detail = check.detail + (f" -> {check.remedy}" if check.remedy else "")
            table.add_row(
                Text(check.status, style=colours[check.status]), check.name, Text(clean(detail, 2000))
            )
        printing.stdout_console().print(table)
    if any(check.status == "fail" for check in checks):
        raise typer.Exit(1)
