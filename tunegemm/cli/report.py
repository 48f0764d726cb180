"""`tunegemm report`: the records of one GPU as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from tunegemm.cli import arguments, printing
from tunegemm.cli.options import DatabaseLocation, count_option, option
from tunegemm.describe.command import command_line
from tunegemm.describe.device import cuda_device_count
from tunegemm.errors import TunegemmError
from tunegemm.files import write_text
from tunegemm.report.text import counted


def command(
    out: Annotated[Path, option("FILE", "The page to write.")] = Path("report.html"),
    shape: Annotated[
        list[str] | None, option("MxNxK[xL]", "Only these shapes, with all their trials; may be repeated.")
    ] = None,
    device: Annotated[
        str | None,
        option(
            "NAME",
            "Name of a measured device, or a part of it; replay:h200 for the recorded H200. Default: the "
            "device measured last.",
        ),
    ] = None,
    details: Annotated[int, count_option("How many searches to show, the latest first.")] = 12,
    db: DatabaseLocation = None,
) -> None:
    """Write one self-contained HTML page: speed-ups, roofline, searches, failures, environment."""
    shapes = arguments.parse_shapes(shape)
    with printing.working("reading the records and drawing the page"):
        from tunegemm.report.contents import from_database, from_recording
        from tunegemm.report.html import report

        if device is not None and device.startswith("replay:"):
            from tunegemm.measure.replay import open_replay

            recording = open_replay(device)
            if db is not None:
                raise arguments.UsageError(
                    f"--device {device} and --db: a recording or a database; give one of them"
                )
            contents = from_recording(recording, shapes=shapes, detailed=details)
        else:
            from tunegemm.store import Database

            try:
                with Database.open(db, read_only=True) as database:
                    contents = from_database(database, device=device, shapes=shapes, detailed=details)
            except TunegemmError as error:
                if device is not None or db is not None or cuda_device_count():
                    raise
                command = command_line("report", {"shape": shape, "device": "replay:h200"})
                raise arguments.UsageError(f"no database here; for the recorded H200: {command}") from error
        # The footer's command lacks a database's address, which may hold a password.
        page = report(contents, command=command_line("report", {"shape": shape, "device": device}))
        write_text(out, page, arguments.UsageError)
    printing.say(f"{out}: {counted(len(contents.winners), 'shape')}. {contents.origin}")
