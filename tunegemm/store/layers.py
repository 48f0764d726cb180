"""The layers of the database: system, pack, user, project. Of equal records, the narrower layer's wins.

- *system*: `db/records/*.json`, shipped with the package for known GPUs; text, read-only.
- *pack*: loaded by `tunegemm load` or ``TUNEGEMM_PACK``, with its compiled kernels; read-only.
- *user*: `tunegemm.sqlite` in the user's data folder.
- *project*: ``TUNEGEMM_DB``, a path or URL; else `tunegemm.sqlite` in the working directory, if only this
  user can have written it.

Tuning writes to the narrowest layer: `Database.open()` without a location.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tunegemm import extras
from tunegemm.errors import DatabaseError, ExtraError
from tunegemm.store import packs
from tunegemm.store.locations import project_location, refused_project, user_location
from tunegemm.store.waiting import in_time

if TYPE_CHECKING:
    from tunegemm.store.database import Database
    from tunegemm.store.lookup import Lookup
    from tunegemm.store.record import Record
    from tunegemm.store.shipped import ShippedLookup

T = TypeVar("T")

#: Names of the layers, by how narrow they are: a larger number wins.
NARROWNESS = {"system": 1, "pack": 2, "user": 3, "project": 4}


def modified() -> tuple[tuple[int, int], ...]:
    """Sizes and times of the layers' files, which change when another process publishes into one.

    It takes some microseconds, and does not cover a server's database.
    """
    results = []
    for location in (user_location(), project_location()):
        if location is not None and "://" not in str(location):
            for suffix in ("", "-wal"):  # the write-ahead log holds the latest records
                try:
                    facts = Path(f"{os.path.realpath(location)}{suffix}").stat()
                    results.append((facts.st_size, facts.st_mtime_ns))
                except OSError:
                    results.append((0, 0))
    return tuple(results)


def absent() -> list[str]:
    """A line for each missing file that ``TUNEGEMM_PACK`` or ``TUNEGEMM_DB`` names."""
    remedies = {
        "TUNEGEMM_PACK": "correct or unset it",
        "TUNEGEMM_DB": "correct it, or let `tunegemm tune` create it",
    }
    return [
        f"{name}={place}: no such file; {remedy}"
        for name, remedy in remedies.items()
        if (place := os.environ.get(name)) and "://" not in place and not os.path.lexists(place)
    ]


def read_records() -> tuple[list[Record], list[str]]:
    """The records of every layer, and one line for each layer that could not be read."""
    records, warnings = read_texts()
    for result in of_databases(lambda database: database.records(), warnings):
        records += result
    return records, warnings


def read_lookups() -> tuple[list[Record], list[Lookup | ShippedLookup], list[str]]:
    """As `read_records`: the records of packs, and look-up tables of the other layers.

    SQLAlchemy is loaded only for a server's database, or for a file with a fault.
    """
    from tunegemm.store.lookup import read_file
    from tunegemm.store.shipped import ShippedLookup

    shipped = ShippedLookup()
    lookups: list[Lookup | ShippedLookup] = [shipped]
    warnings = [*shipped.warnings]
    records = [record for pack in packs.loaded(warnings) for record in pack.records]
    for layer, location in _databases(warnings):
        result = None if "://" in str(location) else read_file(location, layer)
        if result is not None:
            lookups.append(result)
        else:
            lookups += _of_database(lambda database: database.lookup(), layer, location, warnings)
    return records, lookups, warnings


def read_texts() -> tuple[list[Record], list[str]]:
    """The records of the system layer and of packs, and one line for each file that could not be read."""
    from tunegemm.store.shipped import read_shipped

    records, warnings = read_shipped()
    for pack in packs.loaded(warnings):
        records += pack.records
    return records, warnings


def of_databases(read: Callable[[Database], T], warnings: list[str]) -> list[T]:
    """The results of `read` for the user's and the project's layer; warns of unreadable ones."""
    return [result for place in _databases(warnings) for result in _of_database(read, *place, warnings)]


def _of_database(
    read: Callable[[Database], T], layer: str, location: Path | str, warnings: list[str]
) -> list[T]:
    try:
        with extras.named():
            from tunegemm.store.connection import display, resolve
            from tunegemm.store.database import Database  # imports SQLAlchemy
    except ExtraError as error:
        warnings.append(f"the {layer}'s database needs a package that serving does not install: {error}")
        return []

    def opened() -> Database:
        return Database.open(location, read_only=True, layer=layer)

    try:
        with in_time(opened, Database.close) if "://" in str(location) else opened() as database:
            return [read(database)]
    except DatabaseError as error:
        warnings.append(str(error))
    except TimeoutError:
        name = display(resolve(location))
        warnings.append(f"{name}: no answer in time; check the address and that the server is running")
    return []


def _databases(warnings: list[str]) -> list[tuple[str, Path | str]]:
    """The database layers and their locations; the user's only if it exists.

    Adds a warning for a project's database that must not be read.
    """
    if refused := refused_project():
        warnings.append(refused)
    user, project = user_location(), project_location()
    results: list[tuple[str, Path | str]] = [("user", user)] if _exists(user) else []
    return results if project is None else [*results, ("project", project)]


def _exists(location: Path | str) -> bool:
    try:
        return Path(location).exists()
    except OSError:
        return True  # the folder may not be searched: opening the database reports that
