"""Weights that lie in one storage as one matrix: what several layers of one input are multiplied by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch

Tensors: TypeAlias = Sequence[torch.Tensor]

_MOST_ROWS, _MOST_ROWS_OF_WIDE, _WIDE = 256, 64, 8192


def most_joined(columns: Sequence[int]) -> int:
    """Up to how many rows torch computes layers of one input as one product, where no kernel does.

    columns: of each layer's result. On an H200 q, k and v were 1.09 to 1.27 times as fast so, of attention in
    CUDA graphs; at 1024 rows and more 0.99 to 1.01 times. Gate and up at 256 rows took 110 us as two products
    and 80 as one where each has 3584 columns, but 168 and 188 at 14336: two fill the GPU as well.
    """
    return _MOST_ROWS if max(columns) <= _WIDE else _MOST_ROWS_OF_WIDE


class Layout(NamedTuple):
    """Where matrices or vectors of certain shapes and strides lie if they are one."""

    offsets: tuple[int, ...]
    """Bytes from the first to each that follows."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, parts: Tensors, *, in_turns: bool = False) -> Layout | None:
        """That of these, after one another or their rows in turns; None where such cannot be one."""
        first, count = parts[0], len(parts)
        strides, rows = first.stride(), [part.shape[0] for part in parts]
        row = strides[0] // count if in_turns else strides[0]
        if row != first[0].numel() or strides[1:] not in ((), (1,)):
            return None
        if any(part.stride() != strides for part in parts):
            return None
        size = row * first.element_size()
        offsets = [index if in_turns else sum(rows[:index]) for index in range(1, count)]
        return cls(tuple(size * each for each in offsets), (sum(rows), *first.shape[1:]), (row, *strides[1:]))

    def view(self, parts: Tensors) -> torch.Tensor | None:
        """All as one, matrices transposed: (k, n); None where one lies elsewhere."""
        first = parts[0]
        begin = first.data_ptr()
        for part, offset in zip(parts[1:], self.offsets, strict=True):
            if part.data_ptr() - begin != offset:
                return None
        try:
            return first.as_strided(self.shape[::-1], self.strides[::-1])
        except RuntimeError:  # neighbours, but not of one storage
            return None


def together(parts: Tensors, *, in_turns: bool = False) -> torch.Tensor | None:
    """Matrices or vectors as one, matrices transposed, if they lie so in one storage: see `Layout`."""
    if len(parts) == 1:
        return parts[0].t()
    layout = Layout.of(parts, in_turns=in_turns)
    return None if layout is None else layout.view(parts)


def put_together(parts: Tensors, *, in_turns: bool = False) -> torch.Tensor:
    """The same by a copy, where they lie elsewhere."""
    whole = together(parts, in_turns=in_turns)
    if whole is not None:
        return whole
    return (torch.stack(tuple(parts), 1).flatten(0, 1) if in_turns else torch.cat(tuple(parts))).t()


def operands_of(weights: Tensors, biases: Tensors, epilogue: str) -> tuple[torch.Tensor, Tensors]:
    """The right operand, and the bias if any, of a call of `several`."""
    in_turns = is_gated(epilogue)
    bias = (put_together(biases, in_turns=in_turns),) if biases else ()
    return put_together(weights, in_turns=in_turns), bias


def is_gated(epilogue: str) -> bool:
    """Of the epilogues of `several`: whether two columns make one."""
    return epilogue.removeprefix("bias_n").removeprefix("+") != ""
