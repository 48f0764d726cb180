"""Kernel family `skinny`: products of few rows at the speed of memory, written in the CuTe DSL.

B is read once, in vectors that go straight to the threads that multiply them; see `kernel`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tunegemm.describe.device import Device
from tunegemm.describe.epilogue import MAX_WORDS, define
from tunegemm.describe.problem import DTYPE_BYTES, Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate.cute_object import compile_object, load_function, toolchain
from tunegemm.generate.generator import CUTE_DSL, TVM_FFI, Generator, Key
from tunegemm.generate.launching import (
    AddressLaunch,
    AddressLauncher,
    Launcher,
    Workspace,
    operand_reader,
    words_reader,
)
from tunegemm.generate.ptxas import Resources
from tunegemm.generate.skinny.config import KernelConfig
from tunegemm.generate.skinny.rules import RULES, config_of
from tunegemm.generate.tiles import balanced, split_workspace, tile_count


def compile_kernel(key: Key, out: Path) -> Resources:
    if source := key.get("epilogue_source"):
        define(str(source))
    config = KernelConfig.from_mapping(key)

    def make() -> Any:
        from tunegemm.generate.skinny.kernel import Gemm

        return Gemm(config)

    words = MAX_WORDS if config.fused.words else 0
    return compile_object(make, 2, str(key["target"]), out, words=words)


def grid_ctas(problem: Problem, candidate: Candidate, device: Device) -> int:
    """The grid for the candidate's `ctas` rule.

    ``tiles`` is one block for each work unit: the hardware hands them out. ``all`` fills the device with
    `ctas_per_sm` persistent blocks each; ``balanced`` takes the fewest of these that need no further wave.
    """
    work = tile_count(problem, candidate) * int(candidate["split_k"])
    resident = device.sm_count * int(candidate["ctas_per_sm"])
    if candidate["ctas"] == "tiles":
        return work
    return balanced(work, resident) if candidate["ctas"] == "balanced" else min(resident, work)


def launcher(
    problem: Problem, candidate: Candidate, device: Device, artifact: Path, workspace: Workspace | None
) -> Launcher:
    from torch._C import _cuda_getCurrentRawStream as current_stream  # 0.1 us, torch.cuda.current_stream 0.5

    function = load_function(artifact)
    extents = (problem.m, problem.n, problem.k, problem.batch)
    division = (grid_ctas(problem, candidate, device), int(candidate["split_k"]))
    index = device.index if device.is_real else 0

    def make(*strides: int) -> AddressLaunch:
        fixed = (*extents, *strides, *division)

        def launch(a: int, b: int, d: int, *words: int) -> None:
            stream = current_stream(index)
            scratch = (0, 0) if workspace is None else workspace.addresses(stream)
            function(a, b, d, *fixed, *scratch, *words, stream)

        return launch

    read = operand_reader(problem, int(candidate["vector_bytes"]), DTYPE_BYTES[problem.out_dtype])
    return AddressLauncher(read, make, words_reader(problem) if problem.fused.words else None)


FAMILY = Generator(
    name="skinny",
    parameters={
        "compile": (
            "tile_m", "tile_n", "tile_k", "warps_n", "warps_k", "stages", "vector_bytes", "ctas_per_sm",
        ),
        "launch": ("ctas", "split_k"),
    },
    folder=Path(__file__).parent,
    config=KernelConfig,
    config_of=config_of,
    rules=RULES,
    extent_rules=frozenset({"whole_vectors", "epilogue_lines", "rows_fits", "split_fits"}),
    unlisted={"ctas": ("balanced",)},
    limited_launch=("split_k",),
    fuses=True,
    compile=compile_kernel,
    workspace=split_workspace,
    launcher=launcher,
    toolchain=toolchain,
    packages=(CUTE_DSL, TVM_FFI),
)  # fmt: skip
