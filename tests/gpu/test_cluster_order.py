"""Kernels whose clusters take tiles in the order of their GPCs: right, and the same bits as in any other."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from tests.gpu.test_cute_sm90 import NAMES
from tests.support.kernels import Kernels, selected
from tests.support.numerics import check_product
from tunegemm.describe import clusters
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate.cute_sm90 import FAMILY

pytestmark = pytest.mark.gpu

KERNELS = [
    ("cooperative", 128, 128, 64, 4, 2, 1, 32, False, "static"),
    ("pingpong", 128, 128, 64, 4, 1, 2, 32, False, "static"),
    ("pingpong", 64, 64, 64, 6, 1, 1, 32, False, "static"),
    ("cooperative", 64, 128, 64, 4, 4, 1, 32, False, "static"),
    ("cooperative", 128, 64, 64, 4, 2, 2, 32, False, "static"),
    ("pingpong", 128, 64, 64, 4, 2, 1, 32, False, "stream_k"),
    ("cooperative", 128, 128, 64, 4, 1, 1, 32, False, "stream_k"),
]
#: Many tiles in both modes, few in either, several entries of a batch, fewer tiles than clusters.
SHAPES = ["4104x4360x136", "8200x264x264", "264x9000x72", "1032x2056x328x3", "264x264x264"]
OTHERS: list[dict[str, str | int]] = [
    {},
    {"ctas": "balanced"},
    {"split_k": 2},
    {"split_k": 2, "reduction": "second_kernel"},
]
WALKS = [("along_m", 8), ("along_n", 8), ("along_m", 1), ("along_n", 2), ("along_n", 16)]


def candidate(kernel: tuple[str | int, ...], **launch: str | int) -> Candidate:
    standard: dict[str, str | int] = {
        "raster_order": "along_m", "swizzle_size": 8, "cluster_order": "gpc", "ctas": "all", "split_k": 1,
        "reduction": "pairs", "l2_hint": "none",
    }  # fmt: skip
    names = (*NAMES, "tile_scheduler")
    return Candidate.make("cute_sm90", dict(zip(names, kernel, strict=True)), standard | launch)


@pytest.fixture(scope="module")
def kernels(kernels: Kernels, request: pytest.FixtureRequest) -> Kernels:
    wanted = itertools.product([kernel for (kernel,) in selected(request, "kernel")], ("index", "gpc"))
    problem = Problem.parse("512x512x512")
    kernels.begin_all((problem, candidate(kernel, cluster_order=order)) for kernel, order in wanted)
    return kernels


@pytest.fixture(params=["as measured", "not known", "at random"])
def placement(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPCs as they are, and any others: a wrong belief may cost time, and nothing else."""
    if request.param == "not known":
        monkeypatch.setattr("tunegemm.describe.device.gpcs_of_clusters", lambda *asked: None)
    elif request.param == "at random":
        generator = random.Random(7)

        def gpcs(index: int, size: int, count: int, smem_bytes: int) -> tuple[int, ...]:
            return tuple(generator.randrange(5) for _ in range(count))

        monkeypatch.setattr("tunegemm.describe.device.gpcs_of_clusters", gpcs)
    else:
        assert clusters.gpcs_of_clusters(0, 2, 66, 232448)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: FAMILY.label(candidate(kernel).kernel))
def test_right_on_every_shape(kernels: Kernels, kernel: tuple[str | int, ...], placement: None) -> None:
    for i, shape in enumerate(SHAPES):
        problem = Problem.parse(shape)
        for order, width in WALKS:
            for more in OTHERS if i < 2 else OTHERS[:1]:
                if more and kernel[-1] == "stream_k":
                    continue
                chosen = candidate(kernel, raster_order=order, swizzle_size=width, **more)
                check_product(kernels.load(problem, chosen), problem, FAMILY.label(chosen), runs=2)


def test_the_order_does_not_change_a_bit(kernels: Kernels) -> None:
    problem = Problem.parse("4104x4360x136")
    a = torch.randn(problem.m, problem.k, device="cuda").bfloat16()
    b = torch.randn(problem.n, problem.k, device="cuda").bfloat16().t()
    for kernel in KERNELS[:5]:
        outs = [torch.full((problem.m, problem.n), torch.nan, device="cuda").bfloat16() for _ in range(2)]
        for out, order in zip(outs, ("index", "gpc"), strict=True):
            kernels.load(problem, candidate(kernel, cluster_order=order))(a, b, out)
        assert torch.equal(*outs), FAMILY.label(candidate(kernel))


def test_a_captured_graph_keeps_the_table(kernels: Kernels) -> None:
    problem = Problem.parse("4104x4360x136")
    a = torch.randn(problem.m, problem.k, device="cuda").bfloat16()
    b = torch.randn(problem.n, problem.k, device="cuda").bfloat16().t()
    out = torch.empty(problem.m, problem.n, device="cuda", dtype=torch.bfloat16)
    launch = kernels.load(problem, candidate(KERNELS[0]))
    launch(a, b, out)
    wanted = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(a, b, out)
    del launch
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, wanted)


def test_during_a_capture_nothing_is_measured(kernels: Kernels) -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert clusters.gpcs_of_clusters(0, 2, 66, 232448) is None
