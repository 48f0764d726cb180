"""`tunegemm record`: run a program, and write down the products it computes."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tunegemm.cli import printing, program
from tunegemm.cli.options import option
from tunegemm.cli.program import Signals
from tunegemm.describe.command import command_line
from tunegemm.errors import WorkloadError
from tunegemm.files import cause, check_target, read_text
from tunegemm.report.text import counted
from tunegemm.untrusted import decoded

if TYPE_CHECKING:
    from tunegemm.describe.workload import Workload


def command(
    words: Annotated[
        list[str], typer.Argument(metavar="COMMAND...", help="The program and its arguments, after `--`.")
    ],
    out: Annotated[Path, option("FILE", "JSON file to write.")] = Path("shapes.json"),
) -> None:
    """Run a program and record the matrix products of its Python processes: `-- python train.py`."""
    try:
        out = out.absolute()
        if not out.parent.is_dir():
            raise WorkloadError(f"{out}: its folder does not exist; create it first")
        check_target(out, WorkloadError, reads=words)
    except OSError as error:  # a deleted working directory, or an unsearchable folder
        raise WorkloadError(f"{out}: {cause(error, 'give a full path')}") from None
    with Signals() as signals, program.folder("tunegemm-record-") as parts:
        variables = program.attached(TUNEGEMM_RECORD_PARTS=parts)
        code = signals.run(words, variables, "record")
        _write(words, parts, out)
    raise typer.Exit(code)


def _write(words: list[str], parts: str, out: Path) -> None:
    """Merges the files of the processes."""
    from tunegemm.describe.workload import Workload, demands, merge

    results = []
    for part in sorted(Path(parts).glob("[!.]*.json")):
        workload, refused = Workload.from_document(decoded(read_text(part)), str(part))
        results.append(workload)
        printing.say(*(f"tunegemm: left out: {line}" for line in refused), err=True)
    if not results:
        printing.say(
            "tunegemm: recorded nothing: no Python process with tunegemm installed imported torch "
            "(python -I, -E and -S also disable recording)",
            err=True,
        )
        return
    workload = merge(results, words)
    try:
        workload.write(out)
    except WorkloadError as error:  # the program may have run for hours
        kept = Path(tempfile.mkdtemp(prefix="tunegemm-record-"), out.name)
        workload.write(kept)
        raise WorkloadError(f"{error}; the recorded products are in {kept}") from None
    with suppress(OSError):  # the terminal may be gone
        printing.say(f"tunegemm: {_summary(workload, out)}", err=True)
        if demands(workload.products)[0]:
            shown = out.relative_to(Path.cwd()) if out.is_relative_to(Path.cwd()) else out
            again = command_line("tune", {"from": shown, "budget": "10m"})
            printing.say_command("Tune them where they lose most:", again, err=True)


def _summary(workload: Workload, out: Path) -> str:
    from tunegemm.describe.workload import demands

    calls = sum(product.calls for product in workload.products)
    text = (
        f"{counted(len(workload.products), 'product')}, {counted(calls, 'call')} in "
        f"{counted(workload.processes, 'process')}, in {out.name}"
    )
    only_captured = sum(1 for product in workload.products if not product.calls)
    if only_captured:
        text += f"; {only_captured} were only captured, so their captures count as calls"
    if workload.unknown_replays:
        text += (
            f"; {workload.unknown_replays} replays of CUDA graphs from before the recording are not counted"
        )
    if own := [product for product in workload.products if not demands([product])[0]]:
        count, calls = len(own), sum(product.weight for product in own)
        _, (why, *_) = demands(own)
        text += (
            f"; only torch can compute {count} of them ({counted(calls, 'call')}), the first because: {why}"
        )
    return f"{text}."
