"""Kernel family `skinny`: products of few rows at the speed of memory, written in the CuTe DSL.

It reads B once, in vectors that go straight to the threads that multiply them; see `kernel`.
"""

from __future__ import annotations

from pathlib import Path

from tunegemm.compile.cute_object import compiler, toolchain
from tunegemm.describe.device import Device
from tunegemm.describe.problem import DTYPE_BYTES, Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate.cute_launch import load_launch
from tunegemm.generate.generator import CUTE_DSL, TVM_FFI, TileGenerator
from tunegemm.generate.launching import (
    AddressLauncher,
    Launcher,
    operand_reader,
    words_reader,
)
from tunegemm.generate.skinny.config import KernelConfig
from tunegemm.generate.skinny.rules import RULES, config_of
from tunegemm.generate.tiles import persistent_grid, split_workspace
from tunegemm.generate.workspace import Workspace


def launcher(
    problem: Problem, candidate: Candidate, device: Device, artifact: Path, workspace: Workspace | None
) -> Launcher:
    extents = (problem.m, problem.n, problem.k, problem.batch)
    schedule = (persistent_grid(problem, candidate, device), int(candidate["split_k"]))
    units = int(candidate["vector_bytes"]), DTYPE_BYTES[problem.out_dtype]
    make = load_launch(artifact, candidate, device, workspace, extents, schedule, unit_bytes=units)
    read = operand_reader(problem, *units)
    return AddressLauncher(read, make, words_reader(problem) if problem.fused.words else None)


FAMILY = TileGenerator(
    name="skinny",
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
    launcher=launcher,
    toolchain=toolchain,
    packages=(CUTE_DSL, TVM_FFI),
)  # fmt: skip
