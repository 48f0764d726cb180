"""Search spaces, which list the values that may vary, and single points of them.

A space is a TOML file: lists of values, with separate tables for compile time and launch time. Nothing in it
is executable; the family's rules decide what is legal.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tunegemm.errors import SpaceError
from tunegemm.files import read_text
from tunegemm.untrusted import printable, shown

Value = int | str | bool
_TABLES = ("compile", "launch")
#: Rules look at each kernel and launch. The largest shipped space has 500,000 kernels, which takes seconds.
_MOST_KERNELS, _MOST_LAUNCHES = 10**7, 10**6


@dataclass(frozen=True)
class Candidate:
    """One point of a search space: how a kernel is compiled and how it is launched. Hashable."""

    family: str
    """Kernel family, such as ``cute_sm90``."""
    compile_params: tuple[tuple[str, Value], ...] = ()
    """Sorted name-value pairs; each combination is a separate kernel."""
    launch_params: tuple[tuple[str, Value], ...] = ()
    """Sorted name-value pairs that are arguments of the launch."""

    @classmethod
    def make(
        cls,
        family: str,
        compile_params: Mapping[str, Value],
        launch_params: Mapping[str, Value] | None = None,
    ) -> Candidate:
        """Make one from mappings, in any order. Raises SpaceError unless given a name and two mappings."""
        launch_params = launch_params or {}
        for value, expected in (family, str), (compile_params, Mapping), (launch_params, Mapping):
            if not isinstance(value, expected):
                raise SpaceError(f"{value!r:.40}: a candidate needs a family's name and mappings of values")
        for table in (compile_params, launch_params):
            for name, parameter in table.items():
                if not isinstance(name, str) or not isinstance(parameter, int | str):
                    raise SpaceError(
                        f"{shown(name)}={shown(parameter)}: "
                        "a parameter is a whole number, a text or a boolean"
                    )
        return cls(family, tuple(sorted(compile_params.items())), tuple(sorted(launch_params.items())))

    @cached_property
    def params(self) -> Mapping[str, Value]:
        """Compile-time and launch-time parameters together."""
        return dict(self.compile_params + self.launch_params)

    def __getitem__(self, name: str) -> Any:
        return self.params[name]

    def with_launch(self, **launch_params: Value) -> Candidate:
        """The same kernel with some launch parameters replaced."""
        launch = dict(self.launch_params) | launch_params
        return Candidate(self.family, self.compile_params, tuple(sorted(launch.items())))

    @property
    def kernel(self) -> Candidate:
        """The candidate without its launch parameters: the part that is compiled once."""
        return Candidate(self.family, self.compile_params) if self.launch_params else self

    def to_json(self) -> str:
        """Canonical JSON; `from_json` reads it back."""
        return json.dumps(
            {"family": self.family, "compile": dict(self.compile_params), "launch": dict(self.launch_params)},
            sort_keys=True,
            separators=(",", ":"),
        )

    @classmethod
    def from_json(cls, text: str) -> Candidate:
        """The inverse of `to_json`. Raises SpaceError for anything else."""
        try:
            data = json.loads(text)
            return cls.make(data["family"], data["compile"], data["launch"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            reason = printable(str(error), 100)
            raise SpaceError(f"not a stored candidate: {shown(text)} ({reason})") from None

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON, 16 hex digits: the name of this candidate in records."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def __repr__(self) -> str:
        """An expression that recreates it, to paste after ``from tunegemm import Candidate``."""
        launch = f", {dict(self.launch_params)}" if self.launch_params else ""
        return f"Candidate.make({self.family!r}, {dict(self.compile_params)}{launch})"

    def __str__(self) -> str:
        return " ".join(
            [self.family] + [f"{name}={value}" for name, value in self.compile_params + self.launch_params]
        )


@dataclass(frozen=True)
class SearchSpace:
    """Value lists of one family. No list contains `None`; every combination is a candidate, legal or not."""

    family: str
    compile_values: Mapping[str, tuple[Value, ...]]
    """Per compile-time parameter its values, in the file's order."""
    launch_values: Mapping[str, tuple[Value, ...]]
    """Per launch-time parameter its values, in the file's order."""
    source: Path | None = field(default=None, compare=False)
    """The file it was read from."""

    @classmethod
    def load(cls, path: Path, *, parameters: Mapping[str, tuple[str, ...]] | None = None) -> SearchSpace:
        """The space of a TOML file.

        `parameters` names the parameters that the family knows, per table ``compile`` and ``launch``; a
        missing or further one raises SpaceError, which names the nearest known key.
        """
        text = read_text(path, SpaceError)
        try:
            data = _tables(text)
        except (ValueError, RecursionError) as error:  # of the syntax, of 5,000 digits, nested too deep
            reason = printable(str(error), 100)
            raise SpaceError(f"{path}: not TOML ({reason}); see search_spaces/ for examples") from None
        _check_keys(path, "", data, ("family", *_TABLES))
        tables: dict[str, dict[str, tuple[Value, ...]]] = {}
        for table in _TABLES:
            if not isinstance(data[table], dict):
                raise SpaceError(f"{path}: {table!r} must be a table of lists, not {shown(data[table])}")
            if parameters is not None:
                _check_keys(path, f"[{table}] ", data[table], parameters[table])
            tables[table] = {}
            for name, values in data[table].items():
                if not (isinstance(values, list) and _are_values(values)):
                    raise SpaceError(
                        f"{path}: [{table}] {name} = {printable(repr(values), 100)}: give a non-empty list "
                        "of distinct integers from 0 to 2147483647, of distinct strings or of booleans"
                    )
                tables[table][name] = tuple(values)
        if not isinstance(data["family"], str):
            raise SpaceError(f"{path}: family {shown(data['family'])} is not a name; see `tunegemm space`")
        space = cls(data["family"], tables["compile"], tables["launch"], path)
        if space.compile_size > _MOST_KERNELS or space.launch_size > _MOST_LAUNCHES:
            most = f"{_MOST_KERNELS:,} kernels, or {_MOST_LAUNCHES:,} launches of each"
            raise SpaceError(f"{path}: more than {most}; give shorter lists")
        return space

    @property
    def compile_size(self) -> int:
        """Number of kernels before feasibility."""
        return math.prod(map(len, self.compile_values.values()))

    @property
    def launch_size(self) -> int:
        """Number of launches of each kernel."""
        return math.prod(map(len, self.launch_values.values()))

    @property
    def size(self) -> int:
        """Number of candidates before feasibility."""
        return self.compile_size * self.launch_size

    def kernels(self) -> Iterator[Candidate]:
        """Every compile-time combination, without launch parameters, in the file's order."""
        # There are 100,000 and more: names are sorted once, not per candidate as `Candidate.make` does.
        places = sorted(range(len(self.compile_values)), key=list(self.compile_values).__getitem__)
        lists = [[(name, value) for value in values] for name, values in self.compile_values.items()]
        for pairs in itertools.product(*lists):
            yield Candidate(self.family, tuple([pairs[place] for place in places]))

    def launches(self, kernel: Candidate) -> Iterator[Candidate]:
        """Every launch of one kernel."""
        for values in itertools.product(*self.launch_values.values()):
            yield kernel.with_launch(**dict(zip(self.launch_values, values, strict=True)))


