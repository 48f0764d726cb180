"""`tunegemm explain`: a problem's roofline, a candidate's share of it, what dispatch would launch and why."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

import typer

from tunegemm.cli import options, printing
from tunegemm.report.text import to_json


def command(
    problems: options.Problems,
    candidate: Annotated[
        str | None,
        options.option(
            "FAMILY[,NAME=VALUE]",
            "Explain this candidate. Missing parameters come from the kernel that dispatch would launch, or "
            "for another family from the model's first choice.",
        ),
    ] = None,
    device: options.DeviceSpec = None,
    db: options.OneDatabase = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON list with an entry for each shape.")
    ] = False,
) -> None:
    """Show the rooflines of a shape and of a tile, and which kernel tunegemm.matmul would use."""
    with printing.working("looking up what dispatch would launch"):
        from tunegemm.report.explain import explain_problem
        from tunegemm.tuning.tuner import open_device

        opened = open_device(device)
        if opened.is_real and candidate is None:
            import torch

            with suppress(RuntimeError):  # no memory for a context: predictions have wider margins then
                torch.cuda.init()  # type: ignore[no-untyped-call]  # torch's heuristics need CUDA
        result = [explain_problem(item, opened, candidate=candidate, database=db) for item in problems]
    if as_json:
        typer.echo(to_json([explanation.asdict() for explanation in result]))
        return
    for explanation in result:
        printing.say(*str(explanation).splitlines(), hang=12)
