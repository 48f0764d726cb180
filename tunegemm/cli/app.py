"""The `tunegemm` command and its error reports."""

from __future__ import annotations

import errno
import io
import logging
import os
import re
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

import tunegemm
from tunegemm.cli import (
    db,
    doctor,
    explain,
    history,
    leaderboard,
    pack,
    printing,
    record,
    report,
    run,
    shapes,
    space,
    tune,
    verify,
)
from tunegemm.cli.help import App
from tunegemm.describe.served import UNATTACHED
from tunegemm.errors import TunegemmError
from tunegemm.extras import lack
from tunegemm.untrusted import shown

#: Exit codes: 0 done, 1 done without a usable result, 2 bad input, 130 interrupted by Ctrl-C, 141 its
#: output was closed.
BAD_INPUT, INTERRUPTED, PIPE_CLOSED = 2, 130, 141

# The base class of all usage errors. Newer versions of Typer carry their own copy of Click and export the
# class only as an ancestor of BadParameter; this lookup works for both.
_UsageProblem: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


class OneLineErrors(TyperGroup):
    """A command group whose errors are one line on stderr and an exit code, never a traceback."""

    def main(self, *args: Any, **extra: Any) -> Any:
        if not extra.get("standalone_mode", True):
            return super().main(*args, **extra)
        _prepare_output()
        try:
            # Without standalone mode an exit code that a command raised is returned instead.
            code = super().main(*args, **extra | {"standalone_mode": False})
        except TunegemmError as error:
            _fail(str(error))
        except ModuleNotFoundError as error:
            if (lacking := lack(error)) is None:
                raise
            _fail(str(lacking))
        except BrokenPipeError:  # the reader of our output, such as `head`, has closed it
            # Suppress the flush at exit, which would fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(PIPE_CLOSED)
        except OSError as error:  # the working directory was deleted, a disk is full or does not answer
            where = "the output" if error.errno == errno.ENOSPC else "the working directory"
            _fail(f"{error.filename or where}: {error.strerror or error}")
        except _UsageProblem as error:
            _fail(_usage(error))
        except (KeyboardInterrupt, typer.Abort):
            printing.say("tunegemm: interrupted", err=True)
            sys.exit(INTERRUPTED)
        sys.exit(code if isinstance(code, int) else 0)


def _usage(error: Any) -> str:
    """Click's message about a command line, with the offending value and the command whose help to read."""
    message = error.format_message().replace("Value error, ", "")
    # Newer versions of Typer parse values with pydantic, whose message omits the value.
    if (details := getattr(error.__cause__, "errors", None)) is not None:
        value = details()[0]["input"]
        if repr(value) not in message:
            message = message.replace(": ", f": {shown(value)}: ", 1)
    if extents := re.fullmatch(r"Got unexpected extra argument(?:\(s\))? \((\d+x\d+x\d+\S*)\)", message):
        message = f"Got unexpected extra argument; give the shape as --shape {extents[1]}"
    if message.startswith(("No such option: --m ", "No such option: --n ", "No such option: --k ")):
        message = f"{message.partition(' (')[0]}; give the extents as --shape 512:4096:512x6144x4096"
    if not message.endswith((".", "?")):
        message += "."
    command = error.ctx.command_path.split()[1:] if getattr(error, "ctx", None) is not None else ()
    return f"{message} See `{' '.join(['tunegemm', *command])} --help`."


def _fail(message: str) -> NoReturn:
    printing.say(f"tunegemm: {TunegemmError(' '.join(message.split()))}", err=True)
    sys.exit(BAD_INPUT)


class _Lines(logging.Handler):
    """Warnings of the library, one line each."""

    def emit(self, record: logging.LogRecord) -> None:
        printing.say(f"tunegemm: {record.getMessage()}", err=True)


def _prepare_output() -> None:
    """Opens streams that are closed (`2>&-`), escapes letters that the terminal's encoding lacks, and prints
    warnings as single lines.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("r+"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    log = logging.getLogger("tunegemm")
    if not log.handlers:
        log.addHandler(_Lines(logging.WARNING))
        log.propagate = False


app = App(
    cls=OneLineErrors,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 160},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tunegemm {tunegemm.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Find, store and launch the fastest matrix-product kernels for your GPU."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


app.command("tune", cls=tune.Command)(tune.command)
# Options after the program's name belong to the program.
app.command("record", context_settings={"allow_interspersed_args": False})(record.command)
app.command("run", context_settings={"allow_interspersed_args": False})(run.command)
app.command("shapes")(shapes.command)
app.command("leaderboard")(leaderboard.command)
app.command("verify")(verify.command)
app.command("pack")(pack.pack_command)
app.command("load")(pack.load_command)
app.command("unload")(pack.unload_command)
app.command("history")(history.history)
app.add_typer(db.app, name="db")
app.command("report")(report.command)
app.command("space")(space.command)
app.command("explain")(explain.command)
app.command("doctor")(doctor.command)


def main() -> None:
    """Entry point of the `tunegemm` script."""
    # Even under TUNEGEMM_ENABLE, as in a container, a race's baseline must be torch's own kernel.
    os.environ |= UNATTACHED if os.environ.get("TUNEGEMM_ENABLE") == "1" else {}
    if "_TUNEGEMM_COMPLETE" in os.environ:  # a shell takes each line of a wrapped help text for a completion
        os.environ["COLUMNS"] = "9999"
    app(prog_name="tunegemm")
