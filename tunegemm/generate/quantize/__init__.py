"""Kernels that quantise activations to float8_e4m3fn with one fp32 scale for each 1 x 128 block.

No search includes them. There is one for each dtype of the input, without a gate and with one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tunegemm.compile.cute_object import compiler
from tunegemm.generate.cute_launch import LoadedKernel
from tunegemm.generate.generator import Kernels
from tunegemm.generate.quantize.config import BLOCK, EPSILON, LARGEST, VECTOR, QuantizeConfig
from tunegemm.generate.takes import TORCHS, UNIT_BYTES, NotTaken, not_aligned, wrong_extents

__all__ = ["BLOCK", "CONFIGS", "EPSILON", "FAMILY", "LARGEST", "QuantizeConfig", "Quantizer"]

#: The input's dtypes.
DTYPES = ("bf16", "fp16", "fp32")
#: All kernels; all ship.
CONFIGS = tuple(QuantizeConfig(dtype, gated) for dtype in DTYPES for gated in (False, True))


class Quantizer(LoadedKernel[QuantizeConfig]):
    """A compiled kernel that quantises."""

    def bound(
        self, x: Any, values: Any, scales: Any, *, power_of_two: bool = False
    ) -> Callable[[int, int, int], None]:
        """The launch for addresses of tensors with these layouts, in this order.

        x: (rows, k), or (rows, 2 k) where gated. values: float8_e4m3fn (rows, k). scales: fp32
        (rows, k / 128), rounded up, of any strides. Raises NotTaken if `refusal` objects; a launch raises it
        for unaligned addresses.
        """
        from torch._C import _cuda_getCurrentRawStream as current_stream

        if wrong := refusal(x, self.config.gated):
            raise NotTaken(wrong)
        if str(x.dtype) != f"torch.{TORCHS[self.config.dtype]}":
            raise NotTaken(f"x is {x.dtype} for a kernel of {self.config.dtype}")
        (rows, k), index, function = values.shape, x.device.index, self.function
        fixed = rows, k, int(power_of_two), 0, x.stride(0), values.stride(0), *scales.stride(), 0, 0

        def launch(x: int, values: int, scales: int) -> None:
            if (x | values) & (UNIT_BYTES - 1) or scales & 3:
                raise not_aligned(x=x, values=values, scales=scales)
            function(x, values, scales, *fixed, current_stream(index))

        return launch


FAMILY = Kernels(
    folder=Path(__file__).parent,
    compile=compiler(QuantizeConfig, "tunegemm.generate.quantize.kernel", 0, addresses=0, words=0),
    kernel=Quantizer.load,
)
kernel_key = FAMILY.key_of


def refusal(x: Any, gated: bool) -> str:
    """Why no kernel quantises a tensor, in one line; empty if one does."""
    if x.ndim != 2 or str(x.dtype) not in {f"torch.{TORCHS[dtype]}" for dtype in DTYPES}:
        return f"x has {x.ndim} dimensions of {x.dtype}, not 2 of {', '.join(DTYPES)}"
    rows, k = x.shape[0], x.shape[1] // (1 + gated)
    if wrong := wrong_extents(rows=rows, k=k):
        return wrong
    apart = x.stride(0) * x.element_size() if rows > 1 else 0
    if k % VECTOR or x.stride(1) != 1 or apart % UNIT_BYTES:
        return f"x of shape {tuple(x.shape)} and strides {x.stride()} has no rows of whole 16 bytes"
    return ""
