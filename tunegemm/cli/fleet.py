"""`tunegemm fleet`: hosts that tune one list of shapes together, through one database."""

from __future__ import annotations

import json
import signal
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tunegemm.cli import options
from tunegemm.cli.tune import Effort, show_result
from tunegemm.errors import DatabaseError

if TYPE_CHECKING:
    from rich.console import Console

    from tunegemm.tuning.fleet import Worked
    from tunegemm.tuning.tuner import Tuner

app = typer.Typer(
    help="Tune a list of shapes on many hosts: each shape once per GPU model and software versions.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command("add")
def add(
    shape: options.Shapes,
    dtype: options.Dtype = "bf16",
    out_dtype: options.OutDtype = None,
    layout: options.Layout = "tn",
    alignment: options.Alignment = None,
    epilogue: options.EpilogueText = "",
    accumulation: options.Accumulation = "fast",
    effort: Annotated[Effort, typer.Option("--effort", help="How much of the space to try.")] = Effort.quick,
    trials: Annotated[
        int | None, options.count_option("--trials", "Most candidates to measure per shape.")
    ] = None,
    budget: Annotated[
        str | None, typer.Option("--budget", metavar="TIME", help="Most time per shape: 90, 90s, 10m, 1h30m.")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Also those that are done or failed.")] = False,
    db: options.DatabaseLocation = None,
) -> None:
    """Ask for shapes to be tuned."""
    problems = options.parse_problems(shape, dtype, out_dtype, layout, alignment, epilogue, accumulation)
    seconds = options.parse_seconds(budget) if budget is not None else None

    from tunegemm.store import Database
    from tunegemm.store.claims import Claims, Task

    with Database.open(db) as database:
        claims = Claims(database)
        added = claims.add([Task(each, effort.value, trials, seconds) for each in problems], again=again)
        known = len(problems) - added
        told = f"; {known} known already{', to be tuned again' if again else ''}" if known else ""
        typer.echo(f"{added} added{told}; {claims.tasks()} in all. Tune them with: tunegemm fleet work")


@app.command("work")
def work(
    stay: Annotated[bool, typer.Option("--stay", help="Wait for further shapes when all are done.")] = False,
    lease: Annotated[
        str, typer.Option("--lease", metavar="TIME", help="A dead worker's shape is taken over after that.")
    ] = "2m",
    families: Annotated[
        str | None, typer.Option("--families", metavar="A,B", help="Kernel families to try. Default: all.")
    ] = None,
    device: options.GpuSpec = None,
    workers: Annotated[
        int | None, options.count_option("--workers", "Compile workers. Default: by cores and RAM.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the search.")] = 0,
    db: options.DatabaseLocation = None,
) -> None:
    """Tune the shapes that nobody else tunes on this GPU's model, until all are done."""
    names = options.parse_families(families)
    lease_s = options.parse_seconds(lease, "--lease")

    from rich.console import Console

    from tunegemm.store import Database
    from tunegemm.store.claims import Claims
    from tunegemm.store.connection import display
    from tunegemm.tuning import fleet
    from tunegemm.tuning.tuner import Tuner, open_gpu

    opened = open_gpu(device)
    # Schedulers of clusters end a job so; the claim is then given back at once.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    out, log = options.stdout_console(), Console(stderr=True)
    failed = 0
    with (
        Database.open(db) as database,
        Tuner(opened, database, families=names, workers=workers, seed=seed) as tuner,
    ):
        for worked in fleet.work(
            Claims(database), opened.fingerprint, _tuning(tuner, log), lease_s=lease_s, stay=stay
        ):
            failed += worked.result.best is None
            _show(out, log, worked, display(database.location))
            if worked.result.interrupted:
                raise typer.Exit(130)
    log.print("All shapes are done.", highlight=False)
    if failed:
        raise typer.Exit(1)


def _tuning(tuner: Tuner, log: Console) -> Any:
    from tunegemm.cli.progress import ProgressView

    def tune(task: Any) -> Any:
        with ProgressView(log) as view:
            return tuner.tune(
                task.problem,
                effort=task.effort,
                trials=task.trials,
                budget_seconds=task.budget_seconds,
                on_progress=view.update,
            )

    return tune


def _show(out: Console, log: Console, worked: Worked, where: str) -> None:
    show_result(out, worked.result, 3, where=where)
    if worked.result.interrupted:
        log.print(
            f"Interrupted: what was measured is kept, {worked.claim.task.problem} is for another worker.",
            soft_wrap=True,
            highlight=False,
        )
    elif not worked.kept:
        log.print(
            f"{worked.claim.task.problem}: another worker took over, since this one's claim was not renewed.",
            soft_wrap=True,
            highlight=False,
        )


@app.command("status")
def status(
    db: options.DatabaseLocation = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show how far the shapes are on each GPU model, who tunes what, and what failed."""
    from tunegemm.store import Database
    from tunegemm.store.claims import Claims
    from tunegemm.store.connection import resolve

    place = resolve(db)
    if isinstance(place, Path) and not place.exists():
        raise DatabaseError(f"{place}: no such database; `tunegemm fleet add` creates it")
    with Database.open(db, read_only=True) as database:
        claims = Claims(database)
        tasks, progress, holdings = claims.tasks(), claims.progress(), claims.holdings()
    if as_json:
        document = {
            "tasks": tasks,
            "progress": [asdict(row) for row in progress],
            "holdings": [
                asdict(row) | {"problem": str(row.problem), "since": row.since.isoformat(timespec="seconds")}
                for row in holdings
            ],
        }
        typer.echo(json.dumps(document, indent=2))
        return
    from rich.table import Table

    table = Table(title=f"{tasks} shapes to tune on each GPU model and software", title_justify="left")
    for heading in ("device", "driver", "torch", "waiting", "being tuned", "done", "failed"):
        table.add_column(heading, justify="left" if heading in ("device", "driver", "torch") else "right")
    for row in progress:
        table.add_row(*map(str, asdict(row).values()))
    console = options.stdout_console()
    console.print(table)
    for entry in holdings:
        what = f"failed: {entry.failure}" if entry.failure else f"being tuned by {entry.worker}"
        console.print(
            f"{entry.problem} on {entry.device_name}: {what}, since {entry.since:%Y-%m-%d %H:%M:%S} UTC",
            soft_wrap=True,
            highlight=False,
            markup=False,
        )
