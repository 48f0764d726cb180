"""Kernel family `triton_tma`: persistent kernels that load and store with TMA, compiled by Triton.

On Hopper, where they were measured, they multiply with WGMMA; on Blackwell with tcgen05.mma or mma.sync.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tunegemm.compile.ptxas import Resources
from tunegemm.compile.triton_object import build_without_spills, toolchain
from tunegemm.describe.architectures import of_target
from tunegemm.generate.feasibility import register_budget
from tunegemm.generate.generator import CUDA_BINDINGS, TRITON, Key, TileGenerator
from tunegemm.generate.tiles import ordered_bf16_sum, split_workspace
from tunegemm.generate.triton_launch import load_launcher
from tunegemm.generate.triton_tma.config import KernelConfig
from tunegemm.generate.triton_tma.rules import RULES, config_of


def compile_kernel(key: Key, out: Path) -> Resources:
    """As `Generator.compile`, for its target."""
    from tunegemm.generate.triton_tma.kernel import gemm

    config = KernelConfig.from_mapping(key)
    architecture = of_target(str(key["target"]))
    constants: dict[str, Any] = {
        name: getattr(config, name) for name in ("tile_m", "tile_n", "tile_k", "epi_n", "schedule")
    } | {
        "a_contiguous": config.a_major == "k",
        "b_contiguous": config.b_major == "n",
        "d_contiguous": config.out_major == "n",
    }
    arguments = {name: "i32" for name in gemm.arg_names if name not in constants} | {
        "a_desc": _descriptor(config.in_dtype, config.tile_m, config.tile_k, config.a_major == "k"),
        "b_desc": _descriptor(config.in_dtype, config.tile_k, config.tile_n, config.b_major == "n"),
        "d_desc": _descriptor(config.out_dtype, config.tile_m, config.epi_n, config.out_major == "n"),
        "partials": "*fp32",
        "counters": "*i32",
    }
    return build_without_spills(
        register_budget(config.threads, architecture, 1),
        gemm,
        arguments,
        constants,
        out,
        num_warps=config.warps,
        # With mma.sync the compiler has one slot less than stages: none for a tile that is being multiplied.
        num_stages=config.stages + (not (architecture.wgmma or architecture.tcgen05)),
        aligned=("partials",),
        capability=architecture.number,
    )


def _descriptor(dtype: str, rows: int, columns: int, contiguous: bool) -> str:
    """The type of a tensor map with a batch mode, for a tile whose columns or rows are contiguous."""
    box = (rows, columns) if contiguous else (columns, rows)
    return f"tensordesc<{dtype}[1, {box[0]}, {box[1]}]>"


FAMILY = TileGenerator(
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
    launcher=load_launcher,
    toolchain=toolchain,
    packages=(CUDA_BINDINGS,),
    compiler_packages=(TRITON,),
)
