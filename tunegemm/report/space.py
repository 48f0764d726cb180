"""`tunegemm.Space`: what a kernel family may try for one product, and what is expected of each kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate, Value
from tunegemm.errors import SpaceError
from tunegemm.generate import families
from tunegemm.generate.feasibility import Verdict
from tunegemm.model import rank as model
from tunegemm.model.feasible import extent_check, possible_kernels
from tunegemm.report.census import Census, take_census
from tunegemm.tuning.tuner import open_device


@dataclass(frozen=True)
class Space:
    """The candidates of one kernel family for one problem on one device. Made by `Space.of`."""

    family: str
    """Name of the family, such as ``cute_sm90``."""
    problem: Problem
    device: Device

    @classmethod
    def of(cls, family: str, problem: Problem | str, device: Device | str | None = None) -> Space:
        """The space of a family, by its name.

        problem: a `Problem`, or extents such as ``"512x6144x4096"``, bf16 and k-major. device: a `Device` or
        its name; by default the first GPU, and without one the recorded H200. Raises SpaceError, ProblemError
        or DeviceError for one that is not known.
        """
        families.get(family)
        asked = problem if isinstance(problem, Problem) else Problem.parse(problem)
        return cls(family, asked, device if isinstance(device, Device) else open_device(device))

    @property
    def values(self) -> Mapping[str, tuple[Value, ...]]:
        """Each parameter's values, in the order of the space's file."""
        space = families.load_space(self.family)
        return {**space.compile_values, **space.launch_values}

    def candidate(self, **chosen: Value) -> Candidate:
        """The candidate with these parameters; one that is not given has its first value.

        Raises SpaceError for a parameter or a value that the family does not have.
        """
        return candidate(self.family, chosen)

    def check(self, candidate: Candidate) -> Verdict:
        """Whether a candidate can be compiled and launched for the problem: true, or the rule that forbids it
        with its reason. It says nothing of speed.
        """
        return families.get(candidate.family).check(self.problem, candidate, self.device)

    def census(self) -> Census:
        """How many kernels and candidates there are, how many are feasible, and what each rule rejects."""
        return take_census(families.load_space(self.family), self.problem, self.device)

    def predict(self, candidate: Candidate) -> model.Prediction:
        """The model's terms for one candidate: waves, and microseconds of arithmetic, L2 and memory.

        They rank candidates of one problem, and are no times. Raises SpaceError for a library's algorithm.
        """
        return model.predict(self.problem, candidate, self.device)

    def ranked(self, count: int | None = None) -> Sequence[model.Prediction]:
        """The feasible kernels at their first launch, in the model's order; the first `count`, or all.

        Raises SpaceError for a library, which names its kernels itself.
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
    """A family's candidate with these parameters; those that are not given have the space's first value.

    Raises SpaceError for a family or a parameter that is not known, and for a value that it cannot have.
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
    return Candidate.make(
        family,
        {name: whole[name] for name in space.compile_values},
        {name: whole[name] for name in space.launch_values},
    )
