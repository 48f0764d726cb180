"""What kernels take of operands: every launch asks here, whatever path led to it.

A kernel does not say that it cannot read an operand. TMA leaves out the low bits of an address and reads what
lies before it, a load of 16 bytes faults at another address, and a number beyond 32 bits becomes another one.
Layouts are looked at once, addresses at each launch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

#: Bytes of one access by TMA, and of the widest vector.
UNIT_BYTES = 16
#: Extents, and strides where a kernel has them as int32, stay below.
MOST = 2**31
#: Bytes from a line to the next stay below: globalStrides of cuTensorMapEncodeTiled.
MOST_STRIDE_BYTES = 2**40


class NotTaken(ValueError):
    """A kernel does not take these operands; torch is to compute the product."""


def not_aligned(**addresses: int) -> NotTaken:
    """What is raised for operands of which one is at an address that its kernel does not take."""
    named = ", ".join(f"{name} {address:#x}" for name, address in addresses.items() if address)
    return NotTaken(f"the kernel does not take operands at these addresses: {named}; clone() those of views")


class Place(NamedTuple):
    """What a kernel is given for one operand."""

    name: str
    tensor: torch.Tensor
    dtype: str
    """Torch's name."""
    shape: tuple[int, ...]
    order: tuple[int, ...]
    """The dimensions, the outermost first and the contiguous one last."""
    unit_bytes: int = UNIT_BYTES
    """What the other strides are multiples of."""
    apart: bool = True
    """Whether lines must not overlap."""

    def objection(self, device: torch.device) -> str:
        """Why a kernel on a device does not take it; empty if it does."""
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


def first_objection(places: Iterable[Place], device: torch.device) -> str:
    """The first objection to one of them, if there is one."""
    return next(filter(None, (place.objection(device) for place in places)), "")


def wrong_extents(**extents: int) -> str:
    """Why a kernel does not count so far; empty if it does."""
    for name, extent in extents.items():
        if not 0 < extent < MOST:
            return f"{name} is {extent}, not from 1 to {MOST - 1}"
    return ""
