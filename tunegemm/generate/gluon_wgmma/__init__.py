"""Kernel family `gluon_wgmma`: TMA + WGMMA kernels for Hopper, written in Gluon."""

from __future__ import annotations

from pathlib import Path

from tunegemm.compile.triton_object import toolchain
from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate.generator import CUDA_BINDINGS, TRITON, TileGenerator
from tunegemm.generate.gluon_wgmma.build import compile_kernel
from tunegemm.generate.gluon_wgmma.config import KernelConfig
from tunegemm.generate.gluon_wgmma.rules import RULES, config_of
from tunegemm.generate.launching import Launcher
from tunegemm.generate.tiles import ordered_bf16_sum, persistent_grid, seen_by_kernel, tile_count
from tunegemm.generate.workspace import Workspace


def grid(problem: Problem, candidate: Candidate, device: Device) -> int:
    """The grid, in blocks: one per tile, but what the `ctas` rule says for persistent kernels."""
    persistent = config_of(problem, candidate).specialized
    return persistent_grid(problem, candidate, device) if persistent else tile_count(problem, candidate)


def launcher(
    problem: Problem, candidate: Candidate, device: Device, artifact: Path, workspace: Workspace | None
) -> Launcher:
    from tunegemm.generate.triton_launch import load_launcher

    seen = seen_by_kernel(problem, candidate)
    scalars = {
        "k_tiles": -(-seen.k // candidate["tile_k"]),
        "tiles_m": -(-seen.m // candidate["tile_m"]),
        "tiles_n": -(-seen.n // candidate["tile_n"]),
        "batch": seen.batch,
        "raster_along_m": int(candidate["raster_order"] == "along_m"),
        "swizzle_size": int(candidate["swizzle_size"]),
    }
    ctas = grid(problem, candidate, device)
    return load_launcher(problem, candidate, device, artifact, ctas, scalars, workspace)


FAMILY = TileGenerator(
    name="gluon_wgmma",
    parameters={
        "compile": (
            "schedule", "tile_m", "tile_n", "tile_k", "stages", "warps", "instr_n", "lhs_in_registers",
            "occupancy", "swap_ab",
        ),
        "launch": ("raster_order", "swizzle_size", "ctas"),
    },
    folder=Path(__file__).parent,
    config=KernelConfig,
    config_of=config_of,
    rules=RULES,
    reduction_class=ordered_bf16_sum,
    tma=True,
    compile=compile_kernel,
    launcher=launcher,
    toolchain=toolchain,
    packages=(CUDA_BINDINGS,),
    compiler_packages=(TRITON,),
)  # fmt: skip
