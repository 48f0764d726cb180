"""What commands share: options, how their text is read, and how lines are printed."""

from __future__ import annotations

import functools
import inspect
import io
import itertools
import math
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from tunegemm import files
from tunegemm.describe.problem import LAYOUTS, OUTPUT_DTYPES, Problem, default_out_dtype, normalize_dtype
from tunegemm.errors import DeviceError, ProblemError, TunegemmError
from tunegemm.report.text import clean
from tunegemm.untrusted import digits, shown

if TYPE_CHECKING:
    from rich.console import Console

    from tunegemm.describe.device import Device
    from tunegemm.store import Database

SomeShapes = Annotated[
    list[str] | None,
    typer.Option("--shape", metavar="MxNxK[xL]", help="May be repeated, as may values. Default: all."),
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
Families = Annotated[
    str | None,
    typer.Option("--families", "--family", metavar="NAME[,NAME]", help="Kernel families. Default: all."),
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


#: Shapes of one command line.
_MOST_SHAPES = 1000

#: Letters of a line that are printed; a message that lists values may be long.
_LONGEST_LINE = 4000


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


Workers = Annotated[int | None, count_option("--workers", "Compile workers. Default: by cores and RAM.")]


def parse_problems(
    shape: Annotated[
        list[str] | None,
        typer.Option(
            "--shape",
            metavar="MxNxK[xL]",
            help="Extents, and the batch if any; may be repeated. Several values of one, quoted: "
            "'{512,1024}x6144x4096', or '512:4096:512x6144x4096' from 512 to 4096 by 512.",
        ),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype", metavar="DTYPE", help=f"Element type of A and B: {', '.join(OUTPUT_DTYPES)}."
        ),
    ] = "bf16",
    out_dtype: Annotated[
        str | None,
        typer.Option(
            "--out-dtype",
            metavar="DTYPE",
            help="Element type of D: bf16, fp16 or fp32; of fp8 operands also fp8_e4m3 or fp8_e5m2; "
            "of int8 int32, or with scales bf16, fp16 or fp32. "
            "Default: as A and B; of fp8 bf16, of tf32 fp32, of int8 int32.",
        ),
    ] = None,
    layout: Annotated[
        str,
        typer.Option(
            "--layout",
            metavar="LAYOUT",
            help="Layout of A and B: tn (both K-major: activations times a transposed weight), tt, nn or nt.",
        ),
    ] = "tn",
    alignment: Annotated[
        int | None,
        typer.Option(
            "--alignment",
            metavar="BYTES",
            help="Of the operands' addresses and strides: 1 to 16. Default: that of packed operands.",
        ),
    ] = None,
    epilogue: Annotated[
        str,
        typer.Option(
            "--epilogue",
            metavar="STEPS",
            help="What becomes of the product in the same kernel, such as bias_n+gelu_tanh, swiglu or "
            "residual.",
        ),
    ] = "",
    accumulation: Annotated[
        str,
        typer.Option(
            "--accumulation",
            metavar="HOW",
            help="How sums of fp8 products are kept: fast, or two_level, in fp32 from every 128 of k on.",
        ),
    ] = "fast",
) -> list[Problem]:
    """The problems of a command line, in order, without repetitions. Raises ProblemError."""
    how: dict[str, Any] = {"dtype": dtype, "out_dtype": out_dtype, "layout": layout, "alignment": alignment}
    how |= {"epilogue": epilogue, "accumulation": accumulation}
    return list(dict.fromkeys(Problem.parse(text, **how) for text in expanded(shape)))


def of_problems(command: Callable[..., None], *, required: bool = True) -> Callable[..., None]:
    """The command with the options of `parse_problems`; its first parameter becomes their problems.

    required: whether `--shape` is.
    """
    shared = dict(inspect.signature(parse_problems, eval_str=True).parameters)
    if required:
        shared["shape"] = shared["shape"].replace(default=inspect.Parameter.empty)
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        command(parse_problems(**{name: given.pop(name) for name in shared}), **given)

    named = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in (*shared.values(), *own)]
    run.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
    return run


