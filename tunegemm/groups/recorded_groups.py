"""Describes a call of torch's grouped products, or of our gated one: one row of a recording."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tunegemm.describe.problem import MAX_ALIGNMENT, Problem, contiguous_mode, normalize_dtype
from tunegemm.describe.workload.products import Kind
from tunegemm.dispatch.library import argument_names
from tunegemm.errors import ProblemError
from tunegemm.groups.grouped import fits

#: ATen's.
OPERATORS = ("_grouped_mm", "_scaled_grouped_mm")


@dataclass(frozen=True)
class GroupedCall:
    """A product of rows in groups, or another product that torch computes with the same operator."""

    op: str
    """The name of the ATen operator without its underscore, or ``experts``."""
    a: torch.Tensor
    b: torch.Tensor
    offs: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    scale_a: torch.Tensor | None = None
    scale_b: torch.Tensor | None = None
    scale_result: torch.Tensor | None = None
    out_dtype: torch.dtype | None = None
    use_fast_accum: bool = False
    gate: str = ""

    @classmethod
    def of(cls, name: str, arguments: Sequence[Any], keywords: dict[str, Any]) -> GroupedCall:
        """The call of an ATen operator with these arguments."""
        value = dict(zip(argument_names(name), arguments, strict=False)) | keywords
        return cls(name.strip("_"), value.pop("self"), value.pop("mat2"), **value)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors of the call except a and b."""
        every = self.offs, self.bias, self.scale_a, self.scale_b, self.scale_result
        return [tensor for tensor in every if tensor is not None]

    @property
    def key(self) -> tuple[Any, ...]:
        """Everything that defines the call except its tensors."""
        value = tuple(tensor is not None for tensor in (self.offs, self.bias, self.scale_result))
        return self.op, self.gate, self.out_dtype, self.use_fast_accum, value

    def kind(self, result: torch.Tensor) -> Kind:
        """The problem that `tunegemm.grouped_mm` and the other grouped products look up.

        For a call that no kernel serves, a description as far as its terms allow, and the reason.
        """
        a, b, groups = self.a, self.b, len(self.offs if self.offs is not None else self.b)
        majors = mode_of(a, "m", "k", "k"), mode_of(b, "k", "n", "k"), mode_of(result, "m", "n", "n")
        results = Kind(
            a.shape[-2], b.shape[-1], a.shape[-1], 1, dtype_of(a.dtype), dtype_of(result.dtype), *majors,
            MAX_ALIGNMENT, self.op, "none" if self.bias is None else "vector", device=a.device.type,
            refusal=self._refusal(), groups=groups,
        )  # fmt: skip
        try:
            if not results.refusal:
                problem = Problem.of_groups(
                    results.m, results.n, results.k, groups, dtype=results.in_dtype, gate=self.gate,
                    b_major=results.b_major,
                )  # fmt: skip
                return replace(results, epilogue=problem.epilogue)
        except ProblemError as error:
            return replace(results, refusal=str(error))
        return results

    def _refusal(self) -> str:
        """Why no kernel can compute the call, however tuned; empty if one may."""
        a, b = self.a, self.b
        if a.ndim == b.ndim == 2:
            return "its groups lie along k, as in a weight's gradient, and are never tuned"
        if self.offs is None or (a.ndim, b.ndim) != (2, 3):
            return "its groups do not divide a's rows, as the kernels need"
        scaled = self.scale_a is not None
        if scaled and (self.bias is not None or self.scale_result is not None or not self.use_fast_accum):
            return (
                "kernels of scaled groups need use_fast_accum=True, without a bias or a scale of the result"
            )
        out_dtype = "bf16" if scaled else dtype_of(a.dtype)
        if self.out_dtype is not None and normalize_dtype(self.out_dtype) != out_dtype:
            return f"grouped kernels store {out_dtype}, not {self.out_dtype}"
        beside = self.scale_b if scaled else self.bias
        words: dict[str, Any] = {"gated": bool(self.gate), "scales": self.scale_a}
        is_aligned = (a.data_ptr() | b.data_ptr()) % MAX_ALIGNMENT == 0
        if not is_aligned or not fits(a, b, self.offs, beside, **words):
            return "grouped kernels do not read operands of this dtype or layout"
        return ""


def mode_of(tensor: torch.Tensor, rows: str, columns: str, prefer: str) -> str:
    """The contiguous mode, rows or columns; empty if neither is contiguous."""
    try:
        return contiguous_mode(tensor, row_mode=rows, column_mode=columns, prefer=prefer)
    except ProblemError:
        return ""


def dtype_of(dtype: torch.dtype) -> str:
    """The short name of a dtype, or torch's name if it has no short one."""
    try:
        return normalize_dtype(str(dtype))
    except ProblemError:
        return str(dtype).removeprefix("torch.")
