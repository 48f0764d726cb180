"""A kernel of `cute_sm90` that is feasible for most problems, to vary."""

from __future__ import annotations

from collections.abc import Mapping

from tunegemm.describe.space import Candidate, Value

KERNEL: dict[str, Value] = {
    "schedule": "cooperative", "tile_m": 128, "tile_n": 128, "tile_k": 64, "stages": 4, "cluster_m": 1,
    "cluster_n": 1, "epi_n": 32, "swap_ab": False, "tile_scheduler": "static",
}  # fmt: skip
LAUNCH: dict[str, Value] = {
    "raster_order": "along_m", "swizzle_size": 2, "ctas": "all", "split_k": 1, "reduction": "pairs",
    "l2_hint": "none", "cluster_order": "index",
}  # fmt: skip


def hopper(kernel: Mapping[str, Value] = {}, launch: Mapping[str, Value] = {}) -> Candidate:
    """It, with other values of the kernel and of its launch."""
    return Candidate.make("cute_sm90", KERNEL | dict(kernel), LAUNCH | dict(launch))
