"""Kernel family `skinny`: products of few rows at the speed of memory, written in the CuTe DSL.

It reads B once, in vectors that go straight to the threads that multiply them; see `kernel`.
"""

from __future__ import annotations

from pathlib import Path

from tunegemm.compile.cute_object import compiler
from tunegemm.generate.cute_launch import vector_launcher
from tunegemm.generate.generator import TileGenerator
from tunegemm.generate.skinny.config import KernelConfig
from tunegemm.generate.skinny.rules import RULES, config_of
from tunegemm.generate.tiles import split_workspace

FAMILY = TileGenerator(
    parameters={
        "compile": (
            "tile_m", "tile_n", "tile_k", "warps_n", "warps_k", "stages", "vector_bytes", "ctas_per_sm",
        ),
        "launch": ("ctas", "split_k"),
    },
    folder=Path(__file__).parent,
    config=KernelConfig,
    config_of=config_of,
    rules=RULES,
    unlisted={"ctas": ("balanced",)},
    fuses=True,
    compile=compiler(KernelConfig, "tunegemm.generate.skinny.kernel", 2),
    workspace=split_workspace,
    launcher=vector_launcher,
)  # fmt: skip
