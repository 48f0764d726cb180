"""Code that the families with generated kernels share: everything that follows from a config and rules."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self, TypeVar

from tunegemm.compile import cute_object
from tunegemm.compile.ptxas import Resources
from tunegemm.describe.device import Device, is_older, package_version
from tunegemm.describe.problem import Problem, swapped_dtype
from tunegemm.describe.space import Candidate, Value
from tunegemm.errors import ArtifactError
from tunegemm.generate.feasibility import Rule, Verdict, apply_rules, epilogue, rows_together
from tunegemm.generate.sources import hash_of_code, kernel_sources
from tunegemm.generate.tiles import majors
from tunegemm.generate.workspace import Workspace, exceeded_workspace
from tunegemm.resources import data_path

if TYPE_CHECKING:
    from tunegemm.generate.launching import Launcher

Key = Mapping[str, str | int | bool]

HOPPER = "sm_90a"
"""The compile target of kernels that no search includes."""

#: The fields of a config that come from the problem.
_OF_PROBLEM = ("in_dtype", "out_dtype", "accumulation", "a_major", "b_major", "out_major")

#: The words for launch parameters in a label; empty for values that stand for the default behaviour.
_LAUNCH_WORDS: Mapping[str, Callable[[Any], str]] = {
    "raster_order": lambda order: "rm" if order == "along_m" else "rn",
    "swizzle_size": lambda size: f"w{size}",
    "cluster_order": lambda order: "" if order == "index" else str(order),
    "ctas": str,
    "split_k": lambda splits: f"k{splits}" if splits > 1 else "",
    "reduction": lambda how: "second" if how == "second_kernel" else "",
    "l2_hint": lambda hint: "" if hint == "none" else f"h{hint[0]}",
}


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
    """A function that makes the config of a problem and a candidate, from the candidate's compile parameters
    and the problem's dtypes and majors; also from the epilogue and the cluster order, if the config has
    fields for them.
    """
    fuses = "epilogue" in config.__dataclass_fields__
    has_orders = "gpc_aware" in config.__dataclass_fields__

    @functools.lru_cache(maxsize=1 << 16)  # a search asks for each several times
    def make(
        compile_params: tuple[tuple[str, Value], ...],
        epilogue: str,
        swapped: bool,
        gpc_aware: bool,
        *of_problem: str,
    ) -> AnyConfig:
        values = dict(compile_params) | dict(zip(_OF_PROBLEM, of_problem, strict=True))
        if epilogue:
            values |= {"epilogue": epilogue, "transposed": swapped}
        if gpc_aware:
            values["gpc_aware"] = True
        return config.from_mapping(values)

    def config_of(problem: Problem, candidate: Candidate) -> AnyConfig:
        swapped = bool(candidate.params.get("swap_ab", False))
        gpc_aware = has_orders and candidate.params.get("cluster_order", "index") == "gpc"
        in_dtype = swapped_dtype(problem.in_dtype) if swapped else problem.in_dtype
        return make(
            candidate.compile_params, problem.epilogue if fuses else "", swapped, gpc_aware,
            in_dtype, problem.out_dtype, problem.accumulation, *majors(problem, swapped),
        )  # fmt: skip

    return config_of


@dataclass(frozen=True)
class Package:
    """A package that a family needs."""

    module: str
    """A module of the package."""
    name: str
    """The package's name for pip."""
    oldest: tuple[int, ...] = ()
    """The oldest version that works; empty for any."""

    def missing(self) -> str | None:
        """Why the package cannot be used, and the remedy; None if it can."""
        try:
            found = find_spec(self.module)
        except ModuleNotFoundError:  # the parent module, such as `cuda`, is missing
            found = None
        version = package_version(self.name)
        if found is None and version:  # the DSL needs its .pth file, which Python ignores on PYTHONPATH
            remedy = f"reinstall it without --target: pip install --force-reinstall {self.name}"
            return f"{self.name} {version} is installed, but Python finds no module {self.module}; {remedy}"
        if found is None:
            return f"{self.name} is not installed; pip install {self.name}"
        if is_older(version, self.oldest):
            oldest = ".".join(map(str, self.oldest))
            return f"{self.name} {version} is older than {oldest}; pip install '{self.name}>={oldest}'"
        return None


TRITON = Package("triton", "triton", (3, 6))
CUDA_BINDINGS = Package("cuda.bindings", "cuda-bindings")
CUTE_DSL = Package("cutlass", "nvidia-cutlass-dsl", (4, 8))
TVM_FFI = Package("tvm_ffi", "apache-tvm-ffi")


