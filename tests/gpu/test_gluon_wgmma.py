"""Numerics of the Gluon kernels on the GPU, against fp32, on ragged, strided, batched and tiny shapes."""

import pytest
import torch

from tests.support.kernels import Kernels
from tests.support.numerics import TOLERANCE, check_bits, check_product, check_refusals, relative_error
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate.feasibility import FEASIBLE
from tunegemm.generate.gluon_wgmma import FAMILY

pytestmark = pytest.mark.gpu

NAMES = (
    "schedule", "tile_m", "tile_n", "tile_k", "stages", "warps", "instr_n", "lhs_in_registers", "occupancy",
    "swap_ab",
)  # fmt: skip
KERNELS = [
    ("blocking", 64, 256, 128, 1, 4, 256, False, 2, False),
    ("blocking", 128, 64, 64, 1, 8, 32, True, 2, False),
    ("blocking", 64, 128, 64, 1, 8, 256, False, 2, False),
    ("pipelined", 128, 128, 64, 2, 4, 256, False, 2, False),
    ("pipelined", 128, 256, 64, 2, 8, 256, True, 1, False),
    ("multistage", 128, 256, 64, 3, 8, 256, False, 1, False),
    ("multistage", 256, 64, 32, 4, 4, 256, True, 2, False),
    ("multistage", 64, 8, 128, 4, 4, 256, False, 2, True),
    ("cooperative", 128, 256, 64, 4, 8, 256, False, 1, False),
    ("cooperative", 256, 128, 64, 4, 8, 256, False, 1, False),
    ("cooperative", 128, 128, 64, 5, 8, 128, True, 1, False),
    ("cooperative", 64, 256, 64, 2, 4, 128, False, 2, False),
    ("cooperative", 128, 16, 128, 3, 8, 256, False, 1, True),
    ("pingpong", 128, 128, 64, 6, 8, 256, False, 1, False),
    ("pingpong", 64, 256, 64, 3, 8, 256, True, 1, False),
    ("pingpong", 64, 32, 128, 4, 8, 256, False, 2, False),
]
LAUNCHES = [
    ("along_m", 1, "all"),
    ("along_n", 2, "balanced"),
    ("along_m", 4, "balanced"),
    ("along_n", 16, "all"),
]
# m, n, k, batch and the padding of each row, in elements
SHAPES = [
    (512, 512, 512, 1, 0),
    (1000, 1032, 520, 1, 0),
    (8, 8, 8, 1, 0),
    (72, 264, 1096, 1, 8),
    (304, 520, 136, 3, 0),
    (2048, 2112, 1000, 1, 16),
]
KINDS = [
    ("tn", "bf16", "bf16"), ("tt", "bf16", "bf16"), ("nn", "fp16", "fp16"), ("nt", "bf16", "fp32"),
    ("tn", "fp16", "fp32"), ("tt", "fp16", "bf16"),
]  # fmt: skip


@pytest.fixture(scope="module")
def kernels(kernels: Kernels) -> Kernels:
    for layout, in_dtype, out_dtype in KINDS:
        problem = Problem.parse("512x512x512", dtype=in_dtype, out_dtype=out_dtype, layout=layout)
        for kernel in KERNELS:
            kernels.begin(problem, candidate(kernel))
    return kernels


def candidate(kernel: tuple[str | int, ...], launch: tuple[str | int, ...] = LAUNCHES[0]) -> Candidate:
    return Candidate.make(
        "gluon_wgmma",
        dict(zip(NAMES, kernel, strict=True)),
        dict(zip(("raster_order", "swizzle_size", "ctas"), launch, strict=True)),
    )


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: FAMILY.label(candidate(kernel).kernel))
@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_right_on_every_shape(
    kernels: Kernels, kernel: tuple[str | int, ...], kind: tuple[str, str, str]
) -> None:
    layout, in_dtype, out_dtype = kind
    launched = 0
    for i, (m, n, k, batch, pad) in enumerate(SHAPES):
        problem = Problem.parse(f"{m}x{n}x{k}x{batch}", dtype=in_dtype, out_dtype=out_dtype, layout=layout)
        chosen = candidate(kernel, LAUNCHES[i % len(LAUNCHES)])
        verdict = FAMILY.check(problem, chosen, kernels.device)
        if verdict.rule == "narrow_lines":
            pytest.skip(verdict.reason)
        if (verdict.rule or "").endswith("_fits"):  # these look at speed: it must be right all the same
            verdict = FEASIBLE
        assert verdict, (problem, verdict)
        check_product(kernels.load(problem, chosen), problem, FAMILY.label(chosen), pad=pad)
        launched += 1
    assert launched == len(SHAPES)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: FAMILY.label(candidate(kernel).kernel))
def test_back_to_back_runs_agree_bitwise(kernels: Kernels, kernel: tuple[str | int, ...]) -> None:
    problem = Problem.parse("2048x2112x1000")
    a = torch.randn(2048, 1000, device="cuda").bfloat16()
    b = torch.randn(2112, 1000, device="cuda").bfloat16().t()
    check_bits(kernels.load(problem, candidate(kernel)), a, b, FAMILY.label(candidate(kernel)))


def test_refuses_what_tma_cannot_read(kernels: Kernels) -> None:
    check_refusals(kernels.load(Problem.parse("512x512x512"), candidate(KERNELS[8])))


def test_a_captured_launch_replays(kernels: Kernels) -> None:
    problem = Problem.parse("512x512x512")
    launch = kernels.load(problem, candidate(KERNELS[13]))
    a, b = (torch.randn(512, 512, device="cuda").bfloat16() for _ in range(2))
    out = torch.zeros(512, 512, device="cuda", dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(a, b.t(), out)
    a.copy_(torch.randn(512, 512, device="cuda"))
    graph.replay()
    torch.cuda.synchronize()
    assert relative_error(out, a, b.t()) < TOLERANCE["bf16"]