#: A line of a space that ships: a table; or a name and a text, or a list of numbers, texts and booleans.
_ITEM = r'(?:"[^"\\\x00-\x1f\x7f]*"|0|-?[1-9][0-9]{0,17}|true|false)'
_TABLE = re.compile(r"\[(?P<table>[a-z_]+)\]")
_PAIR = re.compile(
    rf'(?P<name>[a-z_0-9]+) *= *(?P<value>"[^"\\\x00-\x1f\x7f]*"|\[{_ITEM}(?:, *{_ITEM})*\])(?: *#.*)?'
)


def _tables(text: str) -> dict[str, Any]:
    """The content of a TOML file. Raises ValueError.

    Dispatch checks records against spaces. In shipped spaces JSON reads each value as TOML does; only other
    files need tomllib, which takes some 5 ms a file.
    """
    data: dict[str, Any] = {}
    into = data
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        table, pair = _TABLE.fullmatch(line), _PAIR.fullmatch(line)
        name = table["table"] if table else pair["name"] if pair else ""
        place = data if table else into
        if not name or name in place:
            import tomllib

            return tomllib.loads(text)
        place[name] = {} if table else json.loads(pair["value"]) if pair else None
        into = place[name] if table else into
    return data


def _are_values(values: list[Any]) -> bool:
    """Whether they are distinct values of one type, which rules compute with, and numbers of 32 bits, which
    launches take.
    """
    types = set(map(type, values))
    if len(types) != 1 or not types <= {int, str, bool} or len(set(values)) != len(values):
        return False
    return types != {int} or (min(values) >= 0 and max(values) < 2**31)


def _check_keys(path: Path, where: str, table: Any, known: tuple[str, ...]) -> None:
    import difflib

    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
            raise SpaceError(f"{path}: {where}unknown key {key!r}; {hint}")
    if missing := [key for key in known if key not in table]:
        raise SpaceError(f"{path}: {where}key {missing[0]!r} is missing; add it")
