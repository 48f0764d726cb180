"""Numerics of the Hopper kernels on the GPU, against fp32, on ragged, strided, batched and tiny shapes."""

import pytest
import torch

from tests.support.kernels import Kernels
from tests.support.numerics import (
    TOLERANCE,
    check_bits,
    check_product,
    check_refusals,
    check_views,
    operand,
    poisoned,
    relative_error,
)
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate.cute_sm90 import FAMILY
from tunegemm.generate.feasibility import FEASIBLE

pytestmark = pytest.mark.gpu

NAMES = ("schedule", "tile_m", "tile_n", "tile_k", "stages", "cluster_m", "cluster_n", "epi_n", "swap_ab")
KERNELS = [
    ("cooperative", 128, 256, 64, 4, 2, 1, 32, False),
    ("cooperative", 256, 128, 64, 4, 1, 2, 64, False),
    ("cooperative", 192, 160, 64, 4, 1, 1, 32, False),
    ("cooperative", 64, 96, 128, 4, 1, 1, 32, False),
    ("cooperative", 128, 176, 64, 5, 2, 1, 16, False),
    ("pingpong", 128, 128, 64, 6, 1, 2, 32, False),
    ("pingpong", 128, 192, 64, 4, 2, 2, 32, False),
    ("pingpong", 64, 256, 64, 4, 4, 1, 64, False),
    ("pingpong", 192, 112, 64, 3, 1, 1, 16, False),
    ("pingpong", 64, 16, 128, 8, 1, 1, 16, False),
    ("cooperative", 128, 16, 64, 6, 1, 1, 16, True),
    ("pingpong", 64, 32, 128, 6, 2, 1, 32, True),
    ("cooperative", 256, 48, 64, 4, 1, 1, 16, True),
    ("cooperative", 128, 256, 64, 4, 2, 1, 0, False),
    ("pingpong", 128, 64, 64, 9, 1, 4, 0, False),
    ("pingpong", 64, 128, 64, 9, 4, 2, 32, False),
    ("cooperative", 64, 16, 128, 9, 1, 1, 0, True),
]
LAUNCHES = [
    ("along_m", 1, "all", 1, "none"),
    ("along_n", 2, "balanced", 1, "b_first"),
    ("along_m", 4, "balanced", 3, "a_first"),
    ("along_n", 16, "all", 2, "none"),
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
        "cute_sm90",
        dict(zip(NAMES, kernel, strict=True)),
        dict(zip(("raster_order", "swizzle_size", "ctas", "split_k", "l2_hint"), launch, strict=True)),
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
        if verdict.rule == "shared_memory":  # an fp32 output stages twice the bytes
            compile_params = dict(chosen.compile_params) | {"stages": 2}
            chosen = Candidate.make(chosen.family, compile_params, dict(chosen.launch_params))
            verdict = FAMILY.check(problem, chosen, kernels.device)
        if verdict.rule in ("cluster_fits", "swap_fits", "split_fits"):
            verdict = FEASIBLE  # these look at speed: the kernel must be right all the same
        assert verdict, (problem, verdict)
        check_product(kernels.load(problem, chosen), problem, FAMILY.label(chosen), pad=pad)
        launched += 1
    assert launched >= 3


@pytest.mark.parametrize("layout", ["tn", "tt", "nn", "nt"])
@pytest.mark.parametrize("shape", ["1023x1025x1027", "520x264x1001", "264x521x512x3", "7x9x11"])
def test_right_on_operands_that_tma_refuses(kernels: Kernels, shape: str, layout: str) -> None:
    problem = Problem.parse(shape, layout=layout)
    launch = kernels.load(problem, candidate(KERNELS[5]))
    a = operand(problem.a_major == "k", problem.m, problem.k, problem.batch, 0, "bf16")
    b = operand(problem.b_major == "n", problem.k, problem.n, problem.batch, 0, "bf16")
    out = poisoned(problem.batch, problem.m, problem.n)
    if problem.batch == 1:
        a, b, out = a[0], b[0], out[0]
    launch(a, b, out)
    assert relative_error(out, a, b) < TOLERANCE["bf16"], problem
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(a, b, out)
    out.fill_(torch.nan)
    graph.replay()
    assert relative_error(out, a, b) < TOLERANCE["bf16"], (problem, "in a graph")


def test_back_to_back_runs_agree_bitwise(kernels: Kernels) -> None:
    problem = Problem.parse("2048x2112x1000")
    a = torch.randn(2048, 1000, device="cuda").bfloat16()
    b = torch.randn(2112, 1000, device="cuda").bfloat16().t()
    for kernel in KERNELS:
        chosen = candidate(kernel)
        check_bits(kernels.load(problem, chosen), a, b, FAMILY.label(chosen))


def test_refuses_what_tma_cannot_read(kernels: Kernels) -> None:
    check_refusals(kernels.load(Problem.parse("512x512x512"), candidate(KERNELS[0])))


def test_views_with_an_aligned_offset_are_right(kernels: Kernels) -> None:
    check_views(kernels.load(Problem.parse("512x512x512"), candidate(KERNELS[5])))
