"""Numerics of the Ampere kernels on the GPU, against fp32, at every alignment, ragged, batched and tiny."""

from functools import cache

import pytest
import torch

from tests.support.kernels import Kernels, selected
from tests.support.numerics import (
    TOLERANCE,
    Case,
    Examples,
    check_bits,
    difference,
    poisoned,
    untouched,
)
from tests.support.sampled import covering
from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate.cute_sm80 import FAMILY
from tunegemm.generate.cute_sm80.rules import config_of
from tunegemm.measure.operands import tolerance

pytestmark = pytest.mark.gpu

NAMES = (
    "tile_m",
    "tile_n",
    "tile_k",
    "stages",
    "warps_m",
    "warps_n",
    "atoms_n",
    "smem_swizzle",
    "ctas_per_sm",
)
KERNELS = [
    (128, 128, 32, 3, 2, 2, 2, 2, 1),
    (128, 128, 64, 4, 2, 4, 2, 3, 1),
    (128, 256, 32, 4, 2, 4, 2, 2, 1),
    (64, 64, 64, 4, 2, 2, 2, 3, 2),
    (64, 128, 32, 5, 2, 2, 1, 2, 2),
    (256, 64, 32, 3, 4, 1, 2, 0, 1),
    (32, 64, 64, 6, 1, 2, 2, 2, 2),
    (64, 192, 64, 2, 2, 2, 2, 3, 1),
    (32, 32, 32, 2, 1, 1, 1, 0, 1),
]
LAUNCHES = [
    ("along_m", 1, "tiles", 1),
    ("along_n", 2, "balanced", 1),
    ("along_m", 4, "all", 3),
    ("along_n", 16, "tiles", 2),
]
EXAMPLES = Examples(
    "cute_sm80",
    NAMES,
    KERNELS,
    ("raster_order", "swizzle_size", "ctas", "split_k"),
    LAUNCHES,
    of_each_schedule=(0, 5, 8),
    refusals=frozenset({"copies", "registers", "shared_memory"}),
    fixed={"vector_bytes": 16, "acc_dtype": "fp32"},
)
# m, n, k, batch; gap between lines and offset of the first element, in elements
SHAPES = [
    (512, 512, 512, 1, 0, 0),
    (1000, 1032, 1001, 1, 0, 0),  # odd rows
    (1001, 1003, 999, 1, 0, 0),
    (7, 5, 3, 1, 0, 0),
    (1, 1, 1, 1, 0, 0),
    (129, 257, 1096, 1, 7, 0),  # rows of an odd pitch
    (300, 520, 136, 3, 0, 1),  # packed, at an odd offset
    (301, 523, 137, 3, 0, 0),  # batch entries an odd number of elements apart
    (520, 264, 1000, 1, 2, 2),  # 4 bytes
    (520, 264, 1000, 1, 4, 4),  # 8 bytes
    (65, 66, 67, 1, 69, 3),  # aligned pitch of 136 or so, odd offset
    (2048, 2112, 1000, 1, 24, 8),
]
KINDS = [
    ("tn", "bf16", "bf16"), ("tt", "bf16", "bf16"), ("nn", "fp16", "fp16"), ("nt", "bf16", "fp32"),
    ("tn", "fp16", "fp32"), ("tt", "fp16", "bf16"),
]  # fmt: skip


@pytest.fixture(scope="module")
def kernels(kernels: Kernels, request: pytest.FixtureRequest) -> Kernels:
    sizes, pairs = selected(request, "vector_bytes"), selected(request, "kind", "kernel")
    kernels.begin_all(
        (square(kind, size), candidate(kernel, size))
        for kind, kernel, size in compiled_of(kernels.device)
        if (kind == KINDS[0] and (size,) in sizes) or (kind, kernel) in pairs
    )
    return kernels


Sized = tuple[tuple[str, str, str], tuple[int, ...], int]


def square(kind: tuple[str, str, str], size: int) -> Problem:
    layout, in_dtype, out_dtype = kind
    return Problem.parse("512x512x512", dtype=in_dtype, out_dtype=out_dtype, layout=layout, alignment=size)


@cache
def compiled_of(device: Device) -> list[Sized]:
    """Kind, kernel and bytes of its vectors: each two of them together, and those that launches repeat."""
    every = [(kind, kernel, size) for kind in KINDS for kernel in KERNELS for size in (2, 4, 8, 16)]

    def runs(case: Sized) -> bool:
        kind, kernel, size = case
        return FAMILY.check(square(kind, size), candidate(kernel, size), device).runs

    there = [*filter(runs, every)]
    return covering(there, given=[case for case in there if case[0] == KINDS[0] and case[2] in (2, 16)])


def candidate(
    kernel: tuple[int, ...],
    vector_bytes: int = 16,
    launch: tuple[str | int, ...] = LAUNCHES[0],
    acc_dtype: str = "fp32",
) -> Candidate:
    return Candidate.make(
        "cute_sm80",
        dict(zip(NAMES, kernel, strict=True)) | {"vector_bytes": vector_bytes, "acc_dtype": acc_dtype},
        dict(zip(("raster_order", "swizzle_size", "ctas", "split_k"), launch, strict=True)),
    )


