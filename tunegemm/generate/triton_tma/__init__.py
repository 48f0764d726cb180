"""Kernel family `triton_tma`: persistent TMA + WGMMA kernels for Hopper, compiled by Triton."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tunegemm.describe.device import Device, package_version
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate, Value
from tunegemm.generate.generator import Generator
from tunegemm.generate.launching import AddressLaunch, AddressLauncher, Workspace, tma_reader
from tunegemm.generate.ptxas import Resources
from tunegemm.generate.tiles import balanced, seen_by_kernel, tile_count
from tunegemm.generate.triton_object import FORMAT, read_object
from tunegemm.generate.triton_tma.config import KernelConfig
from tunegemm.generate.triton_tma.rules import RULES, config_of

if TYPE_CHECKING:
    from tunegemm.generate.families import Launcher
    from tunegemm.generate.triton_launch import Kernel, View


class TritonTma(Generator):
    """The generator behind `tunegemm.generate.families.Family`."""

    name = "triton_tma"
    tma = True
    parameters: Mapping[str, tuple[str, ...]] = {
        "compile": ("schedule", "tile_m", "tile_n", "tile_k", "stages", "warps", "epi_n", "swap_ab"),
        "launch": ("raster_order", "swizzle_size", "ctas", "split_k"),
    }
    unlisted: Mapping[str, tuple[Value, ...]] = {"schedule": ("warp_specialized",)}
    limited_launch = ("ctas", "split_k")
    extent_rules = frozenset({"tma_alignment", "warp_specialization", "two_fits", "swap_fits", "split_fits"})
    packages = (("cuda.bindings", "cuda-bindings"),)
    compiler_packages = (("triton", "triton"),)
    config = KernelConfig
    rules = RULES

    def toolchain(self) -> Mapping[str, str | int]:
        return {"triton": package_version("triton"), "object_format": FORMAT}

    def config_of(self, problem: Problem, candidate: Candidate) -> KernelConfig:
        return config_of(problem, candidate)

    def compile(self, key: Mapping[str, str | int | bool], out: Path) -> Resources:
        from tunegemm.generate.triton_tma.build import build

        return build(KernelConfig.from_mapping(key), out)

    def workspace(
        self, problem: Problem, candidate: Candidate, device: Device, artifact: Path | None
    ) -> Workspace | None:
        """Descriptors that blocks make for themselves, or split-K's partial sums and counters; never both."""
        config, split_k = config_of(problem, candidate), int(candidate["split_k"])
        index = device.index if device.is_real else 0
        if config.specialized and artifact is not None:  # their size is known to the object alone
            header, _ = read_object(artifact.read_bytes())
            num_bytes = grid(problem, candidate, device) * header.scratch_bytes
            return Workspace(num_bytes, 0, index) if num_bytes else None
        if split_k == 1:
            return None
        tiles = tile_count(problem, candidate)
        return Workspace(tiles * split_k * config.tile_m * config.tile_n * 4, tiles * 4, index)

    def launcher(
        self,
        problem: Problem,
        candidate: Candidate,
        device: Device,
        artifact: Path,
        workspace: Workspace | None,
    ) -> Launcher:
        from tunegemm.generate.triton_launch import load

        index = device.index if device.is_real else 0
        ctas = grid(problem, candidate, device)
        return _launcher(problem, candidate, load(artifact, index), ctas, index, workspace)


FAMILY = TritonTma()


def grid(problem: Problem, candidate: Candidate, device: Device) -> int:
    """The grid, in blocks, for the candidate's `ctas` rule.

    ``all`` is one per multiprocessor, ``two_per_sm`` two, ``balanced`` as few as need no further wave.
    """
    work = tile_count(problem, candidate) * int(candidate["split_k"])
    if candidate["ctas"] == "balanced":
        return balanced(work, device.sm_count)
    return min(work, device.sm_count * (2 if candidate["ctas"] == "two_per_sm" else 1))


def _launcher(
    problem: Problem,
    candidate: Candidate,
    kernel: Kernel,
    ctas: int,
    index: int,
    workspace: Workspace | None,
) -> Launcher:
    from torch._C import _cuda_getCurrentRawStream as current_stream  # 0.1 us, torch.cuda.current_stream 0.5

    from tunegemm.generate.triton_launch import Arguments, Kept, batch_view

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

    def make(lda: int, ldb: int, ldd: int, a_step: int, b_step: int, d_step: int) -> AddressLaunch:
        kept = Kept()

        def arguments(a: int, b: int, d: int, partials: int, counters: int) -> Arguments:
            if config.specialized:
                pointers = {"a": a, "b": b, "d": d, "lda": lda, "ldb": ldb, "ldd": ldd}
                return Arguments(kernel.header, scalars | pointers, scratch=partials)
            maps: dict[str, int | View] = {
                "a_desc": batch_view(a, batch, m, k, lda, a_step, config.a_major == "k"),
                "b_desc": batch_view(b, batch, k, n, ldb, b_step, config.b_major == "n"),
                "d_desc": batch_view(d, batch, m, n, ldd, d_step, config.out_major == "n"),
            }
            return Arguments(kernel.header, scalars | maps | {"partials": partials, "counters": counters})

        def launch(a: int, b: int, d: int) -> None:
            if swap:
                a, b = b, a
            stream = current_stream(index)
            memory = (0, 0) if workspace is None else workspace.addresses(stream)
            key = (a, b, d, *memory)
            found = kept.get(key)
            if found is None:
                kernel.ensure_context()
                found = kept.keep(key, arguments(*key))
            kernel.launch(ctas, stream, found)

        if swap:
            lda, ldb, a_step, b_step = ldb, lda, b_step, a_step
        return launch

    return AddressLauncher(tma_reader(problem), make)
