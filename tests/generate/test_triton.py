"""Examples of the portable Triton family, and what only it has. No GPU needed."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tests.support.processes import run_interpreted
from tunegemm.compile.pool import CompilePool
from tunegemm.compile.triton_object import read_object
from tunegemm.describe.architectures import ARCHITECTURES
from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate import families
from tunegemm.generate.triton import FAMILY, rules
from tunegemm.generate.triton.config import KernelConfig
from tunegemm.generate.triton.rules import config_of
from tunegemm.testing import TOO_LARGE, Examples, Rejection, compile_all

SHAPE = "4096x4096x4096"
GOOD = {
    "tile_m": 128, "tile_n": 128, "tile_k": 32, "stages": 3, "warps": 8, "vector_bytes": 16,
    "store_bytes": 16,
}  # fmt: skip
LAUNCH = {"raster_order": "along_m", "swizzle_size": 8, "ctas": "tiles", "split_k": 1}
PROBLEMS = [
    Problem.parse(SHAPE),
    Problem.parse(SHAPE, layout="nt", dtype="fp16"),
    Problem.parse("4097x4095x1001", dtype="fp16"),
    Problem.parse(SHAPE, dtype="tf32"),
    Problem.parse(SHAPE, dtype="int8"),
    Problem.parse(SHAPE, dtype="fp8_e4m3", out_dtype="bf16"),
    Problem.parse(SHAPE, alignment=4, layout="nn", out_dtype="fp32"),
    Problem.parse("4096x4100x4096", layout="tt"),
]
#: Of what lines, addresses and D's lines are multiples.
VECTORS = [
    {},
    {},
    {"vector_bytes": 2, "store_bytes": 2},
    {},
    {},
    {},
    {"vector_bytes": 4},
    {"vector_bytes": 8},
]
VECTORS[-1] |= {"store_bytes": 8}

EXAMPLES = Examples(
    "triton",
    GOOD,
    LAUNCH,
    PROBLEMS[:2] + PROBLEMS[3:6],
    corners=[
        (PROBLEMS[0], {"tile_m": 256, "tile_k": 64, "stages": 4}),
        (PROBLEMS[0], {"warps": 4, "stages": 5}),
        (PROBLEMS[2], {"tile_n": 64, "tile_m": 64, "warps": 4, "stages": 2, **VECTORS[2]}),
        (PROBLEMS[6], {**VECTORS[6]}),
        (PROBLEMS[7], {"tile_k": 64, **VECTORS[7]}),
        (PROBLEMS[0], {"tile_m": 16, "tile_n": 64, "tile_k": 128, "warps": 4}),
    ],
    rejected=[
        Rejection("shared_memory", {"tile_m": 256, "tile_k": 64, "stages": 5}, TOO_LARGE),
        Rejection("block_shape", {"tile_m": 96}, "power of 2"),
        Rejection("warps", {"warps": 6}, "power of 2"),
        Rejection("registers", {"tile_m": 256, "tile_n": 256, "tile_k": 32}, "spills"),
    ],
    objections=[
        ("operands", Problem.parse(SHAPE, dtype="fp8_e4m3_e5m2", out_dtype="bf16"), {}),
        ("operands", Problem.parse(SHAPE, dtype="fp8_e4m3", out_dtype="fp8_e4m3"), {}),
        ("majors", Problem.parse(SHAPE, dtype="int8", layout="nt"), {}),
        ("whole_vectors", PROBLEMS[2], {}),
        ("whole_vectors", PROBLEMS[0], {"vector_bytes": 8}),
        ("whole_vectors", Problem.parse("4096x4096x4094", alignment=16), {}),
        ("whole_stores", Problem.parse("4096x4095x4096"), {}),
        ("near_lines", Problem.parse("64x64x8388608"), {}),
        ("ring_depth", PROBLEMS[0], {"stages": 1}),
        ("warps", PROBLEMS[0], {"tile_m": 64}),
        ("copied_ahead", PROBLEMS[2], {"tile_m": 64, "tile_n": 64, "warps": 4, **VECTORS[2]}),
        ("two_blocks", Problem.parse("128x128x4096"), {"ctas": "two_per_sm"}),
        ("split_work", PROBLEMS[0], {"split_k": 2}),
    ],
    elsewhere=frozenset({"tensor_cores"}),
)  # fmt: skip


def candidate(**changes: int | str) -> Candidate:
    return Candidate.make("triton", GOOD | changes)


def test_fp8_needs_ada(h200: Device) -> None:
    verdicts = {
        one.number: FAMILY.check(PROBLEMS[5], candidate(), replace(h200, architecture=one)).rule
        for one in ARCHITECTURES.values()
    }
    assert {number for number, rule in verdicts.items() if rule == "tensor_cores"} == {80, 86, 87}
    assert {rule for number, rule in verdicts.items() if number > 87} == {None}


def test_registers_may_be_used_up(h200: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Candidate.make("triton", GOOD)
    monkeypatch.setattr(rules, "register_budget", lambda *_: 0)
    need, _, _ = str(rules.registers(PROBLEMS[0], kernel, h200)).partition(" > ")
    numbers = sum(map(int, re.findall(r"\d+", need)))
    for budget, fits in ((numbers, True), (numbers - 1, False)):
        monkeypatch.setattr(rules, "register_budget", lambda *_, budget=budget: budget)
        assert (rules.registers(PROBLEMS[0], kernel, h200) is None) == fits


@pytest.mark.slow
def test_objects_say_what_a_launch_needs(pool: CompilePool, h200: Device) -> None:
    (result,) = compile_all(pool, [(PROBLEMS[0], candidate())], h200)
    assert result.artifact is not None
    header, _ = read_object(result.artifact.path.read_bytes())
    assert (header.threads, header.smem_bytes) == (256, config_of(PROBLEMS[0], candidate()).smem_bytes)
    assert [one.name for one in header.arguments[:3]] == ["a", "b", "d"]


PROGRAM = """
import sys
import torch
import triton.language as tl
from tunegemm.generate.triton import operands
from tunegemm.generate.triton.kernel import gemm

