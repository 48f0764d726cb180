"""Checks of what comes from outside: each returns the value, or raises one of `BAD` with what is wrong.

No SQLAlchemy is loaded here: dispatch reads the shipped records with these.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from tunegemm.describe.device import Fingerprint
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.errors import TunegemmError
from tunegemm.generate import families

Value = TypeVar("Value", Problem, Fingerprint)
Row = Mapping[str, Any]

#: What a value that is not as it should be raises.
BAD = (TunegemmError, TypeError, ValueError, KeyError, AttributeError)

_LONGEST = 4096

#: Fields that documents of an earlier version lack; they then have their defaults.
_ADDED = {"epilogue", "accumulation"}


def typed(kind: type[Value], data: Any) -> Value:
    """A frozen dataclass of integers and strings from a JSON object that has exactly its fields."""
    fields = {field.name: {"int": int, "str": str}[str(field.type)] for field in dataclasses.fields(kind)}
    if not isinstance(data, dict) or not set(fields) - _ADDED <= set(data) <= set(fields):
        raise ValueError(f"its {kind.__name__.lower()} needs exactly the fields {', '.join(fields)}")
    for name, value in data.items():
        if type(value) is not fields[name] or (isinstance(value, str) and len(value) > 128):
            raise ValueError(f"{name} {value!r} of its {kind.__name__.lower()} is no {fields[name].__name__}")
    return kind(**data)


def candidate_of(data: Any) -> Candidate:
    """A candidate of a family that is known here, from its JSON object."""
    candidate = Candidate.from_json(json.dumps(data))
    families.require(candidate.family)
    for name, value in (*candidate.compile_params, *candidate.launch_params):
        if type(value) not in (int, str, bool):
            raise ValueError(f"parameter {name} {value!r} is no integer, text or boolean")
    return candidate


def times_of(row: Row, name: str) -> tuple[float, ...]:
    """A list of numbers."""
    values = row[name]
    if not isinstance(values, list) or not all(type(value) in (int, float) for value in values):
        raise ValueError(f"{name} is no list of numbers")
    return tuple(map(float, values))


def number_of(row: Row, name: str) -> float:
    """A finite number."""
    value = row[name]
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"{name} {value!r} is no number")
    return float(value)


def text_of(row: Row, name: str, *, longest: int = _LONGEST) -> str:
    """One printable line; empty when it is missing."""
    value = row.get(name) or ""
    if not isinstance(value, str) or len(value) > longest or not value.isprintable():
        raise ValueError(f"{name} is no line of at most {longest} letters")
    return value


def moment_of(value: Any) -> datetime:
    """A past time with a zone, in UTC."""
    moment = datetime.fromisoformat(value)
    if moment.tzinfo is None:
        raise ValueError(f"time {value} has no zone")
    if moment > datetime.now(UTC) + timedelta(days=1):
        raise ValueError(f"time {value} has not come yet")
    return moment.astimezone(UTC)


def one_line(error: Exception) -> str:
    """What is wrong, without line breaks."""
    words = f"{error} is missing" if isinstance(error, KeyError) else str(error)
    return " ".join(words.split())[:300]