def require_memory(device: Device, problems: Iterable[Problem]) -> None:
    """Raises ProblemError for the first problem that the device's memory cannot hold."""
    for problem in problems:
        if (lack := device.lacks_memory(problem)) is not None:
            raise ProblemError(f"{lack}; give a smaller --shape")


def problem_filter(
    shapes: list[str] | None, dtype: str | None, layout: str | None, out_dtype: str | None = None
) -> Callable[[Problem], bool]:
    """Whether a problem is one of those asked for; None asks for any. Raises ProblemError."""
    extents = parse_shapes(shapes)
    in_dtype = normalize_dtype(dtype, OUTPUT_DTYPES) if dtype is not None else None
    if in_dtype is not None:
        default_out_dtype(in_dtype)  # raises for one without kernels
    out = normalize_dtype(out_dtype) if out_dtype is not None else None
    if layout is not None and layout.lower() not in LAYOUTS:
        raise ProblemError(f"layout {layout!r} is not known; use one of {', '.join(LAYOUTS)}")
    return lambda problem: (
        (not extents or problem.shape in extents)
        and in_dtype in (None, problem.in_dtype)
        and out in (None, problem.out_dtype)
        and (layout is None or layout.lower() == problem.layout)
    )


def require_fingerprint(database: Database, start: str | None, flag: str) -> None:
    """Raises UsageError unless None, or the start of the digest of a fingerprint in the database."""
    if start is None:
        return
    from tunegemm.store.queries import fingerprint_digests

    known = fingerprint_digests(database)
    if not any(digest.startswith(start) for digest in known):
        listed = ", ".join(f"{digest} ({name})" for digest, name in known.items()) or "none"
        raise UsageError(
            f"{database.name}: {flag} {start!r} is not the start of a fingerprint; it has {listed}"
        )


def parse_shapes(shapes: list[str] | None) -> list[str]:
    """The extents that are asked for, as `Problem.shape` writes them. Raises ProblemError."""
    return list(dict.fromkeys(Problem.parse(text).shape for text in expanded(shapes)))


_RANGE = re.compile(r"(\d{1,9}):(\d{1,9}):(\d{1,9})", re.ASCII)


def expanded(shapes: list[str] | None) -> list[str]:
    """Shapes without braces and ranges: ``{512,1024}x8x8`` is two, ``512:2048:512x8x8`` four.

    Raises UsageError for a range that has no value, and for more than a thousand shapes.
    """
    found: list[str] = []
    for text in shapes or ():
        lists = [_values(text, part) for part in re.split(r"x(?![^{]*\})", text)]
        if len(found) + math.prod(map(len, lists)) > _MOST_SHAPES:
            raise UsageError(
                f"--shape {shown(text)}: more than {_MOST_SHAPES} shapes; give fewer, or use --from"
            )
        found += ["x".join(parts) for parts in itertools.product(*lists)]
    return found


def _values(text: str, part: str) -> list[str]:
    """The values of one extent."""
    if part.startswith("{") and part.endswith("}"):
        return [value for word in part[1:-1].split(",") for value in _values(text, word.strip())]
    if ":" not in part:
        return [part]
    match = _RANGE.fullmatch(part)
    first, last, step = map(int, match.groups()) if match else (0, 0, 0)
    if not 0 < first <= last or not step:
        raise UsageError(f"--shape {shown(text)}: {shown(part)} is not FIRST:LAST:STEP, as 512:4096:512")
    values = range(first, last + 1, step)
    if len(values) > _MOST_SHAPES:
        raise UsageError(f"--shape {shown(text)}: more than {_MOST_SHAPES} shapes; give fewer, or use --from")
    return list(map(str, values))


def parse_pattern(text: str | None) -> str | None:
    """A regular expression over labels, as it is. Raises UsageError for what is none."""
    if text is not None:
        try:
            re.compile(text)
        except (re.error, OverflowError, RecursionError) as error:
            raise UsageError(f"--kernels {shown(text)}: not a regular expression: {error}") from None
    return text


_DURATION = re.compile(r"(?:(\d{1,9})h)?(?:(\d{1,9})m)?(?:(\d{1,9}(?:\.\d{1,9})?)s?)?", re.ASCII)


