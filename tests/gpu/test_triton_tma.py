"""Numerics of the Triton kernels on the GPU, against fp32, on ragged, strided, batched and tiny shapes."""

import threading
import time

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
from tunegemm.generate.feasibility import FEASIBLE
from tunegemm.generate.triton_tma import FAMILY

pytestmark = pytest.mark.gpu

NAMES = ("schedule", "tile_m", "tile_n", "tile_k", "stages", "warps", "epi_n", "swap_ab")
KERNELS = [
    ("pipelined", 128, 256, 64, 3, 8, 64, False),
    ("pipelined", 256, 128, 64, 3, 8, 32, False),
    ("pipelined", 64, 128, 64, 4, 4, 64, False),
    ("pipelined", 64, 128, 128, 2, 8, 32, False),
    ("pipelined", 64, 16, 128, 5, 4, 16, True),
    ("pipelined", 512, 64, 64, 2, 8, 32, False),
    ("flattened", 128, 128, 64, 4, 8, 64, False),
    ("flattened", 128, 128, 64, 3, 4, 32, False),
    ("flattened", 128, 256, 64, 3, 8, 32, False),
    ("flattened", 64, 32, 128, 4, 4, 32, True),
    ("warp_specialized", 128, 128, 64, 3, 4, 128, False),
    ("warp_specialized", 128, 256, 64, 3, 4, 256, False),
    ("warp_specialized", 256, 64, 64, 4, 4, 64, False),
]
LAUNCHES = [
    ("along_m", 1, "all", 1),
    ("along_n", 2, "balanced", 1),
    ("along_m", 4, "two_per_sm", 3),
    ("along_n", 16, "all", 2),
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
        "triton_tma",
        dict(zip(NAMES, kernel, strict=True)),
        dict(zip(("raster_order", "swizzle_size", "ctas", "split_k"), launch, strict=True)),
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
        if verdict.rule in ("reduction", "two_fits"):
            chosen = candidate(kernel, LAUNCHES[i % 2])
            verdict = FAMILY.check(problem, chosen, kernels.device)
        if verdict.rule == "shared_memory":  # an fp32 output stages twice the bytes
            compile_params = dict(chosen.compile_params) | {"stages": 2}
            chosen = Candidate.make(chosen.family, compile_params, dict(chosen.launch_params))
            verdict = FAMILY.check(problem, chosen, kernels.device)
        if verdict.rule in ("two_fits", "swap_fits", "split_fits"):
            verdict = FEASIBLE  # these look at speed: the kernel must be right all the same
        if verdict.rule == "warp_specialization" and batch > 1:
            continue
        assert verdict, (problem, verdict)
        check_product(kernels.load(problem, chosen), problem, FAMILY.label(chosen), pad=pad, runs=2)
        launched += 1
    assert launched >= 5


@pytest.mark.parametrize("schedule", ["pipelined", "flattened", "warp_specialized"])
def test_an_output_whose_columns_are_contiguous(kernels: Kernels, schedule: str) -> None:
    problem = Problem(520, 264, 512, out_major="m")
    kernel = next(kernel for kernel in KERNELS if kernel[0] == schedule)
    launch = kernels.load(problem, candidate(kernel))
    a, b = operand(True, 520, 512, 1, 0, "bf16")[0], operand(False, 512, 264, 1, 0, "bf16")[0]
    out = poisoned(264, 520).t()
    launch(a, b, out)
    assert relative_error(out, a, b) < TOLERANCE["bf16"]


def test_back_to_back_runs_agree_bitwise(kernels: Kernels) -> None:
    problem = Problem.parse("2048x2112x1000")
    a = torch.randn(2048, 1000, device="cuda").bfloat16()
    b = torch.randn(2112, 1000, device="cuda").bfloat16().t()
    for kernel in KERNELS:
        for launch_values in LAUNCHES if kernel[0] == "pipelined" else LAUNCHES[:2]:
            chosen = candidate(kernel, launch_values)
            check_bits(kernels.load(problem, chosen), a, b, FAMILY.label(chosen))


def test_split_k_does_not_depend_on_who_is_last(kernels: Kernels) -> None:
    """A long k over many parts, on two streams at once and replayed from a graph: the same bits."""
    problem = Problem.parse("256x256x16384")
    chosen = candidate(("pipelined", 128, 128, 64, 4, 8, 64, False), ("along_m", 1, "all", 16))
    assert FAMILY.check(problem, chosen, kernels.device)
    launch = kernels.load(problem, chosen)
    a = torch.randn(256, 16384, device="cuda").bfloat16()
    b = torch.randn(256, 16384, device="cuda").bfloat16().t()
    outs = [poisoned(256, 256) for _ in range(41)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for i, out in enumerate(outs[:40]):
        with torch.cuda.stream(side if i % 2 else torch.cuda.current_stream()):
            launch(a, b, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(a, b, outs[40])
    for _ in range(3):
        outs[40].fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(outs[0], out) for out in outs[1:])
    assert relative_error(outs[0], a, b) < TOLERANCE["bf16"]


def test_refuses_what_tma_cannot_read(kernels: Kernels) -> None:
    check_refusals(kernels.load(Problem.parse("512x512x512"), candidate(KERNELS[0])))


def test_views_with_an_aligned_offset_are_right(kernels: Kernels) -> None:
    for kernel in (KERNELS[0], KERNELS[6], KERNELS[10]):
        check_views(kernels.load(Problem.parse("512x512x512"), candidate(kernel)))


def test_a_thread_that_never_used_cuda_can_launch(kernels: Kernels) -> None:
    launch = kernels.load(Problem.parse("512x512x512"), candidate(KERNELS[6]))
    a, b = (torch.randn(512, 512, device="cuda").bfloat16() for _ in range(2))
    out = poisoned(512, 512)
    torch.cuda.synchronize()
    failed: list[BaseException] = []

    def run() -> None:
        try:
            launch(a, b.t(), out)
        except BaseException as error:  # reported by the test's own thread
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert failed == []
    assert relative_error(out, a, b.t()) < TOLERANCE["bf16"]


def test_host_cost_of_a_launch(kernels: Kernels) -> None:
    """A launch with known operands is a look-up and one driver call; a generous bound for busy hosts."""
    launch = kernels.load(Problem.parse("512x512x512"), candidate(KERNELS[6]))
    a, b, out = (torch.zeros(512, 512, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    b = b.t()
    best_us = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(200):
            launch(a, b, out)
        best_us = min(best_us, (time.perf_counter() - start) / 200 * 1e6)
    print(f"launch: {best_us:.1f} us on the host")
    assert best_us < 30
