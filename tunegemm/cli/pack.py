"""`tunegemm pack`, `load`, `unload`: records and their compiled kernels, for hosts that compile nothing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from tunegemm.cli import arguments, options, printing
from tunegemm.cli.arguments import UsageError
from tunegemm.cli.options import option
from tunegemm.errors import PackError
from tunegemm.files import check_target, descriptor, replacing
from tunegemm.report.text import counted
from tunegemm.untrusted import shown


def pack_command(
    out: Annotated[Path, option("FILE", "The pack to write; an existing one is replaced.")],
    gpu: Annotated[
        str | None, option("NAME", "Only records for this GPU: h200, or a part of its name. Default: all.")
    ] = None,
    shape: options.SomeShapes = None,
    from_files: Annotated[
        list[Path] | None,
        option("FILE", "Only a program's products, as `tune --from` reads them. May be repeated.", "--from"),
    ] = None,
    families: options.Families = None,
    no_compile: Annotated[
        bool,
        typer.Option("--no-compile", help="Fail if a kernel is missing, instead of compiling it."),
    ] = False,
    workers: options.Workers = None,
    db: options.OneDatabase = None,
) -> None:
    """Write records and their compiled kernels to one file, for `tunegemm load` on a serving host."""
    shapes, names = arguments.parse_shapes(shape), arguments.parse_families(families)
    from tunegemm.describe import workload
    from tunegemm.store import Database, packing
    from tunegemm.store.layers import read_records

    check_target(out, PackError, reads=from_files or ())
    problems = None
    if from_files:
        problems = {demand.problem for demand in workload.read(*from_files)[0]}
    if db is None:
        records, warnings = read_records()
        printing.say(*(f"tunegemm: {warning}" for warning in warnings), err=True)
    else:
        with Database.open(db, read_only=True) as database:
            records = database.records()
    chosen = [
        record
        for record in records
        if (gpu is None or gpu.lower() in record.fingerprint.device_name.lower())
        and (not shapes or record.problem.shape in shapes)
        and (problems is None or record.problem in problems)
        and (names is None or record.candidate.family in names)
    ]
    if not chosen:
        words = filter(None, (gpu, *(shape or ()), families, *(from_files or ())))
        named = ", ".join(shown(str(word)) for word in words)
        result = f"none of {len(records)} records matches {named}" if records else "no record to pack"
        raise UsageError(f"{result}; `tunegemm leaderboard --device all` lists what there is")
    with replacing(out, PackError) as part:  # fails before kernels compile for minutes
        packed = packing.pack(chosen, part, compile_missing=not no_compile, workers=workers)
    for reason, count in packed.left_out.items():
        printing.say(f"left out: {counted(count, 'record')}, {reason}", err=True)
    printing.say(
        f"wrote {out}: {counted(packed.records, 'record')} of {', '.join(packed.gpus)}, "
        f"{counted(packed.objects, 'kernel')} ({packed.compiled} compiled now), "
        f"{out.stat().st_size / 1e6:.1f} MB",
        f"sha256 {packed.sha256}",
        err=descriptor(out) == 1,  # stdout carries only the pack
    )


def load_command(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Packs that `tunegemm pack` wrote.")],
    sha256: Annotated[str | None, option("HEX", "Refuse a file with any other SHA-256.")] = None,
) -> None:
    """Verify packs and serve from them until `tunegemm unload`. Compiles nothing."""
    if sha256 is not None and len(files) > 1:
        raise UsageError("--sha256 applies to one file; load the others one by one")
    if sha256 is not None and not re.fullmatch("[0-9a-fA-F]{64}", sha256):
        raise UsageError(f"--sha256 {shown(sha256)}: give its 64 hexadecimal digits")
    from tunegemm.report.doctor import described
    from tunegemm.store import packs

    for file in files:
        pack = packs.install(file, sha256=sha256)
        contents, troubles = described(pack)
        printing.say(*(f"tunegemm: {trouble}" for trouble in troubles), err=True)
        printing.say(f"loaded {file} as {pack.name}: {contents}")


def unload_command(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME...", help="The name that `load` printed, or its start."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove every loaded pack.")] = False,
) -> None:
    """Remove loaded packs."""
    if bool(names) == everything:
        raise UsageError("give the names of packs, or --all; `tunegemm db layers` lists them")
    from tunegemm.store import packs

    for name in [folder.name for folder in packs.installed()] if everything else names or []:
        printing.say(f"unloaded {packs.remove(name)}")