def parse_seconds(text: str) -> float:
    """Seconds of ``90``, ``90s``, ``10m`` or ``1h30m``. Raises UsageError for anything else."""
    match = _DURATION.fullmatch(text.strip().lower())
    hours, minutes, seconds = match.groups() if match else (None, None, None)
    total = 3600 * int(hours or 0) + 60 * int(minutes or 0) + float(seconds or 0)
    if total <= 0:
        raise UsageError(
            f"--budget {clean(repr(text), 60)} is not a duration; for example 90, 90s, 10m or 1h30m"
        )
    return total


def parse_gpus(text: str) -> tuple[int, ...]:
    """Numbers of this host's GPUs from ``all`` or ``0,1``. Raises UsageError, DeviceError without a GPU."""
    from tunegemm.describe.device import cuda_device_count

    found = [] if text == "all" else [digits(word.strip()) for word in text.split(",")]
    numbers = [number for number in found if number is not None]
    if len(numbers) < len(found):
        raise UsageError(f"--devices {shown(text)}: not numbers of GPUs; give all, or such as 0,1")
    for number in numbers:
        if numbers.count(number) > 1:
            raise UsageError(f"--devices {text!r}: names GPU {number} twice; name each once")
    count = cuda_device_count()
    if not count:
        raise DeviceError(f"--devices {text!r}: no CUDA device here, and this measures; run it on a GPU")
    if numbers and max(numbers) >= count:
        raise UsageError(f"--devices {text!r}: no GPU {max(numbers)}; here are {count}: 0 to {count - 1}")
    return tuple(numbers or range(count))


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


def say(*lines: object, err: bool = False, hang: int = 0) -> None:
    """Prints each as one line, whatever the names in it hold (`report.text.clean`); on a terminal as several
    that end between words, all but the first `hang` columns in; but a command whole. err: on stderr.
    """
    stream = sys.stderr if err else sys.stdout
    width = shutil.get_terminal_size().columns if stream.isatty() else 0
    for line in lines:
        text = clean(line, _LONGEST_LINE)
        if len(text) > width > hang + 20 and not text.lstrip().startswith("tunegemm "):
            text = textwrap.fill(
                text, width, subsequent_indent=" " * hang, break_long_words=False, break_on_hyphens=False
            )
        typer.echo(text, err=err)


def say_command(lead: str, command: str, *, err: bool = False) -> None:
    """A command to copy: whole and alone on its line, under the words that lead to it."""
    say(lead, f"  {command}", err=err)


@contextmanager
def working(what: str) -> Iterator[Callable[[str], None]]:
    """Says on a terminal what takes a while, until it is done; what it gives changes the words."""
    console = stderr_console()
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status(f"{what} ...") as status:
        yield lambda now: status.update(f"{clean(now)} ...")


def stdout_console() -> Console:
    """For tables. A pipe or a log has no width of its own: there nothing is cut to 80 columns."""
    console = _console(stderr=False)
    return console if console.is_terminal else _console(file=_Lines(sys.stdout), width=160)


def stderr_console() -> Console:
    """For what is said beside the result: progress, notes, warnings."""
    console = _console(stderr=True)
    return console if console.is_terminal else _console(file=_Lines(sys.stderr), width=160)


def page(console: Console, parts: Sequence[Any]) -> None:
    """Prints on a terminal, through the user's pager what is longer than its screen."""
    lines = sum(len(console.render_lines(part)) for part in parts)
    if lines < console.height or not (sys.stdin.isatty() and console.is_terminal):
        console.print(*parts, sep="\n")
        return
    os.environ.setdefault("LESS", "FRX")  # colours, and no pager for less than a screen
    with console.pager(styles="PAGER" not in os.environ):
        console.print(*parts, sep="\n")


class _Lines(io.TextIOBase):
    """Takes the blanks off the ends of lines, with which a table fills its last column."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(re.sub(r" +(?=\n)", "", text))
        return len(text)

    def flush(self) -> None:
        self._stream.flush()


def _console(**how: Any) -> Console:
    from rich.console import Console

    return Console(**how, markup=False, emoji=False, highlight=False)


def write_text(path: Path, text: str) -> None:
    """Writes a report. Raises UsageError, which names the path, where that is not possible."""
    files.write_text(path, text, UsageError)
