"""Options that commands share, and how a command takes a group of them as one value."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin

import typer

from tunegemm.cli.arguments import UsageError, expanded
from tunegemm.describe.problem import ACCUMULATIONS, DTYPE_BYTES, LAYOUTS, OUTPUT_DTYPES, Problem


@dataclass(frozen=True)
class Group:
    """Annotates a parameter of a command that a function makes of several options: those of its signature."""

    of: Callable[..., Any]
    required: tuple[str, ...] = ()
    """Names of its options that have to be given, whatever their defaults."""

    def parameters(self) -> dict[str, inspect.Parameter]:
        """The options, by their names."""
        found = dict(inspect.signature(self.of, eval_str=True).parameters)
        for name in self.required:
            found[name] = found[name].replace(default=inspect.Parameter.empty)
        return found


def flat(command: Callable[..., None]) -> Callable[..., None]:
    """The command as Typer reads it: the options of its groups are its own."""
    own = inspect.signature(command, eval_str=True).parameters
    groups = {name: group for name, one in own.items() if (group := _group(one.annotation)) is not None}
    shared = {name: group.parameters() for name, group in groups.items()}

    @functools.wraps(command)
    def run(**given: Any) -> None:
        made = {
            name: group.of(**{option: given.pop(option) for option in shared[name]})
            for name, group in groups.items()
        }
        command(**given, **made)

    options = [each for name, one in own.items() for each in shared.get(name, {name: one}).values()]
    named = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in options]
    run.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
    return run


def _group(annotation: Any) -> Group | None:
    facts = get_args(annotation)[1:] if get_origin(annotation) is Annotated else ()
    return next((one for one in facts if isinstance(one, Group)), None)


def _positive(parameter: typer.CallbackParam, value: int | None) -> int | None:
    # Typer's own `min=` says what is allowed, but not what was given.
    if value is not None and value < 1:
        raise UsageError(f"{parameter.opts[0]} {value}: must be 1 or more")
    return value


def completed(values: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """What a shell offers for a value that was begun; of several with commas, for the last one."""

    def found(incomplete: str) -> list[str]:
        before, comma, begun = incomplete.rpartition(",")
        return [before + comma + value for value in values() if value.startswith(begun)]

    return found


def _families() -> Iterable[str]:
    from tunegemm.generate import families

    return families.NAMES


DEVICES = completed(lambda: ("cuda:0", "model:h100", "model:h200", "replay:h200"))
DTYPES = completed(lambda: OUTPUT_DTYPES)


def count_option(flag: str, help: str) -> Any:
    """An option whose value is a positive number. Raises UsageError for others."""
    return typer.Option(flag, metavar="N", callback=_positive, help=help)


SomeShapes = Annotated[
    list[str] | None,
    typer.Option(
        "--shape", metavar="MxNxK[xL]", help="May be repeated, also with lists and ranges. Default: all."
    ),
]
DeviceSpec = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="SPEC",
        autocompletion=DEVICES,
        help="cuda:N, replay:h200 (recorded) or model:h200. Default: cuda:0, or replay:h200 without a GPU.",
    ),
]
#: For commands that measure and have no use for a recorded or modelled device.
GpuSpec = Annotated[
    str | None,
    typer.Option("--device", metavar="cuda:N", help="The GPU to measure on. Default: cuda:0."),
]
Families = Annotated[
    str | None,
    typer.Option(
        "--families",
        "--family",
        metavar="NAME[,NAME]",
        autocompletion=completed(_families),
        help="Kernel families. Default: all.",
    ),
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
Workers = Annotated[int | None, count_option("--workers", "Compile workers. Default: by cores and RAM.")]


def parse_problems(
    shape: Annotated[
        list[str] | None,
        typer.Option(
            "--shape",
            metavar="MxNxK[xL]",
            help="M, N, K and optionally the batch; may be repeated. Several values, quoted: "
            "'{512,1024}x6144x4096', or '512:4096:512x6144x4096' from 512 to 4096 by 512.",
        ),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype",
            metavar="DTYPE",
            autocompletion=DTYPES,
            help=f"Element type of A and B: {', '.join(OUTPUT_DTYPES)}.",
        ),
    ] = "bf16",
    out_dtype: Annotated[
        str | None,
        typer.Option(
            "--out-dtype",
            metavar="DTYPE",
            autocompletion=completed(lambda: DTYPE_BYTES),
            help="Element type of D: bf16, fp16 or fp32; with fp8 operands also fp8_e4m3 or fp8_e5m2; "
            "with int8 "
            "operands int32, or bf16, fp16 or fp32 with scales. "
            "Default: that of A and B; bf16 for fp8, fp32 for tf32, int32 for int8.",
        ),
    ] = None,
    layout: Annotated[
        str,
        typer.Option(
            "--layout",
            metavar="LAYOUT",
            autocompletion=completed(lambda: LAYOUTS),
            help="Layout of A and B: tn (both K-major: activations times a transposed weight), tt, nn or nt.",
        ),
    ] = "tn",
    alignment: Annotated[
        int | None,
        typer.Option(
            "--alignment",
            metavar="BYTES",
            help="Alignment of the operands' addresses and strides, 1 to 16. Default: the alignment "
            "of packed "
            "operands.",
        ),
    ] = None,
    epilogue: Annotated[
        str,
        typer.Option(
            "--epilogue",
            metavar="STEPS",
            help="Steps that the kernel applies to the product, such as bias_n+gelu_tanh, swiglu or "
            "residual.",
        ),
    ] = "",
    accumulation: Annotated[
        str,
        typer.Option(
            "--accumulation",
            metavar="HOW",
            autocompletion=completed(lambda: ACCUMULATIONS),
            help="Precision of fp8 sums: fast, or two_level, which adds every 128 of k in fp32.",
        ),
    ] = "fast",
    groups: Annotated[
        int,
        typer.Option(
            "--groups",
            metavar="E",
            min=0,
            help="Divide the M rows into E groups with separate weights, as tunegemm.grouped_mm does. "
            "--epilogue may be a gate, such as swiglu.",
        ),
    ] = 0,
) -> list[Problem]:
    """The problems of a command line, in order, without repetitions. Raises ProblemError."""
    how: dict[str, Any] = {"dtype": dtype, "out_dtype": out_dtype, "layout": layout, "alignment": alignment}
    how |= {"epilogue": epilogue, "accumulation": accumulation, "groups": groups}
    return list(dict.fromkeys(Problem.parse(text, **how) for text in expanded(shape)))


#: The products that a command line describes; `Problems` insists on a shape.
SomeProblems = Annotated[list[Problem], Group(parse_problems)]
Problems = Annotated[list[Problem], Group(parse_problems, required=("shape",))]
