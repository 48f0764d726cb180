"""Kernel families: each is a generator with its own space, rules, compile and launch.

A family is a folder here with a module-level `FAMILY`, and a file in `search_spaces/` of its name.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate, SearchSpace, Value
from tunegemm.errors import SpaceError
from tunegemm.generate.feasibility import Rule, Verdict, refusal
from tunegemm.generate.ptxas import Resources

if TYPE_CHECKING:
    from tunegemm.generate.launching import Workspace

#: The families that ship, in the order in which they are tried.
_SHIPPED = ("cute_sm90", "gluon_wgmma", "triton_tma", "cute_sm80", "cublaslt")
#: All families: every folder here is one, and those that are not listed above come last.
NAMES = (
    *_SHIPPED,
    *sorted({path.parent.name for path in Path(__file__).parent.glob("*/__init__.py")} - {*_SHIPPED}),
)

#: Launches and descriptors take 32-bit numbers.
_LARGEST = 2**31 - 1

#: Launches one product on the current stream: (a, b, out), operands as in torch.matmul, and what the
#: problem's epilogue takes: tensors and numbers, in the order of `Epilogue.operands`.
Launcher = Callable[..., None]


class Family(Protocol):
    """What tuning and dispatch need of a kernel family."""

    name: str
    parameters: Mapping[str, tuple[str, ...]]
    """Names of the parameters, per table ``compile`` and ``launch`` of the search space."""
    unlisted: Mapping[str, tuple[Value, ...]]
    """Words that the shipped space does not list, and 0 where it is a value: what `expected` allows, too."""
    limited_launch: tuple[str, ...]
    """The launch parameters that `check` looks at: for the others every value is as feasible as the first."""
    rules: tuple[Rule, ...]
    """What `check` applies to a candidate, cheapest first; a library's algorithms need none."""
    extent_rules: frozenset[str]
    """The rules that look at m, n, k or batch: what another one rejects is rejected for all extents."""
    compiled: bool
    """Whether candidates need `compile`; a library's algorithms do not."""
    tma: bool
    """Whether kernels read and write through TMA, which wants 16-byte addresses and strides."""
    edges_inside: bool
    """Whether tiles at the edge begin inside, so that none hangs over it where a tile fits at all."""

    def unavailable(self, *, launching: bool = False) -> str | None:
        """None when the family's packages are installed; else one line that names the missing one.

        launching: ask only for what loads and launches a compiled object, as on a host that compiles nothing.
        """

    def check(self, problem: Problem, candidate: Candidate, device: Device) -> Verdict:
        """Whether the candidate can be compiled and launched for this problem on this device."""

    def kernel_key(
        self, problem: Problem, candidate: Candidate, device: Device
    ) -> Mapping[str, str | int | bool]:
        """Everything the compiled object depends on: never m, n, k. Hashed by the artifact store."""

    def smem_bytes(self, problem: Problem, candidate: Candidate) -> int:
        """Shared memory of one block, computed."""

    def label(self, candidate: Candidate) -> str:
        """A short name for tables, such as ``pp128x192x64 s4 c2x1``."""

    def compile(self, key: Mapping[str, str | int | bool], out: Path) -> Resources:
        """Compile the kernel of a `kernel_key` into the object file `out`. Runs in a worker without a GPU."""

    def workspace(
        self, problem: Problem, candidate: Candidate, device: Device, artifact: Path | None
    ) -> Workspace | None:
        """The device memory that a launch needs beside its operands, not allocated yet; None for none."""

    def load(
        self,
        problem: Problem,
        candidate: Candidate,
        device: Device,
        artifact: Path | None,
        workspace: Workspace | None = None,
    ) -> Launcher:
        """A prepared launcher for operands of exactly this problem's extents and majors.

        workspace: what `workspace` gave, for a caller that lends memory; else the launcher has its own.

        Raises TunegemmError subclasses, ValueError or RuntimeError when the candidate cannot run here.
        """


def require(name: str) -> None:
    """Raises SpaceError, which lists the known families, for a name that is none; loads no family."""
    if name not in NAMES:
        raise SpaceError(f"kernel family {name!r} is not known; use one of {', '.join(NAMES)}")


@cache
def get(name: str) -> Family:
    """The family of that name. Raises SpaceError, which lists the known ones."""
    require(name)
    return importlib.import_module(f"tunegemm.generate.{name}").FAMILY


def refusal_by_all(problem: Problem, names: Sequence[str] = NAMES) -> str:
    """Why no generator can ever have a kernel for the problem, by the first one; empty where one may."""
    generators = [family for family in map(get, names) if family.compiled]
    reasons = [refusal(family.rules, family.name, problem) for family in generators]
    return reasons[0] if reasons and all(reasons) else ""


def load_space(name: str, path: Path | None = None) -> SearchSpace:
    """The search space of a family, checked against the parameters it knows and the values they take."""
    space = SearchSpace.load(path or name, parameters=get(name).parameters)
    for parameter, values in {**space.compile_values, **space.launch_values}.items() if path else ():
        for value in values:
            if (allowed := expected(name, parameter, value)) is not None:
                raise SpaceError(f"{path}: {parameter} has {value!r}; {allowed}")
    return space


def expected(family: str, parameter: str, value: Value) -> str | None:
    """What to use in place of a value that no kernel of the family has; None for one that some could have.

    Of numbers the shipped space lists what a search looks at, and rules know which others are feasible. They
    compute with them, and take words for known, so that both are asked for here first.
    """
    listed = (*_shipped_values(family)[parameter], *get(family).unlisted.get(parameter, ()))
    kind = type(listed[0])
    if kind is int:
        least = 0 if 0 in listed else 1
        fits = type(value) is int and least <= value <= _LARGEST
        return None if fits else f"use a whole number from {least} to {_LARGEST}"
    if type(value) is kind and value in listed:
        return None
    return "use true or false" if kind is bool else f"use one of {', '.join(map(str, listed))}"


def completed(candidate: Candidate) -> Candidate:
    """A stored candidate with the parameters that its family got later, at what kernels did before: the first
    of their values in the shipped space.
    """
    if not get(candidate.family).compiled:
        return candidate
    compile_first, launch_first = _first_values(candidate.family)
    return Candidate.make(
        candidate.family,
        compile_first | dict(candidate.compile_params),
        launch_first | dict(candidate.launch_params) if candidate.launch_params else {},
    )


@cache
def _shipped_values(family: str) -> Mapping[str, tuple[Value, ...]]:
    space = load_space(family)
    return {**space.compile_values, **space.launch_values}


@cache
def _first_values(family: str) -> tuple[dict[str, Value], dict[str, Value]]:
    space = load_space(family)
    return (
        {name: values[0] for name, values in space.compile_values.items()},
        {name: values[0] for name, values in space.launch_values.items()},
    )
