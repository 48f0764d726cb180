"""Checks whether kernels take operands; every launch passes these checks, on any path.

A kernel does not report that it cannot read an operand. TMA ignores the low bits of an address and reads the
bytes before it, a load of 16 bytes faults at an unaligned address, and a number beyond 32 bits is truncated.
Layouts are checked once, addresses at each launch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

#: Torch's names of element types, without ``torch.``.
TORCHS = {
    "bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "tf32": "float32", "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2", "int8": "int8", "int32": "int32",
}  # fmt: skip
#: Bytes of one access by TMA, and of the widest vector.
UNIT_BYTES = 16
#: Extents must stay below this, and so must strides that a kernel has as int32.
MOST = 2**31
#: The bytes from one line to the next must stay below this: globalStrides of cuTensorMapEncodeTiled.
MOST_STRIDE_BYTES = 2**40


class NotTaken(ValueError):
    """A kernel does not take these operands, so torch must compute the product."""


def not_aligned(**addresses: int) -> NotTaken:
    """The error to raise if the kernel does not take the address of one of these operands."""
    named = ", ".join(f"{name} {address:#x}" for name, address in addresses.items() if address)
    return NotTaken(f"the kernel does not take operands at these addresses: {named}; clone() those of views")


class Place(NamedTuple):
    """An operand, and what its kernel requires of it."""

    name: str
    tensor: torch.Tensor
    dtype: str
    """The required dtype, by torch's name."""
    shape: tuple[int, ...]
    order: tuple[int, ...]
    """The dimensions, the outermost first and the contiguous one last."""
    unit_bytes: int = UNIT_BYTES
    """The strides of the outer dimensions must be multiples of this."""
    apart: bool = True
    """Whether lines must not overlap."""

    def objection(self, device: torch.device) -> str:
        """Why a kernel on a device does not take the operand; empty if it does."""
        name, tensor = self.name, self.tensor
        strides, size = tensor.stride(), tensor.element_size()
        if (
            str(tensor.dtype) != f"torch.{self.dtype}"
            or tensor.shape != self.shape
            or tensor.device != device
        ):
            given = f"{name} is {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
            return f"{given}, not {self.shape} torch.{self.dtype} on {device}"
        *outer, inner = self.order
        if strides[inner] != 1 and (self.apart or self.shape[inner] > 1):
            return f"{name} of strides {strides} is not contiguous along dimension {inner}"
        least = self.shape[inner]
        for dimension in reversed(outer):
            stride = strides[dimension]
            apart = stride * size
            if apart % self.unit_bytes or apart >= MOST_STRIDE_BYTES:
                return f"{name} of strides {strides}: lines {apart} B apart, not units of {self.unit_bytes}"
            if self.apart and stride < least:
                return f"{name} of strides {strides} overlaps itself"
            least = stride * self.shape[dimension]
        return ""


def first_objection(places: Iterable[Place], device: torch.device, **extents: int) -> str:
    """The first objection to the extents or to one of the operands; empty if there is none."""
    return wrong_extents(**extents) or next(filter(None, (each.objection(device) for each in places)), "")


def wrong_extents(**extents: int) -> str:
    """Why a kernel cannot have these extents; empty if it can."""
    for name, extent in extents.items():
        if not 0 < extent < MOST:
            return f"{name} is {extent}, not from 1 to {MOST - 1}"
    return ""
