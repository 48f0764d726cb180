"""`tunegemm space`: count candidates, and how many each rule rejects."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from tunegemm.cli import arguments, options, printing
from tunegemm.report.text import to_json


def command(
    problems: options.Problems,
    families: options.Families = None,
    device: options.DeviceSpec = None,
    format: Annotated[Literal["table", "json"], typer.Option(help="How to print.")] = "table",
) -> None:
    """Count candidates, and those that each feasibility rule rejects."""
    from tunegemm.generate import families as known
    from tunegemm.report.space import take_census
    from tunegemm.tuning.tuner import open_device

    names = arguments.parse_families(families) or known.NAMES
    spaces = [known.load_space(name) for name in names]
    opened = open_device(device)
    arguments.require_memory(opened, problems)
    counts = []
    with printing.working("counting candidates") as now:
        for problem in problems:
            for space in spaces:
                now(f"counting {space.size:,} candidates of {space.family} for {problem}")
                counts.append(take_census(space, problem, opened))
    if format == "json":
        typer.echo(to_json([count.asdict() for count in counts]))
        return
    from rich.table import Table

    for count in counts:
        title = f"{count.family} for {count.problem} on {count.device.name}"
        table = Table(title=title, title_justify="left", show_footer=True)
        table.add_column("rule", footer="feasible")
        table.add_column("candidates", justify="right", footer=f"{count.feasible:,}")
        kernels = f"{count.feasible_kernels:,} of {count.kernels:,} kernels"
        table.add_column("first rejection", footer=f"{kernels}, {count.launches:,} launches of each")
        table.add_row("(the whole space)", f"{count.size:,}", "")
        for rule, rejected in count.rejected.items():
            table.add_row(rule, f"-{rejected:,}", count.examples[rule])
        printing.stdout_console().print(table)
