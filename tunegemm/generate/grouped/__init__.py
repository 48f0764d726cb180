"""Kernel family `grouped`: groups of rows, each with its own weights, built from parts of `cute_sm90`.

db/grouped.toml names the kernels that ship, some with a gate that no `Problem` describes. For a compile pool
with such keys this module takes the place of `tunegemm.generate.families`: `get` and `import_compiler`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tunegemm.compile.cute_object import compile_object, toolchain
from tunegemm.compile.ptxas import Resources
from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate import along_k, routing
from tunegemm.generate.cute_launch import load_function
from tunegemm.generate.families import import_compiler
from tunegemm.generate.generator import CUTE_DSL, TVM_FFI, TileGenerator
from tunegemm.generate.grouped.config import GroupedConfig
from tunegemm.generate.grouped.operands import objection, output_objection
from tunegemm.generate.grouped.rules import RULES, config_from, config_of
from tunegemm.generate.sources import hash_of_code, kernel_sources
from tunegemm.generate.takes import UNIT_BYTES, NotTaken, not_aligned
from tunegemm.generate.tiles import ordered_sum
from tunegemm.generate.workspace import Workspace

if TYPE_CHECKING:
    from tunegemm.generate.launching import Launcher

__all__ = [
    "FAMILY", "L2_HINTS", "NAME", "TARGET", "GroupedKernel", "compile", "config_of", "get",
    "import_compiler", "kernel_key", "launch_arguments", "unavailable",
]  # fmt: skip

NAME = "grouped"
_FOLDER = Path(__file__).parent
TARGET = "sm_90a"
#: The launch parameter `l2_hint`, in the order of its numbers: `GroupedKernel.launch`.
L2_HINTS = ("none", "weights_first")


def get(name: str) -> ModuleType:
    """What a compile worker asks for the kernel of a key: this module, or that of kernels around products, of
    those along k, of those that draw their tiles, or of those of parts of k.
    """
    if name in ("drawn", "parted"):  # which import this module
        return import_module(__name__.replace("grouped", name))
    others = {module.NAME: module for module in (along_k, routing)}
    return others.get(name, sys.modules[__name__])


def kernel_key(config: GroupedConfig) -> Mapping[str, str | int | bool]:
    """Everything the compiled object depends on: never extents or numbers of groups."""
    return {
        **{name: getattr(config, name) for name in config.__dataclass_fields__},
        "family": NAME,
        "target": TARGET,
        **toolchain(),
        "source": hash_of_code(kernel_sources(_FOLDER)),
    }


def unavailable(*, launching: bool = False) -> str | None:
    """None when the packages are installed; else one line that names the missing one."""
    return next(filter(None, (package.missing() for package in (CUTE_DSL, TVM_FFI))), None)


def compile(key: Mapping[str, str | int | bool], out: Path) -> Resources:
    """Compile the kernel of a key to the object `out`. Raises whatever the compiler raises."""
    config = GroupedConfig.from_mapping(key)

    def make() -> Any:
        from tunegemm.generate.grouped.kernel.gemm import Gemm

        return Gemm(config)

    return compile_object(make, 3, str(key["target"]), out, addresses=3)


@dataclass(frozen=True)
class GroupedKernel:
    """A compiled kernel, ready to be launched on the device that was the current one when it was loaded."""

    config: GroupedConfig
    function: Callable[..., None]

    @classmethod
    def load(cls, config: GroupedConfig, artifact: Path) -> GroupedKernel:
        """Raises RuntimeError for what cannot be loaded here."""
        return cls(config, load_function(artifact))

    def launch(
        self, a: Any, weights: Any, out: Any, offsets: Any, bias: Any = None, *,
        scales: Any = None, interleaved: bool = False, blocks: int, swizzle_size: int = 8, l2_hint: int = 0,
    ) -> None:  # fmt: skip
        """out[r] = a[r] weights[g]^T + bias[g] for the rows r of each group g; gated if the kernel is.

        a: (rows, K). weights: (E, N, K), k contiguous, or n where the config says so. out: (rows, N).
        offsets: int32 (E). bias: (E, N), its columns contiguous.
        With a gate weights are (E, 2 N, K), the rows of gate before those of up, or `interleaved`: a row of
        either in turns; bias is as they are.
        scales: of a kernel with scales, fp32 (rows); bias are then those of the weights' rows, fp32.
        blocks: the grid, at most as many as are resident; of clusters as many whole ones, or one.
        swizzle_size: tiles of rows that share weights.
        l2_hint: 1 where lines of the weights are to leave the L2 first.

        Raises NotTaken for operands that the kernel does not take.
        """
        launch = self.of(
            a, weights, out, offsets, bias, scales=scales, interleaved=interleaved,
            blocks=blocks, swizzle_size=swizzle_size, l2_hint=l2_hint,
        )  # fmt: skip
        launch(a, weights, out, offsets, bias, scales)

    def of(
        self, a: Any, weights: Any, out: Any, offsets: Any, bias: Any = None, scales: Any = None, *,
        interleaved: bool = False, blocks: int, swizzle_size: int = 8, l2_hint: int = 0,
    ) -> Callable[..., None]:  # fmt: skip
        """`launch` for operands that are laid out as these: a, the weights, out, offsets, bias and scales.
        Raises NotTaken, here for how operands are laid out, at a launch for their addresses.
        """
        from torch._C import _cuda_getCurrentRawStream as current_stream

        config, fused = self.config, self.config.fused
        wrong = objection(
            a, weights, offsets, bias, scales,
            dtype=config.in_dtype, gated=fused.gated, n_major=config.a_major == "m",
        )  # fmt: skip
        columns = weights.shape[1] // (1 + fused.gated)
        if wrong := wrong or output_objection(out, a, columns, config.out_dtype):
            raise NotTaken(wrong)
        groups, _, k = weights.shape
        n, up_stride = out.shape[1], 0
        row_stride = weights.stride(1 if config.a_major == "k" else 2)
        if fused.gated:
            up_stride = row_stride if interleaved else n * row_stride
            row_stride *= 1 + interleaved
        function, index = self.function, a.device.index
        numbers = (
            n, a.shape[0], k, groups, row_stride, a.stride(0), out.stride(0), weights.stride(0),
            0 if bias is None else bias.stride(0), up_stride, swizzle_size, blocks, l2_hint,
        )  # fmt: skip
        bias_mask = 0 if bias is None else bias.element_size() - 1

        def launch(a: Any, weights: Any, out: Any, offsets: Any, bias: Any, scales: Any) -> None:
            places = a.data_ptr(), weights.data_ptr(), out.data_ptr(), offsets.data_ptr()
            first_bias = 0 if bias is None else bias.data_ptr()
            first_scale = 0 if scales is None else scales.data_ptr()
            a, weights, out, offsets = places
            if (
                (a | weights | out) & (UNIT_BYTES - 1)
                or (offsets | first_scale) & 3
                or first_bias & bias_mask
            ):
                raise not_aligned(
                    a=a, weights=weights, out=out, offsets=offsets, bias=first_bias, scales=first_scale
                )
            function(weights, a, out, *numbers, offsets, first_bias, first_scale, current_stream(index))

        return launch


#: What a kernel of this family is loaded as.
Kernel = GroupedKernel


class _Named(GroupedConfig):
    """What a label is made of: a config of a candidate's parameters, for which no problem stands."""

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Any:
        return config_from({"tile_k": 64} | {name: value for name, value in values.items() if value != ""})


