"""Two CTAs on a multiprocessor, and no WGMMAs in flight between k tiles: right, and the same bits as else."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.test_device_layer import HOPPER
from tests.support.kernels import Kernels
from tests.support.numerics import Case, check_product
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate.cute_sm90 import FAMILY

pytestmark = pytest.mark.gpu

_PAIR: dict[str, int | str] = {"occupancy": 2, "stages": 3, "cluster_n": 1}
_NONE: dict[str, int | str] = {"wgmma_in_flight": 0, "stages": 3}
_PINGPONG: dict[str, int | str] = {"schedule": "pingpong"}
_STREAM: dict[str, int | str] = {"tile_scheduler": "stream_k"}
_BYTES: dict[str, int | str] = {"tile_m": 64, "tile_k": 128}
KERNELS: list[dict[str, int | str]] = [
    _PAIR | {"tile_m": 64, "tile_n": 192},
    _PAIR | {"tile_m": 64, "tile_n": 64, "stages": 6, "cluster_n": 4},
    _PAIR | {"tile_n": 96, "cluster_m": 2},
    _PAIR | {"tile_m": 192, "tile_n": 64},
    _PAIR | {"tile_m": 256, "tile_n": 16, "epi_n": 16},
    _PAIR | _PINGPONG | {"tile_m": 64, "tile_n": 80, "epi_n": 16, "cluster_m": 2},
    _PAIR | _PINGPONG | {"tile_n": 64, "wgmma_in_flight": 0},
    _PAIR | _STREAM | {"tile_n": 64},
    _PAIR | {"tile_m": 64, "tile_n": 16, "epi_n": 16, "swap_ab": True},
    _NONE,
    _NONE | _PINGPONG,
    _NONE | {"tile_m": 256, "cluster_m": 2, "cluster_n": 1},
    _NONE | _STREAM | {"tile_m": 192, "tile_n": 160, "cluster_n": 1},
]
#: More tiles than fit at once, ragged sides, few of them, entries of a batch, many k tiles.
SHAPES = ["4104x2568x136", "1000x1032x1096", "72x264x2056", "304x520x1160x3"]
LAUNCHES: list[dict[str, str | int]] = [{}, {"ctas": "balanced"}, {"split_k": 2}]
FUSED = [
    ("328x528x392", {"epilogue": "bias_n+gelu+residual"}, _PAIR | {"tile_m": 64, "tile_n": 96}),
    ("328x528x392", {"epilogue": "swiglu"}, _PAIR | {"tile_n": 64}),
    (
        "200x272x656",
        {"dtype": "fp8_e4m3", "epilogue": "scale_rowwise"},
        _PAIR | {"tile_m": 64, "tile_k": 128},
    ),
    ("200x272x656", {"dtype": "int8"}, _PAIR | {"tile_m": 64, "tile_k": 128}),
    ("200x264x328", {"dtype": "tf32"}, _PAIR | {"tile_m": 64, "tile_k": 32}),
    ("200x264x328", {"layout": "nt", "out_dtype": "fp32"}, _PAIR | {"tile_m": 64}),
    ("328x528x392", {"epilogue": "bias_n+gelu+residual"}, _NONE),
    ("200x272x656", {"dtype": "fp8_e4m3", "epilogue": "scale_rowwise"}, _NONE | {"tile_k": 128}),
]


def candidate(change: dict[str, int | str], **launch: str | int) -> Candidate:
    kernel = dict(HOPPER.compile_params) | change
    return Candidate.make("cute_sm90", kernel, dict(HOPPER.launch_params) | launch)


def label(change: dict[str, int | str]) -> str:
    return FAMILY.label(candidate(change).kernel)


@pytest.fixture(scope="module")
def kernels(kernels: Kernels) -> Kernels:
    for change in KERNELS:
        kernels.begin(Problem.parse("512x512x512"), candidate(change))
    for shape, others, change in FUSED:
        kernels.begin(Problem.parse(shape, **others), candidate(change))
    return kernels


@pytest.mark.parametrize("change", KERNELS, ids=label)
def test_right_on_every_shape(kernels: Kernels, change: dict[str, int | str]) -> None:
    for shape in SHAPES:
        problem = Problem.parse(shape)
        for launch in LAUNCHES:
            if launch.get("split_k") and change.get("tile_scheduler") == "stream_k":
                continue
            chosen = candidate(change, **launch)
            check_product(kernels.load(problem, chosen), problem, f"{label(change)} {launch}", runs=2)


@pytest.mark.parametrize(("shape", "others", "change"), FUSED)
def test_right_with_epilogues_and_other_dtypes(
    kernels: Kernels, shape: str, others: dict[str, str], change: dict[str, int | str]
) -> None:
    problem = Problem.parse(shape, **others)
    case = Case.of(problem, seed=3)
    case.check(kernels.load(problem, candidate(change)), label(change), runs=2)


def test_neither_changes_a_bit(kernels: Kernels) -> None:
    problem = Problem.parse("1000x1032x1096")
    a = torch.randn(problem.m, problem.k, device="cuda").bfloat16()
    b = torch.randn(problem.n, problem.k, device="cuda").bfloat16().t()
    outs = []
    for change in (_PAIR | {"tile_n": 64}, {"tile_n": 64, "cluster_n": 1}, _NONE | {"tile_n": 64}):
        outs.append(torch.full((problem.m, problem.n), torch.nan, device="cuda").bfloat16())
        kernels.load(problem, candidate(change))(a, b, outs[-1])
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[1], outs[2])
