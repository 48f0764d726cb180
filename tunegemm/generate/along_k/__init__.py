"""The kernel of products of groups along k, weights' gradients: D[e] = A[rows of e]^T B[rows of e].

No search has it: db/grouped.toml says what it serves (`tunegemm.model.grouped.choose_along_k`). For a compile
pool `tunegemm.generate.grouped` finds it by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tunegemm.compile.cute_object import compiler, toolchain
from tunegemm.generate.cute_launch import load_function
from tunegemm.generate.cute_sm90.config import KernelConfig
from tunegemm.generate.generator import CUTE_DSL, TVM_FFI, Key
from tunegemm.generate.sources import hash_of_code, kernel_sources
from tunegemm.generate.workspace import Workspace

NAME = "along_k"
TARGET = "sm_90a"


def config_from(parameters: Mapping[str, Any]) -> KernelConfig:
    """The config of a tile, a cluster, stages, and the columns of the epilogue's subtiles."""
    return KernelConfig(
        **parameters, schedule="cooperative", tile_k=64, tile_scheduler="dynamic",
        in_dtype="bf16", out_dtype="bf16", a_major="m", b_major="n", out_major="n",
    )  # fmt: skip


def kernel_key(config: KernelConfig) -> Key:
    """Everything the compiled object depends on: never extents or numbers of groups."""
    return {
        **{name: getattr(config, name) for name in config.__dataclass_fields__},
        "family": NAME,
        "target": TARGET,
        **toolchain(),
        "source": hash_of_code(kernel_sources(Path(__file__).parent)),
    }


def unavailable(*, launching: bool = False) -> str | None:
    """None when the packages are installed; else one line that names the missing one."""
    return next(filter(None, (package.missing() for package in (CUTE_DSL, TVM_FFI))), None)


#: Compiles the kernel of a key to an object. Raises whatever the compiler raises.
compile = compiler(KernelConfig, "tunegemm.generate.along_k.kernel", 2, addresses=2)


@cache
def _counter(index: int) -> Workspace:
    """The memory of a launch's counter of tiles that were drawn."""
    return Workspace(0, 4, index)


@dataclass(frozen=True)
class AlongK:
    """A compiled kernel, ready to be launched on the device that was the current one when it was loaded."""

    config: KernelConfig
    function: Callable[..., None]

    @classmethod
    def load(cls, config: KernelConfig, artifact: Path) -> AlongK:
        """Raises RuntimeError for what cannot be loaded here."""
        return cls(config, load_function(artifact))

    def launch(self, a: Any, b: Any, out: Any, offsets: Any, *, blocks: int, swizzle_size: int = 8) -> None:
        """out[e] = a[rows of e]^T b[rows of e].

        a: (rows, M). b: (rows, N). out: (E, M, N). Rows' strides, and those of out, are multiples of 16
        bytes. offsets: int32 (E). blocks: the grid, at most as many as are resident. swizzle_size: tiles
        along N that share tiles of a.
        """
        from torch._C import _cuda_getCurrentRawStream as current_stream

        groups, m, n = out.shape
        index = a.device.index
        stream = current_stream(index)
        _, counter, memory = _counter(index).take(stream)
        self.function(
            a.data_ptr(), b.data_ptr(), out.data_ptr(), m, n, a.shape[0], groups, a.stride(0), b.stride(0),
            out.stride(1), 0, 0, out.stride(0), swizzle_size, max(1, blocks // self.config.cluster_size),
            offsets.data_ptr(), counter, stream,
        )  # fmt: skip
        del memory  # the launch is queued
