"""Kernel family `plain_triton`: the smallest whole family, for tests and to begin one from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tunegemm.describe.device import Device, kernel_source_hash, package_version
from tunegemm.describe.problem import DTYPE_BYTES, Problem
from tunegemm.describe.space import Candidate, Value
from tunegemm.errors import ArtifactError
from tunegemm.generate.families.plain_triton.config import KernelConfig
from tunegemm.generate.feasibility import Verdict, apply_rules
from tunegemm.generate.launching import operand_reader
from tunegemm.generate.ptxas import Resources
from tunegemm.generate.tiles import tile_count
from tunegemm.generate.triton_object import FORMAT

if TYPE_CHECKING:
    import torch

    from tunegemm.generate.families import Launcher
    from tunegemm.generate.launching import Workspace

#: Elements of 16 bytes.
VECTOR = 8


def operands(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """The kernel loads vectors of 16 bytes along k, of one product."""
    if problem.layout != "tn" or problem.out_major != "n" or problem.batch != 1:
        return f"{problem}: only one product of layout tn with a row-major output"
    if problem.k % VECTOR or problem.alignment < 16:
        return f"k={problem.k} at {problem.alignment} B: vectors are {VECTOR} elements at 16 B"
    return None


def smem(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """A block's shared memory is limited."""
    needed = KernelConfig.from_mapping(candidate.params).smem_bytes
    if needed > device.architecture.smem_bytes_per_block:
        return f"smem {needed} B > {device.architecture.smem_bytes_per_block} B"
    return None


def registers(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """More than 128 accumulators of a thread leave too few of its 255 registers for the rest."""
    accumulators = KernelConfig.from_mapping(candidate.params).accumulators
    return f"{accumulators} accumulators per thread > 128" if accumulators > 128 else None


class PlainTriton:
    """See `tunegemm.generate.families.Family`."""

    name = "plain_triton"
    compiled = True
    tma = False
    parameters: Mapping[str, tuple[str, ...]] = {
        "compile": ("tile_m", "tile_n", "tile_k", "stages", "warps"),
        "launch": ("swizzle_size",),
    }
    unlisted: Mapping[str, tuple[Value, ...]] = {}
    limited_launch = ()
    rules = (operands, smem, registers)
    extent_rules = frozenset({"operands"})

    def unavailable(self, *, launching: bool = False) -> str | None:
        missing = not launching and find_spec("triton") is None
        return "triton is not installed; pip install triton" if missing else None

    def check(self, problem: Problem, candidate: Candidate, device: Device) -> Verdict:
        return apply_rules(self.rules, problem, candidate, device)

    def kernel_key(
        self, problem: Problem, candidate: Candidate, device: Device
    ) -> Mapping[str, str | int | bool]:
        return asdict(KernelConfig.from_mapping(candidate.params)) | {
            "family": self.name,
            "in_dtype": problem.in_dtype,
            "out_dtype": problem.out_dtype,
            "triton": package_version("triton"),
            "object_format": FORMAT,
            "source": kernel_source_hash(self.name),
        }

    def smem_bytes(self, problem: Problem, candidate: Candidate) -> int:
        return KernelConfig.from_mapping(candidate.params).smem_bytes

    def label(self, candidate: Candidate) -> str:
        kernel = "plain{tile_m}x{tile_n}x{tile_k} s{stages} w{warps}".format(**candidate.params)
        return f"{kernel} b{candidate['swizzle_size']}" if candidate.launch_params else kernel

    def compile(self, key: Mapping[str, str | int | bool], out: Path) -> Resources:
        from tunegemm.generate.families.plain_triton import kernel
        from tunegemm.generate.triton_object import build

        config = KernelConfig.from_mapping(key)
        pointers = {"a": f"*{key['in_dtype']}", "b": f"*{key['in_dtype']}", "d": f"*{key['out_dtype']}"}
        integers = dict.fromkeys(("m", "n", "k"), "i32") | dict.fromkeys(
            ("lda_vectors", "ldb_vectors", "ldd"), "i64"
        )
        tile = {name: getattr(config, name) for name in ("tile_m", "tile_n", "tile_k")}
        return build(
            kernel.gemm, pointers | integers | {"swizzle": "i32"}, tile, out,
            num_warps=config.warps, num_stages=config.stages, aligned=("a", "b"),
        )  # fmt: skip

    def workspace(
        self, problem: Problem, candidate: Candidate, device: Device, artifact: Path | None
    ) -> Workspace | None:
        return None

    def load(
        self,
        problem: Problem,
        candidate: Candidate,
        device: Device,
        artifact: Path | None,
        workspace: Workspace | None = None,
    ) -> Launcher:
        if artifact is None:
            raise ArtifactError(f"{self.label(candidate)} has no compiled object; run tunegemm tune again")
        from torch._C import _cuda_getCurrentRawStream as current_stream

        from tunegemm.generate.triton_launch import Arguments, load

        kernel = load(artifact, device.index)
        read = operand_reader(problem, 16, DTYPE_BYTES[problem.out_dtype])
        blocks = tile_count(problem, candidate)
        extents = {"m": problem.m, "n": problem.n, "k": problem.k, "swizzle": int(candidate["swizzle_size"])}

        def launch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
            at_a, at_b, at_d, lda, ldb, ldd, *_ = read(a, b, out)
            places = {"a": at_a, "b": at_b, "d": at_d, "ldd": ldd}
            lines = {"lda_vectors": lda // VECTOR, "ldb_vectors": ldb // VECTOR}
            arguments = Arguments(kernel.header, extents | places | lines)
            kernel.launch(blocks, current_stream(device.index), arguments)

        return launch


FAMILY = PlainTriton()
