"""Kernel family `gluon_wgmma`: TMA + WGMMA kernels for Hopper, written in Gluon."""

from __future__ import annotations

from pathlib import Path

from tunegemm.compile.ptxas import Resources
from tunegemm.compile.triton_object import build, toolchain
from tunegemm.describe.device import Device
from tunegemm.describe.problem import DTYPE_BYTES, Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate.generator import CUDA_BINDINGS, TRITON, Key, TileGenerator
from tunegemm.generate.gluon_wgmma.config import WARPGROUP_WARPS, KernelConfig
from tunegemm.generate.gluon_wgmma.rules import RULES, config_of
from tunegemm.generate.launching import Launcher
from tunegemm.generate.tiles import ordered_bf16_sum, persistent_grid, tile_count
from tunegemm.generate.workspace import Workspace


def grid(problem: Problem, candidate: Candidate, device: Device) -> int:
    """The number of blocks: one per tile, or `persistent_grid` for persistent kernels."""
    persistent = config_of(problem, candidate).specialized
    return persistent_grid(problem, candidate, device) if persistent else tile_count(problem, candidate)


def launcher(
    problem: Problem, candidate: Candidate, device: Device, artifact: Path, workspace: Workspace | None
) -> Launcher:
    from tunegemm.generate.triton_launch import load_launcher

    ctas = grid(problem, candidate, device)
    return load_launcher(problem, candidate, device, artifact, workspace, ctas=ctas)


def compile_kernel(key: Key, out: Path) -> Resources:
    """As `Generator.compile`, for sm_90a."""
    from tunegemm.generate.gluon_wgmma.kernel import gemm

    config = KernelConfig.from_mapping(key)
    rows, columns, depth = config.tile_m, config.tile_n, config.tile_k
    maps = {
        "a_desc": tensor_map_of(config.in_dtype, rows, depth, config.a_major == "k"),
        "b_desc": tensor_map_of(config.in_dtype, depth, columns, config.b_major == "n"),
        "d_desc": tensor_map_of(
            config.out_dtype, config.epilogue_rows, config.epilogue_columns, config.out_major == "n"
        ),
    }
    scalars = {name: "i32" for name in gemm.arg_names if name not in maps and name != "CONFIG"}
    return build(
        gemm,
        maps | scalars,
        {"CONFIG": config},
        out,
        # A specialized kernel forks its other warps itself.
        num_warps=WARPGROUP_WARPS if config.specialized else config.warps,
        max_registers=config.launch_registers if config.occupancy > 1 else None,
    )


def tensor_map_of(dtype: str, rows: int, columns: int, contiguous: bool) -> str:
    """The type of a tensor map over a batch of matrices whose columns, if `contiguous`, else its rows are
    contiguous in memory; with the widest smem swizzle that the tile's lines take.
    """
    from triton.experimental.gluon.language import NVMMASharedLayout

    box = (rows, columns) if contiguous else (columns, rows)
    line_bytes = box[1] * DTYPE_BYTES[dtype]
    swizzle = next(width for width in (128, 64, 32, 0) if width == 0 or line_bytes % width == 0)
    layout = NVMMASharedLayout(swizzle, DTYPE_BYTES[dtype] * 8, rank=3)
    return f"tensordesc<{dtype}[1, {box[0]}, {box[1]}],{layout!r}>"


FAMILY = TileGenerator(
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
