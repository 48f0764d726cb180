"""`tunegemm db`: export, import, merge, upgrade, and list the layers."""

from __future__ import annotations

import re
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tunegemm.cli import arguments, options, printing
from tunegemm.cli.arguments import UsageError
from tunegemm.cli.help import App
from tunegemm.cli.options import option
from tunegemm.files import descriptor

if TYPE_CHECKING:
    from tunegemm.store.exchange import Report

app = App(help="Exchange and merge tuning databases.", rich_markup_mode=None)

#: Bad rows to name one by one; the others are only counted.
NAMED = 20


@app.command("export")
def export_command(
    out: Annotated[Path | None, option("FILE", "The file to write; an existing one is replaced.")] = None,
    shape: options.SomeShapes = None,
    records: Annotated[
        Path | None,
        option("FOLDER", "Write only confirmed records, one reviewable file per GPU, as in db/records."),
    ] = None,
    db: options.DatabaseLocation = None,
) -> None:
    """Write measurements, failures and the history of records to a file."""
    if (out is None) == (records is None):
        raise UsageError("export needs --out FILE, or --records FOLDER")
    if records is not None and shape:
        raise UsageError("--records takes every confirmed record; to choose some, use --out FILE")
    if out is not None:
        _require_json(out)
    shapes = arguments.parse_shapes(shape)
    from tunegemm.store import Database
    from tunegemm.store.exchange import dump, of_shapes, sound, write

    skipped: list[str] = []
    with Database.open(db, read_only=True) as database:
        if records is not None:
            from tunegemm.store.shipped import latest_confirmed, write_records

            paths = write_records(latest_confirmed(database.records()), records)
            if not paths:
                raise UsageError(
                    f"{database.name}: no confirmed record to write; `tunegemm tune` confirms one per shape"
                )
        else:
            assert out is not None
            rows = of_shapes(sound(dump(database), skipped), shapes)
            first = next(rows, None)
            if first is None:
                name_skipped(skipped)
                kind = " of that kind" if shapes else ""
                raise UsageError(f"{database.name}: nothing{kind} to export; see `tunegemm leaderboard`")
            write(chain([first], rows), out)
            paths = [out]
    name_skipped(skipped)
    for path in paths:
        printing.say(f"wrote {path}", err=descriptor(path) == 1)  # stdout carries only the rows


@app.command("import")
def import_command(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Files that `tunegemm db export --out` wrote.")
    ],
    db: options.DatabaseLocation = None,
) -> None:
    """Add the rows of files to a database. Skips and names bad rows and files; stored rows do not change.

    Exit code 2 if a file cannot be read, 1 if no row is usable.
    """
    from tunegemm.errors import DatabaseError
    from tunegemm.store import Database
    from tunegemm.store.exchange import load, read

    readable = []
    for file in files:  # check before creating a database, which would be a layer of this folder
        _require_json(file)
        rows = read(file)
        try:
            readable.append((file, chain(list(islice(rows, 1)), rows)))
        except DatabaseError as error:
            printing.say(f"tunegemm: {error}", err=True)
            if len(files) > 1:
                printing.say(f"{file}: 0 rows added, not read")
    used = 0
    if readable:
        with Database.open(db, create=True) as database:
            for file, rows in readable:
                report = load(database, rows, origin=file.name)
                _print(f"{file}", report)
                used += report.added + report.known
    if len(readable) < len(files):
        raise typer.Exit(2)
    if not used:
        raise typer.Exit(1)


@app.command("merge")
def merge_command(
    sources: Annotated[
        list[str], typer.Argument(metavar="DB...", help="Paths or URLs of databases to read.")
    ],
    into: Annotated[str, option("DB", "The database to write; created if missing.")],
) -> None:
    """Merge databases. Of conflicting records, the one with better evidence wins; lists conflicts."""
    from tunegemm.store.connection import display
    from tunegemm.store.exchange import merge

    _print(display(into), merge(sources, into))


@app.callback(invoke_without_command=True)
def root(context: typer.Context) -> None:
    """Exchange and merge tuning databases."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command("upgrade")
def upgrade_command(
    databases: Annotated[list[str], typer.Argument(metavar="PATH|URL...", help="Tuning databases.")],
) -> None:
    """Upgrade databases of older releases to this release's schema, without loss."""
    from tunegemm.store import Database

    for location in databases:
        with Database.open(location) as database:
            printing.say(f"{database.name}: up to date")


@app.command("layers")
def layers_command() -> None:
    """List the layers that dispatch reads, and how many records each has."""
    from collections import Counter

    from tunegemm.resources import data_path
    from tunegemm.store import packs
    from tunegemm.store.layers import read_records
    from tunegemm.store.locations import project_location, user_location

    records, warnings = read_records()
    counts = Counter(record.layer for record in records)
    places = {
        "system": data_path("db", "records"),
        "pack": ", ".join(str(pack.folder) for pack in packs.loaded([])) or "none: see `tunegemm load`",
        "user": user_location(),
        "project": project_location() or "none: no TUNEGEMM_DB, no tunegemm.sqlite of yours in this folder",
    }
    for layer, place in places.items():
        printing.say(f"{layer:8} {counts[layer]:6} records  {_without_password(str(place))}")
    printing.say(*(f"tunegemm: {warning}" for warning in warnings), err=True)


def _without_password(location: str) -> str:
    """As `connection.display`, on a serving host without SQLAlchemy, too."""
    if "://" not in location:
        return location
    return re.sub(r"://([^:@/]*):.*@", r"://\1:***@", location).partition("?")[0]


def _print(name: str, report: Report) -> None:
    printing.say(
        f"{name}: {report.added} rows added, {report.known} known already, {len(report.skipped)} left out"
    )
    name_skipped(report.skipped)
    for conflict in report.conflicts:
        printing.say(
            f"conflict {conflict.problem} on {conflict.device_name}: "
            f"{conflict.kept} over {conflict.other}, {conflict.reason}"
        )


def name_skipped(lines: list[str]) -> None:
    """Prints one line for reasons that differ only in numbers, with a count of their rows."""
    groups: dict[str, list[str]] = {}
    for line in lines:
        groups.setdefault(re.sub(r"[0-9a-f]*\d[0-9a-f]*", "#", line), []).append(line)
    ordered = sorted(groups.values(), key=len, reverse=True)
    for same in ordered[:NAMED]:
        more = f" (and {len(same) - 1} more like it)" if len(same) > 1 else ""
        printing.say(f"left out: {same[0]}{more}", err=True)
    if rest := sum(map(len, ordered[NAMED:])):
        printing.say(f"left out: {rest} more", err=True)


def _require_json(path: Path) -> None:
    """Raises UsageError for a name of another kind of file."""
    if path.suffix.lower() in (".csv", ".parquet"):
        raise UsageError(
            f"{path}: exports are JSON; `tunegemm leaderboard --format csv` writes a table of the records"
        )
