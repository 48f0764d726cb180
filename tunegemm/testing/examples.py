"""A family's kernels at the borders of its rules, which the suite tries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tunegemm.compile.pool import CompilePool, CompileResult
from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate, Value
from tunegemm.generate import families

Change = Mapping[str, Value]

OTHERWISE = "another kernel"
"""Marks kernels that the compiler gives more or less shared memory than the formula predicts: it does not
pipeline, specialize or subtile as requested. With one version of it, they may also spill."""
TOO_LARGE = ""
"""Stands for an object that exceeds a limit of the hardware."""


@dataclass(frozen=True)
class Rejection:
    """A kernel that one rule rejects, and the result of compiling it."""

    rule: str
    change: Change
    """To `Examples.good`."""
    outcome: str
    """A part of the compiler's complaint, or `OTHERWISE`, or `TOO_LARGE`."""
    problem: Problem | None = None
    """None for the family's first."""


@dataclass(frozen=True)
class Examples:
    """The examples of one family."""

    family: str
    good: Change
    """Compile-time parameters of a kernel that is feasible for the first problem."""
    launch: Change
    """A launch of it, without optional parameters."""
    problems: Sequence[Problem]
    """Of all dtypes and majors that kernels have."""
    corners: Sequence[tuple[Problem, Change]]
    """Feasible kernels at the borders of the rules on registers and memory, where a spill shows first."""
    rejected: Sequence[Rejection]
    objections: Sequence[tuple[str, Problem, Change]]
    """Rules, and the other kernels and launches that they reject although these may run."""
    elsewhere: frozenset[str] = frozenset()
    """Rules that other tests have examples of."""

    def candidate(self, change: Change | None = None) -> Candidate:
        """The good kernel with changes; with a launch, if a launch parameter changes."""
        change = change or {}
        launch_names = families.get(self.family).parameters["launch"]
        launch = {name: value for name, value in change.items() if name in launch_names}
        kernel = {name: value for name, value in change.items() if name not in launch_names}
        return Candidate.make(
            self.family, {**self.good, **kernel}, {**self.launch, **launch} if launch else {}
        )


def compile_all(
    pool: CompilePool, pairs: Sequence[tuple[Problem, Candidate]], device: Device
) -> list[CompileResult]:
    """Each candidate compiled for its problem, as many at once as the pool has workers."""
    futures = []
    for problem, candidate in pairs:
        family = families.generator(candidate.family)
        futures.append(pool.submit(candidate.family, family.kernel_key(problem, candidate, device)))
    return [future.result() for future in futures]
