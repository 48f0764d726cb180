"""`tunegemm record`: run a program, and write down the products it computes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tunegemm.cli import options, program
from tunegemm.describe.command import command_line
from tunegemm.errors import WorkloadError
from tunegemm.files import cause, check_target, read_text
from tunegemm.untrusted import decoded

if TYPE_CHECKING:
    from tunegemm.describe.workload import Workload


def command(
    words: Annotated[
        list[str], typer.Argument(metavar="COMMAND...", help="The program and its arguments, after `--`.")
    ],
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="Where the products go, as JSON.")
    ] = Path("shapes.json"),
) -> None:
    """Run a program and record the matrix products of its Python processes: `-- python train.py`."""
    from tunegemm.describe.workload import Workload, merge

    try:
        out = out.absolute()
        if not out.parent.is_dir():
            raise WorkloadError(f"{out}: its folder does not exist; make it first")
        check_target(out, WorkloadError)
    except OSError as error:  # a deleted working directory, or a folder that one may not search
        raise WorkloadError(f"{out}: {cause(error, 'give a full path')}") from None
    with tempfile.TemporaryDirectory(prefix="tunegemm-record-") as parts:
        code = program.run(words, program.attached(TUNEGEMM_RECORD_PARTS=parts), "record")
        found = []
        for part in sorted(Path(parts).glob("[!.]*.json")):
            workload, refused = Workload.from_document(decoded(read_text(part)), str(part))
            found.append(workload)
            options.say(*(f"tunegemm: left out: {line}" for line in refused), err=True)
    if not found:
        options.say(
            "tunegemm: nothing recorded: no Python process of the command imported torch with tunegemm "
            "installed beside it (python -I, -E and -S turn recording off, too)",
            err=True,
        )
    else:
        workload = merge(found, words)
        try:
            workload.write(out)
        except WorkloadError as error:  # the program may have run for hours
            kept = Path(tempfile.mkdtemp(prefix="tunegemm-record-"), out.name)
            workload.write(kept)
            raise WorkloadError(f"{error}; what was recorded is in {kept}") from None
        options.say(f"tunegemm: {_summary(workload, out)}", err=True)
    raise typer.Exit(code)


def _summary(workload: Workload, out: Path) -> str:
    calls = sum(product.calls for product in workload.products)
    text = (
        f"{len(workload.products)} products, {calls} calls in {workload.processes} processes, in {out.name}"
    )
    only_captured = sum(1 for product in workload.products if not product.calls)
    if only_captured:
        text += f"; {only_captured} were only captured, and are weighted by that"
    if workload.unknown_replays:
        text += f"; {workload.unknown_replays} replays of CUDA graphs captured before are not counted"
    if workload.products:
        shown = out.relative_to(Path.cwd()) if out.is_relative_to(Path.cwd()) else out
        text += f". Tune them: {command_line('tune', {'from': shown, 'budget': '10m'})}"
    return text
