"""Compiles one kernel into an object file. Runs in a worker process that sees no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tunegemm.compile.ptxas import Resources
from tunegemm.compile.triton_object import build
from tunegemm.generate.generator import Key
from tunegemm.generate.triton_tma.config import KernelConfig


def compile_kernel(key: Key, out: Path) -> Resources:
    """Compile the kernel of a key for sm_90a and write the object `out`.

    Extents, strides and launch parameters are run-time integers: one object serves every problem of its
    dtypes and majors. Raises whatever the compiler raises.
    """
    from tunegemm.generate.triton_tma.kernel import gemm

    config = KernelConfig.from_mapping(key)
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
    return build(
        gemm,
        arguments,
        constants,
        out,
        num_warps=config.warps,
        num_stages=config.stages,
        aligned=("partials",),
    )


def _descriptor(dtype: str, rows: int, columns: int, contiguous: bool) -> str:
    """The type of a tensor map with a batch mode, for a tile whose columns or rows are contiguous."""
    box = (rows, columns) if contiguous else (columns, rows)
    return f"tensordesc<{dtype}[1, {box[0]}, {box[1]}]>"
