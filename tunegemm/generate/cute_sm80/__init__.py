"""Kernel family `cute_sm80`: cp.async multistage kernels for Ampere and later, written in the CuTe DSL.

Unlike TMA kernels it takes operands of any alignment: ragged k, odd leading dimensions, odd offsets.
"""

from __future__ import annotations

from pathlib import Path

from tunegemm.compile.cute_object import compiler
from tunegemm.generate.cute_launch import vector_launcher
from tunegemm.generate.cute_sm80.config import KernelConfig
from tunegemm.generate.cute_sm80.rules import RULES, config_of
from tunegemm.generate.generator import TileGenerator
from tunegemm.generate.tiles import ordered_bf16_sum, split_workspace

FAMILY = TileGenerator(
    parameters={
        "compile": (
            "tile_m", "tile_n", "tile_k", "stages", "warps_m", "warps_n", "atoms_n", "smem_swizzle",
            "vector_bytes", "ctas_per_sm", "acc_dtype",
        ),
        "launch": ("raster_order", "swizzle_size", "ctas", "split_k"),
    },
    folder=Path(__file__).parent,
    config=KernelConfig,
    config_of=config_of,
    rules=RULES,
    reduction_class=ordered_bf16_sum,
    compile=compiler(KernelConfig, "tunegemm.generate.cute_sm80.kernel", 4),
    workspace=split_workspace,
    launcher=vector_launcher,
)  # fmt: skip
