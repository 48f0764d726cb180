"""How large a search space is, before and after feasibility, and what each rule takes away."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import SearchSpace, Value
from tunegemm.generate import families
from tunegemm.generate.family import Family, Generator
from tunegemm.generate.feasibility import Verdict, parameters_read
from tunegemm.model.feasible import CandidateTable

_Values = Mapping[str, tuple[Value, ...]]


@dataclass(frozen=True)
class Census:
    """The candidates of one family for one problem on one device, counted."""

    family: str
    problem: Problem
    device: Device
    kernels: int
    """Compile-time combinations before feasibility."""
    launches: int
    """Launch-time combinations of each kernel."""
    feasible_kernels: int
    """Kernels with at least one feasible launch."""
    feasible: int
    """Feasible candidates: pairs of kernel and launch."""
    rejected: Mapping[str, int]
    """Per rule the number of candidates that it was the first to reject, most first."""
    examples: Mapping[str, str]
    """Per rule the reason given for the first candidate it rejected."""

    @property
    def size(self) -> int:
        """Candidates before feasibility."""
        return self.kernels * self.launches

    def asdict(self) -> dict[str, Any]:
        """For JSON; the device by its spec."""
        facts = {field.name: getattr(self, field.name) for field in fields(self)}
        return facts | {"size": self.size, "problem": asdict(self.problem), "device": self.device.spec}


def take_census(space: SearchSpace, problem: Problem, device: Device) -> Census:
    """What is said of every kernel of a space, and of every launch of those that pass whose verdict may
    differ.
    """
    family = families.get(space.family)
    # Most launch parameters never decide on feasibility, and their product has millions of candidates.
    read = parameters_read(family.rules if family.compiled else ())
    deciding = {name: values for name, values in space.launch_values.items() if name in read}
    values = {name: values[:1] for name, values in space.launch_values.items()} | deciding
    if family.compiled:
        counted = _by_rules(family, space, values, problem, device)
    else:
        counted = _one_by_one(family, space, values, problem, device)
    launches = math.prod(map(len, deciding.values()))
    multiplicity = space.launch_size // launches
    rejected: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for verdict, kernels, launched in counted.rejected:
        rule = str(verdict.rule)
        rejected[rule] += kernels * space.launch_size + launched * multiplicity
        examples.setdefault(rule, verdict.reason)
    return Census(
        space.family, problem, device, space.compile_size, space.launch_size, counted.feasible_kernels,
        counted.feasible_launches * multiplicity, dict(rejected.most_common()), examples,
    )  # fmt: skip


@dataclass(frozen=True)
class _Counted:
    feasible_kernels: int
    feasible_launches: int
    rejected: list[tuple[Verdict, int, int]]
    """A verdict, and how many kernels and launches of others share it, in the space's order."""


def _by_rules(
    family: Generator, space: SearchSpace, launch_values: _Values, problem: Problem, device: Device
) -> _Counted:
    rules = family.rules
    kernels = CandidateTable.kernels(space.family, space.compile_values)
    of_kernel = kernels.rejected(rules, problem, device)
    passed = np.flatnonzero(of_kernel == len(rules))
    launched = kernels.with_launches(passed, launch_values)
    of_launch = launched.rejected(rules, problem, device)
    launches = math.prod(map(len, launch_values.values()))
    found = []
    for number in range(len(rules)):
        rows, launch_rows = np.flatnonzero(of_kernel == number), np.flatnonzero(of_launch == number)
        firsts = [(int(row), kernels.candidate(int(row))) for row in rows[:1]]
        firsts += [(int(passed[row // launches]), launched.candidate(int(row))) for row in launch_rows[:1]]
        if firsts:
            place, first = min(firsts, key=lambda one: one[0])
            found.append((place, (family.check(problem, first, device), len(rows), len(launch_rows))))
    feasible = of_launch.reshape(-1, launches) == len(rules)
    in_order = [one for _, one in sorted(found, key=lambda one: one[0])]
    return _Counted(int(feasible.any(axis=1).sum()), int(feasible.sum()), in_order)


def _one_by_one(
    family: Family, space: SearchSpace, launch_values: _Values, problem: Problem, device: Device
) -> _Counted:
    """Asks a library about each of its few kernels: it has no rules."""
    rejected: list[tuple[Verdict, int, int]] = []
    feasible = feasible_kernels = 0
    for kernel in space.kernels():
        if not (verdict := family.check(problem, kernel, device)):
            rejected.append((verdict, 1, 0))
            continue
        before = feasible
        for values in itertools.product(*launch_values.values()):
            launch = kernel.with_launch(**dict(zip(launch_values, values, strict=True)))
            if verdict := family.check(problem, launch, device):
                feasible += 1
            else:
                rejected.append((verdict, 0, 1))
        feasible_kernels += feasible > before
    return _Counted(feasible_kernels, feasible, rejected)
