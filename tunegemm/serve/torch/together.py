"""Weights that lie in one storage as one matrix: what several layers of one input are multiplied by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

Tensors: TypeAlias = Sequence[torch.Tensor]


def together(parts: Tensors, *, in_turns: bool = False) -> torch.Tensor | None:
    """Matrices or vectors as one, if they lie so in one storage, after one another or their rows in turns."""
    first, count = parts[0], len(parts)
    if count == 1:
        return first
    row = first.stride(0) // count if in_turns else first.stride(0)
    shape = (sum(part.shape[0] for part in parts), *first.shape[1:])
    if row != first[0].numel() or (first.ndim == 2 and first.stride(1) != 1):
        return None
    address, strides, size = first.data_ptr(), first.stride(), first.element_size()
    for part in parts:
        if part.data_ptr() != address or part.stride() != strides:
            return None
        address += row * size if in_turns else part.shape[0] * row * size
    if (first.storage_offset() + shape[0] * row) * size > first.untyped_storage().nbytes():
        return None  # neighbours, but not of one storage
    return first.as_strided(shape, (row, 1)[: first.ndim] if first.ndim == 2 else (1,))


def put_together(parts: Tensors, *, in_turns: bool = False) -> torch.Tensor:
    """The same by a copy, where they lie elsewhere."""
    whole = together(parts, in_turns=in_turns)
    if whole is not None:
        return whole
    return torch.stack(tuple(parts), 1).flatten(0, 1) if in_turns else torch.cat(tuple(parts))


def operands_of(weights: Tensors, biases: Tensors, epilogue: str) -> tuple[torch.Tensor, Tensors]:
    """The right operand, and the bias if any, of a call of `several`."""
    in_turns = is_gated(epilogue)
    whole = put_together(weights, in_turns=in_turns)
    bias = (put_together(biases, in_turns=in_turns),) if biases else ()
    return whole.t(), bias


def is_gated(epilogue: str) -> bool:
    """Of the epilogues of `several`: whether two columns make one."""
    return epilogue.removeprefix("bias_n").removeprefix("+") != ""
