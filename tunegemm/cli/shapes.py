"""`tunegemm shapes`: list the products that an engine will compute for a model, before it runs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tunegemm.cli import arguments, printing
from tunegemm.cli.options import count_option, option
from tunegemm.describe.command import command_line
from tunegemm.errors import WorkloadError
from tunegemm.files import check_target
from tunegemm.untrusted import digits, shown

if TYPE_CHECKING:
    from tunegemm.describe.workload import Workload


Engine = Literal["vllm", "sglang", "transformers"]
Dtype = Literal["bf16", "fp16"]


def command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_CONFIG",
            help="A config.json, a folder with one, or a model in the local Hugging Face cache, such as "
            "meta-llama/Llama-3.1-8B. Nothing is downloaded.",
        ),
    ],
    tp: Annotated[int, count_option("Ranks of tensor parallelism.")] = 1,
    engine: Annotated[
        Engine,
        typer.Option(
            help="The engine that runs the model. It determines which layers are merged, and the numbers "
            "of rows."
        ),
    ] = "vllm",
    rows: Annotated[str | None, option("N,N", "Numbers of rows. Default: the engine's own.")] = None,
    dtype: Annotated[
        Dtype | None,
        typer.Option(help="Element type of layers that are not quantised. Default: the model's."),
    ] = None,
    out: Annotated[Path, option("FILE", "JSON file to write.")] = Path("shapes.json"),
) -> None:
    """List the matrix products that an engine computes for a model, in a file for `tune --from`."""
    from tunegemm.describe.workload.engines import shapes
    from tunegemm.describe.workload.models import read_model

    values, config = _rows(rows), read_model(model)
    check_target(out, WorkloadError, reads=[config.where])
    result = shapes(config, engine, ranks=tp, rows=values, dtype=dtype)
    how = {"--tp": str(tp), "--engine": engine, "--rows": rows, "--dtype": dtype}
    words = [word for flag, value in how.items() if value is not None for word in (flag, value)]
    replace(result.workload, program=("tunegemm", "shapes", model, *words)).write(out)
    for name, reason in result.refused.items():
        printing.say(f"tunegemm: left out: {name}: {reason}", err=True)
    printing.say(*(f"{count:5} x {name}" for name, count in result.layers.items()))
    tune = command_line("tune", {"from": out, "budget": "30m"})
    count = len(result.workload.products)
    printing.say(f"tunegemm: wrote {count} products to {out}{_recorded(result.workload)}", err=True)
    printing.say(f"tunegemm: on the serving GPU, run: {tune}", err=True)


def _recorded(workload: Workload) -> str:
    """How many of the products have a record, for each GPU that has any."""
    from tunegemm.describe.workload import demands
    from tunegemm.store.layers import read_records

    wanted = {demand.problem for demand in demands(workload.products)[0]}
    known = {(record.fingerprint.device_name, record.problem) for record in read_records()[0]}
    counts = Counter(name for name, problem in known if problem in wanted)
    listed = ", ".join(f"{count} have a record for {name}" for name, count in sorted(counts.items()))
    return f"; {listed}" if listed else ""


def _rows(text: str | None) -> list[int]:
    """Numbers of ``1,8,64``. Raises UsageError."""
    if text is None:
        return []
    results = [digits(word.strip()) for word in text.split(",")]
    if not all(number is not None and 1 <= number < 2**31 for number in results):
        raise arguments.UsageError(
            f"--rows {shown(text)}: not numbers of rows; give numbers such as 1,8,64,8192"
        )
    return [number for number in dict.fromkeys(results) if number is not None]
