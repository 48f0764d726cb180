"""The generators' kernels on one device: which are feasible for a problem, and in which order to try them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate, SearchSpace, Value
from tunegemm.errors import DeviceError
from tunegemm.generate import families, model
from tunegemm.generate.cublaslt import TORCH_MM
from tunegemm.generate.feasibility import plausible_kernels


@dataclass(frozen=True)
class Ranking:
    """One generator's feasible kernels for a problem."""

    launch_values: Mapping[str, tuple[Value, ...]]
    """Values of each launch-time parameter that some kernel can take."""
    predictions: list[model.Prediction]
    """One per kernel at its model-best launch, fastest first."""


class Kernels:
    """What the families have for a device. Remembers which kernels all problems of a kind share."""

    def __init__(self, device: Device, names: Sequence[str] | None = None) -> None:
        """names: of the families to try; by default all whose packages are installed.

        Raises SpaceError for a family that is not known, DeviceError for one that cannot be used here.
        """
        self.device = device
        self.families = _usable(names)
        self.space: Callable[[str], SearchSpace] = cache(families.load_space)
        self._possible: dict[tuple[str | int, ...], list[Candidate]] = {}

    @property
    def generators(self) -> tuple[str, ...]:
        """The families whose kernels are compiled from a search space, the one expected to win first."""
        return tuple(name for name in self.families if families.get(name).compiled)

    def is_feasible(self, problem: Problem, candidate: Candidate) -> bool:
        """Whether the candidate can compile and launch here."""
        return families.get(candidate.family).check(problem, candidate, self.device).feasible

    def is_worth_a_trial(self, problem: Problem, launch: Candidate) -> bool:
        """Whether the launch is feasible and differs from every other of its kernel."""
        return self.is_feasible(problem, launch) and not model.is_redundant_launch(
            problem, launch, self.device
        )

    def usable(self, stored: Candidate) -> Candidate | None:
        """A stored candidate of a generator with the parameters that its family got later; None for one that
        its family cannot read: a damaged row, or another version's.
        """
        if stored.family not in self.generators:
            return None
        space, candidate = self.space(stored.family), families.completed(stored)
        compiled, launched = dict(candidate.compile_params), dict(candidate.launch_params)
        complete = compiled.keys() == space.compile_values.keys() and (
            not launched or launched.keys() == space.launch_values.keys()
        )
        values = {**compiled, **launched}.items()
        if not complete or any(families.expected(stored.family, name, value) for name, value in values):
            return None
        return candidate

    def ranked(
        self,
        problem: Problem,
        name: str,
        *,
        recorded: Collection[Candidate] | None = None,
        only: Callable[[Candidate], bool] | None = None,
    ) -> Ranking:
        """A generator's feasible kernels for the problem, in the model's order.

        recorded: on a recorded device the candidates that have a time; others cannot be tried. only: which
        kernels to take.
        """
        kernels = self._feasible(problem, name)
        if only is not None:
            kernels = [kernel for kernel in kernels if only(kernel)]
        values = self.space(name).launch_values
        if recorded is not None:
            return Ranking(values, self._ranked_recorded(problem, set(kernels), recorded))
        # Depth of the ring and of the epilogue have no say in what a launch may be.
        shapes = {model.grid_shape(kernel): kernel for kernel in kernels}.values()

        def fits(launch: Candidate) -> bool:
            return self.is_feasible(problem, launch)

        taken = {
            parameter: tuple(
                value
                for value in listed
                if value == listed[0]
                or any(fits(shape.with_launch(**{parameter: value})) for shape in shapes)
            )
            for parameter, listed in values.items()
        }
        return Ranking(taken, model.rank_kernels(problem, kernels, taken, self.device, feasible=fits))

    def _ranked_recorded(
        self, problem: Problem, kernels: Collection[Candidate], recorded: Iterable[Candidate]
    ) -> list[model.Prediction]:
        """A recording has few launches of each kernel: the model's best among them stands for the kernel."""
        best: dict[Candidate, model.Prediction] = {}
        launches = sorted((c for c in recorded if c.kernel in kernels), key=Candidate.to_json)
        for prediction in model.rank(problem, launches, self.device):
            best.setdefault(prediction.candidate.kernel, prediction)
        return list(best.values())

    def _feasible(self, problem: Problem, name: str) -> list[Candidate]:
        """Those of a generator's space. Of its 100,000 kernels most are ruled out for all extents alike."""
        family = families.get(name)
        majors = (problem.a_major, problem.b_major, problem.out_major)
        dtypes = (problem.in_dtype, problem.out_dtype, problem.accumulation, problem.epilogue)
        kind = (name, *dtypes, *majors, problem.alignment)
        known = self._possible.get(kind)
        rules = [rule for rule in family.rules if rule.__name__ not in family.extent_rules]
        kernels: Iterable[Candidate] = (
            plausible_kernels(self.space(name), rules, problem, self.device) if known is None else known
        )
        possible, feasible, learned = [], [], False
        for kernel in kernels:
            rule = family.check(problem, kernel, self.device).rule
            if rule is None:
                feasible.append(kernel)
            if rule is None or rule in family.extent_rules:
                possible.append(kernel)
            else:
                learned = True
        # Where extents rule out the whole family first, nothing was learned of its kernels.
        if known is None and learned:
            self._possible[kind] = possible
        return feasible


def _usable(names: Sequence[str] | None) -> tuple[str, ...]:
    """The families asked for, or all that can work here. Raises DeviceError when an asked one cannot."""
    usable = []
    for name in names or families.NAMES:
        reason = families.get(name).unavailable()
        # Without nvmath-python the library's family still has torch.mm.
        if reason is None or name == TORCH_MM.family:
            usable.append(name)
        elif names:
            raise DeviceError(f"family {name!r} cannot be used: {reason}")
    return tuple(usable)
