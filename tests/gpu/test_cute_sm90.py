"""What only the Hopper kernels have, on the GPU: operands that TMA refuses."""

import pytest
import torch

from tests.support.kernels import Kernels
from tests.support.numerics import (
    TOLERANCE,
    Examples,
    operand,
    poisoned,
    relative_error,
)
from tunegemm.describe.problem import Problem

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
EXAMPLES = Examples(
    "cute_sm90",
    NAMES,
    KERNELS,
    ("raster_order", "swizzle_size", "ctas", "split_k", "l2_hint"),
    LAUNCHES,
    of_each_schedule=(0, 5, 10),
)


@pytest.mark.parametrize("layout", ["tn", "tt", "nn", "nt"])
@pytest.mark.parametrize("shape", ["1023x1025x1027", "520x264x1001", "264x521x512x3", "7x9x11"])
def test_right_on_operands_that_tma_refuses(kernels: Kernels, shape: str, layout: str) -> None:
    problem = Problem.parse(shape, layout=layout)
    launch = kernels.load(problem, EXAMPLES.launch(5))
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