def lines(rows, columns, row_major, dtype, gap, batch):
    shape = (batch, rows, columns) if row_major else (batch, columns, rows)
    poison = float("nan") if dtype.is_floating_point else 77
    room = torch.full((*shape[:2], shape[2] + gap), poison, dtype=dtype)
    inner = room[..., : shape[2]]
    inner.copy_(torch.randint(-4, 5, shape))
    return inner if row_major else inner.mT

def leading(tensor):
    return max(tensor.stride(-2), tensor.stride(-1))

for m, n, k, batch, dtype, rows, split_k, vector, out_vector, ctas, gap in (
    (64, 64, 64, 1, torch.float16, (True, False, True), 1, 8, 8, 99, 0),
    (37, 67, 101, 2, torch.float16, (True, True, True), 2, 1, 1, 3, 3),
    (40, 72, 104, 2, torch.float16, (False, True, False), 3, 8, 8, 2, 8),
    (48, 80, 96, 1, torch.float32, (True, False, True), 1, 4, 4, 99, 0),
    (48, 80, 96, 1, torch.int8, (True, False, True), 2, 16, 4, 99, 16),
):
    torch.manual_seed(0)
    a, b = lines(m, k, rows[0], dtype, gap, batch), lines(k, n, rows[1], dtype, gap, batch)
    out_dtype = torch.int32 if dtype is torch.int8 else torch.float32
    out = lines(m, n, rows[2], out_dtype, gap, batch)
    tile_m, tile_n, tile_k = 32, 64, 32
    tiles = -(-m // tile_m) * -(-n // tile_n) * batch
    sums = torch.zeros(tiles * split_k * tile_m * tile_n, dtype=out_dtype)
    counters = torch.zeros(tiles, dtype=torch.int32)
    strides = [leading(one) for one in (a, b, out)] + [one.stride(0) for one in (a, b, out)]
    for _ in range(2):  # counters are left as they were
        gemm[(min(ctas, tiles * split_k),)](
            **operands(None, a, b, out, *strides), m=m, n=n, k=k, batch=batch,
            k_tiles=-(-(-(-k // tile_k)) // split_k), along_m=ctas % 2, swizzle=2, split_k=split_k,
            partials=sums, counters=counters, tile_m=tile_m, tile_n=tile_n, tile_k=tile_k, epi_n=32,
            vector=vector, out_vector=out_vector, a_contiguous=rows[0], b_contiguous=rows[1],
            d_contiguous=rows[2], sums_dtype=tl.int32 if dtype is torch.int8 else tl.float32,
        )
    assert torch.equal(out.double(), a.double() @ b.double()), (m, n, k, dtype)
    beyond = out.as_strided((batch, n if not rows[2] else m, gap), (out.stride(0), leading(out), 1),
                            out.storage_offset() + (n if rows[2] else m))
    assert not gap or (beyond.isnan().all() if out_dtype.is_floating_point else (beyond == 77).all())
"""


@pytest.mark.slow
def test_products_are_exact_and_nothing_else_is_read_or_written() -> None:
    """By Triton's interpreter, on a CPU: ragged, poisoned between lines, batched, with splits of k; whole
    numbers, of which every sum is exact. bf16 is left out: the interpreter has its bits as integers."""
    run_interpreted(PROGRAM)


def test_stages_are_buffers_whatever_multiplies() -> None:
    from tunegemm.generate.triton import multiplies_asynchronously

    config = KernelConfig.from_mapping(
        GOOD
        | dict.fromkeys(("a_major", "b_major"), "k")
        | {"in_dtype": "int8", "out_dtype": "int32", "out_major": "n"}
    )
    by_wgmma = [one.number for one in ARCHITECTURES.values() if multiplies_asynchronously(config, one)]
    assert by_wgmma == [90], "Triton has no tcgen05.mma of int8"
    halves = replace(config, in_dtype="bf16", out_dtype="bf16")
    assert [one.number for one in ARCHITECTURES.values() if multiplies_asynchronously(halves, one)] == [
        90, 100, 103, 110
    ]  # fmt: skip
    assert families.get("triton") is FAMILY
