"""Kernel family `gluon_wgmma`: TMA + WGMMA kernels for Hopper, written in Gluon."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tunegemm.describe.device import Device, package_version
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate.generator import Generator
from tunegemm.generate.gluon_wgmma.config import KernelConfig
from tunegemm.generate.gluon_wgmma.rules import RULES, config_of
from tunegemm.generate.launching import AddressLaunch, AddressLauncher, tma_reader
from tunegemm.generate.ptxas import Resources
from tunegemm.generate.tiles import balanced, seen_by_kernel, tile_count
from tunegemm.generate.triton_object import FORMAT

if TYPE_CHECKING:
    from tunegemm.generate.families import Launcher
    from tunegemm.generate.launching import Workspace
    from tunegemm.generate.triton_launch import Kernel, View

_OLDEST_TRITON = (3, 6)


class GluonWgmma(Generator):
    """The generator behind `tunegemm.generate.families.Family`."""

    name = "gluon_wgmma"
    tma = True
    parameters: Mapping[str, tuple[str, ...]] = {
        "compile": (
            "schedule", "tile_m", "tile_n", "tile_k", "stages", "warps", "instr_n", "lhs_in_registers",
            "occupancy", "swap_ab",
        ),
        "launch": ("raster_order", "swizzle_size", "ctas"),
    }  # fmt: skip
    limited_launch = ("ctas",)
    extent_rules = frozenset({"tma_alignment", "swap_fits", "grid_fits"})
    packages = (("cuda.bindings", "cuda-bindings"),)
    compiler_packages = (("triton", "triton"),)
    config = KernelConfig
    rules = RULES

    def unavailable(self, *, launching: bool = False) -> str | None:
        if (missing := super().unavailable(launching=launching)) is not None or launching:
            return missing
        version = package_version("triton")
        if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST_TRITON:
            return f"triton {version} has another Gluon; pip install 'triton>=3.6'"
        return None

    def toolchain(self) -> Mapping[str, str | int]:
        return {"triton": package_version("triton"), "object_format": FORMAT}

    def config_of(self, problem: Problem, candidate: Candidate) -> KernelConfig:
        return config_of(problem, candidate)

    def compile(self, key: Mapping[str, str | int | bool], out: Path) -> Resources:
        from tunegemm.generate.gluon_wgmma.build import build

        return build(KernelConfig.from_mapping(key), out)

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
        return _launcher(problem, candidate, load(artifact, index), grid(problem, candidate, device), index)


FAMILY = GluonWgmma()


def grid(problem: Problem, candidate: Candidate, device: Device) -> int:
    """The grid, in blocks: one per tile, but what the `ctas` rule says for persistent kernels.

    ``all`` fills the device, ``balanced`` takes as few blocks as need no further wave.
    """
    config, work = config_of(problem, candidate), tile_count(problem, candidate)
    if not config.specialized:
        return work
    resident = device.sm_count * config.occupancy
    return balanced(work, resident) if candidate["ctas"] == "balanced" else min(work, resident)


def _launcher(problem: Problem, candidate: Candidate, kernel: Kernel, ctas: int, index: int) -> Launcher:
    from torch._C import _cuda_getCurrentRawStream as current_stream  # 0.1 us, torch.cuda.current_stream 0.5

    from tunegemm.generate.triton_launch import Arguments, Kept, batch_view

    config, seen = config_of(problem, candidate), seen_by_kernel(problem, candidate)
    swap = bool(candidate.params.get("swap_ab", False))
    m, n, k, batch = seen.m, seen.n, seen.k, seen.batch
    scalars = {
        "k_tiles": -(-k // config.tile_k),
        "tiles_m": -(-m // config.tile_m),
        "tiles_n": -(-n // config.tile_n),
        "batch": batch,
        "raster_along_m": int(candidate["raster_order"] == "along_m"),
        "swizzle_size": int(candidate["swizzle_size"]),
    }

    def make(lda: int, ldb: int, ldd: int, a_step: int, b_step: int, d_step: int) -> AddressLaunch:
        kept = Kept()

        def arguments(a: int, b: int, d: int) -> Arguments:
            maps: dict[str, int | View] = {
                "a_desc": batch_view(a, batch, m, k, lda, a_step, config.a_major == "k"),
                "b_desc": batch_view(b, batch, k, n, ldb, b_step, config.b_major == "n"),
                "d_desc": batch_view(d, batch, m, n, ldd, d_step, config.out_major == "n"),
            }
            return Arguments(kernel.header, scalars | maps)

        def launch(a: int, b: int, d: int) -> None:
            key = (b, a, d) if swap else (a, b, d)
            found = kept.get(key)
            if found is None:
                kernel.ensure_context()
                found = kept.keep(key, arguments(*key))
            kernel.launch(ctas, current_stream(index), found)

        if swap:
            lda, ldb, a_step, b_step = ldb, lda, b_step, a_step
        return launch

    return AddressLauncher(tma_reader(problem), make)
