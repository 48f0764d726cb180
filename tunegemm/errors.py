"""The exception tree. Every error a user can cause names the value and the remedy, on one line.

A failure of *one candidate* is data, not an exception: see `tunegemm.measure.outcome.Failure`. A fall-back to
torch is a `TunegemmWarning`, issued once.
"""

from __future__ import annotations

import difflib
import errno
import functools
import inspect
import os
import re
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

Given = ParamSpec("Given")
Result = TypeVar("Result")

#: Letters up to which a message shows a word whole; a longer value is shown by its ends.
_LONGEST_WORD = 400


class TunegemmError(Exception):
    """Base of all errors that tunegemm raises on purpose; the message is always one line."""

    def __str__(self) -> str:  # not in __init__, through which Dynamo cannot trace a `raise`
        line = re.sub(r"\s*[\r\n]\s*", " ", super().__str__())
        word = rf"\S{{{_LONGEST_WORD},}}"
        return re.sub(word, lambda match: f"{match[0][:80]}...{match[0][-40:]}", line)


class FileError(TunegemmError):
    """A file that cannot be read or written."""


class ExtraError(TunegemmError, ImportError):
    """A missing package that only tuning, the command line or a report needs."""


class BadValueError(TunegemmError, ValueError):
    """An invalid value in a file, a pack or a damaged database."""


class ProblemError(TunegemmError, ValueError):
    """A shape, dtype, layout or tensor that does not describe a matrix product."""


class OperandError(ProblemError, TypeError):
    """An operand that is not a tensor."""


class DeviceError(TunegemmError):
    """A device that is absent, unknown, or unable to do the requested work."""


class WorkloadError(TunegemmError):
    """A list of shapes that cannot be read or written, or a recording that cannot begin."""


class PolicyError(TunegemmError, ValueError):
    """An unknown policy of dispatch, or an impossible number in one."""


class SpaceError(TunegemmError, ValueError):
    """A search-space file with an unknown key, an empty list or a value of the wrong kind."""


class ArtifactError(TunegemmError):
    """A compiled object that is missing, was changed on disk, or belongs to another user."""


class PackError(ArtifactError):
    """A pack that is cut, edited, of another format or not loaded, or that cannot be written."""


class CompileError(TunegemmError):
    """The compile pool cannot work at all, for example because the compiler is not installed."""


class ArgumentError(TunegemmError, TypeError):
    """A keyword that a function does not have; the message names the nearest."""


class OperationError(TunegemmError):
    """A chosen kernel that cannot run its problem or is not initialized, or a workspace that does not do."""


class ClusterError(TunegemmError):
    """A Ray cluster that cannot be reached, has no GPU to give, or whose workers do not start."""


class MeasureError(TunegemmError):
    """The measuring worker cannot work at all, for example because the GPU went away."""


class StudyError(TunegemmError):
    """An Optuna study that is locked, belongs to another problem or space, or is a tuning database."""


class DatabaseError(TunegemmError):
    """A database that cannot be opened, read or written."""


class TunegemmWarning(UserWarning):
    """A product falls back to torch, for the reason given (once per problem), or a call has no effect."""


def named_arguments(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """The function, but a keyword that it does not have is an ArgumentError that names the nearest.

    Not for functions that a program calls in its inner loop.
    """
    known = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def called(*arguments: Given.args, **keywords: Given.kwargs) -> Result:
        for name in keywords:
            if name not in known:
                raise unknown_argument(function.__name__, name, known)
        return function(*arguments, **keywords)

    return called


def unknown_argument(function: str, name: str, known: Sequence[str]) -> ArgumentError:
    """The error of a keyword that a function does not have; it names the nearest."""
    # A part of a name, such as `budget`, is nearer than a similar spelling.
    near = [word for word in known if name in word or word in name]
    near = near or difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}"
    return ArgumentError(f"{function}() has no argument {name!r}; {hint}")


#: Errors of the operating system in the texts of compilers and libraries. Those of Python have their number.
_TRANSIENT_ERRNO = (
    errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.EINTR, errno.EBUSY, errno.ENOSPC,
    errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ETXTBSY, errno.ESTALE, errno.EPIPE,
)  # fmt: skip
#: Texts of failures that depend on the machine's current state: memory, files, processes or the GPU were
#: unavailable, or somebody ended the process. Only signals from outside count, not those of a program's
#: faults.
_TRANSIENT = re.compile(
    r"out[ _]of[ _](host[ _])?memory|memoryerror|bad_alloc|memory allocation fail|alloc_failed"
    r"|failed to allocate|busy or unavailable|ecc error|launch timed out|took longer than|no answer within"
    r"|the compile pool was closed|\[errno \d|^(modulenotfound|import)error\b|'s own code failed at "
    r"|killed by signal (1|2|3|9|15|24|25)\b|aborted by sig(hup|int|quit|kill|term|xcpu|xfsz)\b|"
    + "|".join(re.escape(os.strerror(number)) for number in _TRANSIENT_ERRNO),
    re.IGNORECASE,
)


def is_transient(error: BaseException | str) -> bool:
    """Whether an error, or the reason of a failure, tells of the machine at that moment: any error of the
    operating system, lack of memory, a package that cannot be imported, a fault of the code around a family's
    kernels, a process that was killed. Remembered of a candidate it would hide a good kernel from then on.
    """
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    return isinstance(error, OSError | ImportError) or _TRANSIENT.search(text) is not None


def one_line(error: BaseException | str, limit: int = 300) -> str:
    """The first meaningful line of a message, printable, cut to a length."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    text = "".join(letter if letter.isprintable() else " " for letter in text)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def raised(error: BaseException) -> str:
    """The error's type and place, such as ``KeyError at planning.py:12``: equal each time it happens."""
    trace, place = error.__traceback__, ""
    while trace is not None:
        place = f" at {trace.tb_frame.f_code.co_filename.rpartition('/')[2]}:{trace.tb_lineno}"
        trace = trace.tb_next
    return type(error).__name__ + place
