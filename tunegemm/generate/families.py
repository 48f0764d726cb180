"""Finds kernel families by name, and loads their search spaces.

A family is an entry point of the group `tunegemm.families`: its name, and either a module with the attribute
`FAMILY` or the family object itself. The shipped families are declared in the same way, but also listed here,
so that finding them needs no search of installed packages: that takes some 10 ms (250 packages), and a
checkout may be newer than its metadata.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate, SearchSpace, Value
from tunegemm.errors import SpaceError
from tunegemm.generate.family import Family, Generator, Library
from tunegemm.generate.feasibility import Rule, refusal, refusal_on
from tunegemm.generate.sources import hash_of_code, kernel_sources
from tunegemm.untrusted import shown

if TYPE_CHECKING:
    from tunegemm.generate.generator import Kernels

GROUP = "tunegemm.families"
"""The group of the families' entry points."""
SHIPPED = {
    name: f"tunegemm.generate.{name}"
    for name in (
        "cute_sm90", "gluon_wgmma", "triton_tma", "triton", "cute_sm80", "skinny", "grouped", "cublaslt"
    )
}  # fmt: skip
"""The module of each shipped family, as in pyproject.toml, in the order in which they are tried."""
LISTED = ("along_k", "block_groups", "blocks", "drawn", "joined", "parted", "quantize", "routing")
"""The modules here whose kernels no search includes; tables in db list those that ship."""
ONLY_IF_ASKED = ("triton",)
"""Families that are tried on Hopper only on request, because others have been faster there."""

NAMES: tuple[str, ...]
"""All usable families, those of other packages last. The first access reads the installed entry points."""

_log = logging.getLogger(__name__)
_LARGEST = 2**31 - 1  # launches and descriptors take 32-bit numbers


def __getattr__(name: str) -> Any:
    if name == "NAMES":
        return tuple(_each_name())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _each_name() -> Iterator[str]:
    yield from SHIPPED
    yield from _plug_ins().families


def require(name: str) -> None:
    """Raises SpaceError, which lists the known families, if the name is not one of them."""
    if name not in SHIPPED and name not in _plug_ins().families:
        raise SpaceError(
            dict(_plug_ins().unusable).get(name)
            or f"kernel family {name!r} is not known; use one of {', '.join(_each_name())}"
        )


@cache
def get(name: str) -> Generator | Library:
    """The family of that name. Raises SpaceError, which lists the known families, if there is none."""
    require(name)
    return _load(EntryPoint(name, SHIPPED[name], GROUP)) if name in SHIPPED else _plug_ins().families[name]


def generator(name: str) -> Generator:
    """The family of that name, with compiled kernels. Raises SpaceError like `get`, and for a library."""
    family = get(name)
    if not family.compiled:
        raise SpaceError(f"kernel family {name!r} is a library: its kernels are not compiled")
    return family


def compiler(name: str) -> Kernels | Generator:
    """The compiler of a family's kernels, also for the modules in `LISTED`. Raises SpaceError like `get`."""
    if name not in LISTED:
        return generator(name)
    found: Kernels = importlib.import_module(f"tunegemm.generate.{name}").FAMILY
    return found


def unusable() -> Sequence[str]:
    """A line with the reason and the remedy for each family of another package that cannot be used."""
    return [line for _, line in _plug_ins().unusable]


@dataclass(frozen=True)
class _PlugIns:
    families: Mapping[str, Generator | Library]
    unusable: Sequence[tuple[str, str]]
    """Names of families, each with a line that gives the reason."""


@cache
def _plug_ins() -> _PlugIns:
    """The families of other packages. Logs once why a family cannot be used."""
    found: dict[str, Generator | Library] = {}
    unusable: list[tuple[str, str]] = []
    owners = dict.fromkeys(SHIPPED, "tunegemm")
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: (_package(entry), entry.name)):
        name, package = entry.name, _package(entry)
        if package == "tunegemm":
            continue
        try:
            if name in owners:
                raise SpaceError(f"{owners[name]} has a family of that name")
            found[name] = _checked(name, _load(entry))
            owners[name] = package
        except Exception as error:  # another package's code may raise anything
            reason = str(error) if isinstance(error, SpaceError) else f"{type(error).__name__}: {error}"
            cause = " ".join(reason.split())
            line = (
                f"kernel family {name!r} cannot be used: {cause}; upgrade or uninstall the package {package}"
            )
            unusable.append((name, line))
            _log.warning(line)
    return _PlugIns(found, unusable)


def _package(entry: EntryPoint) -> str:
    return str(entry.dist.name) if entry.dist is not None else "without a name"


def _load(entry: EntryPoint) -> Generator | Library:
    loaded = entry.load()
    return getattr(loaded, "FAMILY", loaded)


def _checked(name: str, family: Generator | Library) -> Generator | Library:
    """The family, after checks. Raises SpaceError if it is not valid, and whatever its code raises."""
    protocol = Generator if getattr(family, "compiled", False) else Library
    members = [name for base in (Family, protocol) for name in vars(base) if name[0] != "_"]
    if missing := [member for member in members if not hasattr(family, member)]:
        raise SpaceError(f"it has no {', '.join(missing)} (see tunegemm.generate.family.{protocol.__name__})")
    if family.name != name or not name.isidentifier():
        raise SpaceError(f"its name is {family.name!r}, and has to be the entry point's, an identifier")
    space = _space_of(family)
    if space.family != name:
        raise SpaceError(f"{space.source} is of family {space.family!r}")
    if family.compiled:
        if not hash_of_code(family.sources):
            raise SpaceError("it names no sources of its kernels")
        if plain := [rule for rule in family.rules if not isinstance(rule, Rule)]:
            raise SpaceError(f"{plain[0]} is no rule; tunegemm.generate.feasibility.rule makes one")
    return family


