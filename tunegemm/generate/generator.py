"""What the families that generate kernels share: all that follows from a `KernelConfig` and its rules."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeVar

from tunegemm.describe.device import Device, kernel_source_hash
from tunegemm.describe.problem import Problem, swapped_dtype
from tunegemm.describe.space import Candidate, Value
from tunegemm.errors import ArtifactError
from tunegemm.generate.feasibility import Rule, Verdict, apply_rules
from tunegemm.generate.ptxas import Resources
from tunegemm.generate.tiles import majors

if TYPE_CHECKING:
    from tunegemm.generate.families import Launcher
    from tunegemm.generate.launching import Workspace

#: Fields of a config that come from the problem.
_OF_PROBLEM = ("in_dtype", "out_dtype", "accumulation", "a_major", "b_major", "out_major")


class Config(Protocol):
    """A family's frozen dataclass of compile-time choices."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self: ...

    @property
    def smem_bytes(self) -> int: ...

    @property
    def label(self) -> str: ...


AnyConfig = TypeVar("AnyConfig", bound=Config)


def config_maker(config: type[AnyConfig]) -> Callable[[Problem, Candidate], AnyConfig]:
    """A function that gives the compile-time choices that a candidate and the problem's dtypes and majors
    make together; for a config that has the fields, with the problem's epilogue and the clusters' order too.
    """
    fuses = "epilogue" in config.__dataclass_fields__
    gathers = "gpc_aware" in config.__dataclass_fields__

    @functools.lru_cache(maxsize=1 << 16)  # a search asks for each several times
    def make(
        compile_params: tuple[tuple[str, Value], ...],
        epilogue: str,
        swapped: bool,
        gathered: bool,
        *of_problem: str,
    ) -> AnyConfig:
        values = dict(compile_params) | dict(zip(_OF_PROBLEM, of_problem, strict=True))
        if epilogue:
            values |= {"epilogue": epilogue, "transposed": swapped}
        if gathered:
            values["gpc_aware"] = True
        return config.from_mapping(values)

    # One rule after the other asks for that of the same candidate.
    last: tuple[Problem, tuple[tuple[str, Value], ...], tuple[bool, bool], AnyConfig] | None = None

    def config_of(problem: Problem, candidate: Candidate) -> AnyConfig:
        nonlocal last
        params, swapped = candidate.compile_params, bool(candidate.params.get("swap_ab", False))
        gathered = gathers and candidate.params.get("cluster_order", "index") == "gpc"
        if (known := last) and known[0] is problem and known[1] is params and known[2] == (swapped, gathered):
            return known[3]
        in_dtype = swapped_dtype(problem.in_dtype) if swapped else problem.in_dtype
        found = make(
            params, problem.epilogue if fuses else "", swapped, gathered,
            in_dtype, problem.out_dtype, problem.accumulation, *majors(problem, swapped),
        )  # fmt: skip
        last = problem, params, (swapped, gathered), found
        return found

    return config_of


class Generator(ABC):
    """The part of `tunegemm.generate.families.Family` that is the same for every generator."""

    compiled = True
    name: str
    packages: tuple[tuple[str, str], ...]
    """A module of each package that loading and launching an object needs, and the package's name."""
    compiler_packages: tuple[tuple[str, str], ...] = ()
    """As `packages`: what only compiling needs."""
    config: type[Config]
    rules: Sequence[Rule]
    unlisted: Mapping[str, tuple[Value, ...]] = {}
    fuses = False
    """Whether kernels take an epilogue."""
    edges_inside = False

    @abstractmethod
    def config_of(self, problem: Problem, candidate: Candidate) -> Config:
        """The compile-time choices of a candidate for a problem."""

    @abstractmethod
    def toolchain(self) -> Mapping[str, str | int]:
        """What of the compiler an object depends on."""

    @abstractmethod
    def launcher(
        self,
        problem: Problem,
        candidate: Candidate,
        device: Device,
        artifact: Path,
        workspace: Workspace | None,
    ) -> Launcher:
        """See `load`, which calls it with an object and a workspace, if one is needed."""

    @abstractmethod
    def compile(self, key: Mapping[str, str | int | bool], out: Path) -> Resources: ...

    def unavailable(self, *, launching: bool = False) -> str | None:
        for module, package in self.packages if launching else (*self.compiler_packages, *self.packages):
            try:
                found = find_spec(module)
            except ModuleNotFoundError:  # of the parent, such as `cuda`
                found = None
            if found is None:
                return f"{package} is not installed; pip install {package}"
        return None

    def check(self, problem: Problem, candidate: Candidate, device: Device) -> Verdict:
        if problem.epilogue and not self.fuses:
            return Verdict("epilogue", f"{self.name} stores products as they are, without {problem.epilogue}")
        return apply_rules(self.rules, problem, candidate, device)

    def kernel_key(
        self, problem: Problem, candidate: Candidate, device: Device
    ) -> Mapping[str, str | int | bool]:
        return {
            **asdict(self.config_of(problem, candidate)),
            "family": self.name,
            "target": device.architecture.compile_target,
            **self.toolchain(),
            "source": kernel_source_hash(self.name),
        }

    def smem_bytes(self, problem: Problem, candidate: Candidate) -> int:
        return self.config_of(problem, candidate).smem_bytes

    def label(self, candidate: Candidate) -> str:
        params = candidate.params
        kernel = self.config.from_mapping(
            dict(candidate.compile_params) | dict.fromkeys(_OF_PROBLEM, "")
        ).label
        if params.get("swap_ab", False):
            kernel = kernel.replace(" ", "S ", 1)
        if not candidate.launch_params:
            return kernel
        raster = "m" if params["raster_order"] == "along_m" else "n"
        words = [kernel, f"r{raster}", f"w{params['swizzle_size']}"]
        if params.get("cluster_order", "index") != "index":
            words.append(str(params["cluster_order"]))
        words.append(str(params["ctas"]))
        if int(params.get("split_k", 1)) > 1:
            words.append(f"k{params['split_k']}")
        if params.get("reduction", "pairs") == "second_kernel":
            words.append("second")
        if (hint := params.get("l2_hint", "none")) != "none":
            words.append(f"h{str(hint).removesuffix('_first')}")
        return " ".join(words)

    def workspace(
        self, problem: Problem, candidate: Candidate, device: Device, artifact: Path | None
    ) -> Workspace | None:
        return None

    def load(
        self,
        problem: Problem,
        candidate: Candidate,
        device: Device,
        artifact: Path | None,
        workspace: Workspace | None = None,
    ) -> Launcher:
        if artifact is None:
            raise ArtifactError(f"{self.label(candidate)} has no compiled object; run tunegemm tune again")
        workspace = workspace or self.workspace(problem, candidate, device, artifact)
        return self.launcher(problem, candidate, device, artifact, workspace)
