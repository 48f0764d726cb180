"""How large a search space is, before and after feasibility, and what each rule takes away."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import SearchSpace
from tunegemm.generate import families
from tunegemm.generate.feasibility import Verdict


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
    """Checks every kernel of a space, and of those that pass every launch whose verdict may differ."""
    family = families.get(space.family)
    # Most launch parameters never decide on feasibility, and their product has millions of candidates.
    deciding = {name: values for name, values in space.launch_values.items() if name in family.limited_launch}
    multiplicity = space.launch_size // math.prod(map(len, deciding.values()))
    defaults = {name: values[0] for name, values in space.launch_values.items()}
    rejected: Counter[str] = Counter()
    examples: dict[str, str] = {}
    feasible = feasible_kernels = 0

    def reject(verdict: Verdict, candidates: int) -> None:
        rule = str(verdict.rule)
        rejected[rule] += candidates
        examples.setdefault(rule, verdict.reason)

    for kernel in space.kernels():
        if not (verdict := family.check(problem, kernel, device)):
            reject(verdict, space.launch_size)
            continue
        before = feasible
        for values in itertools.product(*deciding.values()):
            launch = defaults | dict(zip(deciding, values, strict=True))
            if verdict := family.check(problem, kernel.with_launch(**launch), device):
                feasible += multiplicity
            else:
                reject(verdict, multiplicity)
        feasible_kernels += feasible > before
    return Census(
        space.family, problem, device, space.compile_size, space.launch_size, feasible_kernels, feasible,
        dict(rejected.most_common()), examples,
    )  # fmt: skip