@cache
def kernel_source_hash(name: str) -> str:
    """SHA-256 (16 hex digits) of the code that ends up in a family's kernels; records and objects are valid
    only for this hash. Empty for a library's kernels and for an unknown family.
    """
    if name in SHIPPED:  # without importing it: the first dispatch asks for the families of all records
        return hash_of_code(kernel_sources(Path(__file__).with_name(name)))
    family = _plug_ins().families.get(name)
    return hash_of_code(family.sources) if family is not None and family.compiled else ""


def refusal_here(name: str, device: Device) -> str:
    """Why a family has no kernel for any problem on a device; empty if it may have some."""
    family = get(name)
    return refusal_on(family.rules, name, device) if family.compiled else ""


def of_device(device: Device) -> tuple[str, ...]:
    """The families that may have kernels on a device, in the order in which they are tried, without those
    that are tried only on request.
    """
    left_out = ONLY_IF_ASKED if device.architecture.wgmma else ()
    return tuple(n for n in _each_name() if n not in left_out and not refusal_here(n, device))


def refusal_by_all(problem: Problem, names: Iterable[str] | None = None) -> str:
    """Why none of these families (by default all) can ever generate a kernel for the problem: the reason of
    the first generator. Empty if a family may have one.
    """
    first = ""
    for family in map(get, _each_name() if names is None else names):
        if family.compiled:
            if not (reason := refusal(family.rules, family.name, problem)):
                return ""
            first = first or reason
    return first


def reduction_class(problem: Problem, candidate: Candidate) -> str:
    """The candidate's reduction class, according to its family (`Family.reduction_class`)."""
    return get(candidate.family).reduction_class(problem, candidate)


def load_space(name: str) -> SearchSpace:
    """The search space of a family, checked against the family's parameters."""
    return _space_of(get(name))


def _space_of(family: Family) -> SearchSpace:
    try:
        return SearchSpace.load(family.space_file, parameters=family.parameters)
    except FileNotFoundError as error:
        raise SpaceError(f"no search space of family {family.name!r}: {error}") from None


def expected(family: str, parameter: str, value: Value) -> str | None:
    """What to use instead of a value that no kernel of the family has; None if a kernel could have the value.

    A kernel can have numbers that the shipped space, a search's selection, does not list; rules decide
    whether these are feasible. The rules compute with numbers and assume that words are known, so this
    function checks both first.
    """
    space, known = _shipped_space(family), get(family)
    values = {**space.compile_values, **space.launch_values}[parameter]
    listed = (*values, *(known.unlisted.get(parameter, ()) if known.compiled else ()))
    value_type = type(listed[0])
    if value_type is int:
        least = 0 if 0 in listed else 1
        fits = type(value) is int and least <= value <= _LARGEST
        return None if fits else f"use a whole number from {least} to {_LARGEST}"
    if type(value) is value_type and value in listed:
        return None
    return "use true or false" if value_type is bool else f"use one of {', '.join(map(str, listed))}"


def wrong_parameter(candidate: Candidate, *, listed: bool = False) -> str:
    """One clause about a parameter that is missing, unknown to the family, or has an impossible value; empty
    if all parameters are right, and always for a library, which names its kernels itself.

    listed: whether launch parameters must have values of the shipped space. No rule bounds the parameters
    that only order tiles, yet a kernel computes with them.
    """
    family = get(candidate.family)
    if not family.compiled:
        return ""
    space = _shipped_space(family.name)
    for table, given, values in (
        ("compile", candidate.compile_params, space.compile_values),
        ("launch", candidate.launch_params, space.launch_values),
    ):
        for name, value in given:
            if name not in values:
                import difflib

                near = ", ".join(difflib.get_close_matches(name, values, n=1) or values)
                return f"{name!r} is not a {table} parameter of {family.name}; use {near}"
            allowed = expected(family.name, name, value)
            known = (*values[name], *family.unlisted.get(name, ()))
            if allowed is None and listed and table == "launch" and value not in known:
                allowed = f"use one of {', '.join(map(str, known))}"
            if allowed is not None:
                return f"{table} parameter {name!r} is {shown(value)}; {allowed}"
        if missing := [name for name in values if name not in candidate.params]:
            options = ", ".join(map(str, values[missing[0]]))
            return f"{table} parameter {missing[0]!r} is missing; use one of {options}"
    return ""


def completed(candidate: Candidate) -> Candidate:
    """A stored candidate, completed with parameters that its family got later. Each gets its first value in
    the shipped space, which stands for what kernels did before the parameter existed.
    """
    if not get(candidate.family).compiled:
        return candidate
    space = _shipped_space(candidate.family)
    compile_first = {name: values[0] for name, values in space.compile_values.items()}
    launch_first = {name: values[0] for name, values in space.launch_values.items()}
    return Candidate.make(
        candidate.family,
        compile_first | dict(candidate.compile_params),
        launch_first | dict(candidate.launch_params) if candidate.launch_params else {},
    )


_shipped_space = cache(load_space)


def import_compiler() -> None:
    """Import the DSL while the first jobs are chosen, without torch, which tvm_ffi imports if it can.

    A worker has no tensors. On an H200's host importing torch takes 3 s, and all workers import at once.
    """
    absent = "torch" not in sys.modules
    if absent:
        sys.modules["torch"] = None  # type: ignore[assignment]  # the documented way to make it not importable
    try:
        with suppress(ImportError):
            importlib.import_module("tunegemm.compile.cute_object").import_dsl()
            importlib.import_module("tvm_ffi")
    finally:
        if absent:
            del sys.modules["torch"]
