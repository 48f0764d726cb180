"""Parses the text of arguments. Invalid text raises UsageError, which names it and the remedy."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from tunegemm.describe.problem import LAYOUTS, OUTPUT_DTYPES, Problem, default_out_dtype, normalize_dtype
from tunegemm.errors import DeviceError, ProblemError, TunegemmError
from tunegemm.report.text import clean
from tunegemm.untrusted import digits, named, shown

if TYPE_CHECKING:
    from tunegemm.describe.device import Device

#: Most shapes of one command line.
_MOST_SHAPES = 1000


class UsageError(TunegemmError):
    """An argument that cannot be read; the message names it and the remedy."""


def require_memory(device: Device, problems: Iterable[Problem]) -> None:
    """Raises ProblemError for the first problem that does not fit into the device's memory."""
    for problem in problems:
        if (lack := device.lacks_memory(problem)) is not None:
            raise ProblemError(f"{lack}; give a smaller --shape")


def problem_filter(
    shapes: list[str] | None, dtype: str | None, layout: str | None, out_dtype: str | None = None
) -> Callable[[Problem], bool]:
    """A filter for the requested problems; None accepts any value. Raises ProblemError."""
    extents = parse_shapes(shapes)
    in_dtype = normalize_dtype(dtype, OUTPUT_DTYPES) if dtype is not None else None
    if in_dtype is not None:
        default_out_dtype(in_dtype)  # raises for a dtype without kernels
    out = normalize_dtype(out_dtype) if out_dtype is not None else None
    if layout is not None and layout.lower() not in LAYOUTS:
        raise ProblemError(f"layout {layout!r} is not known; use one of {', '.join(LAYOUTS)}")
    return lambda problem: (
        (not extents or problem.shape in extents)
        and in_dtype in (None, problem.in_dtype)
        and out in (None, problem.out_dtype)
        and (layout is None or layout.lower() == problem.layout)
    )


def parse_shapes(shapes: list[str] | None) -> list[str]:
    """The requested extents, in the format of `Problem.shape`. Raises ProblemError."""
    return list(dict.fromkeys(Problem.parse(text).shape for text in expanded(shapes)))


_RANGE = re.compile(r"(\d{1,9}):(\d{1,9}):(\d{1,9})", re.ASCII)


def expanded(shapes: list[str] | None) -> list[str]:
    """Shapes without braces and ranges: ``{512,1024}x8x8`` is two, ``512:2048:512x8x8`` four.

    Raises UsageError for a range that has no value, and for more than a thousand shapes.
    """
    results: list[str] = []
    for text in shapes or ():
        lists = [_values(text, part) for part in re.split(r"x(?![^{]*\})", text)]
        if len(results) + math.prod(map(len, lists)) > _MOST_SHAPES:
            raise UsageError(
                f"--shape {shown(text)}: more than {_MOST_SHAPES} shapes; give fewer, or use --from"
            )
        results += ["x".join(parts) for parts in itertools.product(*lists)]
    return results


def _values(text: str, part: str) -> list[str]:
    """The values of one extent."""
    if part.startswith("{") and part.endswith("}"):
        return [value for word in part[1:-1].split(",") for value in _values(text, word.strip())]
    if ":" not in part:
        return [part]
    match = _RANGE.fullmatch(part)
    first, last, step = map(int, match.groups()) if match else (0, 0, 0)
    if not 0 < first <= last or not step:
        raise UsageError(f"--shape {shown(text)}: {shown(part)} is not FIRST:LAST:STEP, such as 512:4096:512")
    return list(map(str, range(first, last + 1, step)[: _MOST_SHAPES + 1]))  # one more: too many


def parse_pattern(text: str | None) -> str | None:
    """A regular expression over labels, unchanged. Raises UsageError if it is invalid."""
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

    result = [] if text == "all" else [digits(word.strip()) for word in text.split(",")]
    numbers = [number for number in result if number is not None]
    if len(numbers) < len(result):
        raise UsageError(f"--devices {shown(text)}: not GPU numbers; give all, or numbers such as 0,1")
    for number in numbers:
        if numbers.count(number) > 1:
            raise UsageError(f"--devices {text!r}: names GPU {number} twice; name each once")
    count = cuda_device_count()
    if not count:
        raise DeviceError(f"--devices {text!r}: no CUDA device here; run this command on a GPU")
    if numbers and max(numbers) >= count:
        raise UsageError(f"--devices {text!r}: no GPU {max(numbers)}; this host has GPUs 0 to {count - 1}")
    return tuple(numbers or range(count))


def parse_families(text: str | None) -> tuple[str, ...] | None:
    """Names of kernel families from ``a,b``; None for all. Raises SpaceError for an unknown name."""
    if text is None:
        return None
    from tunegemm.generate import families

    names = named(text)
    if not names:
        raise UsageError(f"--families {text!r} names no family; use some of {','.join(families.NAMES)}")
    for name in names:
        families.get(name)
    return names
