"""Compiles one `KernelConfig` into an object file. Runs in a worker process that sees no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tunegemm.generate.ptxas import Resources
from tunegemm.generate.triton_object import build as build_object
from tunegemm.generate.triton_tma.config import KernelConfig

_EXTENTS = ("m", "n", "k_tiles", "along_m", "swizzle")


def build(config: KernelConfig, out: Path) -> Resources:
    """Compile for sm_90a and write the object `out`.

    Extents, strides and launch parameters are run-time integers: one object serves every problem of its
    dtypes and majors. Raises whatever the compiler raises.
    """
    from tunegemm.generate.triton_tma import kernel

    constants: dict[str, Any] = {
        name: getattr(config, name) for name in ("tile_m", "tile_n", "tile_k", "epi_n", "schedule")
    } | {
        "a_contiguous": config.a_major == "k",
        "b_contiguous": config.b_major == "n",
        "d_contiguous": config.out_major == "n",
    }
    integers = dict.fromkeys(_EXTENTS, "i32")
    if config.specialized:
        function = kernel.gemm_specialized
        arguments = {"a": f"*{config.in_dtype}", "b": f"*{config.in_dtype}", "d": f"*{config.out_dtype}"}
        aligned = tuple(arguments)
        arguments |= integers | {"k": "i32", "lda": "i64", "ldb": "i64", "ldd": "i64"}
    else:
        function = kernel.gemm
        arguments = {
            "a_desc": _descriptor(config.in_dtype, config.tile_m, config.tile_k, config.a_major == "k"),
            "b_desc": _descriptor(config.in_dtype, config.tile_k, config.tile_n, config.b_major == "n"),
            "d_desc": _descriptor(config.out_dtype, config.tile_m, config.epi_n, config.out_major == "n"),
            "partials": "*fp32",
            "counters": "*i32",
        }
        aligned = ("partials",)
        arguments |= integers | {"batch": "i32", "split_k": "i32"}
    order = {name: arguments[name] for name in function.arg_names if name in arguments}
    return build_object(
        function,
        order,
        constants,
        out,
        num_warps=config.warps,
        num_stages=config.stages,
        aligned=aligned,
    )


def _descriptor(dtype: str, rows: int, columns: int, contiguous: bool) -> str:
    """The type of a tensor map with a batch mode, for a tile whose columns or rows are contiguous."""
    box = (rows, columns) if contiguous else (columns, rows)
    return f"tensordesc<{dtype}[1, {box[0]}, {box[1]}]>"
