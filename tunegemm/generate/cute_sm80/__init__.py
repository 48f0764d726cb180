"""Kernel family `cute_sm80`: cp.async multistage kernels for Ampere and later, written in the CuTe DSL.

It serves operands of any alignment, which TMA does not: ragged k, odd leading dimensions, odd offsets.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunegemm.describe.device import Device
from tunegemm.describe.problem import DTYPE_BYTES, Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate.cute_object import compile_object, dsl_version, load_function
from tunegemm.generate.cute_sm80.config import KernelConfig
from tunegemm.generate.cute_sm80.rules import RULES, config_of
from tunegemm.generate.generator import Generator
from tunegemm.generate.launching import AddressLaunch, AddressLauncher, Workspace, operand_reader
from tunegemm.generate.ptxas import Resources
from tunegemm.generate.tiles import balanced, tile_count

if TYPE_CHECKING:
    from tunegemm.generate.families import Launcher


class CuteSm80(Generator):
    """The generator behind `tunegemm.generate.families.Family`."""

    name = "cute_sm80"
    tma = False
    parameters: Mapping[str, tuple[str, ...]] = {
        "compile": (
            "tile_m", "tile_n", "tile_k", "stages", "warps_m", "warps_n", "atoms_n", "smem_swizzle",
            "vector_bytes", "ctas_per_sm", "acc_dtype",
        ),
        "launch": ("raster_order", "swizzle_size", "ctas", "split_k"),
    }  # fmt: skip

    limited_launch = ("split_k",)
    extent_rules = frozenset({"accumulation_fits", "split_fits"})
    packages = (("cutlass", "nvidia-cutlass-dsl"), ("tvm_ffi", "apache-tvm-ffi"))
    config = KernelConfig
    rules = RULES

    def toolchain(self) -> Mapping[str, str | int]:
        return {"cutlass_dsl": dsl_version()}

    def config_of(self, problem: Problem, candidate: Candidate) -> KernelConfig:
        return config_of(problem, candidate)

    def compile(self, key: Mapping[str, str | int | bool], out: Path) -> Resources:
        def make() -> Any:
            from tunegemm.generate.cute_sm80.kernel import Gemm

            return Gemm(KernelConfig.from_mapping(key))

        return compile_object(make, 4, str(key["target"]), out)

    def workspace(
        self, problem: Problem, candidate: Candidate, device: Device, artifact: Path | None
    ) -> Workspace | None:
        """Partial sums of every part of every tile, and one counter per tile."""
        split_k = int(candidate["split_k"])
        if split_k == 1:
            return None
        config, tiles = config_of(problem, candidate), tile_count(problem, candidate)
        index = device.index if device.is_real else 0
        return Workspace(tiles * split_k * config.tile_m * config.tile_n * 4, tiles * 4, index)

    def launcher(
        self,
        problem: Problem,
        candidate: Candidate,
        device: Device,
        artifact: Path,
        workspace: Workspace | None,
    ) -> Launcher:
        return _launcher(problem, candidate, device, load_function(artifact), workspace)


FAMILY = CuteSm80()


def grid_ctas(problem: Problem, candidate: Candidate, device: Device) -> int:
    """The grid for the candidate's `ctas` rule.

    ``tiles`` is one block for each piece of work: the hardware hands them out. ``all`` fills the device with
    `ctas_per_sm` persistent blocks each; ``balanced`` takes the fewest of these that need no further wave.
    """
    work = tile_count(problem, candidate) * int(candidate["split_k"])
    resident = device.sm_count * int(candidate["ctas_per_sm"])
    if candidate["ctas"] == "tiles":
        return work
    return balanced(work, resident) if candidate["ctas"] == "balanced" else min(resident, work)


def _launcher(
    problem: Problem, candidate: Candidate, device: Device, function: Any, workspace: Workspace | None
) -> Launcher:
    from torch._C import _cuda_getCurrentRawStream as current_stream  # 0.1 us, torch.cuda.current_stream 0.5

    extents = (problem.m, problem.n, problem.k, problem.batch)
    walk = (
        int(candidate["raster_order"] == "along_m"),
        int(candidate["swizzle_size"]),
        grid_ctas(problem, candidate, device),
        int(candidate["split_k"]),
    )
    index = device.index if device.is_real else 0

    def make(*strides: int) -> AddressLaunch:
        fixed = (*extents, *strides, *walk)

        def launch(a: int, b: int, d: int) -> None:
            stream = current_stream(index)
            scratch = (0, 0) if workspace is None else workspace.addresses(stream)
            function(a, b, d, *fixed, *scratch, stream)

        return launch

    read = operand_reader(problem, int(candidate["vector_bytes"]), DTYPE_BYTES[problem.out_dtype])
    return AddressLauncher(read, make)
