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
        """The name of the family and of its entry point, an identifier."""

    @property
    def parameters(self) -> Mapping[str, tuple[str, ...]]:
        """The names of the parameters in the tables ``compile`` and ``launch`` of the search space."""

    @property
    def space_file(self) -> Path:
        """The TOML file of the search space."""

    @property
    def tma(self) -> bool:
        """Whether kernels read and write through TMA, which needs 16-byte addresses and strides."""

    @property
    def edges_inside(self) -> bool:
        """Whether tiles at an edge are moved inside, so that none crosses the edge if a whole tile fits."""

    def unavailable(self, *, launching: bool = False) -> str | None:
        """One line that names a missing package; None if all of the family's packages are installed.

        launching: check only what loads and launches a compiled object, for a host that compiles nothing.
        """

    def check(self, problem: Problem, candidate: Candidate, device: Device) -> Verdict:
        """Whether the candidate can be compiled and launched for this problem on this device."""

    def label(self, candidate: Candidate) -> str:
        """A short name for tables, such as ``pp128x192x64 s4 c2x1``."""

    def reduction_class(self, problem: Problem, candidate: Candidate) -> str:
        """A word for the order in which the kernel adds up an element, for any m. Kernels of any family
        that share the word give the same bits (docs/decisions/0018). Empty if it is unknown or depends on m.
        """

    def workspace(self, problem: Problem, candidate: Candidate, device: Device) -> Workspace | None:
        """The device memory, not yet allocated, that a launch needs beside its operands; None for none."""

    def load(
        self,
        problem: Problem,
        candidate: Candidate,
        device: Device,
        artifact: Path | None,
        workspace: Workspace | None = None,
    ) -> Launcher:
        """A prepared launcher for operands of exactly this problem's extents and majors.

        artifact: the object file of a generator's kernel. workspace: the result of `workspace`, for a caller
        that lends memory; by default the launcher has its own.

        Raises a TunegemmError, ValueError or RuntimeError if the candidate cannot run here.
        """


class Generator(Family, Protocol):
    """A family whose kernels are compiled. `tunegemm.generate.generator.TileGenerator` makes one."""

    @property
    def compiled(self) -> Literal[True]:
        """Distinguishes it from a library."""

    @property
    def sources(self) -> tuple[Path, ...]:
        """The Python files that kernels are compiled from; a change of their code makes records stale."""

    @property
    def unlisted(self) -> Mapping[str, tuple[Value, ...]]:
        """Words, and 0, that `families.expected` allows although the space does not list them."""

    @property
    def rules(self) -> Sequence[Rule]:
        """The rules that `check` applies to a candidate, cheapest first."""

    def kernel_key(
        self, problem: Problem, candidate: Candidate, device: Device
    ) -> Mapping[str, str | int | bool]:
        """Everything that the compiled object depends on, never m, n or k. The artifact store hashes it."""

    def smem_bytes(self, problem: Problem, candidate: Candidate) -> int:
        """The shared memory of one block, computed without compiling."""

    def compile(self, key: Mapping[str, str | int | bool], out: Path) -> Resources:
        """Compile the kernel of a `kernel_key` into the object file `out`. Runs in a worker without a GPU."""


class Library(Family, Protocol):
    """A family whose kernels ship with another library, which names them itself."""

    @property
    def compiled(self) -> Literal[False]:
        """Distinguishes it from a generator."""

    def discover(self, problem: Problem, device: Device) -> list[Candidate]:
        """The candidates that the library names for a problem; on a real device only."""