def launcher(
    problem: Problem, candidate: Candidate, device: Device, artifact: Path, workspace: Workspace | None
) -> Launcher:
    """Takes a, b (groups, K, N), out, the groups' ends, and of fp8 the scales of rows and columns."""
    kernel = GroupedKernel.load(config_of(problem, candidate), artifact)
    swizzle_size, l2_hint = launch_arguments(candidate)

    def launch(a: Any, b: Any, out: Any, offsets: Any, scale_a: Any = None, scale_b: Any = None) -> None:
        kernel.launch(
            a, b.mT, out, offsets, scale_b, scales=scale_a,
            blocks=device.sm_count, swizzle_size=swizzle_size, l2_hint=l2_hint,
        )  # fmt: skip

    return launch


def launch_arguments(candidate: Candidate) -> tuple[int, int]:
    """A candidate's `swizzle_size` and `l2_hint` as `GroupedKernel.launch` takes them."""
    return int(candidate["swizzle_size"]), L2_HINTS.index(candidate["l2_hint"])


FAMILY = TileGenerator(
    name=NAME,
    parameters={
        "compile": ("schedule", "tile_m", "tile_n", "tile_k", "stages", "epi_n", "narrow", "cluster_m"),
        "launch": ("swizzle_size", "l2_hint"),
    },
    folder=_FOLDER,
    config=_Named,
    config_of=config_of,
    rules=RULES,
    reduction_class=ordered_sum,
    grouped=True,
    fuses=True,
    tma=True,
    compile=compile,
    launcher=launcher,
    toolchain=toolchain,
    packages=(CUTE_DSL, TVM_FFI),
)
