"""Tiles at the edge of the matrix, on the GPU: the bits of a padded product, and nothing touched outside."""

from dataclasses import replace

import pytest
import torch

from tests.gpu.test_cute_sm90 import NAMES
from tests.support.kernels import Kernels, selected
from tests.support.numerics import TOLERANCE, difference, poisoned, untouched
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate.cute_sm90 import FAMILY
from tunegemm.generate.launching import Launcher

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
EPILOGUES = ["residual", "beta_c", "bias_n+relu+amax", "bias_m+gelu_tanh", "swiglu"]


def candidate(
    kernel: tuple[str | int, ...], launch: tuple[str | int, ...] = ("along_m", 1, "all", 1, "none")
) -> Candidate:
    names = ("raster_order", "swizzle_size", "ctas", "split_k", "l2_hint")
    return Candidate.make(
        "cute_sm90", dict(zip(NAMES, kernel, strict=True)), dict(zip(names, launch, strict=True))
    )


@pytest.fixture(scope="module")
def kernels(kernels: Kernels, request: pytest.FixtureRequest) -> Kernels:
    plain = selected(request, "layout", "kernel")
    wanted = [(Problem.parse("512x512x512", layout=layout), kernel) for layout, kernel in plain]
    for (epilogue,) in selected(request, "epilogue"):
        wanted += [(Problem(512, 512, 512, epilogue=epilogue), kernel) for kernel in KERNELS]
    kernels.begin_all(
        (problem, candidate(kernel)) for problem, kernel in wanted if fuses(kernels, kernel, problem)
    )
    return kernels


def fuses(kernels: Kernels, kernel: tuple[str | int, ...], problem: Problem) -> bool:
    return FAMILY.check(problem, candidate(kernel), kernels.device).rule not in (
        "fused_store", "fused_registers", "accumulators", "shared_memory",
    )  # fmt: skip


def load(kernels: Kernels, problem: Problem, kernel: tuple[str | int, ...], parts: int = 1) -> Launcher:
    return kernels.load(problem, candidate(kernel, ("along_n", 2, "all", parts, "none")))


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
    kernels: Kernels, layout: str, kernel: tuple[str | int, ...]
) -> None:
    for m, n, k, batch, parts in SHAPES:
        problem = Problem.parse(f"{m}x{n}x{k}x{batch}", layout=layout)
        if problem.alignment != 16 or (problem.a_major == "m" and m % 8):
            continue  # TMA would not read it as it lies
        whole = Problem.parse(f"{-(-m // 1024) * 1024}x{-(-n // 2048) * 2048}x{k}x{batch}", layout=layout)
        a = torch.zeros(batch, whole.m, k, device="cuda", dtype=torch.bfloat16)
        b = torch.zeros(batch, k, whole.n, device="cuda", dtype=torch.bfloat16)
        a[:, :m], b[..., :n] = torch.randn(batch, m, k), torch.randn(batch, k, n)
        wanted = poisoned(batch, whole.m, whole.n)
        rows_of_a, rows_of_b = problem.a_major == "k", problem.b_major == "n"
        padded = [a if rows_of_a else a.mT.contiguous().mT, b if rows_of_b else b.mT.contiguous().mT, wanted]
        room = poisoned(batch, m + 264, n + 264)
        out = room[:, :m, :n]
        ragged = [
            inside(a[:, :m], rows_of_a, torch.nan), inside(b[..., :n], rows_of_b, torch.nan), out
        ]  # fmt: skip
        if batch == 1:
            padded, ragged = [each[0] for each in padded], [each[0] for each in ragged]
        load(kernels, whole, kernel, parts)(*padded)
        load(kernels, problem, kernel, parts)(*ragged)
        exact = torch.matmul(a[:, :m].float(), b[..., :n].float())
        assert difference(out, exact) < TOLERANCE["bf16"], (problem, "wrong")
        assert torch.equal(out, wanted[:, :m, :n]), (problem, "other bits than the padded product's")
        assert untouched(room, out), (problem, "wrote outside its output")


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("shape", ["65x528x200", "200x272x1096", "1000x1000x520"])
def test_epilogues_at_the_edge(kernels: Kernels, shape: str, epilogue: str) -> None:
    """Matrices are the output itself: what one tile has stored another must not read."""
    problem = replace(Problem.parse(shape), epilogue=epilogue)
    m, n = problem.m, problem.n
    a = torch.randn(m, problem.k, device="cuda").bfloat16()
    b = torch.randn(n, problem.k, device="cuda").bfloat16().t()
    exact = a.float() @ b.float()
    launched = 0
    for kernel in KERNELS:
        if not fuses(kernels, kernel, problem):
            continue
        out = (10 * torch.randn(m, problem.out_n, device="cuda")).bfloat16()
        given: list[float | torch.Tensor] = []
        if epilogue == "residual":
            wanted, given = exact + out.float(), [out]
        elif epilogue == "beta_c":
            wanted, given = exact + 2 * out.float(), [2.0, out]
        elif epilogue == "bias_n+relu+amax":
            bias, amax = torch.randn(n, device="cuda").bfloat16(), torch.zeros(1, device="cuda")
            wanted, given = torch.relu(exact + bias.float()), [bias, amax]
        elif epilogue == "bias_m+gelu_tanh":
            bias = torch.randn(m, device="cuda").bfloat16()
            wanted = torch.nn.functional.gelu(exact + bias.float()[:, None], approximate="tanh")
            given = [bias]
        else:
            wanted = torch.nn.functional.silu(exact[:, 0::2]) * exact[:, 1::2]
        load(kernels, problem, kernel)(a, b, out, *given)
        error = difference(out, wanted)
        assert error < TOLERANCE["bf16"], (problem, FAMILY.label(candidate(kernel).kernel), error)
        if "amax" in epilogue:
            assert amax.item() == pytest.approx(wanted.abs().max().item(), rel=1e-3)
        launched += 1
    assert launched >= 3


def test_an_output_of_bytes_is_stored_where_tma_may(kernels: Kernels) -> None:
    """TMA wants innermost coordinates at multiples of 16 bytes: of fp8, columns of 16."""
    problem = Problem.parse("200x1000x272", dtype="fp8_e4m3", out_dtype="fp8_e4m3")
    a = (torch.randn(200, 272, device="cuda") / 8).to(torch.float8_e4m3fn)
    b = (torch.randn(1000, 272, device="cuda") / 8).to(torch.float8_e4m3fn).t()
    out = torch.zeros(200, 1000, device="cuda").to(torch.float8_e4m3fn)
    load(kernels, problem, ("pingpong", 64, 128, 128, 4, 1, 2, 32, False))(a, b, out)
    exact = a.float() @ b.float()
    assert difference(out, exact) < 2 * 2.0**-5
