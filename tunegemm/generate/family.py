"""What a kernel family is: a `Generator`, whose kernels are compiled, or a `Library`, which names its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from tunegemm.compile.ptxas import Resources
from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate, Value
from tunegemm.generate.feasibility import Rule, Verdict
from tunegemm.generate.workspace import Workspace

if TYPE_CHECKING:
    from tunegemm.generate.launching import Launcher


class Family(Protocol):
    """What tuning and dispatch need of every kernel family: of a `Generator` and of a `Library`."""

    @property
    def name(self) -> str:
        """Its name, an identifier: that of its entry point."""

    @property
    def parameters(self) -> Mapping[str, tuple[str, ...]]:
        """Names of the parameters, per table ``compile`` and ``launch`` of the search space."""

    @property
    def space_file(self) -> Path:
        """The TOML file of its search space."""

    @property
    def tma(self) -> bool:
        """Whether kernels read and write through TMA, which wants 16-byte addresses and strides."""

    @property
    def edges_inside(self) -> bool:
        """Whether tiles at the edge begin inside, so that none hangs over it where a tile fits at all."""

    def unavailable(self, *, launching: bool = False) -> str | None:
        """None when the family's packages are installed; else one line that names the missing one.

        launching: ask only for what loads and launches a compiled object, as on a host that compiles nothing.
        """

    def check(self, problem: Problem, candidate: Candidate, device: Device) -> Verdict:
        """Whether the candidate can be compiled and launched for this problem on this device."""

    def label(self, candidate: Candidate) -> str:
        """A short name for tables, such as ``pp128x192x64 s4 c2x1``."""

    def reduction_class(self, problem: Problem, candidate: Candidate) -> str:
        """A word for the order in which a kernel adds up an element, whatever m is: kernels of the same one,
        of any family, give the same bits (docs/decisions/0018). Empty where it is not known, or depends on m.
        """

    def workspace(self, problem: Problem, candidate: Candidate, device: Device) -> Workspace | None:
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

        artifact: the object file of a generator's kernel. workspace: what `workspace` gave, for a caller that
        lends memory; else the launcher has its own.

        Raises TunegemmError subclasses, ValueError or RuntimeError when the candidate cannot run here.
        """


class Generator(Family, Protocol):
    """A family whose kernels are compiled. `tunegemm.generate.generator.TileGenerator` makes one."""

    @property
    def compiled(self) -> Literal[True]:
        """What tells it from a library."""

    @property
    def sources(self) -> tuple[Path, ...]:
        """The Python files that end up in kernels: a change of their code makes records stale."""

    @property
    def unlisted(self) -> Mapping[str, tuple[Value, ...]]:
        """Words that its space does not list, and 0 where it is a value: what `expected` allows, too."""

    @property
    def rules(self) -> Sequence[Rule]:
        """What `check` applies to a candidate, cheapest first."""

    def kernel_key(
        self, problem: Problem, candidate: Candidate, device: Device
    ) -> Mapping[str, str | int | bool]:
        """Everything the compiled object depends on: never m, n, k. Hashed by the artifact store."""

    def smem_bytes(self, problem: Problem, candidate: Candidate) -> int:
        """Shared memory of one block, computed."""

    def compile(self, key: Mapping[str, str | int | bool], out: Path) -> Resources:
        """Compile the kernel of a `kernel_key` into the object file `out`. Runs in a worker without a GPU."""


class Library(Family, Protocol):
    """A family whose kernels ship with another library, which names them itself."""

    @property
    def compiled(self) -> Literal[False]:
        """What tells it from a generator."""

    def discover(self, problem: Problem, device: Device) -> list[Candidate]:
        """What the library names for a problem; on a real device only."""
