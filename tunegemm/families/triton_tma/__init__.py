"""Kernel family `triton_tma`: persistent TMA + WGMMA kernels for Hopper, compiled by Triton."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tunegemm.device import Device, kernel_source_hash, package_version
from tunegemm.errors import ArtifactError
from tunegemm.families.launching import Places, Workspace, tma_reader
from tunegemm.families.tiles import balanced, seen_by_kernel, tile_count
from tunegemm.families.triton_object import FORMAT
from tunegemm.families.triton_tma.config import KernelConfig
from tunegemm.families.triton_tma.rules import RULES, config_of
from tunegemm.feasibility import Verdict, apply_rules
from tunegemm.outcome import Resources
from tunegemm.problem import Problem
from tunegemm.space import Candidate

if TYPE_CHECKING:
    import torch

    from tunegemm.families import Launcher
    from tunegemm.families.triton_launch import Kernel, View


class TritonTma:
    """The generator behind `tunegemm.families.Family`."""

    name = "triton_tma"
    compiled = True
    tma = True
    parameters: Mapping[str, tuple[str, ...]] = {
        "compile": ("schedule", "tile_m", "tile_n", "tile_k", "stages", "warps", "epi_n", "swap_ab"),
        "launch": ("raster_order", "swizzle_size", "ctas", "split_k"),
    }
    limited_launch = ("ctas", "split_k")
    extent_rules = frozenset({"tma_alignment", "warp_specialization", "two_fits", "swap_fits", "split_fits"})

    def unavailable(self) -> str | None:
        for module, package in (("triton", "triton"), ("cuda.bindings", "cuda-bindings")):
            try:
                found = find_spec(module)
            except ModuleNotFoundError:  # of the parent, `cuda`
                found = None
            if found is None:
                return f"{package} is not installed; pip install {package}"
        return None

    def check(self, problem: Problem, candidate: Candidate, device: Device) -> Verdict:
        return apply_rules(RULES, problem, candidate, device)

    def kernel_key(
        self, problem: Problem, candidate: Candidate, device: Device
    ) -> Mapping[str, str | int | bool]:
        return asdict(config_of(problem, candidate)) | {
            "family": self.name,
            "target": device.architecture.compile_target,
            "triton": package_version("triton"),
            "object_format": FORMAT,
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
        from tunegemm.families.triton_tma.build import build

        return build(KernelConfig.from_mapping(key), out)

    def load(self, problem: Problem, candidate: Candidate, device: Device, artifact: Path | None) -> Launcher:
        if artifact is None:
            raise ArtifactError(f"{self.label(candidate)} has no compiled object; run tunegemm tune again")
        from tunegemm.families.triton_launch import load

        index = device.index if device.is_real else 0
        return _launcher(problem, candidate, load(artifact, index), grid(problem, candidate, device), index)


FAMILY = TritonTma()


def grid(problem: Problem, candidate: Candidate, device: Device) -> int:
    """The grid, in blocks, for the candidate's `ctas` rule.

    ``all`` is one per multiprocessor, ``two_per_sm`` two, ``balanced`` as few as need no further wave.
    """
    work = tile_count(problem, candidate) * int(candidate["split_k"])
    if candidate["ctas"] == "balanced":
        return balanced(work, device.sm_count)
    return min(work, device.sm_count * (2 if candidate["ctas"] == "two_per_sm" else 1))


def _launcher(problem: Problem, candidate: Candidate, kernel: Kernel, ctas: int, index: int) -> Launcher:
    from torch._C import _cuda_getCurrentRawStream as current_stream  # 0.1 us, torch.cuda.current_stream 0.5

    from tunegemm.families.triton_launch import Arguments, Kept

    config, seen = config_of(problem, candidate), seen_by_kernel(problem, candidate)
    split_k, swap = int(candidate["split_k"]), bool(candidate["swap_ab"])
    batch, m, n, k = seen.batch, seen.m, seen.n, seen.k
    scalars = {
        "m": m,
        "n": n,
        "k": k,
        "batch": batch,
        "k_tiles": math.ceil(math.ceil(k / config.tile_k) / split_k),
        "along_m": int(candidate["raster_order"] == "along_m"),
        "swizzle": int(candidate["swizzle_size"]),
        "split_k": split_k,
    }
    tiles = tile_count(problem, candidate)
    # Descriptors that blocks make for themselves, or split-K's sums and counters; never both.
    workspace = None
    if kernel.header.scratch_bytes:
        workspace = Workspace(ctas * kernel.header.scratch_bytes, 0, index)
    elif split_k > 1:
        workspace = Workspace(tiles * split_k * config.tile_m * config.tile_n * 4, tiles * 4, index)
    read, kept = tma_reader(problem), Kept()

    def arguments(places: Places, memory: tuple[int, int]) -> Arguments:
        a, b, d, lda, ldb, ldd, a_step, b_step, d_step = places
        if swap:
            a, b, lda, ldb, a_step, b_step = b, a, ldb, lda, b_step, a_step
        if config.specialized:
            pointers = {"a": a, "b": b, "d": d, "lda": lda, "ldb": ldb, "ldd": ldd}
            return Arguments(kernel.header, scalars | pointers, scratch=memory[0])
        maps: dict[str, int | View] = {
            "a_desc": _view(a, batch, m, k, lda, a_step, config.a_major == "k"),
            "b_desc": _view(b, batch, k, n, ldb, b_step, config.b_major == "n"),
            "d_desc": _view(d, batch, m, n, ldd, d_step, config.out_major == "n"),
        }
        return Arguments(kernel.header, scalars | maps | {"partials": memory[0], "counters": memory[1]})

    def launch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        places, stream = read(a, b, out), current_stream(index)
        memory = (0, 0) if workspace is None else workspace.addresses(stream)
        key = (places, memory)
        found = kept.get(key)
        if found is None:
            kernel.ensure_context()
            found = kept.keep(key, arguments(places, memory))
        kernel.launch(ctas, stream, found)

    return launch


def _view(
    address: int, batch: int, rows: int, columns: int, leading: int, step: int, contiguous: bool
) -> View:
    """A batch of matrices whose columns, if `contiguous`, else its rows are contiguous in memory."""
    extents = (batch, rows, columns) if contiguous else (batch, columns, rows)
    return address, extents, (step, leading, 1)
