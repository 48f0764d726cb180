"""The commands that messages and reports print for users to run; a shell reads them as the same words."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from tunegemm.describe.problem import Problem, default_out_dtype


def command_line(command: str, options: Mapping[str, object]) -> str:
    """``tunegemm COMMAND --option value ...``, quoted for a shell.

    A list repeats its option, True is a flag, and None, False and an empty text are left out.
    """
    words = ["tunegemm", *command.split()]
    for name, value in options.items():
        for item in value if isinstance(value, list | tuple) else [value]:
            if item is True:
                words.append(f"--{name}")
            elif item not in (None, False, ""):
                words += [f"--{name}", str(item)]
    return shlex.join(words)


def tune_command(problem: Problem, **more: object) -> str:
    """The command line that tunes exactly this problem, or the Python call if no option can name it.

    That is the case for a user's own epilogue, which only its program knows, and for a column-major output.
    more: further options of `tunegemm tune`.
    """
    if problem.out_major != "n" or problem.fused.function is not None:
        return f"tunegemm.tune(tunegemm.{problem!r})"
    return command_line("tune", {**options_of(problem), **more})


def options_of(problem: Problem) -> dict[str, object]:
    """The options that name a problem on a command line, but for its output's major and a user's function."""
    return {
        "shape": problem.shape,
        "dtype": problem.in_dtype,
        "out-dtype": problem.out_dtype if problem.out_dtype != default_out_dtype(problem.in_dtype) else None,
        "layout": problem.layout,
        "alignment": problem.alignment if problem.alignment != problem.packed_alignment else None,
        "groups": problem.groups or None,
        "epilogue": problem.epilogue,
        "accumulation": problem.accumulation if problem.accumulation != "fast" else None,
    }
