"""`tunegemm.Space`: the candidates of a kernel family for one product, and the model's predictions for them;
and its `Census`, which counts candidates before and after feasibility and by rule."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate, SearchSpace, Value
from tunegemm.describe.stored import document_of
from tunegemm.errors import SpaceError
from tunegemm.generate import families
from tunegemm.generate.cublaslt import TORCH_MM, is_torch
from tunegemm.generate.family import Generator
from tunegemm.generate.feasibility import Verdict, parameters_read
from tunegemm.model import rank as model
from tunegemm.model.feasible import CandidateTable, extent_check, possible_kernels
from tunegemm.tuning.tuner import as_problem, open_device

_Values = Mapping[str, tuple[Value, ...]]


@dataclass(frozen=True)
class Space:
    """The candidates of one kernel family for one problem on one device. Made by `Space.of`."""

    family: str
    """Name of the family, such as ``cute_sm90``."""
    problem: Problem
    device: Device

    @classmethod
    def of(
        cls, family: str, problem: Problem | str | Sequence[int], device: Device | str | None = None
    ) -> Space:
        """The space of a family, by its name.

        problem: as for `tunegemm.tune`. device: a `Device` or its name; by default the first GPU, or the
        recorded H200 if there is none. Raises SpaceError, ProblemError or DeviceError for an unknown one.
        """
        families.get(family)
        return cls(family, as_problem(problem), device if isinstance(device, Device) else open_device(device))

    @property
    def values(self) -> Mapping[str, tuple[Value, ...]]:
        """Each parameter's values, in the order of the space's file."""
        space = families.load_space(self.family)
        return {**space.compile_values, **space.launch_values}

    def candidate(self, **chosen: Value) -> Candidate:
        """The candidate with these parameters; any other parameter has its first value.

        Raises SpaceError for a parameter or value that the family does not have.
        """
        return candidate(self.family, chosen)

    def check(self, candidate: Candidate) -> Verdict:
        """Whether a candidate can compile and launch for the problem: true, or the rule that forbids it, with
        its reason. It says nothing about speed."""
        return families.get(candidate.family).check(self.problem, candidate, self.device)

    def census(self) -> Census:
        """Counts kernels and candidates, the feasible ones, and the rejections of each rule."""
        return take_census(families.load_space(self.family), self.problem, self.device)

    def predict(self, candidate: Candidate) -> model.Prediction:
        """The model's terms for one candidate: waves, and microseconds of arithmetic, L2 and memory.

        They rank candidates of one problem; they are not times. Raises SpaceError for a library's algorithm.
        """
        return model.predict(self.problem, candidate, self.device)

    def ranked(self, count: int | None = None) -> Sequence[model.Prediction]:
        """The feasible kernels at their first launch, in the model's order: the first `count`, or all.

        Raises SpaceError for a library, which names its own kernels.
        """
        family, space = families.generator(self.family), families.load_space(self.family)
        fits = extent_check(family, self.problem, self.device)
        launch = {name: values[0] for name, values in space.launch_values.items()}
        kernels = (
            kernel.with_launch(**launch)
            for kernel in possible_kernels(family, space, self.problem, self.device, None)
            if fits(kernel)
        )
        return model.rank(self.problem, kernels, self.device)[:count]


def candidate(family: str, chosen: Mapping[str, Value]) -> Candidate:
    """A family's candidate with these parameters; the others have the space's first value.

    Raises SpaceError for an unknown family or parameter, and for an impossible value.
    """
    space = families.load_space(family)
    known = {**space.compile_values, **space.launch_values}
    for name, value in chosen.items():
        if name not in known:
            raise SpaceError(f"{family} has no parameter {name!r}; it has {', '.join(known)}")
        if (allowed := families.expected(family, name, value)) is not None:
            written = str(value).lower() if isinstance(value, bool) else value  # as on a command line
            raise SpaceError(f"{family}: {name}={written}; {allowed}")
    whole = {name: chosen.get(name, values[0]) for name, values in known.items()}
    made = Candidate.make(
        family,
        {name: whole[name] for name in space.compile_values},
        {name: whole[name] for name in space.launch_values},
    )
    return TORCH_MM if is_torch(made) else made


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
    """For each rule, its reason for rejecting its first candidate."""

    @property
    def size(self) -> int:
        """Candidates before feasibility."""
        return self.kernels * self.launches

    def asdict(self) -> dict[str, Any]:
        """For JSON; the device by its spec."""
        facts = {field.name: getattr(self, field.name) for field in fields(self)}
        return facts | {"size": self.size, "problem": document_of(self.problem), "device": self.device.spec}


def take_census(space: SearchSpace, problem: Problem, device: Device) -> Census:
    """Counts the verdicts on every kernel of a space, and on every launch of passing kernels whose verdict
    may differ.
    """
    family = families.get(space.family)
    # Most launch parameters never decide on feasibility, and their product has millions of candidates.
    read = parameters_read(family.rules if family.compiled else ())
    deciding = {name: values for name, values in space.launch_values.items() if name in read}
    values = {name: values[:1] for name, values in space.launch_values.items()} | deciding
    if family.compiled:
        feasible_kernels, feasible_launches, refusals = _by_rules(family, space, values, problem, device)
    else:  # a library has few kernels and no rules, so no launch parameter decides
        first = {name: listed[0] for name, listed in values.items()}
        verdicts = [family.check(problem, kernel.with_launch(**first), device) for kernel in space.kernels()]
        feasible_kernels = feasible_launches = sum(map(bool, verdicts))
        refusals = [(verdict, 1, 0) for verdict in verdicts if not verdict]
    launches = math.prod(map(len, deciding.values()))
    multiplicity = space.launch_size // launches
    rejected: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for verdict, kernels, launched in refusals:
        rule = str(verdict.rule)
        rejected[rule] += kernels * space.launch_size + launched * multiplicity
        examples.setdefault(rule, verdict.reason)
    return Census(
        space.family, problem, device, space.compile_size, space.launch_size, feasible_kernels,
        feasible_launches * multiplicity, dict(rejected.most_common()), examples,
    )  # fmt: skip


def _by_rules(
    family: Generator, space: SearchSpace, launch_values: _Values, problem: Problem, device: Device
) -> tuple[int, int, list[tuple[Verdict, int, int]]]:
    """The numbers of feasible kernels and launches, and of each rule in the space's order its first verdict
    and how many kernels and launches of others share it.
    """
    rules = family.rules
    kernels = CandidateTable.kernels(space.family, space.compile_values)
    of_kernel = kernels.rejected(rules, problem, device)
    passed = np.flatnonzero(of_kernel == len(rules))
    launched = kernels.with_launches(passed, launch_values)
    of_launch = launched.rejected(rules, problem, device)
    launches = math.prod(map(len, launch_values.values()))
    results = []
    for number in range(len(rules)):
        rows, launch_rows = np.flatnonzero(of_kernel == number), np.flatnonzero(of_launch == number)
        firsts = [(int(row), kernels.candidate(int(row))) for row in rows[:1]]
        firsts += [(int(passed[row // launches]), launched.candidate(int(row))) for row in launch_rows[:1]]
        if firsts:
            place, first = min(firsts, key=lambda first: first[0])
            results.append((place, (family.check(problem, first, device), len(rows), len(launch_rows))))
    feasible = of_launch.reshape(-1, launches) == len(rules)
    in_order = [item for _, item in sorted(results, key=lambda result: result[0])]
    return int(feasible.any(axis=1).sum()), int(feasible.sum()), in_order
