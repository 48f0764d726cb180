"""The kernel for groups along k, as in gradients of weights: D[e] = A[rows of e]^T B[rows of e].

No search includes it; db/grouped.toml lists what it serves (`tunegemm.model.grouped.choose_along_k`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tunegemm.compile.cute_object import compiler
from tunegemm.generate.cute_launch import LoadedKernel
from tunegemm.generate.cute_sm90.config import KernelConfig
from tunegemm.generate.generator import Kernels
from tunegemm.generate.takes import MOST, TORCHS, UNIT_BYTES, NotTaken, Place, first_objection, not_aligned
from tunegemm.generate.workspace import tile_counter


def config_from(parameters: Mapping[str, Any]) -> KernelConfig:
    """The config for a tile, a cluster, stages, and the columns of the epilogue's subtiles."""
    return KernelConfig(
        **parameters, schedule="cooperative", tile_k=64, tile_scheduler="dynamic",
        in_dtype="bf16", out_dtype="bf16", a_major="m", b_major="n", out_major="n",
    )  # fmt: skip


class AlongK(LoadedKernel[KernelConfig]):
    """A compiled kernel of groups along k."""

    def launch(self, a: Any, b: Any, out: Any, offsets: Any, **words: int) -> None:
        """One product on the current stream; see `of`."""
        self.of(a, b, out, offsets, **words)(a, b, offsets, out)

    def of(
        self, a: Any, b: Any, out: Any, offsets: Any, *, blocks: int, swizzle_size: int = 8
    ) -> Callable[..., None]:
        """The launch of out[e] = a[rows of e]^T b[rows of e] for operands with these layouts, which takes a,
        b, offsets and out.

        a: (rows, M). b: (rows, N). out: (E, M, N). Rows' strides, and those of out, are multiples of 16
        bytes. offsets: int32 (E). blocks: the grid, at most as many as are resident. swizzle_size: tiles
        along N that share tiles of a.

        Raises NotTaken if the kernel does not take the layouts; a launch raises it for unaligned addresses.
        """
        from torch._C import _cuda_getCurrentRawStream as current_stream

        if wrong := objection(a, b, offsets):
            raise NotTaken(wrong)
        groups, m, n = shape = offsets.shape[0], a.shape[1], b.shape[1]
        if wrong := Place("out", out, TORCHS["bf16"], shape, (0, 1, 2)).objection(a.device):
            raise NotTaken(wrong)
        function, index = self.function, a.device.index
        numbers = (
            m, n, a.shape[0], groups, a.stride(0), b.stride(0), out.stride(1), 0, 0, out.stride(0),
            swizzle_size, max(1, blocks // self.config.cluster_size),
        )  # fmt: skip

        def launch(a: Any, b: Any, offsets: Any, out: Any) -> None:
            first_a, first_b, first, ends = a.data_ptr(), b.data_ptr(), out.data_ptr(), offsets.data_ptr()
            if (first_a | first_b | first) & (UNIT_BYTES - 1) or ends & 3:
                raise not_aligned(a=first_a, b=first_b, out=first, offsets=ends)
            stream = current_stream(index)
            _, counter, memory = tile_counter(index).take(stream)
            function(first_a, first_b, first, *numbers, ends, counter, stream)
            del memory  # the launch is queued

        return launch


FAMILY = Kernels(
    folder=Path(__file__).parent,
    compile=compiler(KernelConfig, "tunegemm.generate.along_k.kernel", 2),
    kernel=AlongK.load,
)
kernel_key = FAMILY.key_of


def objection(a: Any, b: Any, offsets: Any) -> str:
    """Why no kernel takes these operands of `AlongK.launch`, apart from addresses; empty if one does."""
    if (a.ndim, b.ndim, offsets.ndim) != (2, 2, 1):
        return f"a has {a.ndim} dimensions, b {b.ndim}, offsets {offsets.ndim}, not 2, 2 and 1"
    (rows, m), n, groups = a.shape, b.shape[1], offsets.shape[0]
    if n % 8 or max(rows, m, n, groups) >= MOST - 2**10:
        return f"n {n} is not a multiple of 8, or an extent of {tuple(a.shape)} x {n} too large"
    places = (
        Place("a", a, TORCHS["bf16"], (rows, m), (0, 1)),
        Place("b", b, TORCHS["bf16"], (rows, n), (0, 1)),
        Place("offsets", offsets, "int32", (groups,), (0,), apart=False),
    )
    return first_objection(places, a.device, rows=rows, m=m, n=n, groups=groups)
