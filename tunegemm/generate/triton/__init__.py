"""Kernel family `triton`: pointers and masks, compiled by Triton for any architecture since Ampere.

It serves operands of any alignment. On GPUs with TMA the family `triton_tma` loads with TMA.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunegemm.compile.ptxas import Resources
from tunegemm.compile.triton_object import build_without_spills, toolchain
from tunegemm.describe.architectures import of_target
from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate.feasibility import register_budget
from tunegemm.generate.generator import CUDA_BINDINGS, TRITON, Key, TileGenerator
from tunegemm.generate.launching import Launcher, Places, operand_reader
from tunegemm.generate.takes import NotTaken
from tunegemm.generate.tiles import split_workspace
from tunegemm.generate.triton.config import KernelConfig
from tunegemm.generate.triton.rules import MAX_LEADING, RULES, config_of, multiplies_asynchronously
from tunegemm.generate.workspace import Workspace

if TYPE_CHECKING:
    import torch

#: Triton's names for element types.
_TYPES = {"tf32": "fp32", "fp8_e4m3": "fp8e4nv", "fp8_e5m2": "fp8e5", "int8": "i8", "int32": "i32"}
_STRIDES = ("lda", "ldb", "ldd", "a_step", "b_step", "d_step")


def launcher(
    problem: Problem, candidate: Candidate, device: Device, artifact: Path, workspace: Workspace | None
) -> Launcher:
    from tunegemm.generate.triton_launch import load_launcher

    units = int(candidate["vector_bytes"]), int(candidate["store_bytes"])
    read = operand_reader(problem, *units)

    def read_near(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Places:
        places = read(a, b, out)
        if (longest := max(places[3:6])) > MAX_LEADING:
            raise NotTaken(f"leading dimension {longest} > {MAX_LEADING}: offsets in a tile have 32 bits")
        return places

    return load_launcher(
        problem, candidate, device, artifact, workspace, views=operands, read=read_near, unit_bytes=units
    )


def operands(seen: Problem, a: int, b: int, d: int, *strides: int) -> dict[str, int]:
    """The arguments that describe the kernel's operands, by name."""
    return {"a": a, "b": b, "d": d} | dict(zip(_STRIDES, strides, strict=True))


def compile_kernel(key: Key, out: Path) -> Resources:
    """As `Generator.compile`, for its target."""
    import triton.language as tl

    from tunegemm.generate.triton.kernel import gemm

    config = KernelConfig.from_mapping(key)
    architecture = of_target(str(key["target"]))
    is_int = config.in_dtype == "int8"
    constants: dict[str, Any] = {
        name: getattr(config, name)
        for name in ("tile_m", "tile_n", "tile_k", "epi_n", "vector", "out_vector")
    } | {
        "a_contiguous": config.a_major == "k",
        "b_contiguous": config.b_major == "n",
        "d_contiguous": config.out_major == "n",
        "sums_dtype": tl.int32 if is_int else tl.float32,
    }
    operand, result = (f"*{_TYPES.get(one, one)}" for one in (config.in_dtype, config.out_dtype))
    arguments = {name: "i32" for name in gemm.arg_names if name not in constants}
    arguments |= dict.fromkeys(_STRIDES, "i64") | {"a": operand, "b": operand, "d": result}
    arguments |= {"partials": "*i32" if is_int else "*fp32", "counters": "*i32"}
    return build_without_spills(
        register_budget(config.threads, architecture, 1),
        gemm,
        arguments,
        constants,
        out,
        num_warps=config.warps,
        num_stages=config.stages + (not multiplies_asynchronously(config, architecture)),
        aligned={"a": config.vector_bytes, "b": config.vector_bytes, "d": config.store_bytes, "partials": 16},
        capability=architecture.number,
    )


FAMILY = TileGenerator(
    parameters={
        "compile": ("tile_m", "tile_n", "tile_k", "stages", "warps", "vector_bytes", "store_bytes"),
        "launch": ("raster_order", "swizzle_size", "ctas", "split_k"),
    },
    folder=Path(__file__).parent,
    config=KernelConfig,
    config_of=config_of,
    rules=RULES,
    compile=compile_kernel,
    workspace=split_workspace,
    launcher=launcher,
    toolchain=toolchain,
    packages=(CUDA_BINDINGS,),
    compiler_packages=(TRITON,),
)
