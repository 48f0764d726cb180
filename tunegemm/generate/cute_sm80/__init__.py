"""Kernel family `cute_sm80`: cp.async multistage kernels for Ampere and later, written in the CuTe DSL.

Unlike TMA kernels it takes operands of any alignment: ragged k, odd leading dimensions, odd offsets.
"""

from __future__ import annotations

from pathlib import Path

from tunegemm.compile.cute_object import compiler, toolchain
from tunegemm.describe.device import Device
from tunegemm.describe.problem import DTYPE_BYTES, Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate.cute_launch import load_launch
from tunegemm.generate.cute_sm80.config import KernelConfig
from tunegemm.generate.cute_sm80.rules import RULES, config_of
from tunegemm.generate.generator import CUTE_DSL, TVM_FFI, TileGenerator
from tunegemm.generate.launching import AddressLauncher, Launcher, operand_reader
from tunegemm.generate.tiles import ordered_bf16_sum, persistent_grid, split_workspace
from tunegemm.generate.workspace import Workspace


def launcher(
    problem: Problem, candidate: Candidate, device: Device, artifact: Path, workspace: Workspace | None
) -> Launcher:
    extents = (problem.m, problem.n, problem.k, problem.batch)
    schedule = (
        int(candidate["raster_order"] == "along_m"),
        int(candidate["swizzle_size"]),
        persistent_grid(problem, candidate, device),
        int(candidate["split_k"]),
    )
    units = int(candidate["vector_bytes"]), DTYPE_BYTES[problem.out_dtype]
    make = load_launch(artifact, candidate, device, workspace, extents, schedule, unit_bytes=units)
    read = operand_reader(problem, *units)
    return AddressLauncher(read, make)


FAMILY = TileGenerator(
    name="cute_sm80",
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
    launcher=launcher,
    toolchain=toolchain,
    packages=(CUTE_DSL, TVM_FFI),
)  # fmt: skip
