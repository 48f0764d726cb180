"""Run time: `matmul` and its kin launch the recorded kernel of a problem, or fall back to torch."""

from tunegemm.serve.api import (
    addmm,
    baddbmm,
    bmm,
    gated_linear,
    interleave,
    linear,
    matmul,
    policy,
    refresh,
    scaled_mm,
)

__all__ = [
    "addmm",
    "baddbmm",
    "bmm",
    "gated_linear",
    "interleave",
    "linear",
    "matmul",
    "policy",
    "refresh",
    "scaled_mm",
]
