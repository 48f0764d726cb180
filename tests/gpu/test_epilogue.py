"""Numerics of fused epilogues on the GPU: ragged, batched, swapped, split, both output majors."""

from dataclasses import replace
from functools import cache

import pytest

from tests.describe.test_epilogue import EVERYTHING, candidate, capped
from tests.support.kernels import Kernels, selected
from tests.support.numerics import Case
from tests.support.sampled import covering
from tunegemm.describe.device import Device
from tunegemm.describe.epilogue import GATED
from tunegemm.describe.problem import Problem
from tunegemm.generate.cute_sm90 import FAMILY
from tunegemm.generate.feasibility import FEASIBLE

pytestmark = pytest.mark.gpu

TEXTS = [
    "alpha+beta_c", "beta_c+bias_m+relu", "bias_n", "bias_n+gelu", "bias_m+gelu_tanh", "silu", *GATED,
    "swiglu+residual+amax", "residual", "scale_tensor", "scale_rowwise+bias_n", EVERYTHING, str(capped),
]  # fmt: skip
KERNELS: list[dict[str, int | str | bool]] = [
    {"schedule": "pingpong", "tile_m": 128, "tile_n": 128, "stages": 4, "swap_ab": False},
    {"schedule": "cooperative", "tile_m": 128, "tile_n": 256, "stages": 3, "swap_ab": False},
    {"schedule": "cooperative", "tile_m": 256, "tile_n": 96, "stages": 3, "swap_ab": False},
    {"schedule": "pingpong", "tile_m": 128, "tile_n": 176, "stages": 4, "swap_ab": False, "epi_n": 16},
    {"schedule": "pingpong", "tile_m": 64, "tile_n": 64, "stages": 6, "swap_ab": True},
    {"schedule": "cooperative", "tile_m": 128, "tile_n": 32, "stages": 6, "swap_ab": True},
]
PROBLEMS = [
    Problem(512, 512, 512),
    Problem(1000, 1040, 520),
    Problem(72, 272, 1096, out_dtype="fp32"),
    Problem(8, 16, 24, in_dtype="fp16", out_dtype="fp16"),
    Problem(304, 528, 136, 3),
    Problem(264, 144, 1000, a_major="m", b_major="n", out_major="m"),
]
SPLITS = [1, 1, 3, 1, 2, 1]


@pytest.fixture(scope="module")
def kernels(kernels: Kernels, request: pytest.FixtureRequest) -> Kernels:
    compiled = compiled_of(kernels.device)
    kernels.begin_all(
        (replace(problem, epilogue=text), candidate(kernel))
        for text, kernel in selected(request, "text", "kernel")
        for problem in PROBLEMS
        if (text, KERNELS.index(kernel), kind_of(problem)) in compiled
    )
    return kernels


#: Rules that look at speed: the kernel must be right all the same.
_ALLOWED = (None, "cluster_extent", "swapped_rows", "split_work")


def kind_of(problem: Problem) -> tuple[str, str]:
    """What of these problems a kernel is compiled for."""
    return problem.out_dtype, problem.out_major


@cache
def compiled_of(device: Device) -> list[tuple[str, int, tuple[str, str]]]:
    """Epilogue, kernel and kind of problem: each two of them together."""
    every = {
        (text, number, kind_of(problem)): None
        for text in TEXTS
        for number, kernel in enumerate(KERNELS)
        for problem in PROBLEMS
        if FAMILY.check(replace(problem, epilogue=text), candidate(kernel), device).rule in _ALLOWED
    }
    return covering(every)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: FAMILY.label(candidate(kernel).kernel))
@pytest.mark.parametrize("text", TEXTS)
def test_right_on_every_shape(kernels: Kernels, text: str, kernel: dict[str, int | str | bool]) -> None:
    launched = refused = spilled = left_out = 0
    for problem, split_k in zip(PROBLEMS, SPLITS, strict=True):
        problem = replace(problem, epilogue=text)
        chosen = candidate(kernel).with_launch(split_k=split_k)
        verdict = FAMILY.check(problem, chosen, kernels.device)
        verdict = FEASIBLE if verdict.rule in _ALLOWED else verdict
        if verdict.rule in ("fused_store", "fused_registers", "accumulators", "shared_memory"):
            refused += verdict.rule != "shared_memory"
            continue
        assert verdict, (problem, verdict)
        if (text, KERNELS.index(kernel), kind_of(problem)) not in compiled_of(kernels.device):
            left_out += 1
            continue
        if "spills" in str(kernels.begin(problem, chosen).result().failure):
            # The DSL's builds for CUDA 12 and 13 have two ptxas: of kernels with 176 accumulators a few spill
            # by the second alone, such as silu to fp16. Nothing that spills is ever launched.
            assert chosen["tile_n"] == 176, (problem, FAMILY.label(chosen))
            spilled += 1
            continue
        Case.of(problem, seed=5).check(kernels.load(problem, chosen), FAMILY.label(chosen), runs=2)
        launched += 1
    assert launched + spilled + left_out >= 4 or refused == len(PROBLEMS)
    assert launched + spilled or refused == len(PROBLEMS)


#: Two buffers and four, a tile for one warpgroup and for two; more tiles than multiprocessors, parts of few.
IN_PLACE = [
    ({"schedule": "pingpong", "tile_m": 128, "tile_n": 128, "stages": 6, "swap_ab": False}, 2200, 1),
    ({"schedule": "pingpong", "tile_m": 128, "tile_n": 192, "stages": 4, "swap_ab": False}, 2200, 1),
    ({"schedule": "cooperative", "tile_m": 128, "tile_n": 256, "stages": 3, "swap_ab": False}, 2200, 1),
    ({"schedule": "cooperative", "tile_m": 128, "tile_n": 128, "stages": 4, "swap_ab": False}, 520, 3),
]


@pytest.mark.parametrize(("kernel", "m", "split_k"), IN_PLACE)
def test_a_residual_may_be_the_output(
    kernels: Kernels, kernel: dict[str, int | str | bool], m: int, split_k: int
) -> None:
    problem = Problem(m, 2056, 776, epilogue="residual")
    chosen = candidate(kernel).with_launch(split_k=split_k)
    launch, case = kernels.load(problem, chosen), Case.of(problem, seed=5)
    operands = case.operands
    for _ in range(5):
        operands.out.copy_(operands.fused[0])
        launch(operands.a, operands.b, operands.out, operands.out)
        assert case.objection() is None
