"""Examples of Gluon kernels for the GPU's conformance suite."""

from tests.support.numerics import Examples

NAMES = (
    "schedule", "tile_m", "tile_n", "tile_k", "stages", "warps", "instr_n", "lhs_in_registers", "occupancy",
    "swap_ab",
)  # fmt: skip
KERNELS = [
    ("blocking", 64, 256, 128, 1, 4, 256, False, 2, False),
    ("blocking", 128, 64, 64, 1, 8, 32, True, 2, False),
    ("blocking", 64, 128, 64, 1, 8, 256, False, 2, False),
    ("pipelined", 128, 128, 64, 2, 4, 256, False, 2, False),
    ("pipelined", 128, 256, 64, 2, 8, 256, True, 1, False),
    ("multistage", 128, 256, 64, 3, 8, 256, False, 1, False),
    ("multistage", 256, 64, 32, 4, 4, 256, True, 2, False),
    ("multistage", 64, 8, 128, 4, 4, 256, False, 2, True),
    ("cooperative", 128, 256, 64, 4, 8, 256, False, 1, False),
    ("cooperative", 256, 128, 64, 4, 8, 256, False, 1, False),
    ("cooperative", 128, 128, 64, 5, 8, 128, True, 1, False),
    ("cooperative", 64, 256, 64, 2, 4, 128, False, 2, False),
    ("cooperative", 128, 16, 128, 3, 8, 256, False, 1, True),
    ("pingpong", 128, 128, 64, 6, 8, 256, False, 1, False),
    ("pingpong", 64, 256, 64, 3, 8, 256, True, 1, False),
    ("pingpong", 64, 32, 128, 4, 8, 256, False, 2, False),
]
LAUNCHES = [
    ("along_m", 1, "all"),
    ("along_n", 2, "balanced"),
    ("along_m", 4, "balanced"),
    ("along_n", 16, "all"),
]
EXAMPLES = Examples(
    "gluon_wgmma",
    NAMES,
    KERNELS,
    ("raster_order", "swizzle_size", "ctas"),
    LAUNCHES,
    of_each_schedule=(0, 3, 5, 8, 13),
    refusals=frozenset({"narrow_lines"}),
)
