"""Kernel family `grouped`: products of groups of rows, each with its own weights, on `cute_sm90`'s parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunegemm.compile.cute_object import compile_object
from tunegemm.compile.ptxas import Resources
from tunegemm.generate.cute_launch import load_function
from tunegemm.generate.grouped.config import GroupedConfig


def compile_kernel(config: GroupedConfig, out: Path, target: str = "sm_90a") -> Resources:
    """Compile a kernel to the object `out`. Raises whatever the compiler raises."""

    def make() -> Any:
        from tunegemm.generate.grouped.kernel.gemm import Gemm

        return Gemm(config)

    return compile_object(make, 3, target, out, addresses=2)


@dataclass(frozen=True)
class GroupedKernel:
    """A compiled kernel, ready to be launched on the current device."""

    config: GroupedConfig
    function: Callable[..., None]

    @classmethod
    def load(cls, config: GroupedConfig, artifact: Path) -> GroupedKernel:
        """Raises RuntimeError for what cannot be loaded here."""
        return cls(config, load_function(artifact))

    def launch(
        self, a: Any, weights: Any, out: Any, offsets: Any, bias: Any = None, *,
        blocks: int, swizzle_size: int = 8, l2_hint: int = 0,
    ) -> None:  # fmt: skip
        """out[r] = a[r] weights[g]^T for the rows r of each group g.

        a: (rows, K). weights: (E, N, K), k contiguous. out: (rows, N). offsets: int32 (E). bias: (E, N).
        blocks: the grid, at most as many as are resident.
        """
        from torch._C import _cuda_getCurrentRawStream as current_stream

        groups, n, k = weights.shape
        self.function(
            weights.data_ptr(), a.data_ptr(), out.data_ptr(), n, a.shape[0], k, groups, weights.stride(1),
            a.stride(0), out.stride(0), weights.stride(0), 0 if bias is None else bias.stride(0), 0,
            swizzle_size, blocks, l2_hint, offsets.data_ptr(), 0 if bias is None else bias.data_ptr(),
            current_stream(a.device.index),
        )  # fmt: skip
