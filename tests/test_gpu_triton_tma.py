"""Numerics of the Triton kernels on the GPU, against fp32, on ragged, strided, batched and tiny shapes."""

import threading
from collections.abc import Iterator

import pytest
import torch

from tests.numerics import DTYPES, TOLERANCE, operand, relative_error
from tests.processes import compile_workers
from tunegemm.artifacts import ArtifactStore
from tunegemm.compile import CompilePool
from tunegemm.device import Device, find_device
from tunegemm.families import Launcher
from tunegemm.families.triton_tma import FAMILY
from tunegemm.feasibility import FEASIBLE
from tunegemm.problem import Problem
from tunegemm.space import Candidate

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
def device() -> Device:
    return find_device("cuda:0")


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory, device: Device) -> Iterator[CompilePool]:
    with CompilePool(ArtifactStore(tmp_path_factory.mktemp("objects")), workers=compile_workers()) as pool:
        for layout, in_dtype, out_dtype in KINDS:  # all at once, on all cores
            problem = Problem.parse("512x512x512", dtype=in_dtype, out_dtype=out_dtype, layout=layout)
            for kernel in KERNELS:
                pool.submit("triton_tma", FAMILY.kernel_key(problem, candidate(kernel), device))
        yield pool


def candidate(kernel: tuple[str | int, ...], launch: tuple[str | int, ...] = LAUNCHES[0]) -> Candidate:
    return Candidate.make(
        "triton_tma",
        dict(zip(NAMES, kernel, strict=True)),
        dict(zip(("raster_order", "swizzle_size", "ctas", "split_k"), launch, strict=True)),
    )


def load(device: Device, pool: CompilePool, problem: Problem, chosen: Candidate) -> Launcher:
    result = pool.submit("triton_tma", FAMILY.kernel_key(problem, chosen, device)).result()
    assert result.artifact is not None, result.failure
    return FAMILY.load(problem, chosen, device, result.artifact.path)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: FAMILY.label(candidate(kernel).kernel))
@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_right_on_every_shape(
    device: Device, pool: CompilePool, kernel: tuple[str | int, ...], kind: tuple[str, str, str]
) -> None:
    layout, in_dtype, out_dtype = kind
    launched = 0
    for i, (m, n, k, batch, pad) in enumerate(SHAPES):
        problem = Problem.parse(f"{m}x{n}x{k}x{batch}", dtype=in_dtype, out_dtype=out_dtype, layout=layout)
        chosen = candidate(kernel, LAUNCHES[i % len(LAUNCHES)])
        verdict = FAMILY.check(problem, chosen, device)
        if verdict.rule in ("reduction", "two_fits"):
            chosen = candidate(kernel, LAUNCHES[i % 2])
            verdict = FAMILY.check(problem, chosen, device)
        if verdict.rule == "shared_memory":  # an fp32 output stages twice the bytes
            compile_params = dict(chosen.compile_params) | {"stages": 2}
            chosen = Candidate.make(chosen.family, compile_params, dict(chosen.launch_params))
            verdict = FAMILY.check(problem, chosen, device)
        if verdict.rule in ("two_fits", "swap_fits", "split_fits"):
            verdict = FEASIBLE  # these look at speed: the kernel must be right all the same
        if verdict.rule == "warp_specialization" and batch > 1:
            continue
        assert verdict, (problem, verdict)
        launch = load(device, pool, problem, chosen)
        a = operand(problem.a_major == "k", m, k, batch, pad, in_dtype)
        b = operand(problem.b_major == "n", k, n, batch, pad, in_dtype)
        whole = torch.full((batch, m + 3, n + pad), torch.nan, dtype=DTYPES[out_dtype], device="cuda")
        out = whole[:, :m, :n]
        if batch == 1:
            a, b, out = a[0], b[0], out[0]
        for _ in range(2):  # the second launch finds the first one's arguments and counters
            out.fill_(torch.nan)
            launch(a, b, out)
            torch.cuda.synchronize()
            error = relative_error(out, a, b)
            assert error < TOLERANCE[out_dtype], (problem, FAMILY.label(chosen), error)
        untouched = int(whole.isnan().sum()) - int(out.isnan().sum())
        assert untouched == whole.numel() - out.numel(), (problem, "wrote outside its output")
        launched += 1
    assert launched >= 5


