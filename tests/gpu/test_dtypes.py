"""fp8, int8 and tf32 on the GPU: every schedule against a reference of its own, on ragged and batched shapes.

fp8 and tf32 against fp32 or fp64 products of the same operands, int8 to the bit.
"""

import itertools
from collections.abc import Iterator

import pytest
import torch

from tests.support.kernels import Kernels, selected
from tests.support.numerics import Case
from tests.support.sampled import covering
from tunegemm.describe.device import Device
from tunegemm.describe.precision import computing_fp32_in, fp32_precision
from tunegemm.describe.problem import DTYPE_BYTES, Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate.cublaslt import FAMILY as LIBRARY
from tunegemm.generate.cublaslt import TORCH_MM
from tunegemm.generate.cute_sm90 import FAMILY

pytestmark = pytest.mark.gpu

NAMES = ("schedule", "tile_m", "tile_n", "stages", "cluster_m", "cluster_n", "epi_n", "swap_ab", "rows")
#: The last column: 128-byte rows of k in a stage.
KERNELS = [
    ("cooperative", 128, 192, 3, 2, 1, 32, False, 1),
    ("cooperative", 256, 96, 3, 1, 2, 32, False, 1),
    ("cooperative", 64, 96, 4, 1, 1, 32, False, 1),
    ("cooperative", 192, 128, 3, 1, 1, 64, False, 1),
    ("cooperative", 128, 208, 3, 1, 1, 16, False, 1),
    ("cooperative", 128, 64, 4, 1, 1, 0, False, 1),
    ("pingpong", 64, 192, 4, 2, 2, 32, False, 1),
    ("pingpong", 64, 128, 5, 1, 1, 64, False, 1),
    ("pingpong", 128, 80, 4, 1, 1, 16, False, 1),
    ("pingpong", 64, 64, 3, 1, 1, 32, False, 2),
    ("cooperative", 128, 16, 4, 1, 1, 16, True, 1),
    ("pingpong", 64, 32, 6, 2, 1, 0, True, 1),
]
LAUNCHES = [
    ("along_m", 1, "all", 1, "none"),
    ("along_n", 2, "balanced", 1, "b_first"),
    ("along_m", 4, "balanced", 3, "a_first"),
    ("along_n", 16, "all", 2, "none"),
]
SHAPES = [
    (512, 512, 512, 1),
    (1000, 1040, 528, 1),
    (16, 16, 16, 1),
    (304, 528, 144, 3),
    (1024, 1056, 2000, 1),
]
KINDS = [
    ("fp8_e4m3", "bf16", "fast"), ("fp8_e4m3", "fp32", "two_level"), ("fp8_e5m2", "fp16", "fast"),
    ("fp8_e4m3_e5m2", "fp8_e4m3", "fast"), ("fp8_e5m2_e4m3", "fp8_e5m2", "two_level"),
    ("int8", "int32", "fast"), ("tf32", "fp32", "fast"), ("tf32", "bf16", "fast"),
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _exact_references() -> Iterator[None]:
    with computing_fp32_in("ieee"):
        yield


def candidate(
    kernel: tuple[str | int, ...], problem: Problem, launch: tuple[str | int, ...] = LAUNCHES[0]
) -> Candidate:
    params = dict(zip(NAMES, kernel, strict=True))
    params["tile_k"] = int(params.pop("rows")) * 128 // DTYPE_BYTES[problem.in_dtype]
    names = ("raster_order", "swizzle_size", "ctas", "split_k", "l2_hint")
    return Candidate.make("cute_sm90", params, dict(zip(names, launch, strict=True)))


def problem_of(kind: tuple[str, str, str], shape: tuple[int, int, int, int]) -> Problem:
    in_dtype, out_dtype, accumulation = kind
    text = "x".join(map(str, shape))
    return Problem.parse(text, dtype=in_dtype, out_dtype=out_dtype, accumulation=accumulation)


Pair = tuple[tuple[str, str, str], tuple[str | int, ...]]


def pairs() -> list[Pair]:
    """Each value of a kernel's parameters with each of a kind; a kernel that has every kind is for others."""
    every = [
        (kind, kernel)
        for kind, kernel in itertools.product(KINDS, KERNELS)
        if not (kind[2] == "two_level" and kernel[-1] == 2)  # those promote every 128 of k
    ]

    def parts(pair: Pair) -> Iterator[tuple[int, str | int]]:
        return enumerate((*pair[0], *pair[1]))

    return covering(every, parts, given=[pair for pair in every if pair[1] == KERNELS[2]])


@pytest.fixture(scope="module")
def kernels(kernels: Kernels, request: pytest.FixtureRequest) -> Kernels:
    wanted = [(problem_of(kind, SHAPES[0]), kernel) for kind, kernel in selected(request, "kind", "kernel")]
    wanted += [scaled(*case) for case in selected(request, *SCALES)]
    kernels.begin_all((problem, candidate(kernel, problem)) for problem, kernel in wanted)
    return kernels


def check_rules(kernels: Kernels, problem: Problem, chosen: Candidate) -> None:
    """Rules about extents look at speed: a kernel must be right all the same."""
    verdict = FAMILY.check(problem, chosen, kernels.device)
    assert verdict.runs, (problem, verdict)


def check_both(kernels: Kernels, case: Case, chosen: Candidate) -> None:
    """Our kernel and torch's own alike, on the same operands."""
    case.check(kernels.load(case.problem, chosen), "ours")
    case.check(LIBRARY.load(case.problem, TORCH_MM, kernels.device, None), "torch")


@pytest.mark.parametrize(("kind", "kernel"), pairs(), ids=lambda value: "-".join(map(str, value)))
def test_right_on_every_shape(
    kernels: Kernels, kind: tuple[str, str, str], kernel: tuple[str | int, ...]
) -> None:
    for i, shape in enumerate(SHAPES):
        problem = problem_of(kind, shape)
        chosen = candidate(kernel, problem, LAUNCHES[i % len(LAUNCHES)])
        check_rules(kernels, problem, chosen)
        Case.of(problem, seed=i).check(kernels.load(problem, chosen), FAMILY.label(chosen), runs=2)


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
@pytest.mark.parametrize("shape", [(1001, 1003, 1007, 1), (7, 9, 11, 1), (40, 30, 50, 2)])
def test_right_on_operands_that_tma_refuses(
    kernels: Kernels, kind: tuple[str, str, str], shape: tuple[int, int, int, int]
) -> None:
    problem = problem_of(kind, shape)
    Case.of(problem).check(kernels.load(problem, candidate(KERNELS[2], problem)))


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
@pytest.mark.parametrize("shape", [*SHAPES, (1001, 1003, 1007, 1), (5, 24, 40, 1)])
def test_the_baseline_is_right(
    device: Device, kind: tuple[str, str, str], shape: tuple[int, int, int, int]
) -> None:
    problem = problem_of(kind, shape)
    Case.of(problem).check(LIBRARY.load(problem, TORCH_MM, device, None))
    assert fp32_precision() == "ieee", "the program's choice is left as it was"


OF_SCALES = itertools.product(
    [False, True], ["bf16", "fp16", "fp8_e4m3"],
    ["scale_tensor", "scale_rowwise", "scale_rowwise+bias_n+gelu+amax"], ["fast", "two_level"],
)  # fmt: skip


SCALES = ("swapped", "out_dtype", "epilogue", "accumulation")


def scaled(
    swapped: bool, out_dtype: str, epilogue: str, accumulation: str, shape: str = "256x512x1024"
) -> tuple[Problem, tuple[str | int, ...]]:
    problem = Problem.parse(
        shape, dtype="fp8_e4m3_e5m2", out_dtype=out_dtype, epilogue=epilogue, accumulation=accumulation
    )
    return problem, ("cooperative", 128, 96, 4, 1, 1, 32, swapped, 1)


@pytest.mark.parametrize(SCALES, covering(OF_SCALES))
def test_scales_are_applied(
    kernels: Kernels, out_dtype: str, epilogue: str, accumulation: str, swapped: bool
) -> None:
    """By our kernel and by torch alike, on extents that the library takes and on ragged ones."""
    for shape in ("256x512x1024", "100x264x400"):
        problem, kernel = scaled(swapped, out_dtype, epilogue, accumulation, shape)
        chosen = candidate(kernel, problem)
        check_rules(kernels, problem, chosen)
        check_both(kernels, Case.of(problem, seed=1), chosen)


SCALED = [
    ("scale_tensor", "bf16"), ("scale_rowwise", "fp16"), ("scale_rowwise+bias_n", "bf16"),
    ("alpha+scale_tensor+bias_n+gelu_tanh+residual", "bf16"), ("scale_rowwise+silu+amax", "fp32"),
    ("scale_rowwise+residual", "fp32"), ("scale_rowwise+bias_n+swiglu", "bf16"),
]  # fmt: skip


@pytest.mark.parametrize("kernel", [KERNELS[0], KERNELS[7], (*KERNELS[2][:7], True, 1)])
def test_int8_products_are_scaled(kernels: Kernels, kernel: tuple[str | int, ...]) -> None:
    """By our kernel, whole and in parts of k, and by torch alike; m as of a decode step, too."""
    cases = []
    for epilogue, out_dtype in SCALED:
        for shape, parts in (("256x512x1024", 1), ("100x272x400", 1), ("3x528x144", 1), ("264x272x2048", 3)):
            problem = Problem.parse(shape, dtype="int8", out_dtype=out_dtype, epilogue=epilogue)
            chosen = candidate(kernel, problem, ("along_m", 1, "all", parts, "none"))
            if FAMILY.check(problem, chosen, kernels.device).rule == "fused_store":
                assert "swiglu" in epilogue
                continue
            check_rules(kernels, problem, chosen)
            kernels.begin(problem, chosen)
            cases.append((problem, chosen))
    for problem, chosen in cases:
        case = Case.of(problem, seed=1)
        assert 0.1 < case.wanted.float().std() < 10, "of a size where activations bend"
        check_both(kernels, case, chosen)


def test_two_level_sums_are_closer_than_fast_ones(kernels: Kernels) -> None:
    """What the accumulation is for: over a long k, and with an fp32 output that shows it."""
    errors = {}
    for accumulation in ("fast", "two_level"):
        problem = problem_of(("fp8_e4m3", "fp32", accumulation), (256, 512, 16384, 1))
        case = Case.of(problem)
        case.check(kernels.load(problem, candidate(KERNELS[0], problem)), accumulation)
        errors[accumulation] = case.checked().relative_error
    print(f"relative errors of 256x512x16384: {errors}")
    assert errors["two_level"] < errors["fast"] / 4


def test_int8_is_exact_at_its_extremes(kernels: Kernels) -> None:
    problem = problem_of(("int8", "int32", "fast"), (128, 128, 4096, 1))
    launch = kernels.load(problem, candidate(KERNELS[0], problem))
    a = torch.full((128, 4096), -128, dtype=torch.int8, device="cuda")
    out = torch.empty(128, 128, dtype=torch.int32, device="cuda")
    launch(a, a.t(), out)
    assert (out == 128 * 128 * 4096).all()


def test_fp8_output_saturates(kernels: Kernels) -> None:
    """As torch._scaled_mm's does: beyond 448 is 448, not NaN."""
    problem = problem_of(("fp8_e4m3_e5m2", "fp8_e4m3", "fast"), (128, 128, 4096, 1))
    launch = kernels.load(problem, candidate(KERNELS[0], problem))
    a = torch.ones(128, 4096, device="cuda").to(torch.float8_e4m3fn)
    b = torch.ones(128, 4096, device="cuda").to(torch.float8_e5m2).t()
    out = torch.empty(128, 128, dtype=torch.float8_e4m3fn, device="cuda")
    launch(a, b, out)
    assert (out.float() == 448).all()
