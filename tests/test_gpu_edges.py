"""Tiles at the edge of the matrix, on the GPU: the bits of a padded product, and nothing touched outside."""

from collections.abc import Iterator

import pytest
import torch

from tests.processes import compile_workers
from tests.test_gpu_cute_sm90 import candidate
from tunegemm.artifacts import ArtifactStore
from tunegemm.compile import CompilePool
from tunegemm.device import Device, find_device
from tunegemm.families import Launcher
from tunegemm.families.cute_sm90 import FAMILY
from tunegemm.problem import Problem

pytestmark = pytest.mark.gpu

KERNELS = [
    ("cooperative", 64, 64, 128, 6, 1, 2, 64, True),
    ("cooperative", 128, 256, 64, 3, 2, 1, 32, False),
    ("cooperative", 256, 48, 64, 4, 1, 1, 16, True),
    ("cooperative", 64, 16, 128, 6, 4, 1, 16, True),
    ("pingpong", 128, 192, 64, 4, 2, 2, 32, False),
    ("pingpong", 64, 256, 64, 4, 4, 1, 64, False),
    ("pingpong", 128, 64, 64, 8, 1, 4, 0, False),
    ("pingpong", 192, 96, 64, 4, 1, 2, 32, False),
]
# m, n, k, batch, parts of k
SHAPES = [
    (65, 520, 200, 1, 1),
    (129, 264, 1096, 1, 1),
    (200, 72, 264, 1, 2),
    (33, 48, 136, 1, 1),
    (1000, 1000, 1000, 1, 3),
    (264, 136, 520, 3, 1),
    (96, 1032, 2056, 1, 4),
]
LAYOUTS = ["tn", "tt", "nn", "nt"]


@pytest.fixture(scope="module")
def device() -> Device:
    return find_device("cuda:0")


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CompilePool]:
    with CompilePool(ArtifactStore(tmp_path_factory.mktemp("objects")), workers=compile_workers()) as pool:
        for layout in LAYOUTS:  # all at once, on all cores
            for kernel in KERNELS:
                key = FAMILY.kernel_key(
                    Problem.parse("512x512x512", layout=layout), candidate(kernel), find_device("cuda:0")
                )
                pool.submit("cute_sm90", key)
        yield pool


def load(pool: CompilePool, problem: Problem, kernel: tuple[str | int, ...], parts: int) -> Launcher:
    device = find_device("cuda:0")
    chosen = candidate(kernel, ("along_n", 2, "all", parts, "none"))
    result = pool.submit("cute_sm90", FAMILY.kernel_key(problem, chosen, device)).result()
    assert result.artifact is not None, result.failure
    return FAMILY.load(problem, chosen, device, result.artifact.path)


def inside(values: torch.Tensor, row_major: bool, around: float) -> torch.Tensor:
    """A copy of (batch, rows, columns) whose memory goes on in both directions with other numbers."""
    *_, rows, columns = values.shape
    padded = (rows + 264, columns + 72) if row_major else (columns + 264, rows + 72)
    room = torch.full((len(values), *padded), around, dtype=values.dtype, device=values.device)
    view = (room if row_major else room.mT)[:, :rows, :columns]
    return view.copy_(values)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: FAMILY.label(candidate(kernel).kernel))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_edges_have_the_bits_of_a_padded_product(
    pool: CompilePool, layout: str, kernel: tuple[str | int, ...]
) -> None:
    for m, n, k, batch, parts in SHAPES:
        problem = Problem.parse(f"{m}x{n}x{k}x{batch}", layout=layout)
        if problem.alignment != 16 or (problem.a_major == "m" and m % 8):
            continue  # TMA would not read it as it lies
        whole = Problem.parse(f"{-(-m // 1024) * 1024}x{-(-n // 2048) * 2048}x{k}x{batch}", layout=layout)
        a = torch.zeros(batch, whole.m, k, device="cuda", dtype=torch.bfloat16)
        b = torch.zeros(batch, k, whole.n, device="cuda", dtype=torch.bfloat16)
        a[:, :m], b[..., :n] = torch.randn(batch, m, k), torch.randn(batch, k, n)
        wanted = torch.full((batch, whole.m, whole.n), torch.nan, device="cuda", dtype=torch.bfloat16)
        rows_of_a, rows_of_b = problem.a_major == "k", problem.b_major == "n"
        padded = [a if rows_of_a else a.mT.contiguous().mT, b if rows_of_b else b.mT.contiguous().mT, wanted]
        room = torch.full((batch, m + 264, n + 264), torch.nan, device="cuda", dtype=torch.bfloat16)
        out = room[:, :m, :n]
        ragged = [
            inside(a[:, :m], rows_of_a, torch.nan), inside(b[..., :n], rows_of_b, torch.nan), out
        ]  # fmt: skip
        if batch == 1:
            padded, ragged = [each[0] for each in padded], [each[0] for each in ragged]
        load(pool, whole, kernel, parts)(*padded)
        load(pool, problem, kernel, parts)(*ragged)
        exact = torch.matmul(a[:, :m].float(), b[..., :n].float())
        assert ((out.float() - exact).norm() / exact.norm()).item() < 4e-3, (problem, "wrong")
        assert torch.equal(out, wanted[:, :m, :n]), (problem, "other bits than the padded product's")
        assert int(room.isnan().sum()) == room.numel() - out.numel(), (problem, "wrote outside its output")


@pytest.mark.parametrize("epilogue", ["residual", "bias_n+relu+amax", "bias_m+gelu_tanh", "swiglu"])
@pytest.mark.parametrize("shape", ["65x528x200", "200x272x1096", "1000x1000x520"])
def test_epilogues_at_the_edge(pool: CompilePool, shape: str, epilogue: str) -> None:
    """Residuals are the output itself: what one tile has stored another must not read."""
    problem = Problem.parse(shape, epilogue=epilogue)
    m, n = problem.m, problem.n
    a = torch.randn(m, problem.k, device="cuda").bfloat16()
    b = torch.randn(n, problem.k, device="cuda").bfloat16().t()
    exact = a.float() @ b.float()
    for kernel in KERNELS:
        if "swiglu" in epilogue and (kernel[-1] or kernel[-2] in (0, 16)):
            continue
        if kernel[-2] == 0:
            continue
        out = torch.randn(m, problem.out_n, device="cuda").bfloat16()
        given: list[torch.Tensor] = []
        if epilogue == "residual":
            wanted, given = exact + out.float(), [out]
        elif epilogue == "bias_n+relu+amax":
            given = [torch.randn(n, device="cuda").bfloat16(), torch.zeros((), device="cuda")]
            wanted = torch.relu(exact + given[0].float())
        elif epilogue == "bias_m+gelu_tanh":
            given = [torch.randn(m, device="cuda").bfloat16()]
            wanted = torch.nn.functional.gelu(exact + given[0].float()[:, None], approximate="tanh")
        else:
            wanted = torch.nn.functional.silu(exact[:, 0::2]) * exact[:, 1::2]
        load(pool, problem, kernel, 1)(a, b, out, *given)
        error = ((out.float() - wanted).norm() / wanted.norm()).item()
        assert error < 4e-3, (problem, FAMILY.label(candidate(kernel).kernel), error)
        if "amax" in epilogue:
            assert given[1].item() == pytest.approx(wanted.abs().max().item(), rel=1e-3)