def fields_of(config: Any) -> dict[str, Any]:
    """The fields of a config. `dataclasses.asdict` takes 20 us to copy nothing."""
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The compiler of one folder's kernels: those of a `TileGenerator`, or kernels that no search includes.

    The latter are for Hopper, and a table in db lists those that ship.
    """

    folder: Path
    """The folder of the `kernel_sources`."""
    compile: Callable[[Key, Path], Resources]
    """Compiles the kernel of a key into an object file. Raises whatever the compiler raises."""
    kernel: Callable[[Any, Path], Any] | None = None
    """Loads the object of a config on the current device, for kernels that are launched without a candidate.
    Raises RuntimeError if it cannot be loaded."""
    choices: Callable[[Any], Mapping[str, Any]] = fields_of
    """Returns the compile-time choices of a config, without extents or group counts."""
    name: str = ""
    """By default the folder's name."""
    toolchain: Callable[[], Mapping[str, str | int]] = cute_object.toolchain
    """Returns the compiler versions and settings that an object depends on: by default those of CuTe."""
    packages: Sequence[Package] = (CUTE_DSL, TVM_FFI)
    """Packages that loading and launching an object needs."""
    compiler_packages: Sequence[Package] = ()
    """Packages that only compiling needs."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or self.folder.name)

    @property
    def sources(self) -> tuple[Path, ...]:
        return kernel_sources(self.folder)

    def unavailable(self, *, launching: bool = False) -> str | None:
        packages = self.packages if launching else (*self.compiler_packages, *self.packages)
        return next(filter(None, (package.missing() for package in packages)), None)

    def cannot_launch(self, device: Device) -> str | None:
        """Why a kernel that no search includes cannot be launched on a device; None if it can."""
        if device.architecture.compile_target != HOPPER:
            return f"{device.name} is no Hopper GPU"
        return self.unavailable(launching=True)

    def key_of(self, config: Any, target: str = HOPPER) -> Key:
        """Everything that the object of a config depends on."""
        return {
            **self.choices(config),
            "family": self.name,
            "target": target,
            **self.toolchain(),
            "source": hash_of_code(self.sources),
        }


@dataclass(frozen=True, kw_only=True)
class TileGenerator(Kernels):
    """A `tunegemm.generate.family.Generator` made from a config of tiles, rules and functions.

    The protocol documents the members.
    """

    parameters: Mapping[str, tuple[str, ...]]
    config: type[Config]
    config_of: Callable[[Problem, Candidate], Config]
    """Returns the compile-time choices of a candidate for a problem; made by `config_maker` from `config`."""
    rules: Sequence[Rule]
    launcher: Callable[[Problem, Candidate, Device, Path, Workspace | None], Launcher]
    """Makes a launcher from an object and, if the candidate needs it, a workspace; `load` calls it."""
    workspace: Callable[[Problem, Candidate, Device], Workspace | None] = lambda *_: None
    space: Path | None = None
    """The file of the search space; None for the shipped space of the family's name."""
    unlisted: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)
    reduction_class: Callable[[Problem, Candidate], str] = lambda *_: ""
    tma: bool = False
    edges_inside: bool = False
    fuses: bool = False
    """Whether kernels take an epilogue."""
    grouped: bool = False
    """Whether the kernels are only for rows in groups."""
    compiled: ClassVar[Literal[True]] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.grouped:
            usual = (rows_together,) if self.fuses else (rows_together, epilogue)
            object.__setattr__(self, "rules", (*usual, *self.rules))

    @property
    def space_file(self) -> Path:
        return self.space or data_path("search_spaces", f"{self.name}.toml")

    def check(self, problem: Problem, candidate: Candidate, device: Device) -> Verdict:
        verdict = apply_rules(self.rules, problem, candidate, device)
        if not verdict.runs or not candidate.launch_params:  # a kernel without a launch needs no workspace
            return verdict
        reason = exceeded_workspace(self.workspace(problem, candidate, device))
        return verdict if reason is None else Verdict("workspace", reason)

    def kernel_key(self, problem: Problem, candidate: Candidate, device: Device) -> Key:
        key = self.key_of(self.config_of(problem, candidate), device.architecture.compile_target)
        function = problem.fused.function
        return key if function is None else {**key, "epilogue_source": function.source}

    def smem_bytes(self, problem: Problem, candidate: Candidate) -> int:
        return self.config_of(problem, candidate).smem_bytes

    def label(self, candidate: Candidate) -> str:
        kernel = self.config.from_mapping(
            dict(candidate.compile_params) | dict.fromkeys(_OF_PROBLEM, "")
        ).label
        if candidate.params.get("swap_ab", False):
            kernel = kernel.replace(" ", "S ", 1)
        launch = dict(candidate.launch_params)
        words = [word(launch[name]) for name, word in _LAUNCH_WORDS.items() if name in launch]
        words += [f"{name}={value}" for name, value in launch.items() if name not in _LAUNCH_WORDS]
        return " ".join(filter(None, [kernel, *words]))

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
        workspace = workspace or self.workspace(problem, candidate, device)
        return self.launcher(problem, candidate, device, artifact, workspace)
