"""Run time: `matmul` and its kin launch the recorded kernel of a problem, or fall back to torch.

`api` is what users call and `dispatcher` the hot path; `slow_path` and `planning` make the plans (`plans`)
of calls that are new, with the launchers that `finding` has of records. Which kernel serves is for
`tunegemm.choose` to say. `background` compiles and `online` tunes meanwhile, `torch` fits it all into torch
and `integrations` into engines; `operation` is a kernel that the caller chose. Imports every room but
`report` and `cli`.
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
