"""Numerics of the Hopper kernels on the GPU, against fp32, on ragged, strided, batched and tiny shapes."""

from collections.abc import Iterator

import pytest
import torch

from tests.numerics import DTYPES, TOLERANCE, operand
from tests.processes import compile_workers
from tunegemm.artifacts import ArtifactStore
from tunegemm.compile import CompilePool
from tunegemm.device import Device, find_device
from tunegemm.families.cute_sm90 import FAMILY
from tunegemm.feasibility import FEASIBLE
from tunegemm.problem import Problem
from tunegemm.space import Candidate

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
def device() -> Device:
    return find_device("cuda:0")


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CompilePool]:
    with CompilePool(ArtifactStore(tmp_path_factory.mktemp("objects")), workers=compile_workers()) as pool:
        for layout, in_dtype, out_dtype in KINDS:  # all at once, on all cores
            problem = Problem.parse("512x512x512", dtype=in_dtype, out_dtype=out_dtype, layout=layout)
            for kernel in KERNELS:
                pool.submit("cute_sm90", FAMILY.kernel_key(problem, candidate(kernel), find_device("cuda:0")))
        yield pool


def candidate(kernel: tuple[str | int, ...], launch: tuple[str | int, ...] = LAUNCHES[0]) -> Candidate:
    return Candidate.make(
        "cute_sm90",
        dict(zip(NAMES, kernel, strict=True)),
        dict(zip(("raster_order", "swizzle_size", "ctas", "split_k", "l2_hint"), launch, strict=True)),
    )


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
        if verdict.rule == "shared_memory":  # an fp32 output stages twice the bytes
            compile_params = dict(chosen.compile_params) | {"stages": 2}
            chosen = Candidate.make(chosen.family, compile_params, dict(chosen.launch_params))
            verdict = FAMILY.check(problem, chosen, device)
        if verdict.rule in ("cluster_fits", "swap_fits", "split_fits"):
            verdict = FEASIBLE  # these look at speed: the kernel must be right all the same
        assert verdict, (problem, verdict)
        result = pool.submit("cute_sm90", FAMILY.kernel_key(problem, chosen, device)).result()
        assert result.artifact is not None, result.failure
        launch = FAMILY.load(problem, chosen, device, result.artifact.path)
        a = operand(problem.a_major == "k", m, k, batch, pad, in_dtype)
        b = operand(problem.b_major == "n", k, n, batch, pad, in_dtype)
        whole = torch.full((batch, m + 3, n + pad), torch.nan, dtype=DTYPES[out_dtype], device="cuda")
        out = whole[:, :m, :n]
        if batch == 1:
            a, b, out = a[0], b[0], out[0]
        launch(a, b, out)
        torch.cuda.synchronize()
        expected = torch.matmul(a.float(), b.float())
        error = ((out.float() - expected).norm() / expected.norm()).item()
        assert error < TOLERANCE[out_dtype], (problem, FAMILY.label(chosen), error)
        untouched = int(whole.isnan().sum()) - int(out.isnan().sum())
        assert untouched == whole.numel() - out.numel(), (problem, "wrote outside its output")
        launched += 1
    assert launched >= 3


@pytest.mark.parametrize("layout", ["tn", "tt", "nn", "nt"])
@pytest.mark.parametrize("shape", ["1023x1025x1027", "520x264x1001", "264x521x512x3", "7x9x11"])
def test_right_on_operands_that_tma_refuses(
    device: Device, pool: CompilePool, shape: str, layout: str
) -> None:
    problem = Problem.parse(shape, layout=layout)
    chosen = candidate(KERNELS[5])
    result = pool.submit("cute_sm90", FAMILY.kernel_key(problem, chosen, device)).result()
    assert result.artifact is not None, result.failure
    launch = FAMILY.load(problem, chosen, device, result.artifact.path)
    a = operand(problem.a_major == "k", problem.m, problem.k, problem.batch, 0, "bf16")
    b = operand(problem.b_major == "n", problem.k, problem.n, problem.batch, 0, "bf16")
    out = torch.full((problem.batch, problem.m, problem.n), torch.nan, device="cuda").bfloat16()
    if problem.batch == 1:
        a, b, out = a[0], b[0], out[0]
    launch(a, b, out)
    expected = torch.matmul(a.float(), b.float())
    error = ((out.float() - expected).norm() / expected.norm()).item()
    assert error < TOLERANCE["bf16"], (problem, error)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(a, b, out)
    out.fill_(torch.nan)
    graph.replay()
    assert ((out.float() - expected).norm() / expected.norm()).item() < TOLERANCE["bf16"]


def test_back_to_back_runs_agree_bitwise(device: Device, pool: CompilePool) -> None:
    """A race would move the result; the order of additions is fixed, so equal inputs give equal bits."""
    problem = Problem.parse("2048x2112x1000")
    a = torch.randn(2048, 1000, device="cuda").bfloat16()
    b = torch.randn(2112, 1000, device="cuda").bfloat16().t()
    for kernel in KERNELS:
        chosen = candidate(kernel)
        artifact = pool.submit("cute_sm90", FAMILY.kernel_key(problem, chosen, device)).result().artifact
        assert artifact is not None
        launch = FAMILY.load(problem, chosen, device, artifact.path)
        outs = [torch.full((2048, 2112), torch.nan, device="cuda").bfloat16() for _ in range(20)]
        for out in outs:
            launch(a, b, out)
        assert all(torch.equal(outs[0], out) for out in outs[1:]), FAMILY.label(chosen)


def test_refuses_what_tma_cannot_read(device: Device, pool: CompilePool) -> None:
    problem = Problem.parse("512x512x512")
    artifact = (
        pool.submit("cute_sm90", FAMILY.kernel_key(problem, candidate(KERNELS[0]), device)).result().artifact
    )
    assert artifact is not None
    launch = FAMILY.load(problem, candidate(KERNELS[0]), device, artifact.path)
    a, out = (torch.zeros(512, 512, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    shifted = torch.zeros(512 * 512 + 1, device="cuda", dtype=torch.bfloat16)[1:].view(512, 512)
    with pytest.raises(ValueError, match="multiple of the 16 B"):
        launch(a, shifted.t(), out)
    padded = torch.zeros(512, 516, device="cuda", dtype=torch.bfloat16)[:, :512]
    with pytest.raises(ValueError, match="leading dimension 516"):
        launch(padded, a.t(), out)


def test_views_with_an_aligned_offset_are_right(device: Device, pool: CompilePool) -> None:
    problem = Problem.parse("512x512x512")
    artifact = (
        pool.submit("cute_sm90", FAMILY.kernel_key(problem, candidate(KERNELS[5]), device)).result().artifact
    )
    assert artifact is not None
    launch = FAMILY.load(problem, candidate(KERNELS[5]), device, artifact.path)
    a = torch.randn(1024, 1024, device="cuda").bfloat16()[256:768, 64:576]
    b = torch.randn(700, 1024, device="cuda").bfloat16()[100:612, 512:].t()
    out = torch.full((600, 1024), torch.nan, device="cuda").bfloat16()[8:520, 8:520]
    launch(a, b, out)
    expected = a.float() @ b.float()
    assert ((out.float() - expected).norm() / expected.norm()).item() < TOLERANCE["bf16"]
