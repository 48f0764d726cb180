"""Compiles listed kernels for each architecture and checks them for spills and planned memory; without a GPU.

    python -m benchmarks.compiled --kernels 12                    # of each family for each architecture
    python -m benchmarks.compiled --kernels 1000000 --families triton --architectures sm_80

Draws so many kernels that the rules accept, the same ones each time, over problems of all dtypes and
alignments, and compiles them for every architecture. Writes results/compiled.json: a row for each family,
architecture and compiler version, which the next run replaces; a row has no kernels if the rules reject all.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.command import add_names, command, parser_of
from benchmarks.results import Results, report
from tunegemm.compile.artifacts import ArtifactStore
from tunegemm.compile.pool import CompilePool
from tunegemm.describe.architectures import ARCHITECTURES, PARTS
from tunegemm.describe.device import Device, find_device, package_version
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate import families
from tunegemm.testing import compile_all
from tunegemm.testing.suite import accepted

PORTABLE = ("triton", "triton_tma", "cute_sm80")
#: One device of each architecture.
DEVICES = {
    architecture.short_name: find_device(next(name for name, part in PARTS.items() if part.capability == key))
    for key, architecture in ARCHITECTURES.items()
}
_SHAPE = "4096x4096x4096"
PROBLEMS = (
    Problem.parse(_SHAPE),
    Problem.parse(_SHAPE, dtype="fp16", layout="nt"),
    Problem.parse("4097x4095x1001"),
    Problem.parse(_SHAPE, dtype="fp8_e4m3", out_dtype="bf16"),
    Problem.parse(_SHAPE, dtype="tf32"),
    Problem.parse(_SHAPE, dtype="int8"),
    Problem.parse("4096x4100x4100", layout="nn", out_dtype="fp32"),
)
_COMPILERS = {"triton": "triton", "triton_tma": "triton", "cute_sm80": "nvidia-cutlass-dsl"}


@command
def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("benchmarks.compiled", __doc__, gpu=False)
    parser.add_argument("--kernels", type=int, default=12, help="of each family for each architecture")
    add_names(parser, "families", PORTABLE)
    add_names(parser, "architectures", DEVICES)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder")
    options = parser.parse_args(arguments)
    results = Results(options.out / "compiled.json", {"command": "python -m benchmarks.compiled"})
    with TemporaryDirectory() as folder, CompilePool(ArtifactStore(folder)) as pool:
        for architecture, family in itertools.product(options.architectures, options.families):
            refused = bool(families.refusal_here(family, DEVICES[architecture]))
            row = compiled(pool, family, DEVICES[architecture], 0 if refused else options.kernels)
            if not refused or results.find(row) is not None:
                report(results, [row])


def drawn(family: str, device: Device, count: int) -> Iterator[tuple[Problem, Candidate]]:
    """So many kernels that the rules accept, in turns of the problems, each once."""
    each = [
        [(problem, kernel) for kernel in accepted(family, problem, device, count)] for problem in PROBLEMS
    ]
    turns = itertools.chain.from_iterable(itertools.zip_longest(*each))
    return itertools.islice(filter(None, turns), count)


def compiled(pool: CompilePool, family: str, device: Device, count: int) -> dict[str, Any]:
    """What came of them: how many are clean, how many spill, and the complaints about the others."""
    pairs, generator = list(drawn(family, device, count)), families.generator(family)
    compiler = _COMPILERS[family]
    wrong: Counter[str] = Counter()
    for (problem, kernel), result in zip(pairs, compile_all(pool, pairs, device), strict=True):
        if result.artifact is None:
            wrong[" ".join(result.failure.split())[:100]] += 1
            continue
        resources, planned = result.artifact.resources, generator.smem_bytes(problem, kernel)
        if resources.spill_bytes or resources.warnings:
            wrong[f"{resources.spill_bytes} B spilled {' '.join(resources.warnings)}".strip()] += 1
        # Blackwell's barriers are not counted, and its tensor memory needs no copies in advance.
        elif resources.smem_bytes != planned and not device.architecture.tcgen05:
            wrong[f"shared memory {resources.smem_bytes} B, planned {planned} B"] += 1
        elif resources.smem_bytes > device.architecture.smem_bytes_per_block:
            wrong[f"shared memory {resources.smem_bytes} B exceeds the block's"] += 1
    return {
        "label": f"{family} {device.architecture.short_name} {compiler} {package_version(compiler)}",
        "family": family, "architecture": device.architecture.short_name, "compiler": compiler,
        "version": package_version(compiler), "kernels": len(pairs), "clean": len(pairs) - wrong.total(),
        "wrong": dict(wrong),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
