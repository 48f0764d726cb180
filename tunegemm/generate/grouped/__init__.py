"""Kernel family `grouped`: groups of rows, each with its own weights, built from parts of `cute_sm90`.

db/grouped.toml lists the kernels that ship. Some have a gate that no `Problem` describes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunegemm.compile.cute_object import compiler
from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate.cute_launch import LoadedKernel
from tunegemm.generate.generator import TileGenerator
from tunegemm.generate.grouped.config import GroupedConfig
from tunegemm.generate.grouped.operands import objection, output_objection
from tunegemm.generate.grouped.rules import RULES, config_from, config_of
from tunegemm.generate.takes import UNIT_BYTES, NotTaken, not_aligned
from tunegemm.generate.tiles import ordered_sum
from tunegemm.generate.workspace import Workspace

if TYPE_CHECKING:
    from tunegemm.generate.launching import Launcher

__all__ = ["FAMILY", "L2_HINTS", "GroupedKernel", "config_of", "launch_arguments"]

#: The launch parameter `l2_hint`, in the order of its numbers: `GroupedKernel.of`.
L2_HINTS = ("none", "weights_first")


class GroupedKernel(LoadedKernel[GroupedConfig]):
    """A compiled kernel for groups of rows."""

    def launch(
        self, a: Any, weights: Any, out: Any, offsets: Any, bias: Any = None, scales: Any = None, **words: Any
    ) -> None:
        """One product on the current stream; see `of`."""
        launch = self.of(a, weights, out, offsets, bias, scales, **words)
        launch(a, weights, offsets, *(each for each in (bias, scales) if each is not None), out)

    def of(
        self, a: Any, weights: Any, out: Any, offsets: Any, bias: Any = None, scales: Any = None, *,
        interleaved: bool = False, blocks: int, swizzle_size: int = 8, l2_hint: int = 0,
    ) -> Callable[..., None]:  # fmt: skip
        """The launch for operands with these layouts, which takes a, weights, offsets, bias and scales if
        there are any, and out.

        out[r] = a[r] weights[g]^T + bias[g] for the rows r of each group g; gated if the kernel is.

        a: (rows, K). weights: (E, N, K), with k contiguous, or n if the config says so. out: (rows, N).
        offsets: int32 (E). bias: (E, N), its columns contiguous.
        With a gate, weights are (E, 2 N, K): the rows of gate come before those of up, or alternate with them
        if `interleaved`. The bias has the same order.
        scales: fp32 (rows), for a kernel with scales; bias then holds the fp32 scales of the weights' rows.
        blocks: the grid, at most as many as are resident; rounded down to whole clusters, at least one.
        swizzle_size: how many tiles of rows share weights.
        l2_hint: 1 to evict lines of the weights from L2 first.

        Raises NotTaken if the kernel does not take the layouts; a launch raises it for unaligned addresses.
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
        biased, scaled = bias is not None, scales is not None

        def launch(a: Any, weights: Any, offsets: Any, *others: Any) -> None:
            first_bias = others[0].data_ptr() if biased else 0
            first_scale = others[1].data_ptr() if scaled else 0
            places = a.data_ptr(), weights.data_ptr(), others[-1].data_ptr(), offsets.data_ptr()
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


class _Named(GroupedConfig):
    """A config made from a candidate's parameters without a problem, for labels."""

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Any:
        return config_from({"tile_k": 64} | {name: value for name, value in values.items() if value != ""})


def launcher(
    problem: Problem, candidate: Candidate, device: Device, artifact: Path, workspace: Workspace | None
) -> Launcher:
    """A launcher of a, b (groups, K, N), out, the groups' ends, and for fp8 the row and column scales."""
    kernel = GroupedKernel.load(config_of(problem, candidate), artifact)
    swizzle_size, l2_hint = launch_arguments(candidate)

    def launch(a: Any, b: Any, out: Any, offsets: Any, scale_a: Any = None, scale_b: Any = None) -> None:
        kernel.launch(
            a, b.mT, out, offsets, scale_b, scales=scale_a,
            blocks=device.sm_count, swizzle_size=swizzle_size, l2_hint=l2_hint,
        )  # fmt: skip

    return launch


def launch_arguments(candidate: Candidate) -> tuple[int, int]:
    """A candidate's `swizzle_size` and `l2_hint` as `GroupedKernel.of` takes them."""
    return int(candidate["swizzle_size"]), L2_HINTS.index(candidate["l2_hint"])


FAMILY = TileGenerator(
    parameters={
        "compile": ("schedule", "tile_m", "tile_n", "tile_k", "stages", "epi_n", "narrow", "cluster_m"),
        "launch": ("swizzle_size", "l2_hint"),
    },
    folder=Path(__file__).parent,
    config=_Named,
    config_of=config_of,
    rules=RULES,
    reduction_class=ordered_sum,
    grouped=True,
    fuses=True,
    tma=True,
    compile=compiler(GroupedConfig, "tunegemm.generate.grouped.kernel.gemm", 3, addresses=3, words=0),
    kernel=GroupedKernel.load,
    launcher=launcher,
)
kernel_key = FAMILY.key_of
