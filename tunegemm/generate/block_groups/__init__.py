"""Kernels for groups of fp8 rows with block scales: 1 x 128 of A, 128 x 128 of each group's weights, fp32.

No search includes them; db/block_groups.toml lists those that ship (`tunegemm.model.block_groups`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tunegemm.compile.cute_object import compiler
from tunegemm.generate.block_groups.config import BlockGroupConfig
from tunegemm.generate.blocks import wrong_scales
from tunegemm.generate.blocks.config import BLOCK
from tunegemm.generate.cute_launch import LoadedKernel
from tunegemm.generate.generator import Kernels
from tunegemm.generate.grouped.operands import output_objection
from tunegemm.generate.takes import TORCHS, UNIT_BYTES, NotTaken, Place, first_objection, not_aligned

_SWIZZLE = 8


def config_of(parameters: Mapping[str, Any]) -> BlockGroupConfig:
    """The config of a kernel. parameters: the fields without a default."""
    return BlockGroupConfig(
        schedule="cooperative", tile_k=BLOCK, cluster_n=1, in_dtype="fp8_e4m3", out_dtype="bf16",
        a_major="k", b_major="k", out_major="m", accumulation="two_level", **parameters,
    )  # fmt: skip


class BlockGroupKernel(LoadedKernel[BlockGroupConfig]):
    """A compiled kernel for groups of rows with block scales."""

    def launch(self, *tensors: Any, blocks: int) -> None:
        """One product on the current stream; see `bound`."""
        self.bound(*tensors, blocks=blocks)(*(each.data_ptr() for each in tensors))

    def bound(
        self, a: Any, weights: Any, scale_a: Any, scale_b: Any, offsets: Any, out: Any, *, blocks: int
    ) -> Callable[[int, int, int, int, int, int], None]:
        """The launch for addresses of tensors with these layouts, in this order.

        a: (rows, K). weights: (E, N, K). scale_a: (rows, K / 128), scale_b: (E, N / 128, K / 128), rounded
        up, of any strides. offsets: the groups' ends, int32 (E). out: (rows, N). blocks: the grid.

        Raises NotTaken if `refusal` objects; a launch raises it for unaligned addresses.
        """
        if wrong := refusal(a, weights, scale_a, scale_b, offsets, out):
            raise NotTaken(wrong)
        from torch._C import _cuda_getCurrentRawStream as current_stream

        (groups, n, k), index = weights.shape, a.device.index
        lines = weights.stride(1), a.stride(0), out.stride(0), weights.stride(0)
        numbers = n, a.shape[0], k, groups, *lines, 0, 0, _SWIZZLE, blocks, 0
        of_rows, of_weights, function = scale_a.stride(), scale_b.stride(), self.function

        def launch_at(a: int, weights: int, scale_a: int, scale_b: int, offsets: int, out: int) -> None:
            if (a | weights | out) & (UNIT_BYTES - 1) or (scale_a | scale_b | offsets) & 3:
                raise not_aligned(a=a, b=weights, out=out, scale_a=scale_a, scale_b=scale_b, offsets=offsets)
            words = offsets, 0, 0, scale_a, *of_rows, scale_b, *of_weights
            function(weights, a, out, *numbers, *words, current_stream(index))

        return launch_at


FAMILY = Kernels(
    folder=Path(__file__).parent,
    compile=compiler(BlockGroupConfig, "tunegemm.generate.block_groups.kernel", 3, addresses=3, words=7),
    kernel=BlockGroupKernel.load,
)
kernel_key = FAMILY.key_of


def refusal(a: Any, weights: Any, scale_a: Any, scale_b: Any, offsets: Any, out: Any) -> str:
    """Why no kernel here takes these tensors of `BlockGroupKernel.bound`, in one line; empty if one does."""
    if (a.ndim, weights.ndim, scale_a.ndim, scale_b.ndim, offsets.ndim) != (2, 3, 2, 3, 1):
        return "operands must be (rows, k), (groups, n, k), the scales of both, and the groups' ends"
    (rows, k), (groups, n, _) = a.shape, weights.shape
    if n % 8:
        return f"n {n} is not a multiple of 8"
    places = [
        Place("a", a, TORCHS["fp8_e4m3"], (rows, k), (0, 1)),
        Place("the weights", weights, TORCHS["fp8_e4m3"], (groups, n, k), (0, 1, 2)),
        Place("offsets", offsets, "int32", (groups,), (0,), apart=False),
    ]
    across, along = -(-n // BLOCK), -(-k // BLOCK)
    return (
        first_objection(places, a.device, rows=rows, n=n, k=k, groups=groups)
        or wrong_scales(a.device, scale_a, (rows, along), scale_b, (groups, across, along))
        or output_objection(out, a, n, "bf16")
    )
