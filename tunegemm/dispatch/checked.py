"""Checks of a launch's operands: dtypes, shapes and devices once, addresses each time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

from tunegemm.describe.epilogue import check_operands
from tunegemm.describe.problem import Problem, operand_dtypes, overlaps_itself
from tunegemm.errors import ProblemError
from tunegemm.measure.operands import torch_dtype

if TYPE_CHECKING:
    import torch

#: How many valid sets of shapes and strides are remembered.
_MAX_KNOWN = 1024


class Extent(NamedTuple):
    """The memory of a view, in bytes from its first element: lines of `line`, multiples of `pitch` apart."""

    span: int
    line: int
    pitch: int
    """0 if there is one line."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Extent:
        size = tensor.element_size()
        steps = [(stride, extent) for stride, extent in zip(tensor.stride(), tensor.shape, strict=True)]
        steps = [(stride, extent) for stride, extent in steps if extent > 1 and stride]
        span = 1 + sum(stride * (extent - 1) for stride, extent in steps)
        line = next((extent for stride, extent in steps if stride == 1), 1)
        pitch = math.gcd(*(stride for stride, _ in steps if stride != 1))
        return cls(span * size, line * size, pitch * size)


def share_memory(start: int, extent: Extent, other_start: int, other: Extent) -> bool:
    """Whether two views at these addresses share a byte. Adjacent columns of one buffer share none. For views
    that interleave their lines in other ways, the answer may be a false True.
    """
    if start >= other_start + other.span or other_start >= start + extent.span:
        return False
    pitch = math.gcd(extent.pitch, other.pitch)
    apart = pitch and (other_start - start) % pitch
    return not (extent.line <= apart <= pitch - other.line)


class Checked:
    """The checks of one problem's operands on one device."""

    def __init__(self, problem: Problem, place: torch.device) -> None:
        self._problem, self._place = problem, place
        fused = problem.fused.operands
        self._tensors = tuple(index for index, parameter in enumerate(fused) if parameter.kind != "number")
        self._names = ("a", "b", "out", *(fused[index].name for index in self._tensors))
        self._matrices = {
            3 + number for number, index in enumerate(self._tensors) if fused[index].kind == "matrix"
        }
        self._known: dict[Any, tuple[Extent, ...]] = {}
        #: Pairs of indices: a written operand, and an operand that it must not overlap.
        self._pairs = [(2, other) for other in range(len(self._names)) if other != 2]
        if "amax" in self._names:
            amax = self._names.index("amax")
            self._pairs += [(amax, other) for other in range(len(self._names)) if other not in (2, amax)]

    def __call__(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, operands: Sequence[Any]) -> None:
        """Raises ProblemError if operands belong to another problem or are not on the device, or if one is
        written where another is read. A matrix of the epilogue may be `out` itself.
        """
        check_operands(self._problem.fused, operands)
        value = (a, b, out, *(operands[index] for index in self._tensors))
        try:
            key: tuple[Any, ...] = tuple(
                (tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in value
            )
            if len(value) < 3 + len(operands):
                key += tuple(map(type, operands))
        except (AttributeError, TypeError):
            for name, item in zip(self._names, value, strict=True):
                if not hasattr(item, "stride"):
                    wrong = f"{name} {item!r:.40} is not a tensor; {self._problem} needs a tensor on"
                    raise ProblemError(f"{wrong} {self._place}") from None
            raise
        extents = self._known.get(key)
        if extents is None:
            self._check(a, b, out)
            self._check_fused(operands)
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            extents = self._known[key] = tuple(map(Extent.of, value))
        starts = [tensor.data_ptr() for tensor in value]
        for written, other in self._pairs:
            start, other_start = starts[written], starts[other]
            if start < other_start + extents[other].span and other_start < start + extents[written].span:
                self._check_apart(value, written, other, extents)

    def _check(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        p, place = self._problem, self._place
        a_dtype, b_dtype = operand_dtypes(p.in_dtype)
        lead = () if p.batch == 1 else (p.batch,)
        for name, tensor, shape, major, row_major, dtype in (
            ("a", a, (*lead, p.m, p.k), p.a_major, p.a_major == "k", a_dtype),
            ("b", b, (*lead, p.k, p.n), p.b_major, p.b_major == "n", b_dtype),
            ("out", out, (*lead, p.m, p.out_n), p.out_major, p.out_major == "n", p.out_dtype),
        ):
            if tuple(tensor.shape) != shape or tensor.dtype != torch_dtype(dtype) or tensor.device != place:
                raise ProblemError(
                    f"{name} is {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}; {p} takes {shape} "
                    f"{torch_dtype(dtype)} on {place}"
                )
            mode = -1 if row_major else -2
            if shape[mode] > 1 and tensor.stride(mode) != 1:
                raise ProblemError(
                    f"{name} has strides {tensor.stride()}; {p} needs it contiguous along {major}"
                )
        if overlaps_itself(out.shape, out.stride()):
            raise ProblemError(
                f"out overlaps itself (strides {out.stride()}); give every element its own place"
            )

    def _check_fused(self, operands: Sequence[Any]) -> None:
        """Check numbers and devices. Launchers check dtypes, shapes and strides (`words_reader`)."""
        for described, value in zip(self._problem.fused.operands, operands, strict=True):
            if described.kind == "number":
                if not isinstance(value, Real):
                    raise ProblemError(f"{described.name} {value!r:.40} is not a number; give a float")
            elif value.device != self._place:
                raise ProblemError(
                    f"{described.name} is on {value.device}; {self._problem} needs it on {self._place}"
                )

    def _check_apart(
        self, tensors: Sequence[torch.Tensor], written: int, other: int, extents: Sequence[Extent]
    ) -> None:
        tensor, two = tensors[written], tensors[other]
        if other in self._matrices and _are_one(tensor, two):
            return
        if share_memory(tensor.data_ptr(), extents[written], two.data_ptr(), extents[other]):
            remedy = " or out itself" if other in self._matrices and written == 2 else ""
            raise ProblemError(
                f"{self._names[other]} shares memory with {self._names[written]}, which the kernel writes; "
                f"give it separate memory{remedy}"
            )


def _are_one(tensor: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two views have the same elements at the same addresses."""
    facts = [(each.data_ptr(), each.dtype, each.shape) for each in (tensor, second)]
    return facts[0] == facts[1] and all(
        extent == 1 or stride == other
        for extent, stride, other in zip(tensor.shape, tensor.stride(), second.stride(), strict=True)
    )
