"""Kernel family `plain_triton`: the smallest whole family, for tests and to begin one from."""

from __future__ import annotations

from pathlib import Path

from plain_triton.config import KernelConfig
from tunegemm.compile.ptxas import Resources
from tunegemm.compile.triton_object import toolchain
from tunegemm.describe.device import Device
from tunegemm.describe.problem import DTYPE_BYTES, Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate.feasibility import half_operands, rule
from tunegemm.generate.generator import CUDA_BINDINGS, TRITON, Key, TileGenerator, config_maker
from tunegemm.generate.launching import AddressLaunch, AddressLauncher, Launcher, operand_reader
from tunegemm.generate.tiles import tile_count
from tunegemm.generate.workspace import Workspace

FOLDER = Path(__file__).parent
#: Elements of 16 bytes.
VECTOR = 8

config_of = config_maker(KernelConfig)


@rule("k", "batch", "in_dtype", "out_dtype", "a_major", "b_major", "out_major", "alignment")
def operands(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """The kernel loads vectors of 16 bytes along k, of one product."""
    if problem.layout != "tn" or problem.out_major != "n" or problem.batch != 1:
        return f"{problem}: only one product of layout tn with a row-major output"
    if problem.out_dtype != problem.in_dtype:
        return (
            f"{problem.out_dtype} out of {problem.in_dtype} would take more shared memory than the ring has"
        )
    if problem.k % VECTOR or problem.alignment < 16:
        return f"k={problem.k} at {problem.alignment} B: vectors are {VECTOR} elements at 16 B"
    return None


@rule("tile_m", "tile_n", "tile_k", "stages", "in_dtype", "device")
def smem(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """A block's shared memory is limited."""
    needed = config_of(problem, candidate).smem_bytes
    if needed > device.architecture.smem_bytes_per_block:
        return f"smem {needed} B > {device.architecture.smem_bytes_per_block} B"
    return None


@rule("tile_m", "tile_n", "warps")
def registers(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """More than 64 accumulators leave too few of a thread's 255 registers for addresses and masks: with 128
    it spills (Triton 3.7).
    """
    accumulators = config_of(problem, candidate).accumulators
    return f"{accumulators} accumulators per thread > 64" if accumulators > 64 else None


def compile_kernel(key: Key, out: Path) -> Resources:
    from plain_triton import kernel
    from tunegemm.compile.triton_object import build

    config = KernelConfig.from_mapping(key)
    pointers = {"a": f"*{config.in_dtype}", "b": f"*{config.in_dtype}", "d": f"*{config.out_dtype}"}
    extents = dict.fromkeys(("m", "n", "k_vectors"), "i32")
    strides = dict.fromkeys(("lda_vectors", "ldb_vectors", "ldd"), "i64")
    return build(
        kernel.gemm, pointers | extents | strides | {"swizzle": "i32"},
        {name: getattr(config, name) for name in ("tile_m", "tile_n", "tile_k")}, out,
        num_warps=config.warps, num_stages=config.stages, aligned=("a", "b"),
    )  # fmt: skip


def launcher(
    problem: Problem, candidate: Candidate, device: Device, artifact: Path, workspace: Workspace | None
) -> Launcher:
    from torch._C import _cuda_getCurrentRawStream as current_stream

    from tunegemm.generate.triton_launch import Arguments, load

    kernel, blocks = load(artifact, device.index), tile_count(problem, candidate)
    k_vectors, swizzle = problem.k // VECTOR, int(candidate["swizzle_size"])
    extents = {"m": problem.m, "n": problem.n, "k_vectors": k_vectors, "swizzle": swizzle}

    def make(lda: int, ldb: int, ldd: int, *_: int) -> AddressLaunch:
        strides = {"lda_vectors": lda // VECTOR, "ldb_vectors": ldb // VECTOR, "ldd": ldd}

        def launch(a: int, b: int, d: int) -> None:
            arguments = Arguments(kernel.header, extents | strides | {"a": a, "b": b, "d": d})
            kernel.launch(blocks, current_stream(device.index), arguments)

        return launch

    return AddressLauncher(operand_reader(problem, 16, DTYPE_BYTES[problem.out_dtype]), make)


FAMILY = TileGenerator(
    name="plain_triton",
    parameters={
        "compile": ("tile_m", "tile_n", "tile_k", "stages", "warps"),
        "launch": ("swizzle_size",),
    },
    folder=FOLDER,
    space=FOLDER / "space.toml",
    config=KernelConfig,
    config_of=config_of,
    rules=(half_operands, operands, smem, registers),
    compile=compile_kernel,
    launcher=launcher,
    toolchain=toolchain,
    packages=(CUDA_BINDINGS,),
    compiler_packages=(TRITON,),
)
