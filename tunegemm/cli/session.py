"""Opens the resources of `tunegemm tune`: the GPUs that measure, and the database that stores the results."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tunegemm.cli import arguments, printing
from tunegemm.cli.tune_options import Output, Place, Search
from tunegemm.describe.problem import Problem

if TYPE_CHECKING:
    from tunegemm.measure.worker import Child
    from tunegemm.store import Database
    from tunegemm.tuning.cluster import Pool
    from tunegemm.tuning.tuner import Tuner


@dataclass(frozen=True)
class Session:
    """An open tuner and the user's options."""

    context: typer.Context
    tuning: Tuner | Pool
    database: Database | None
    search: Search
    output: Output
    is_named: bool
    """Whether the user named a GPU."""

    @property
    def is_real(self) -> bool:
        """Whether a GPU of here measures."""
        return self.tuning.device.is_real


def open_session(
    stack: ExitStack,
    context: typer.Context,
    asked_for: Sequence[Problem],
    is_program: bool,
    search: Search,
    place: Place,
    output: Output,
) -> Session:
    """Opens the GPUs and the database. Raises TunegemmError if that fails or an option is bad.

    asked_for: problems from the command line, rejected if too large. is_program: a program's are tuned.
    """
    _ = search.budget_s  # reject a bad value before anything starts, like the other options
    is_named = place.is_named
    gpus = arguments.parse_gpus(place.devices) if place.devices is not None else ()
    how = search.tuner_options()
    several = place.ray is not None or len(gpus) > 1
    if not several and (place.device is None or place.device.startswith("cuda")):
        how["child"] = begin_to_measure(stack)
    tuning: Tuner | Pool
    database: Database | None
    if several:
        tuning, database = open_pool(stack, gpus, place.ray, place.db, how)
        arguments.require_memory(tuning.device, asked_for)
    else:
        spec = f"cuda:{gpus[0]}" if gpus else place.device
        tuning, database = open_tuner(stack, spec, asked_for, place.db, how)
    if not (is_named or tuning.device.is_real or output.is_bare or is_program):
        device = tuning.device
        printing.say(
            f"No CUDA GPU here: candidates are compiled for {device.architecture.compile_target}; times come "
            f"from a recorded {device.name} ({device.spec}); where it has none, a model ranks the "
            "kernels. Nothing is stored.",
            err=True,
        )
    if search.energy and not tuning.device.is_real:
        printing.say(f"tunegemm: --energy needs a GPU; {tuning.device.spec} meters nothing", err=True)
    return Session(context, tuning, database, search, output, is_named)


def begin_to_measure(stack: ExitStack) -> Child | None:
    """The measuring process, if there is a GPU: it imports torch while this process imports the rest."""
    from tunegemm.describe.device import cuda_device_count

    if not cuda_device_count():
        return None
    from tunegemm.measure.worker import Child

    return stack.enter_context(Child())


def open_tuner(
    stack: ExitStack, spec: str | None, problems: Iterable[Problem], db: str | None, how: Mapping[str, Any]
) -> tuple[Tuner, Database | None]:
    """The tuner of one device, and the database where its measurements go."""
    from tunegemm.store import Database
    from tunegemm.tuning.tuner import Tuner, open_device

    device = open_device(spec)
    arguments.require_memory(device, problems)  # before a database is created
    # Only measurements are stored, so only a real device gets a database; a bad --db is reported anyway.
    wanted = device.is_real or db is not None
    database = stack.enter_context(Database.open(db, create=True)) if wanted else None
    tuner = Tuner(device, database if device.is_real else None, **how)
    return stack.enter_context(tuner), database


def open_pool(
    stack: ExitStack, gpus: Sequence[int], ray: str | None, db: str | None, how: Mapping[str, Any]
) -> tuple[Pool, Database]:
    """A tuner on each of several GPUs, and the database where their measurements go."""
    from tunegemm.store import Database
    from tunegemm.tuning import cluster
    from tunegemm.tuning.studies import Studies

    cluster.import_ray()  # if it is not installed, fail before anything starts
    database = stack.enter_context(Database.open(db, create=True))
    stack.enter_context(cluster.started_here(gpus) if ray is None else cluster.connected(ray))
    cluster.refuse_file(database.location)
    if (study := how["study"]) is not None:
        if "://" not in study:
            cluster.refuse_file(Path(study))
        Studies(study, database=database.location).close()  # refuses a bad one here, before workers start
    place = database.location
    location = str(place) if isinstance(place, Path) else place.render_as_string(hide_password=False)
    opening = functools.partial(cluster.worker_tuner, location, **how)
    return stack.enter_context(cluster.Pool(opening)), database
