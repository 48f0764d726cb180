"""`tunegemm run`: run an unmodified program and serve its products with tuned kernels."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from tunegemm.cli import arguments, printing, program
from tunegemm.cli.program import Signals


def command(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="COMMAND...", help="The program and its arguments, after `--`."),
    ] = None,
    env: Annotated[
        bool,
        typer.Option(
            "--env", help="Print environment variables with the same effect, for a container or a service."
        ),
    ] = False,
) -> None:
    """Run a program and serve its matrix products with tuned kernels, as if each of its Python processes
    called `tunegemm.enable()`: `-- vllm serve ...`.
    """
    words = words or []
    if env == bool(words):
        raise arguments.UsageError("give a program, as in: tunegemm run -- python train.py; or --env alone")
    variables = program.attached(TUNEGEMM_ENABLE="1")
    if env:
        for name, value in variables.items():
            typer.echo(f"export {name}={shlex.quote(value)}")
        return
    from tunegemm.describe.served import Served
    from tunegemm.store.layers import read_records

    records, warnings = read_records()
    printing.say(*(f"tunegemm: {warning}" for warning in warnings), err=True)
    printing.say(f"tunegemm: {_start_line(words, [r.fingerprint.device_name for r in records])}", err=True)
    with Signals() as signals, program.folder("tunegemm-run-") as parts:
        code = signals.run(words, variables | {"TUNEGEMM_ENABLE_PARTS": parts}, "run")
        served = Served.read(Path(parts))
    if served.calls:
        printing.say(f"tunegemm: {served}", err=True)
    else:
        printing.say(
            "tunegemm: served nothing: no Python process with tunegemm installed computed a product "
            "on a GPU (python -I, -E and -S also disable serving)",
            err=True,
        )
    raise typer.Exit(code)


def _start_line(words: list[str], devices: list[str]) -> str:
    from tunegemm.describe.device import cuda_device_count, find_device

    if not cuda_device_count():
        return f"no CUDA GPU here: torch computes every product of {words[0]}"
    name = find_device("cuda:0").name
    return f"serving {words[0]} on {name} from {devices.count(name):,} records"
