"""What tunings of several problems share: device, database, compile workers, search spaces, who measures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate, SearchSpace
from tunegemm.errors import DeviceError
from tunegemm.generate import families
from tunegemm.generate.artifacts import ArtifactStore
from tunegemm.generate.compile import CompilePool
from tunegemm.generate.feasibility import plausible_kernels
from tunegemm.measure import FINAL, Job, Policy
from tunegemm.measure.outcome import Outcome
from tunegemm.measure.replay import ReplayDevice, ReplayMeasurer, open_replay

if TYPE_CHECKING:
    from tunegemm.store import Database

#: Ten steps and more of NVML's energy meter.
_ENERGY_MS = 1000.0


class Measurer(Protocol):
    """What times candidates: the GPU's worker or a recording."""

    def measure(self, problem: Problem, jobs: Sequence[Job], policy: Policy) -> Iterator[Outcome]: ...

    def discover(self, problem: Problem) -> list[Candidate]: ...


class Workbench:
    """Keeps the compile pool and the measuring worker alive over several problems. A context manager."""

    def __init__(
        self,
        device: Device,
        database: Database | None = None,
        *,
        families: Sequence[str] | None = None,
        workers: int | None = None,
        seed: int = 0,
        cache: Path | str | None = None,
        compiled_only: bool = False,
        energy: bool = False,
    ) -> None:
        """
        device: from `open_device`.
        database: where measurements of a real device are published; None keeps them in memory.
        families: names of the kernel families to try; default all whose packages are installed.
        workers: compile workers; default by cores and memory.
        seed: of operands, of the order of rounds and of the sampler.
        cache: folder of compiled objects; default the user's cache directory.
        compiled_only: try no kernel that is not in that folder yet.
        energy: meter the finalists' energy, too, a second each.
        """
        self.device = device
        self.database = database
        self.families = _usable(families)
        self.seed = seed
        self.compiled_only = compiled_only
        self.final = replace(FINAL, seed=seed, energy_ms=_ENERGY_MS if energy else 0.0)
        self.pool = CompilePool(ArtifactStore(cache), workers=workers)
        self._spaces: dict[str, SearchSpace] = {}
        self._possible: dict[tuple[str | int, ...], list[Candidate]] = {}
        self._replay: ReplayDevice | None = None
        self._measurer: Measurer | None = None
        self._resources = ExitStack()

    def __enter__(self) -> Self:
        self._resources.enter_context(self.pool)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers; what was measured is stored already."""
        self._resources.close()
        self._measurer = None

    def measurer_for(self, problem: Problem) -> Measurer | None:
        """The worker of a real device; a recording when it has the problem; else None."""
        if self.device.is_real:
            if self._measurer is None:
                from tunegemm.measure import MeasureWorker

                self._measurer = self._resources.enter_context(MeasureWorker(self.device))
            return self._measurer
        if self.device.spec.startswith("replay:"):
            if self._replay is None:
                self._replay = open_replay(self.device.spec.partition(":")[2])
            if problem in self._replay.problems():
                return ReplayMeasurer(self._replay)
        return None

    @property
    def generators(self) -> tuple[str, ...]:
        """The families whose kernels are compiled from a search space, the one expected to win first."""
        return tuple(name for name in self.families if families.get(name).compiled)

    def space(self, family: str) -> SearchSpace:
        """A generator's search space."""
        if family not in self._spaces:
            self._spaces[family] = families.load_space(family)
        return self._spaces[family]

    def feasible_kernels(self, problem: Problem, name: str) -> list[Candidate]:
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

    def recorded(self, problem: Problem) -> frozenset[Candidate] | None:
        """The candidates that have a time on a recorded device; None when every feasible one may be tried."""
        if self._replay is None or problem not in self._replay.problems():
            return None
        return frozenset(self._replay.recorded(problem))


def _usable(names: Sequence[str] | None) -> tuple[str, ...]:
    """The families asked for, or all that can work here. Raises DeviceError when an asked one cannot."""
    usable = []
    for name in names or families.NAMES:
        reason = families.get(name).unavailable()
        # Without nvmath-python the family `cublaslt` still has torch.mm.
        if reason is None or name == "cublaslt":
            usable.append(name)
        elif names:
            raise DeviceError(f"family {name!r} cannot be used: {reason}")
    return tuple(usable)
