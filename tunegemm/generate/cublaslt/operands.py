"""Describes row-major torch operands to a library that knows only column-major matrices."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from tunegemm.describe.problem import Problem

#: The strides of a, b and out in elements, as in torch.
Strides = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Matrix:
    """A column-major matrix as cublasLtMatrixLayoutCreate takes it."""

    operand: Literal["a", "b", "out"]
    """The torch operand in whose memory the matrix lies."""
    rows: int
    """Extent of the contiguous mode."""
    columns: int
    leading: int
    """Elements from one column to the next."""
    batch_stride: int
    """Elements from one batch entry to the next; 0 without a batch."""
    transpose: bool = False
    """Whether the product reads the matrix transposed."""


def packed_strides(problem: Problem) -> Strides:
    """The strides of operands without gaps: two each, or three if the problem has a batch."""

    def packed(rows: int, columns: int, row_major: bool) -> tuple[int, ...]:
        inner = (columns, 1) if row_major else (1, rows)
        return inner if problem.batch == 1 else (rows * columns, *inner)

    return (
        packed(problem.m, problem.k, problem.a_major == "k"),
        packed(problem.k, problem.n, problem.b_major == "n"),
        packed(problem.m, problem.n, problem.out_major == "n"),
    )


def column_major(problem: Problem, strides: Strides) -> tuple[Matrix, Matrix, Matrix]:
    """The matrices of ``out = op(first) @ op(second)`` for operands of a problem with these strides.

    A row-major `out` is the column-major matrix `out^T = b^T @ a^T`, so b comes first.
    """
    a = _memory("a", problem.m, problem.k, problem.a_major == "k", strides[0])
    b = _memory("b", problem.k, problem.n, problem.b_major == "n", strides[1])
    out = _memory("out", problem.m, problem.n, problem.out_major == "n", strides[2])
    if problem.out_major == "n":
        return replace(b, transpose=problem.b_major == "k"), replace(a, transpose=problem.a_major == "m"), out
    return replace(a, transpose=problem.a_major == "k"), replace(b, transpose=problem.b_major == "n"), out


def _memory(
    operand: Literal["a", "b", "out"], rows: int, columns: int, row_major: bool, strides: tuple[int, ...]
) -> Matrix:
    contiguous, other = (columns, rows) if row_major else (rows, columns)
    leading = strides[-2] if row_major else strides[-1]
    if other == 1:  # torch may report any stride here; the library needs at least the rows
        leading = contiguous
    return Matrix(operand, contiguous, other, leading, strides[0] if len(strides) == 3 else 0)
