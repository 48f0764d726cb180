"""What the GPU executes of a list of kernels, as hashes: equal before and after a change that is none.

    python -m tests.support.objects before.json            # of the sources as they are
    python -m tests.support.objects after.json --against before.json [--quick]

Compiles each kernel of `CASES` for sm_90a, one after the other, without a GPU, and hashes of every cubin in
the object the machine code, its constants and its attributes (registers, parameters, barriers). Names of
functions and modules, which follow those in the sources, are in other sections: the list is of sections'
types and contents, without their names. Hashes hold for one version and build of a compiler.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import struct
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from tests.support import hopper
from tunegemm.describe.device import find_device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate import families

Value = str | int | bool


class Case(NamedTuple):
    """A kernel: of a family, for problems of these dtypes, majors and epilogue."""

    problem: Problem
    candidate: Candidate

    def __str__(self) -> str:
        return f"{self.problem} {json.dumps(dict(self.candidate.params), sort_keys=True)}"


SHAPE = "4096x4096x4096"
AMPERE: dict[str, Value] = {
    "tile_m": 128, "tile_n": 128, "tile_k": 32, "stages": 3, "warps_m": 2, "warps_n": 2, "atoms_n": 2,
    "smem_swizzle": 2, "vector_bytes": 16, "ctas_per_sm": 1, "acc_dtype": "fp32",
}  # fmt: skip
GLUON: dict[str, Value] = {
    "schedule": "cooperative", "tile_m": 128, "tile_n": 128, "tile_k": 64, "stages": 4, "warps": 8,
    "instr_n": 256, "lhs_in_registers": False, "occupancy": 1, "swap_ab": False,
}  # fmt: skip
TRITON: dict[str, Value] = {
    "schedule": "pipelined", "tile_m": 128, "tile_n": 128, "tile_k": 64, "stages": 4, "warps": 8,
    "epi_n": 64, "swap_ab": False,
}  # fmt: skip
SKINNY: dict[str, Value] = {
    "tile_m": 8, "tile_n": 32, "tile_k": 512, "warps_n": 1, "warps_k": 8, "stages": 3, "vector_bytes": 16,
    "ctas_per_sm": 1,
}  # fmt: skip

#: Changes to a problem of bf16 and to the kernel above of its family; arguments of the launch are left out,
#: but for the one of cute_sm90 that is compiled in. The first eight of cute_sm90 are the quick ones.
PP: dict[str, Value] = {"schedule": "pingpong"}
SK: dict[str, Value] = {"tile_scheduler": "stream_k"}
GPC: dict[str, Value] = {"cluster_order": "gpc"}
FP8: dict[str, Value] = {"dtype": "fp8_e4m3"}
TWO_LEVEL: dict[str, Value] = FP8 | {"accumulation": "two_level"}
K128: dict[str, Value] = {"tile_k": 128}


def _fused(epilogue: str) -> dict[str, Value]:
    return {"epilogue": epilogue}


OF_HOPPER: list[tuple[dict[str, Value], dict[str, Value]]] = [
    ({}, {"tile_n": 256, "cluster_m": 2}),
    ({}, PP | {"cluster_n": 2, "stages": 6}),
    ({}, SK | {"cluster_m": 2}),
    ({}, PP | GPC | {"cluster_m": 2}),
    ({"out_dtype": "fp32", "layout": "tt"}, {"tile_m": 192, "tile_n": 160}),
    (_fused("bias_n+gelu_tanh"), PP),
    (_fused("swiglu+residual+amax"), {"tile_n": 256, "stages": 3}),
    (TWO_LEVEL | {"out_dtype": "fp32"}, K128),
    ({}, {"tile_m": 256, "tile_n": 208, "epi_n": 16, "stages": 3}),
    ({}, {"tile_m": 64, "tile_n": 96, "tile_k": 128}),
    ({}, {"tile_n": 176, "epi_n": 16, "cluster_m": 2, "stages": 5}),
    ({}, {"epi_n": 0, "tile_n": 256, "cluster_m": 2}),
    ({"layout": "nt"}, PP | {"epi_n": 0, "tile_n": 64, "cluster_n": 4, "stages": 9}),
    ({"layout": "nn"}, PP | {"tile_m": 192, "tile_n": 112, "epi_n": 16, "stages": 3}),
    ({"layout": "nt"}, {"cluster_m": 2, "cluster_n": 2}),
    ({"layout": "tt"}, PP | {"tile_m": 64, "tile_n": 256, "cluster_m": 4, "epi_n": 64}),
    ({}, PP | {"tile_m": 64, "tile_n": 16, "tile_k": 128, "stages": 8, "epi_n": 16}),
    ({}, PP | {"tile_n": 208, "epi_n": 16}),
    ({"out_major": "m"}, {"tile_n": 192, "epi_n": 64}),
    ({}, {"tile_m": 128, "tile_n": 16, "stages": 6, "epi_n": 16, "swap_ab": True}),
    ({"dtype": "fp16"}, {"tile_n": 256, "cluster_n": 2}),
    ({"dtype": "fp16", "out_dtype": "fp32", "layout": "tt"}, PP | {"tile_m": 64, "tile_n": 128}),
    ({"dtype": "fp16"}, PP | SK | {"cluster_n": 2}),
    ({}, SK | GPC | {"cluster_m": 2}),
    ({}, PP | SK | {"tile_m": 64, "tile_n": 96, "stages": 8, "cluster_m": 2, "cluster_n": 2}),
    ({}, GPC | {"cluster_m": 2, "cluster_n": 2, "tile_n": 64}),
    ({}, GPC | {"tile_n": 256}),
    (FP8, K128 | {"tile_n": 192, "cluster_m": 2}),
    (FP8, PP | K128 | {"tile_m": 64, "tile_n": 192, "cluster_m": 2, "cluster_n": 2}),
    (FP8 | {"out_dtype": "fp8_e4m3"}, K128),
    ({"dtype": "fp8_e5m2_e4m3", "out_dtype": "fp16"}, K128 | SK),
    (TWO_LEVEL, PP | K128 | {"tile_m": 64, "tile_n": 224}),
    (TWO_LEVEL, K128 | SK | {"tile_n": 192, "stages": 3}),
    (TWO_LEVEL | _fused("scale_rowwise+bias_n"), PP | K128 | {"tile_m": 64}),
    (FP8 | _fused("scale_tensor"), K128 | {"tile_n": 256, "stages": 3}),
    (FP8 | _fused("scale_rowwise"), K128 | PP | {"tile_m": 64, "tile_n": 192}),
    (FP8 | _fused("scale_tensor+amax") | {"out_dtype": "fp8_e4m3"}, K128),
    ({"dtype": "int8"}, K128),
    ({"dtype": "int8"}, K128 | PP | SK | {"tile_m": 64}),
    ({"dtype": "tf32"}, {"tile_k": 32}),
    ({"dtype": "tf32", "out_dtype": "fp32"}, PP | {"tile_k": 32, "tile_n": 48, "epi_n": 16}),
    (_fused("bias_n"), {"tile_n": 256, "cluster_m": 2}),
    (_fused("bias_m+relu"), {"tile_m": 256, "tile_n": 96, "stages": 3}),
    (_fused("bias_n+gelu"), {"swap_ab": True, "tile_n": 32, "stages": 6}),
    (_fused("swiglu"), PP),
    (_fused("swiglu"), SK | {"cluster_m": 2}),
    (_fused("geglu") | {"layout": "nn"}, {"tile_n": 192}),
    (_fused("swiglu") | {"layout": "nt"}, PP | {"tile_n": 176, "epi_n": 16}),
    (_fused("residual"), {"cluster_m": 2, "tile_n": 192}),
    (_fused("residual"), PP | SK),
    (_fused("alpha+beta_c"), PP | GPC | {"cluster_n": 2}),
    (_fused("beta_c+bias_m+relu") | {"out_dtype": "fp32"}, {"tile_n": 96}),
    (_fused("amax"), {"tile_m": 64, "tile_n": 128}),
    (_fused("silu") | {"out_major": "m"}, {"tile_n": 160}),
]
OF_AMPERE: list[tuple[dict[str, Value], dict[str, Value]]] = [
    ({}, {}),
    ({"alignment": 2}, {"vector_bytes": 2}),
    ({"layout": "nt", "dtype": "fp16"}, {"smem_swizzle": 3, "tile_k": 64}),
    ({"layout": "tt", "out_dtype": "fp32", "alignment": 4}, {"vector_bytes": 4}),
]
OF_GLUON: list[tuple[dict[str, Value], dict[str, Value]]] = [
    ({}, {}),
    ({}, {"schedule": "pingpong", "stages": 6}),
    ({"layout": "nn"}, {"schedule": "blocking", "stages": 1}),
    ({"dtype": "fp16", "out_dtype": "fp32", "layout": "tt"}, {"schedule": "multistage", "stages": 2}),
]
OF_TRITON: list[tuple[dict[str, Value], dict[str, Value]]] = [
    ({}, {}),
    ({"layout": "tt"}, {"schedule": "flattened"}),
    ({"dtype": "fp16"}, {"warps": 4, "tile_n": 64, "epi_n": 64}),
]
OF_SKINNY: list[tuple[dict[str, Value], dict[str, Value]]] = [
    ({}, {}),
    ({"dtype": "fp16", "out_dtype": "fp32", "alignment": 8}, {"vector_bytes": 8}),
    ({"dtype": "int8"}, {"tile_m": 16, "warps_k": 4}),
    (FP8 | _fused("scale_rowwise+bias_n+swiglu"), {"tile_n": 64, "warps_n": 2, "warps_k": 4}),
    (_fused("alpha+beta_c+bias_m+gelu+residual+amax"), {"tile_m": 16}),
]


def cases() -> Iterator[Case]:
    lists = (
        ("cute_sm90", hopper.KERNEL, OF_HOPPER), ("cute_sm80", AMPERE, OF_AMPERE),
        ("gluon_wgmma", GLUON, OF_GLUON),
        ("triton_tma", TRITON, OF_TRITON), ("skinny", SKINNY, OF_SKINNY),
    )  # fmt: skip
    for family, kernel, changes in lists:
        for of_problem, of_kernel in changes:
            words: dict[str, Any] = {name: of_problem[name] for name in of_problem if name != "out_major"}
            problem = replace(Problem.parse(SHAPE, **words), out_major=str(of_problem.get("out_major", "n")))
            params = kernel | of_kernel
            order = {name: params.pop(name) for name in ("cluster_order",) if name in params}
            yield Case(problem, Candidate.make(family, params, order))


def cubins(content: bytes) -> Iterator[bytes]:
    """The ELF files for NVIDIA GPUs in an object; nothing behind their section headers is read."""
    start = content.find(b"\x7fELF")
    while start >= 0:
        if content[start + 18 : start + 20] == struct.pack("<H", 190):  # EM_CUDA
            yield content[start:]
        start = content.find(b"\x7fELF", start + 4)


def sections(cubin: bytes) -> Iterator[tuple[str, bytes]]:
    """Names and contents; that of a section without bytes in the file, as of shared memory, is its size."""
    (headers,) = struct.unpack_from("<Q", cubin, 40)
    each, count, names = struct.unpack_from("<HHH", cubin, 58)
    table = [struct.unpack_from("<IIQQQQ", cubin, headers + index * each) for index in range(count)]
    for name, kind, _, _, offset, size in table:
        text = cubin[table[names][4] + name :].partition(b"\0")[0].decode()
        yield text, str(size).encode() if kind == 8 else cubin[offset : offset + size]


def digest(content: bytes) -> str:
    """SHA-256 (16 hex digits) of what an object's cubins execute."""
    found = [
        hashlib.sha256(name.split(".")[1].encode() + b"\0" + content).hexdigest()
        for cubin in cubins(content)
        for name, content in sections(cubin)
        if name.startswith((".text", ".nv."))
    ]
    if not found:
        raise ValueError("the object has no cubin")
    return hashlib.sha256(" ".join(sorted(found)).encode()).hexdigest()[:16]


