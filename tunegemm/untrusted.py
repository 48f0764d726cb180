"""Validates values from outside: all values from files, packs and damaged cells pass these readers.

Each takes a value and its name, and returns the value, within bounds that the columns, SQLite, PostgreSQL,
JSON, UTC and a terminal all support; or raises BadValueError: the name, a short form of the value, the
requirement.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

from tunegemm.errors import BadValueError

#: The largest integer of a 32-bit column and of a kernel's argument.
LARGEST_INT = 2**31 - 1

_LONGEST_LINE = 4096
_LONGEST_LIST = 100_000
_DEEPEST = 12


def decoded(text: str | bytes) -> Any:
    """The unchecked value of a JSON text."""
    try:
        return json.loads(text)
    except RecursionError:
        raise BadValueError("nested too deep") from None
    except ValueError as error:  # bad syntax, bytes that are not UTF-8, a number with 5,000 digits
        raise BadValueError(printable(str(error).split("; use")[0], 200)) from None


def shown(value: Any) -> str:
    """A short printable form of any value, for a message."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    if type(value) is int and value.bit_length() > 64:
        return "a number of over 19 digits"
    if value is None:
        return "null"
    return ascii(value[:60] + "..." if isinstance(value, str) and len(value) > 60 else value)[:200]


def printable(text: str, longest: int = _LONGEST_LINE) -> str:
    """A line of foreign text, such as an error of a compiler or a library, that `line` accepts."""
    return "".join(letter if letter.isprintable() else " " for letter in text)[:longest]


def members(
    value: Any, name: str, required: Collection[str], optional: Collection[str] | None = ()
) -> dict[str, Any]:
    """An object with all required fields and no fields beyond the optional ones; None allows any."""
    if not isinstance(value, dict):
        raise BadValueError(f"{name} {shown(value)} is not an object")
    if missing := [field for field in required if field not in value]:
        raise BadValueError(f"{name} lacks {', '.join(missing)}")
    known = value if optional is None else {*required, *optional}
    if unknown := [field for field in value if field not in known]:
        raise BadValueError(f"{name} has an unknown field {shown(unknown[0])}")
    return value


def whole(value: Any, name: str, least: int = 0, most: int = LARGEST_INT) -> int:
    """A whole number."""
    if type(value) is not int or not least <= value <= most:
        raise BadValueError(f"{name} {shown(value)} is not a whole number from {least} to {most}")
    return value


def named(names: Iterable[str] | str) -> tuple[str, ...]:
    """Names from a call: a sequence, a single name, or several names with commas, as on a command line."""
    if isinstance(names, str):
        return tuple(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    return tuple(names)


def digits(text: str) -> int | None:
    """The number that 1 to 18 ASCII digits write, as in names of devices and in options; else None."""
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None


def number(value: Any, name: str, least: float, most: float) -> float:
    """A finite number."""
    if type(value) not in (int, float) or not least <= value <= most or not math.isfinite(value):
        raise BadValueError(f"{name} {shown(value)} is not a number from {least:g} to {most:g}")
    return float(value)


def line(value: Any, name: str, longest: int = _LONGEST_LINE) -> str:
    """One line of printable text: no control, escape or bidirectional characters, no lone surrogates."""
    if not isinstance(value, str) or len(value) > longest or not value.isprintable():
        raise BadValueError(f"{name} {shown(value)} is not a line of at most {longest} printable characters")
    return value


def listed(value: Any, name: str, longest: int = _LONGEST_LIST) -> list[Any]:
    """A list."""
    if not isinstance(value, list):
        raise BadValueError(f"{name}: {shown(value)} is not a list")
    if len(value) > longest:
        raise BadValueError(f"{name}: {len(value)} entries, more than {longest}")
    return value


def moment(value: Any, name: str) -> datetime:
    """A past time with a zone, since 1970, in UTC."""
    text = line(value, name, 40)
    try:
        result = datetime.fromisoformat(text)
    except ValueError:
        raise BadValueError(f"{name} {shown(value)} is not an ISO 8601 time") from None
    if result.tzinfo is None:
        raise BadValueError(f"{name} {shown(value)} has no time zone")
    if not 1970 <= result.year <= 9998:  # within a day of either end UTC has no such time
        raise BadValueError(f"{name} {shown(value)} is not a time since 1970")
    if result > datetime.now(UTC) + timedelta(days=1):
        raise BadValueError(f"{name} {shown(value)} is in the future")
    return result.astimezone(UTC)


def tree(value: Any, name: str, depth: int = 0) -> Any:
    """JSON of any form: finite numbers of at most 19 digits, printable keys and texts, nested a little."""
    if depth > _DEEPEST:
        raise BadValueError(f"{name} is nested deeper than {_DEEPEST}")
    if isinstance(value, dict):
        names = [line(key, f"a name in {name}", 200) for key in value]
        return dict(zip(names, (tree(entry, name, depth + 1) for entry in value.values()), strict=True))
    if isinstance(value, list):
        return [tree(entry, name, depth + 1) for entry in listed(value, name)]
    if isinstance(value, str):
        return line(value, name)
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return whole(value, name, -(2**63), 2**63 - 1)
    return number(value, name, -1e300, 1e300)
