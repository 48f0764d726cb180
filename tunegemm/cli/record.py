"""`tunegemm record`: run a program, and write down the products it computes."""

from __future__ import annotations

import os
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tunegemm.cli import options
from tunegemm.cli.signals import Signals
from tunegemm.describe.command import command_line
from tunegemm.errors import WorkloadError
from tunegemm.files import cause, check_target, read_text
from tunegemm.untrusted import decoded

if TYPE_CHECKING:
    from tunegemm.describe.workload import Workload

#: Holds the `sitecustomize` that begins the recording in each Python process.
_START = Path(__file__).parent.parent / "serve" / "torch" / "start"


def command(
    program: Annotated[
        list[str], typer.Argument(metavar="COMMAND...", help="The program and its arguments, after `--`.")
    ],
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="Where the products go, as JSON.")
    ] = Path("shapes.json"),
) -> None:
    """Run a program and record the matrix products of its Python processes: `-- python train.py`."""
    try:
        out = out.absolute()
        if not out.parent.is_dir():
            raise WorkloadError(f"{out}: its folder does not exist; make it first")
        check_target(out, WorkloadError)
    except OSError as error:  # a deleted working directory, or a folder that one may not search
        raise WorkloadError(f"{out}: {cause(error, 'give a full path')}") from None
    with Signals() as signals, _folder() as parts:
        code = _run(program, parts, signals)
        _write(program, parts, out)
    raise typer.Exit(code)


def _folder() -> tempfile.TemporaryDirectory[str]:
    """For what each process writes."""
    try:
        return tempfile.TemporaryDirectory(prefix="tunegemm-record-")
    except OSError as error:
        raise WorkloadError(f"no temporary folder: {cause(error, 'name one in TMPDIR')}") from None


def _write(program: list[str], parts: str, out: Path) -> None:
    """Adds up what the processes wrote."""
    from tunegemm.describe.workload import Workload, merge

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
        return
    workload = merge(found, program)
    try:
        workload.write(out)
    except WorkloadError as error:  # the program may have run for hours
        kept = Path(tempfile.mkdtemp(prefix="tunegemm-record-"), out.name)
        workload.write(kept)
        raise WorkloadError(f"{error}; what was recorded is in {kept}") from None
    with suppress(OSError):  # of a terminal that is gone
        options.say(f"tunegemm: {_summary(workload, out)}", err=True)


def _run(program: list[str], parts: str, signals: Signals) -> int:
    """The command's exit code; 128 and more for one that a signal ended, as in a shell."""
    path = os.pathsep.join(filter(None, [str(_START), os.environ.get("PYTHONPATH", "")]))
    environment = os.environ | {"PYTHONPATH": path, "TUNEGEMM_RECORD_PARTS": parts}

    def start() -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(program, env=environment)
        except OSError as error:
            raise options.UsageError(
                f"{program[0]}: {error.strerror}; a script runs as: tunegemm record -- python {program[0]}"
            ) from None

    code = signals.run(start)
    return code if code >= 0 else 128 - code


def _summary(workload: Workload, out: Path) -> str:
    from tunegemm.describe.workload import demands

    calls = sum(product.calls for product in workload.products)
    text = (
        f"{len(workload.products)} products, {calls} calls in {workload.processes} processes, in {out.name}"
    )
    only_captured = sum(1 for product in workload.products if not product.calls)
    if only_captured:
        text += f"; {only_captured} were only captured, and are weighted by that"
    if workload.unknown_replays:
        text += f"; {workload.unknown_replays} replays of CUDA graphs captured before are not counted"
    if own := [product for product in workload.products if not demands([product])[0]]:
        count, calls = len(own), sum(product.weight for product in own)
        _, (why, *_) = demands(own)
        text += f"; {count} of them, {calls} calls, are torch's whatever is tuned, the first because: {why}"
    if len(own) < len(workload.products):
        shown = out.relative_to(Path.cwd()) if out.is_relative_to(Path.cwd()) else out
        text += f". Tune them: {command_line('tune', {'from': shown, 'budget': '10m'})}"
    return text
