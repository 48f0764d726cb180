"""The portable Triton kernels on the GPU: every alignment and dtype, ragged, poisoned, threads, k splits.

A Hopper stands in for the architectures that are not here: there the same source becomes WGMMA for tiles of
64 rows and more, and mma.sync, as on Ampere, for smaller ones.
"""

from __future__ import annotations

import itertools
import threading
from functools import cache

import pytest
import torch

from tests.gpu.test_cute_sm80 import operand as misaligned
from tests.support.kernels import Kernels, selected
from tests.support.numerics import TOLERANCE, Case, Examples, difference, poisoned, relative_error, untouched
from tests.support.sampled import covering
from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate.triton import FAMILY

pytestmark = pytest.mark.gpu

NAMES = ("tile_m", "tile_n", "tile_k", "stages", "warps")
KERNELS = [
    (128, 128, 64, 3, 8),
    (128, 256, 64, 3, 8),
    (64, 128, 64, 4, 4),
    (64, 64, 32, 2, 4),
    (256, 64, 32, 3, 8),
    (32, 64, 32, 4, 4),
    (16, 64, 32, 2, 4),
    (32, 128, 32, 3, 4),
    (128, 64, 32, 3, 8),
]
#: Those that have registers for elements of any alignment: every shape is theirs.
SMALL = (3, 5, 6, 8)
LAUNCHES = [
    ("along_m", 1, "tiles", 1),
    ("along_n", 2, "balanced", 1),
    ("along_m", 4, "all", 3),
    ("along_n", 16, "two_per_sm", 2),
]
LAUNCH_NAMES = ("raster_order", "swizzle_size", "ctas", "split_k")
EXAMPLES = Examples(
    "triton",
    NAMES,
    KERNELS,
    LAUNCH_NAMES,
    LAUNCHES,
    of_each_schedule=(0, 3, 6),
    fixed={"vector_bytes": 16, "store_bytes": 16},
)
LAYOUTS = ("tn", "nt")
#: m, n, k, batch; gap between lines and offset of the first element, in elements.
SHAPES = [
    (520, 264, 1000, 1, 0, 0),
    (1000, 1032, 1001, 1, 0, 0),
    (1001, 1003, 999, 1, 0, 0),
    (7, 5, 3, 1, 0, 0),
    (1, 1, 1, 1, 0, 0),
    (129, 257, 1096, 1, 7, 0),
    (300, 520, 136, 3, 0, 1),
    (301, 523, 137, 3, 0, 0),
    (520, 264, 1000, 1, 2, 2),
    (520, 260, 1000, 1, 4, 4),
]


