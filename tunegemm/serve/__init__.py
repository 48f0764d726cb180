"""Run time: `matmul` and its kin launch a problem's recorded kernel, or fall back to torch.

Users call `api`; `dispatcher` is the hot path. For new calls `slow_path` and `planning` make the plans
(`plans`), with launchers that `finding` gets from records. `tunegemm.choose` decides which kernel serves.
`background` compiles and `online` tunes meanwhile, `torch` connects all of it to torch and `integrations` to
engines. `operation` is a kernel that the caller chose. Imports every room but `report` and `cli`.
"""

from tunegemm.serve.api import (
    addmm,
    baddbmm,
    bmm,
    gated_linear,
    interleave,
    linear,
    matmul,
    mm,
    policy,
    refresh,
    scaled_mm,
)
from tunegemm.serve.gated_experts import experts
from tunegemm.serve.grouped import grouped_mm
from tunegemm.serve.scaled_groups import scaled_grouped_mm

__all__ = [
    "addmm", "baddbmm", "bmm", "experts", "gated_linear", "grouped_mm", "interleave", "linear", "matmul",
    "mm", "policy", "refresh", "scaled_grouped_mm", "scaled_mm",
]  # fmt: skip
