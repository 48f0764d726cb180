"""Options that commands share, and groups of options that a command takes as one value."""

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
    """Annotates a command's parameter that a function builds from several options: those of its signature."""

    of: Callable[..., Any]
    required: tuple[str, ...] = ()
    """Names of its required options, whatever their defaults."""

    def parameters(self) -> dict[str, inspect.Parameter]:
        """The options, by their names."""
        result = dict(inspect.signature(self.of, eval_str=True).parameters)
        for name in self.required:
            result[name] = result[name].replace(default=inspect.Parameter.empty)
        return result


def flat(command: Callable[..., None]) -> Callable[..., None]:
    """The command in the form that Typer reads: the groups' options become its own."""
    own = inspect.signature(command, eval_str=True).parameters
    groups = {
        name: group for name, parameter in own.items() if (group := _group(parameter.annotation)) is not None
    }
    shared = {name: group.parameters() for name, group in groups.items()}

    @functools.wraps(command)
    def run(**options: Any) -> None:
        made = {
            name: group.of(**{option: options.pop(option) for option in shared[name]})
            for name, group in groups.items()
        }
        command(**options, **made)

    options = [each for name, item in own.items() for each in shared.get(name, {name: item}).values()]
    named = [item.replace(kind=inspect.Parameter.KEYWORD_ONLY) for item in options]
    run.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
    return run


def _group(annotation: Any) -> Group | None:
    facts = get_args(annotation)[1:] if get_origin(annotation) is Annotated else ()
    return next((fact for fact in facts if isinstance(fact, Group)), None)


def _positive(parameter: typer.CallbackParam, value: int | None) -> int | None:
    # Typer's own `min=` reports the limit but not the value.
    if value is not None and value < 1:
        raise UsageError(f"{parameter.opts[0]} {value}: must be 1 or more")
    return value


def option(
    metavar: str,
    help: str,
    *flags: str,
    values: Iterable[str] | Callable[[], Iterable[str]] = (),
    **more: Any,
) -> Any:
    """An option with a value, named after its parameter unless flags are given.

    values: completions that a shell offers; in a list with commas, for its last entry.
    """

    def offered(incomplete: str) -> list[str]:
        before, comma, begun = incomplete.rpartition(",")
        known = values() if callable(values) else values
        return [before + comma + value for value in known if value.startswith(begun)]

    return typer.Option(
        *flags, metavar=metavar, help=help, autocompletion=offered if values else None, **more
    )


def count_option(help: str) -> Any:
    """An option whose value is a positive number. Raises UsageError for others."""
    return option("N", help, callback=_positive)


def _families() -> Iterable[str]:
    from tunegemm.generate import families

    return families.NAMES


SomeShapes = Annotated[
    list[str] | None,
    option("MxNxK[xL]", "Only these shapes; may be repeated, with lists and ranges. Default: all."),
]
DeviceSpec = Annotated[
    str | None,
    option(
        "SPEC",
        "cuda:N, replay:h200 (recorded) or model:h200. Default: cuda:0, or replay:h200 without a GPU.",
        values=("cuda:0", "model:h100", "model:h200", "replay:h200"),
    ),
]
#: For commands that measure and have no use for a recorded or modelled device.
GpuSpec = Annotated[str | None, option("cuda:N", "The GPU to measure on. Default: cuda:0.")]
Families = Annotated[
    str | None,
    option("NAME[,NAME]", "Kernel families. Default: all.", "--families", "--family", values=_families),
]
DatabaseLocation = Annotated[
    str | None, option("PATH|URL", "Tuning database. Default: the project's, or else the user's.")
]
#: For commands that read the same layers as dispatch.
OneDatabase = Annotated[str | None, option("PATH|URL", "Only this database. Default: all layers.")]
Workers = Annotated[int | None, count_option("Compile workers. Default: by cores and RAM.")]


def parse_problems(
    shape: Annotated[
        list[str] | None,
        option(
            "MxNxK[xL]",
            "M, N, K and optionally the batch; may be repeated. Lists and ranges, in quotes: "
            "'{512,1024}x6144x4096', or '512:4096:512x6144x4096' for 512 to 4096 in steps of 512.",
        ),
    ] = None,
    dtype: Annotated[
        str, option("DTYPE", f"Element type of A and B: {', '.join(OUTPUT_DTYPES)}.", values=OUTPUT_DTYPES)
    ] = "bf16",
    out_dtype: Annotated[
        str | None,
        option(
            "DTYPE",
            "Element type of D: bf16, fp16 or fp32; with fp8 operands also fp8_e4m3 or fp8_e5m2; with int8 "
            "operands int32, or bf16, fp16 or fp32 with scales. Default: that of A and B; bf16 for fp8, fp32 "
            "for tf32, int32 for int8.",
            values=DTYPE_BYTES,
        ),
    ] = None,
    layout: Annotated[
        str,
        option(
            "LAYOUT",
            "Layout of A and B: tn (both K-major: activations times a transposed weight), tt, nn or nt.",
            values=LAYOUTS,
        ),
    ] = "tn",
    alignment: Annotated[
        int | None,
        option(
            "BYTES",
            "Alignment of the operands' addresses and strides, 1 to 16. Default: the alignment of packed "
            "operands.",
        ),
    ] = None,
    epilogue: Annotated[
        str,
        option(
            "STEPS",
            "Steps that the kernel applies to the product, such as bias_n+gelu_tanh, swiglu or residual.",
        ),
    ] = "",
    accumulation: Annotated[
        str,
        option(
            "HOW",
            "Precision of fp8 sums: fast, or two_level, which adds every 128 of k in fp32.",
            values=ACCUMULATIONS,
        ),
    ] = "fast",
    groups: Annotated[
        int,
        option(
            "E",
            "Divide the M rows into E groups with separate weights, as tunegemm.grouped_mm does. --epilogue "
            "may be a gate, such as swiglu.",
            min=0,
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