def operands(layout: str, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    m, n, k, batch, gap, offset = SHAPES[number]
    packed = Problem.parse(f"{m}x{n}x{k}x{batch}", layout=layout)
    a = misaligned(packed.a_major == "k", m, k, batch, gap, offset, "bf16")
    b = misaligned(packed.b_major == "n", k, n, batch, gap, offset, "bf16")
    return (a[0], b[0]) if batch == 1 else (a, b)


def fitting(device: Device, problem: Problem, kernel: int, number: int) -> Candidate | None:
    """The kernel for the problem's alignments, with its launch of that number or another one; None where no
    rule lets one run."""
    for shift in range(len(LAUNCHES)):
        launch = dict(zip(LAUNCH_NAMES, LAUNCHES[(number + shift) % len(LAUNCHES)], strict=True))
        for vector_bytes in (16, 8, 4, 2, 1):
            for store_bytes in (16, 8, 4, 2):
                tile = dict(zip(NAMES, KERNELS[kernel], strict=True))
                tile["stages"] = min(tile["stages"], 2 if vector_bytes < 4 else 4)
                widths = {"vector_bytes": vector_bytes, "store_bytes": store_bytes}
                one = Candidate.make("triton", tile | widths, launch)
                if FAMILY.check(problem, one, device).runs:
                    return one
    return None


Fitted = dict[tuple[int, str, int], tuple[Problem, Candidate]]


@cache
def fitted(device: Device) -> tuple[Fitted, Fitted]:
    """By kernel, layout and number of the shape what can be launched, and what is: of kernels, layouts and
    widths of vectors each two together.
    """
    found, widths = {}, {}
    for layout, number in itertools.product(LAYOUTS, range(len(SHAPES))):
        problem = Problem.from_tensors(*operands(layout, number))
        for kernel in range(len(KERNELS)):
            if (one := fitting(device, problem, kernel, number)) is not None:
                case = kernel, layout, number
                found[case] = problem, one
                widths[case] = kernel, layout, (one["vector_bytes"], one["store_bytes"])
    compiled = covering(dict.fromkeys(widths.values()))
    return found, {case: one for case, one in found.items() if widths[case] in compiled}


@pytest.fixture(scope="module")
def kernels(kernels: Kernels, request: pytest.FixtureRequest) -> Kernels:
    for pair in selected(request, "kernel", "layout"):
        compiled = fitted(kernels.device)[1]
        kernels.begin_all(one for case, one in compiled.items() if case[:2] == pair)
    return kernels


@pytest.mark.parametrize("kernel", range(len(KERNELS)))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_right_at_every_alignment(kernels: Kernels, kernel: int, layout: str) -> None:
    found, compiled = fitted(kernels.device)
    for number, (m, n, _, batch, gap, offset) in enumerate(SHAPES):
        if (kernel, layout, number) not in compiled:
            continue
        problem, one = compiled[kernel, layout, number]
        a, b = operands(layout, number)
        assert Problem.from_tensors(a, b) == problem
        whole = poisoned(batch, m + 3, n)
        out = whole[:, :m] if batch > 1 else whole[0, :m]
        launch = kernels.load(problem, one)
        for _ in range(2):  # the second finds what the first left of counters
            whole.fill_(torch.nan)
            launch(a, b, out)
            torch.cuda.synchronize()
            error = difference(out, torch.matmul(a.float(), b.float()))
            assert error < TOLERANCE["bf16"], (problem, gap, offset, FAMILY.label(one), error)
            assert untouched(whole, out), (problem, "wrote outside its output")
    there = sum(case[:2] == (kernel, layout) for case in found)
    assert there == len(SHAPES) if kernel in SMALL else there
    assert any(case[:2] == (kernel, layout) for case in compiled)


@pytest.mark.parametrize(
    ("dtype", "out_dtype", "tile_k"),
    [("tf32", "fp32", 32), ("int8", "int32", 128), ("fp8_e4m3", "bf16", 128), ("fp8_e5m2", "fp32", 64)],
)
@pytest.mark.parametrize("tile_m", [32, 128])
def test_other_dtypes(kernels: Kernels, dtype: str, out_dtype: str, tile_k: int, tile_m: int) -> None:
    for shape in ("512x512x1024", "272x304x1040", "96x80x208x3"):
        problem = Problem.parse(shape, dtype=dtype, out_dtype=out_dtype)
        tile = {"tile_m": tile_m, "tile_n": 64, "tile_k": tile_k, "stages": 3, "warps": 4}
        one = Candidate.make(
            "triton", tile | {"vector_bytes": 16, "store_bytes": 16},
            dict(zip(LAUNCH_NAMES, LAUNCHES[2], strict=True)),
        )  # fmt: skip
        verdict = FAMILY.check(problem, one, kernels.device)
        assert verdict.runs, verdict
        Case.of(problem).check(kernels.load(problem, one), FAMILY.label(one), runs=2)


def test_an_output_whose_columns_are_contiguous(kernels: Kernels) -> None:
    problem = Problem(520, 264, 512, out_major="m")
    launch = kernels.load(problem, EXAMPLES.launch(0))
    a, b = (
        torch.randn(520, 512, device="cuda").bfloat16(),
        torch.randn(264, 512, device="cuda").bfloat16().t(),
    )
    out = poisoned(264, 520).t()
    launch(a, b, out)
    assert relative_error(out, a, b) < TOLERANCE["bf16"]


def test_splits_of_k_do_not_depend_on_who_is_last(kernels: Kernels) -> None:
    """On two streams at once, and from threads that never used CUDA: the same bits."""
    problem = Problem.parse("256x256x16384")
    one = EXAMPLES.kernel(0).with_launch(**dict(zip(LAUNCH_NAMES, ("along_m", 1, "all", 16), strict=True)))
    assert FAMILY.check(problem, one, kernels.device)
    launch = kernels.load(problem, one)
    a = torch.randn(256, 16384, device="cuda").bfloat16()
    b = torch.randn(256, 16384, device="cuda").bfloat16().t()
    outs = [poisoned(256, 256) for _ in range(40)]
    torch.cuda.synchronize()
    failed: list[BaseException] = []

    def run(mine: list[torch.Tensor]) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for out in mine:
                    launch(a, b, out)
        except BaseException as error:  # reported by the test's own thread
            failed.append(error)

    threads = [threading.Thread(target=run, args=(outs[part::4],)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert failed == []
    assert all(torch.equal(outs[0], out) for out in outs[1:])
    assert relative_error(outs[0], a, b) < TOLERANCE["bf16"]
