"""Options that several commands share, and how their text is read."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tunegemm import files
from tunegemm.describe.problem import OUTPUT_DTYPES, Problem
from tunegemm.errors import ProblemError, TunegemmError

if TYPE_CHECKING:
    from rich.console import Console

    from tunegemm.describe.device import Device

Shapes = Annotated[
    list[str],
    typer.Option("--shape", metavar="MxNxK[xL]", help="Extents, and the batch if any; may be repeated."),
]
ShapesOrFile = Annotated[
    list[str] | None,
    typer.Option("--shape", metavar="MxNxK[xL]", help="Extents, and the batch if any; may be repeated."),
]
SomeShapes = Annotated[
    list[str] | None, typer.Option("--shape", metavar="MxNxK[xL]", help="May be repeated. Default: all.")
]
Dtype = Annotated[str, typer.Option("--dtype", help=f"Element type of A and B: {', '.join(OUTPUT_DTYPES)}.")]
OutDtype = Annotated[
    str | None,
    typer.Option(
        "--out-dtype",
        help="Element type of D: bf16, fp16 or fp32; of fp8 operands also fp8_e4m3 or fp8_e5m2; "
        "of int8 int32, or with scales bf16, fp16 or fp32. "
        "Default: as A and B; of fp8 bf16, of tf32 fp32, of int8 int32.",
    ),
]
Accumulation = Annotated[
    str,
    typer.Option(
        "--accumulation",
        help="How sums of fp8 products are kept: fast, or two_level, in fp32 from every 128 of k on.",
    ),
]
Layout = Annotated[
    str,
    typer.Option(
        "--layout",
        help="Layout of A and B: tn (both K-major: activations times a transposed weight), tt, nn or nt.",
    ),
]
Alignment = Annotated[
    int | None,
    typer.Option(
        "--alignment",
        metavar="BYTES",
        help="Of the operands' addresses and strides: 2, 4, 8 or 16. Default: that of packed operands.",
    ),
]
EpilogueText = Annotated[
    str,
    typer.Option(
        "--epilogue",
        metavar="STEPS",
        help="What becomes of the product in the same kernel, such as bias_n+gelu_tanh, swiglu or residual.",
    ),
]
DeviceSpec = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="SPEC",
        help="cuda:N, replay:h200 (recorded) or model:h200. Default: cuda:0, or replay:h200 without a GPU.",
    ),
]
#: For commands that measure and have no use for a recorded or modelled device.
GpuSpec = Annotated[
    str | None,
    typer.Option("--device", metavar="cuda:N", help="The GPU to measure on. Default: cuda:0."),
]
DatabaseLocation = Annotated[
    str | None,
    typer.Option(
        "--db", metavar="PATH|URL", help="Tuning database. Default: the project's, or else the user's."
    ),
]

#: For commands that read what dispatch reads.
OneDatabase = Annotated[
    str | None, typer.Option("--db", metavar="PATH|URL", help="Only this database. Default: all layers.")
]


class UsageError(TunegemmError):
    """An argument that cannot be read; the message names it and the remedy."""


def _positive(parameter: typer.CallbackParam, value: int | None) -> int | None:
    # Typer's own `min=` says what is allowed, but not what was given.
    if value is not None and value < 1:
        raise UsageError(f"{parameter.opts[0]} {value}: must be 1 or more")
    return value


def count_option(flag: str, help: str) -> Any:
    """An option whose value is a positive number. Raises UsageError for others."""
    return typer.Option(flag, metavar="N", callback=_positive, help=help)


def parse_problems(
    shapes: list[str],
    dtype: str,
    out_dtype: str | None,
    layout: str,
    alignment: int | None = None,
    epilogue: str = "",
    accumulation: str = "fast",
) -> list[Problem]:
    """The problems of a command line, in order, without repetitions. Raises ProblemError."""
    problems = [
        Problem.parse(
            shape,
            dtype=dtype,
            out_dtype=out_dtype,
            layout=layout,
            alignment=alignment,
            epilogue=epilogue,
            accumulation=accumulation,
        )
        for shape in shapes
    ]
    return list(dict.fromkeys(problems))


def require_memory(device: Device, problems: Iterable[Problem]) -> None:
    """Raises ProblemError for the first problem that the device's memory cannot hold."""
    for problem in problems:
        if (lack := device.lacks_memory(problem)) is not None:
            raise ProblemError(f"{lack}; give a smaller --shape")


def parse_shapes(shapes: list[str] | None) -> list[str]:
    """The extents that are asked for, as `Problem.shape` writes them. Raises ProblemError."""
    return list(dict.fromkeys(Problem.parse(text).shape for text in shapes or ()))


_DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s?)?")


def parse_seconds(text: str, flag: str = "--budget") -> float:
    """Seconds of ``90``, ``90s``, ``10m`` or ``1h30m``. Raises UsageError for anything else."""
    match = _DURATION.fullmatch(text.strip().lower())
    hours, minutes, seconds = match.groups() if match else (None, None, None)
    total = 3600 * int(hours or 0) + 60 * int(minutes or 0) + float(seconds or 0)
    if total <= 0:
        raise UsageError(f"{flag} {text!r} is no duration; for example 90, 90s, 10m or 1h30m")
    return total


def parse_families(text: str | None) -> tuple[str, ...] | None:
    """Names of kernel families from ``a,b``; None for all. Raises SpaceError for one that is not known."""
    if text is None:
        return None
    from tunegemm.generate import families

    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise UsageError(f"families {text!r} names none; use some of {','.join(families.NAMES)}")
    for name in names:
        families.get(name)
    return names


def stdout_console() -> Console:
    """For tables. A pipe or a log has no width of its own: there nothing is cut to 80 columns."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=160)


def write_text(path: Path, text: str) -> None:
    """Writes a report. Raises UsageError, which names the path, where that is not possible."""
    files.write_text(path, text, UsageError)
