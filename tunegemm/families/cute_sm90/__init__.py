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
from tunegemm.families.cute_sm90.rules import RULES, config_of, seen_by_kernel, tile_count
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
            "schedule", "tile_m", "tile_n", "tile_k", "stages", "cluster_m", "cluster_n", "epi_n", "swap_ab",
        ),
        "launch": ("raster_order", "swizzle_size", "ctas", "split_k"),
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
            "source": kernel_source_hash(self.name),
        }

    def smem_bytes(self, problem: Problem, candidate: Candidate) -> int:
        return config_of(problem, candidate).smem_bytes

    def label(self, candidate: Candidate) -> str:
        kernel = KernelConfig.from_mapping(
            dict(candidate.compile_params)
            | {"in_dtype": "", "out_dtype": "", "a_major": "", "b_major": "", "out_major": ""}
        ).label
        if candidate.params.get("swap_ab", False):
            kernel = kernel.replace(" ", "S ", 1)
        if not candidate.launch_params:
            return kernel
        raster = "m" if candidate["raster_order"] == "along_m" else "n"
        split = f" k{candidate['split_k']}" if candidate["split_k"] > 1 else ""
        return f"{kernel} r{raster} w{candidate['swizzle_size']} {candidate['ctas']}{split}"

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
    ceil(T / ceil(T / R)) for T pieces of work and R resident clusters; same makespan, less power.
    """
    config = config_of(problem, candidate)
    work = tile_count(problem, candidate) // (config.cluster_m * config.cluster_n) * candidate["split_k"]
    resident = min(resident_clusters(config, device.sm_count), work)
    if candidate["ctas"] == "balanced":
        return math.ceil(work / math.ceil(work / resident))
    return int(resident)


def load_function(artifact: Path):  # type: ignore[no-untyped-def]
    """The launch function in a compiled object."""
    import cutlass.cute as cute

    module = cute.runtime.load_module(str(artifact), enable_tvm_ffi=True)
    return module[FUNCTION_NAME]


def _launcher(problem: Problem, candidate: Candidate, device: Device, function) -> Launcher:  # type: ignore[no-untyped-def]
    from torch._C import _cuda_getCurrentRawStream as current_stream  # 0.1 us, torch.cuda.current_stream 0.5

    seen, swap = seen_by_kernel(problem, candidate), bool(candidate["swap_ab"])
    m, n, k, batch = problem.m, problem.n, problem.k, problem.batch
    extents = (seen.m, seen.n, k, batch)
    walk = (
        int(candidate["raster_order"] == "along_m"),
        int(candidate["swizzle_size"]),
        grid_clusters(problem, candidate, device),
        int(candidate["split_k"]),
    )
    index = device.index if device.is_real else 0
    workspace = Workspace(problem, candidate, index) if candidate["split_k"] > 1 else None
    # Per operand: the strided mode, its extent, and the packed leading dimension. Where the mode has
    # extent 1 its stride says nothing; the packed one is as good and surely aligned.
    a_leading = (-2, m, k) if problem.a_major == "k" else (-1, k, m)
    b_leading = (-1, n, k) if problem.b_major == "k" else (-2, k, n)
    d_leading = (-2, m, n) if problem.out_major == "n" else (-1, n, m)
    in_unit, out_unit = 16 // DTYPE_BYTES[problem.in_dtype], 16 // DTYPE_BYTES[problem.out_dtype]

    def leading(tensor: torch.Tensor, mode: int, lines: int, packed: int, unit: int) -> int:
        stride = packed if lines == 1 else tensor.stride(mode)
        if stride % unit:
            raise ValueError(
                f"leading dimension {stride} is no multiple of the {unit} elements (16 B) of TMA"
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
        lda, ldb, ldd = leading(a, *a_leading, in_unit), leading(b, *b_leading, in_unit), 0
        ldd = leading(out, *d_leading, out_unit)
        a_step, b_step = batch_stride(a, m * k, in_unit), batch_stride(b, n * k, in_unit)
        d_step = batch_stride(out, m * n, out_unit)
        if swap:
            a_address, b_address, lda, ldb, a_step, b_step = b_address, a_address, ldb, lda, b_step, a_step
        stream = current_stream(index)
        scratch = (0, 0) if workspace is None else workspace.addresses(stream)
        function(
            a_address, b_address, d_address, *extents, lda, ldb, ldd, a_step, b_step, d_step, *walk, *scratch,
            stream,
        )  # fmt: skip

    return launch


class Workspace:
    """Device memory of a split-K launcher: fp32 partial sums, and one counter per tile and warpgroup.

    Kernels on one stream follow each other and share it; each stream has its own. A captured graph keeps
    what it was captured with, so that its replays do not disturb anyone else.
    """

    def __init__(self, problem: Problem, candidate: Candidate, index: int) -> None:
        config = config_of(problem, candidate)
        tiles = tile_count(problem, candidate)
        self.partial_bytes = tiles * candidate["split_k"] * config.tile_m * config.tile_n * 4
        self.counter_bytes = tiles * config.tile_warpgroups * 4
        self._place = f"cuda:{index}"
        self._by_stream: dict[int, torch.Tensor] = {}
        self._of_graphs: list[torch.Tensor] = []

    def addresses(self, stream: int) -> tuple[int, int]:
        """Where partial sums and zeroed counters are, for the current stream."""
        import torch

        if torch.cuda.is_current_stream_capturing():
            memory = self._allocate()
            self._of_graphs.append(memory)
        elif (found := self._by_stream.get(stream)) is not None:
            memory = found
        else:
            memory = self._by_stream.setdefault(stream, self._allocate())
        return memory.data_ptr(), memory.data_ptr() + self.partial_bytes

    def _allocate(self) -> torch.Tensor:
        import torch

        memory = torch.empty(self.partial_bytes + self.counter_bytes, dtype=torch.uint8, device=self._place)
        memory[self.partial_bytes :].zero_()
        return memory
