"""Packages that `pip install tunegemm` leaves out, and the extra that installs each.

A host that serves needs torch, the compilers' runtimes, the command line and little more; extras of
pyproject.toml add packages for searching, tables and pages. Code imports packages where it needs them; the
entry points (public names of `tunegemm`, the command, `Tuner`, the layers of dispatch) report a missing one
in one line.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from tunegemm.errors import ExtraError

#: The packages of each extra, by import name; an extra includes those before it, up to `report`.
EXTRAS = {
    "tune": ("alembic", "optuna", "pandas", "psutil", "sqlalchemy"),
    "report": ("jinja2", "matplotlib"),
    "postgres": ("psycopg",),
    "ray": ("ray",),
}
#: What every installation has, unless it was made with --no-deps. Families name the packages that they need.
BASE = ("numpy", "platformdirs", "rich", "torch", "typer")


def require(extra: str) -> None:
    """Raises ExtraError if a package of the extra is not installed. Does not import the packages."""
    for name in EXTRAS[extra]:
        if not _is_here(name):
            raise _error(name, extra)


def lack(error: ImportError) -> ExtraError | None:
    """What a failed import is to be reported as; None where the package is not one of ours."""
    name = (error.name or "").partition(".")[0]
    extra = next((extra for extra, names in (("", BASE), *EXTRAS.items()) if name in names), None)
    is_missing = isinstance(error, ModuleNotFoundError)  # not: it is there and does not work
    return _error(name, extra) if extra is not None and is_missing else None


@contextmanager
def named() -> Iterator[None]:
    """A context in which a missing package of an extra raises ExtraError."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (lacking := lack(error)) is None:
            raise
        raise lacking from None


def _is_here(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):  # of a finder that refuses it, of None in sys.modules
        return False


def _error(name: str, extra: str) -> ExtraError:
    remedy = f"pip install 'tunegemm[{extra}]' brings it" if extra else f"pip install {name}"
    return ExtraError(f"{name} is not installed; {remedy}")
