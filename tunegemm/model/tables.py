"""Reads the tables in db that list shipped kernels and choose among them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from tunegemm.errors import BadValueError
from tunegemm.resources import data_path

T = TypeVar("T")


def reader_of(name: str) -> Callable[[Callable[[dict[str, Any]], T]], Callable[..., T]]:
    """Makes a function that reads a table from one that parses it.

    The function takes a path, by default that of the file in db, and keeps its result. It raises
    BadValueError if the table is damaged.
    """

    def of_parser(parse: Callable[[dict[str, Any]], T]) -> Callable[..., T]:
        @cache
        def read(path: Path | None = None) -> T:
            import tomllib  # here, so that only programs with such products pay for the import

            path = path or data_path("db", name)
            try:
                return parse(tomllib.loads(path.read_text(encoding="utf-8")))
            except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
                reason = f"{type(error).__name__}: {error}"
                raise BadValueError(f"{path}: {reason}; reinstall the package") from None

        return read

    return of_parser