@pytest.mark.parametrize("schedule", ["pipelined", "flattened", "warp_specialized"])
def test_an_output_whose_columns_are_contiguous(device: Device, pool: CompilePool, schedule: str) -> None:
    problem = Problem(520, 264, 512, out_major="m")
    kernel = next(kernel for kernel in KERNELS if kernel[0] == schedule)
    launch = load(device, pool, problem, candidate(kernel))
    a, b = operand(True, 520, 512, 1, 0, "bf16")[0], operand(False, 512, 264, 1, 0, "bf16")[0]
    out = torch.full((264, 520), torch.nan, device="cuda").bfloat16().t()
    launch(a, b, out)
    assert relative_error(out, a, b) < TOLERANCE["bf16"]


def test_back_to_back_runs_agree_bitwise(device: Device, pool: CompilePool) -> None:
    """A race would move the result; the order of additions is fixed, so equal inputs give equal bits."""
    problem = Problem.parse("2048x2112x1000")
    a = torch.randn(2048, 1000, device="cuda").bfloat16()
    b = torch.randn(2112, 1000, device="cuda").bfloat16().t()
    for kernel in KERNELS:
        for launch_values in LAUNCHES if kernel[0] == "pipelined" else LAUNCHES[:2]:
            chosen = candidate(kernel, launch_values)
            launch = load(device, pool, problem, chosen)
            outs = [torch.full((2048, 2112), torch.nan, device="cuda").bfloat16() for _ in range(20)]
            for out in outs:
                launch(a, b, out)
            assert all(torch.equal(outs[0], out) for out in outs[1:]), FAMILY.label(chosen)


def test_split_k_does_not_depend_on_who_is_last(device: Device, pool: CompilePool) -> None:
    """A long k over many parts, on two streams at once and replayed from a graph: the same bits."""
    problem = Problem.parse("256x256x16384")
    chosen = candidate(("pipelined", 128, 128, 64, 4, 8, 64, False), ("along_m", 1, "all", 16))
    assert FAMILY.check(problem, chosen, device)
    launch = load(device, pool, problem, chosen)
    a = torch.randn(256, 16384, device="cuda").bfloat16()
    b = torch.randn(256, 16384, device="cuda").bfloat16().t()
    outs = [torch.full((256, 256), torch.nan, device="cuda").bfloat16() for _ in range(41)]
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


def test_refuses_what_tma_cannot_read(device: Device, pool: CompilePool) -> None:
    launch = load(device, pool, Problem.parse("512x512x512"), candidate(KERNELS[0]))
    a, out = (torch.zeros(512, 512, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    shifted = torch.zeros(512 * 512 + 1, device="cuda", dtype=torch.bfloat16)[1:].view(512, 512)
    with pytest.raises(ValueError, match="multiple of the 16 B"):
        launch(a, shifted.t(), out)
    padded = torch.zeros(512, 516, device="cuda", dtype=torch.bfloat16)[:, :512]
    with pytest.raises(ValueError, match="leading dimension 516"):
        launch(padded, a.t(), out)


def test_views_with_an_aligned_offset_are_right(device: Device, pool: CompilePool) -> None:
    for kernel in (KERNELS[0], KERNELS[6], KERNELS[10]):
        launch = load(device, pool, Problem.parse("512x512x512"), candidate(kernel))
        a = torch.randn(1024, 1024, device="cuda").bfloat16()[256:768, 64:576]
        b = torch.randn(700, 1024, device="cuda").bfloat16()[100:612, 512:].t()
        out = torch.full((600, 1024), torch.nan, device="cuda").bfloat16()[8:520, 8:520]
        launch(a, b, out)
        assert relative_error(out, a, b) < TOLERANCE["bf16"]


def test_a_thread_that_never_used_cuda_can_launch(device: Device, pool: CompilePool) -> None:
    launch = load(device, pool, Problem.parse("512x512x512"), candidate(KERNELS[6]))
    a, b = (torch.randn(512, 512, device="cuda").bfloat16() for _ in range(2))
    out = torch.full((512, 512), torch.nan, device="cuda").bfloat16()
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


def test_host_cost_of_a_launch(device: Device, pool: CompilePool) -> None:
    """A launch with known operands is a look-up and one driver call; a generous bound for busy hosts."""
    import time

    launch = load(device, pool, Problem.parse("512x512x512"), candidate(KERNELS[6]))
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