def compiled(case: Case) -> str:
    """The digest of a case's kernel, compiled in this process; of one that fails, the compiler's words."""
    family = families.get(case.candidate.family)
    key = family.kernel_key(case.problem, case.candidate, find_device("model:h200"))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "kernel.o")
        try:
            resources = family.compile(key, out)
        except Exception as error:
            return f"fails: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        spills = f" spills {resources.spill_bytes} B" if resources.spill_bytes else ""
        return f"{digest(out.read_bytes())}{spills}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path, help="a JSON file: hashes by case")
    parser.add_argument("--against", type=Path, help="such a file of an earlier run; fails where one differs")
    parser.add_argument("--quick", action="store_true", help="the first eight only")
    parser.add_argument("--only", default="", help="cases whose text has this")
    asked = parser.parse_args()
    before = json.loads(asked.against.read_text()) if asked.against else {}
    chosen = [case for case in cases() if asked.only in str(case)][: 8 if asked.quick else None]
    found: dict[str, str] = {}
    for case in chosen:
        start = time.perf_counter()
        name = str(case)
        found[name] = compiled(case)
        verdict = "" if not before else "same " if before.get(name) == found[name] else "OTHER"
        print(f"{verdict} {found[name]:40} {time.perf_counter() - start:5.1f} s  {name}", flush=True)
    asked.out.write_text(json.dumps(found, indent=1) + "\n")
    others = [name for name in found if before and before.get(name) != found[name]]
    print(f"{len(found)} kernels, {len(others)} of them unlike before" if before else f"{len(found)} kernels")
    return 1 if others else 0


if __name__ == "__main__":
    sys.exit(main())
