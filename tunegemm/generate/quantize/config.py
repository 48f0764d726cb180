"""The compile-time choices of a kernel that quantises activations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

BLOCK = 128
"""Neighbouring values of a row that share a scale."""
VECTOR = 8
"""Values of a row that one thread has; half a warp has a block."""
ROWS = 4
"""Rows of one thread, whose loads are in flight together."""
WARPS = 4
"""Warps of a CTA. Each has `ROWS` rows of two neighbouring blocks."""
LARGEST = 448.0
"""float8_e4m3fn's largest value, which a block's largest magnitude becomes."""
EPSILON = 1e-10
"""The least magnitude that a scale is made of, so that it can be divided by."""


@dataclass(frozen=True)
class QuantizeConfig:
    """One kernel."""

    dtype: str
    """That of the input: bf16, fp16 or fp32."""
    gated: bool = False
    """Whether a row has a gate and then as many values that silu of the gate multiplies."""

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        return cls(str(values["dtype"]), bool(values["gated"]))

    @property
    def label(self) -> str:
        return f"{self.dtype}{' swiglu' if self.gated else ''}"
