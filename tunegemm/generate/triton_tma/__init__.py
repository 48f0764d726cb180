"""Kernel family `triton_tma`: persistent TMA + WGMMA kernels for Hopper, compiled by Triton."""

from __future__ import annotations

import math
from pathlib import Path

from tunegemm.compile.triton_object import toolchain
from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate.generator import CUDA_BINDINGS, TRITON, TileGenerator
from tunegemm.generate.launching import Launcher
from tunegemm.generate.tiles import ordered_bf16_sum, persistent_grid, seen_by_kernel, split_workspace
from tunegemm.generate.triton_tma.build import compile_kernel
from tunegemm.generate.triton_tma.config import KernelConfig
from tunegemm.generate.triton_tma.rules import RULES, config_of
from tunegemm.generate.workspace import Workspace


def launcher(
    problem: Problem, candidate: Candidate, device: Device, artifact: Path, workspace: Workspace | None
) -> Launcher:
    from tunegemm.generate.triton_launch import load_launcher

    seen = seen_by_kernel(problem, candidate)
    split_k = int(candidate["split_k"])
    scalars = {
        "m": seen.m,
        "n": seen.n,
        "batch": seen.batch,
        "k_tiles": math.ceil(math.ceil(seen.k / candidate["tile_k"]) / split_k),
        "along_m": int(candidate["raster_order"] == "along_m"),
        "swizzle": int(candidate["swizzle_size"]),
        "split_k": split_k,
    }
    ctas = persistent_grid(problem, candidate, device)
    return load_launcher(problem, candidate, device, artifact, ctas, scalars, workspace)


FAMILY = TileGenerator(
    name="triton_tma",
    parameters={
        "compile": ("schedule", "tile_m", "tile_n", "tile_k", "stages", "warps", "epi_n", "swap_ab"),
        "launch": ("raster_order", "swizzle_size", "ctas", "split_k"),
    },
    folder=Path(__file__).parent,
    config=KernelConfig,
    config_of=config_of,
    rules=RULES,
    reduction_class=ordered_bf16_sum,
    tma=True,
    compile=compile_kernel,
    workspace=split_workspace,
    launcher=launcher,
    toolchain=toolchain,
    packages=(CUDA_BINDINGS,),
    compiler_packages=(TRITON,),
)
