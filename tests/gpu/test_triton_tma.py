"""What only Triton's kernels have, on the GPU."""

import threading

import pytest
import torch

from tests.support.host_time import best_us
from tests.support.kernels import Kernels
from tests.support.numerics import (
    TOLERANCE,
    Examples,
    operand,
    poisoned,
    relative_error,
)
from tunegemm.describe.problem import Problem
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
]
LAUNCHES = [
    ("along_m", 1, "all", 1),
    ("along_n", 2, "balanced", 1),
    ("along_m", 4, "two_per_sm", 3),
    ("along_n", 16, "all", 2),
]
EXAMPLES = Examples(
    "triton_tma",
    NAMES,
    KERNELS,
    ("raster_order", "swizzle_size", "ctas", "split_k"),
    LAUNCHES,
    of_each_schedule=(0, 6),
)
SQUARE = Problem.parse("512x512x512")


@pytest.mark.parametrize("schedule", ["pipelined", "flattened"])
def test_an_output_whose_columns_are_contiguous(kernels: Kernels, schedule: str) -> None:
    problem = Problem(520, 264, 512, out_major="m")
    kernel = next(place for place, kernel in enumerate(KERNELS) if kernel[0] == schedule)
    launch = kernels.load(problem, EXAMPLES.launch(kernel))
    a, b = operand(True, 520, 512, 1, 0, "bf16")[0], operand(False, 512, 264, 1, 0, "bf16")[0]
    out = poisoned(264, 520).t()
    launch(a, b, out)
    assert relative_error(out, a, b) < TOLERANCE["bf16"]


def test_split_k_does_not_depend_on_who_is_last(kernels: Kernels) -> None:
    """A long k over many parts, on two streams at once and replayed from a graph: the same bits."""
    problem = Problem.parse("256x256x16384")
    chosen = EXAMPLES.kernel(0, tile_n=128, stages=4).with_launch(
        raster_order="along_m", swizzle_size=1, ctas="all", split_k=16
    )
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


def test_a_thread_that_never_used_cuda_can_launch(kernels: Kernels) -> None:
    launch = kernels.load(SQUARE, EXAMPLES.launch(6))
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
    """A launch with known operands is a look-up and one driver call: at most twice what torch.mm costs."""
    launch = kernels.load(SQUARE, EXAMPLES.launch(6))
    a, b, out = (torch.zeros(512, 512, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    b = b.t()
    best = best_us({"launch": lambda: launch(a, b, out), "torch.mm": lambda: torch.mm(a, b, out=out)})
    assert best["launch"] < 2 * best["torch.mm"] + 5, best