def operand(
    row_major: bool, rows: int, columns: int, batch: int, gap: int, offset: int, dtype: str
) -> torch.Tensor:
    """Random (batch, rows, columns); all memory around and between its lines is NaN."""
    outer, inner = (rows, columns) if row_major else (columns, rows)
    pitch = inner + gap
    room = poisoned(offset + batch * outer * pitch + 8, dtype=dtype)
    values = room[offset : offset + batch * outer * pitch].view(batch, outer, pitch)[:, :, :inner]
    values.copy_(torch.randn(batch, outer, inner, device="cuda"))
    return values if row_major else values.mT


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: FAMILY.label(candidate(kernel).kernel))
@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_right_at_every_alignment(
    kernels: Kernels, kernel: tuple[int, ...], kind: tuple[str, str, str]
) -> None:
    layout, in_dtype, out_dtype = kind
    launched = set()
    for i, (m, n, k, batch, gap, offset) in enumerate(SHAPES):
        packed = Problem.parse(f"{m}x{n}x{k}x{batch}", dtype=in_dtype, out_dtype=out_dtype, layout=layout)
        a = operand(packed.a_major == "k", m, k, batch, gap, offset, in_dtype)
        b = operand(packed.b_major == "n", k, n, batch, gap, offset, in_dtype)
        whole = poisoned(batch, m + 3, n + gap, dtype=out_dtype)
        out = whole[:, :m, :n]
        if batch == 1:
            a, b, out = a[0], b[0], out[0]
        expected = torch.matmul(a.float(), b.float())
        best = Problem.from_tensors(a, b, out_dtype=out.dtype)
        # The widest vector, and every narrower one: those read the same operands.
        for vector_bytes in (size for size in (2, 4, 8, 16) if size <= best.alignment):
            chosen = candidate(kernel, vector_bytes, LAUNCHES[i % len(LAUNCHES)])
            problem = Problem(
                m, n, k, batch, in_dtype, out_dtype, packed.a_major, packed.b_major, alignment=vector_bytes
            )
            verdict = FAMILY.check(problem, chosen, kernels.device)
            if verdict.rule in ("copies", "registers", "shared_memory"):
                continue
            assert verdict.runs, (problem, verdict)  # rules that look at speed may object
            if (kind, kernel, vector_bytes) not in compiled_of(kernels.device):
                continue
            launch = kernels.load(problem, chosen)
            whole.fill_(torch.nan)
            launch(a, b, out)
            torch.cuda.synchronize()
            error = difference(out, expected)
            assert error < TOLERANCE[out_dtype], (problem, gap, offset, FAMILY.label(chosen), error)
            assert untouched(whole, out), (problem, "wrote outside its output")
            launched.add(vector_bytes)
    assert launched, "no alignment of this kernel was feasible"


@pytest.mark.parametrize("split_k", [1, 3])
@pytest.mark.parametrize("vector_bytes", [2, 16])
def test_back_to_back_runs_agree_bitwise(kernels: Kernels, vector_bytes: int, split_k: int) -> None:
    gap = 1 if vector_bytes == 2 else 0
    problem = Problem(1000, 1032, 1000, alignment=vector_bytes)
    a = operand(True, 1000, 1000, 1, gap, 0, "bf16")[0]
    b = operand(False, 1000, 1032, 1, gap, 0, "bf16")[0]
    for kernel in KERNELS:
        chosen = candidate(kernel, vector_bytes, ("along_m", 4, "tiles", split_k))
        verdict = FAMILY.check(problem, chosen, kernels.device)
        if not verdict.runs:
            continue
        check_bits(kernels.load(problem, chosen), a, b, FAMILY.label(chosen))


def test_half_accumulators_are_as_exact_as_their_rule_says(kernels: Kernels) -> None:
    problem = Problem.parse("512x512x512", dtype="fp16")
    chosen = candidate(KERNELS[0], acc_dtype="fp16")
    assert FAMILY.check(problem, chosen, kernels.device)
    case = Case.of(problem)
    kernels.load(problem, chosen)(*case.operands.arguments)
    assert 1e-4 < case.checked().relative_error < tolerance(problem)


def test_output_of_any_stride_and_major(kernels: Kernels) -> None:
    """Vectors where the output's lines are aligned, elements where not, and the same kernel does both."""
    for out_major in ("n", "m"):
        problem = Problem(200, 264, 136, out_major=out_major)
        chosen = candidate(KERNELS[0])
        assert config_of(problem, chosen).out_major == out_major
        launch = kernels.load(problem, chosen)
        a = torch.randn(200, 136, device="cuda").bfloat16()
        b = torch.randn(264, 136, device="cuda").bfloat16().t()
        expected = a.float() @ b.float()
        lines, extent = (200, 264) if out_major == "n" else (264, 200)
        for gap, offset in ((0, 0), (8, 8), (1, 0), (8, 3)):
            room = poisoned(offset + lines * (extent + gap))
            out = room[offset:].view(lines, extent + gap)[:, :extent]
            out = out if out_major == "n" else out.t()
            launch(a, b, out)
            error = difference(out, expected)
            assert error < TOLERANCE["bf16"], (out_major, gap, offset, error)
            assert untouched(room, out)
