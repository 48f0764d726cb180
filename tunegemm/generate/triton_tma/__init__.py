"""Kernel family `triton_tma`: persistent TMA + WGMMA kernels for Hopper, compiled by Triton."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate.generator import CUDA_BINDINGS, TRITON, Generator, Key
from tunegemm.generate.launching import Launcher, Workspace
from tunegemm.generate.ptxas import Resources
from tunegemm.generate.tiles import balanced, seen_by_kernel, split_workspace, tile_count
from tunegemm.generate.triton_object import read_object, toolchain
from tunegemm.generate.triton_tma.config import KernelConfig
from tunegemm.generate.triton_tma.rules import RULES, config_of

if TYPE_CHECKING:
    from tunegemm.generate.triton_launch import View


def compile_kernel(key: Key, out: Path) -> Resources:
    from tunegemm.generate.triton_tma.build import build

    return build(KernelConfig.from_mapping(key), out)


def grid(problem: Problem, candidate: Candidate, device: Device) -> int:
    """The grid, in blocks, for the candidate's `ctas` rule.

    ``all`` is one per multiprocessor, ``two_per_sm`` two, ``balanced`` as few as need no further wave.
    """
    work = tile_count(problem, candidate) * int(candidate["split_k"])
    if candidate["ctas"] == "balanced":
        return balanced(work, device.sm_count)
    return min(work, device.sm_count * (2 if candidate["ctas"] == "two_per_sm" else 1))


def workspace(
    problem: Problem, candidate: Candidate, device: Device, artifact: Path | None
) -> Workspace | None:
    """Descriptors that blocks make for themselves, or split-K's partial sums and counters; never both."""
    if not config_of(problem, candidate).specialized or artifact is None:
        return split_workspace(problem, candidate, device)
    header, _ = read_object(artifact.read_bytes())  # the size of descriptors is known to the object alone
    num_bytes = grid(problem, candidate, device) * header.scratch_bytes
    return Workspace(num_bytes, 0, device.index if device.is_real else 0) if num_bytes else None


def launcher(
    problem: Problem, candidate: Candidate, device: Device, artifact: Path, workspace: Workspace | None
) -> Launcher:
    from tunegemm.generate.triton_launch import load_launcher, matrix_views

    config, seen = config_of(problem, candidate), seen_by_kernel(problem, candidate)
    split_k = int(candidate["split_k"])
    scalars = {
        "m": seen.m,
        "n": seen.n,
        "k": seen.k,
        "batch": seen.batch,
        "k_tiles": math.ceil(math.ceil(seen.k / config.tile_k) / split_k),
        "along_m": int(candidate["raster_order"] == "along_m"),
        "swizzle": int(candidate["swizzle_size"]),
        "split_k": split_k,
    }

    def pointers(a: int, b: int, d: int, lda: int, ldb: int, ldd: int, *_: int) -> Mapping[str, int | View]:
        return {**scalars, "a": a, "b": b, "d": d, "lda": lda, "ldb": ldb, "ldd": ldd}

    def tensor_maps(*places: int) -> Mapping[str, int | View]:
        return {**scalars, **matrix_views(seen, *places)}

    index, ctas = device.index if device.is_real else 0, grid(problem, candidate, device)
    values = pointers if config.specialized else tensor_maps
    return load_launcher(problem, candidate, artifact, index, ctas, values, workspace)


FAMILY = Generator(
    name="triton_tma",
    parameters={
        "compile": ("schedule", "tile_m", "tile_n", "tile_k", "stages", "warps", "epi_n", "swap_ab"),
        "launch": ("raster_order", "swizzle_size", "ctas", "split_k"),
    },
    folder=Path(__file__).parent,
    config=KernelConfig,
    config_of=config_of,
    rules=RULES,
    extent_rules=frozenset({"tma_alignment", "warp_specialization", "two_fits", "swap_fits", "split_fits"}),
    unlisted={"schedule": ("warp_specialized",)},
    limited_launch=("ctas", "split_k"),
    tma=True,
    compile=compile_kernel,
    workspace=workspace,
    launcher=launcher,
    toolchain=toolchain,
    packages=(CUDA_BINDINGS,),
    compiler_packages=(TRITON,),
)
