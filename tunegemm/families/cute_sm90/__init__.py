"""Kernel family `cute_sm90`: persistent TMA + WGMMA kernels for Hopper, written in the CuTe DSL."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tunegemm.device import Device, kernel_source_hash, package_version
from tunegemm.errors import ArtifactError
from tunegemm.families.cute_sm90.config import KernelConfig
from tunegemm.families.cute_sm90.rules import RULES, config_of
from tunegemm.feasibility import Verdict, apply_rules
from tunegemm.outcome import Resources
from tunegemm.problem import DTYPE_BYTES, Problem
from tunegemm.space import Candidate

if TYPE_CHECKING:
    import torch

    from tunegemm.families import Launcher


class CuteSm90:
    """The generator behind `tunegemm.families.Family`."""

    name = "cute_sm90"
    compiled = True
    parameters: Mapping[str, tuple[str, ...]] = {
        "compile": (
            "schedule", "tile_m", "tile_n", "tile_k", "stages", "cluster_m", "cluster_n", "epi_n",
        ),
        "launch": ("raster_order", "swizzle_size", "ctas"),
    }  # fmt: skip

    def unavailable(self) -> str | None:
        if find_spec("cutlass") is None:
            return "nvidia-cutlass-dsl is not installed; pip install nvidia-cutlass-dsl"
        return None

    def check(self, problem: Problem, candidate: Candidate, device: Device) -> Verdict:
        return apply_rules(RULES, problem, candidate, device)

    def kernel_key(
        self, problem: Problem, candidate: Candidate, device: Device
    ) -> Mapping[str, str | int | bool]:
        return asdict(config_of(problem, candidate)) | {
            "family": self.name,
            "target": device.architecture.compile_target,
            "cutlass_dsl": package_version("nvidia-cutlass-dsl"),
            "source": kernel_source_hash(),
        }

    def smem_bytes(self, problem: Problem, candidate: Candidate) -> int:
        return config_of(problem, candidate).smem_bytes

    def label(self, candidate: Candidate) -> str:
        kernel = KernelConfig.from_mapping(
            dict(candidate.compile_params)
            | {"in_dtype": "", "out_dtype": "", "a_major": "", "b_major": "", "out_major": ""}
        ).label
        if not candidate.launch_params:
            return kernel
        raster = "m" if candidate["raster_order"] == "along_m" else "n"
        return f"{kernel} r{raster} w{candidate['swizzle_size']} {candidate['ctas']}"

    def compile(self, key: Mapping[str, str | int | bool], out: Path) -> Resources:
        from tunegemm.families.cute_sm90.build import build

        return build(KernelConfig.from_mapping(key), out)

    def load(self, problem: Problem, candidate: Candidate, device: Device, artifact: Path | None) -> Launcher:
        if artifact is None:
            raise ArtifactError(f"{self.label(candidate)} has no compiled object; run tunegemm tune again")
        return _launcher(problem, candidate, device, load_function(artifact))


FAMILY = CuteSm90()

FUNCTION_NAME = "tunegemm_gemm"
"""Exported symbol of every compiled object."""


def resident_clusters(config: KernelConfig, sm_count: int) -> int:
    """Clusters that run at once, one block per multiprocessor.

    Clusters of 4 and more may fit fewer times than sm_count // size, since graphics processing clusters
    differ in size; a grid that is a little too large only makes the last clusters start late.
    """
    return max(1, sm_count // (config.cluster_m * config.cluster_n))


def grid_clusters(problem: Problem, candidate: Candidate, device: Device) -> int:
    """The grid, in clusters, for the candidate's `ctas` rule.

    ``all`` fills the device. ``balanced`` takes the fewest clusters that need no further wave:
    ceil(T / ceil(T / R)) for T cluster tiles and R resident clusters; same makespan, less power.
    """
    config = config_of(problem, candidate)
    tiles = (
        math.ceil(problem.m / (config.tile_m * config.cluster_m))
        * math.ceil(problem.n / (config.tile_n * config.cluster_n))
        * problem.batch
    )
    resident = min(resident_clusters(config, device.sm_count), tiles)
    if candidate["ctas"] == "balanced":
        return math.ceil(tiles / math.ceil(tiles / resident))
    return resident


def load_function(artifact: Path):  # type: ignore[no-untyped-def]
    """The launch function in a compiled object."""
    import cutlass.cute as cute

    module = cute.runtime.load_module(str(artifact), enable_tvm_ffi=True)
    return module[FUNCTION_NAME]


def _launcher(problem: Problem, candidate: Candidate, device: Device, function) -> Launcher:  # type: ignore[no-untyped-def]
    from torch._C import _cuda_getCurrentRawStream as current_stream  # 0.1 us, torch.cuda.current_stream 0.5

    clusters = grid_clusters(problem, candidate, device)
    along_m = int(candidate["raster_order"] == "along_m")
    swizzle = int(candidate["swizzle_size"])
    m, n, k, batch = problem.m, problem.n, problem.k, problem.batch
    index = device.index if device.is_real else 0
    # Per operand: the strided mode, its extent, and the packed leading dimension. Where the mode has
    # extent 1 its stride says nothing; the packed one is as good and surely aligned.
    a_leading = (-2, m, k) if problem.a_major == "k" else (-1, k, m)
    b_leading = (-1, n, k) if problem.b_major == "k" else (-2, k, n)
    in_unit, out_unit = 16 // DTYPE_BYTES[problem.in_dtype], 16 // DTYPE_BYTES[problem.out_dtype]

    def leading(tensor: torch.Tensor, mode: int, rows: int, packed: int, unit: int) -> int:
        stride = packed if rows == 1 else tensor.stride(mode)
        if stride % unit:
            raise ValueError(
                f"leading dimension {stride} is no multiple of the {unit} elements (16 B) that TMA needs"
            )
        return stride

    def batch_stride(tensor: torch.Tensor, packed: int, unit: int) -> int:
        if tensor.ndim == 2 or batch == 1:
            return packed
        if tensor.stride(0) % unit:
            raise ValueError(f"batch stride {tensor.stride(0)} is no multiple of {unit} elements (16 B)")
        return tensor.stride(0)

    def launch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        a_address, b_address, d_address = a.data_ptr(), b.data_ptr(), out.data_ptr()
        if (a_address | b_address | d_address) & 15:
            raise ValueError("an operand does not start at a multiple of the 16 B that TMA needs")
        function(
            a_address,
            b_address,
            d_address,
            m,
            n,
            k,
            batch,
            leading(a, *a_leading, in_unit),
            leading(b, *b_leading, in_unit),
            leading(out, -2, m, n, out_unit),
            batch_stride(a, m * k, in_unit),
            batch_stride(b, n * k, in_unit),
            batch_stride(out, m * n, out_unit),
            along_m,
            swizzle,
            clusters,
            current_stream(index),
        )

    return launch
