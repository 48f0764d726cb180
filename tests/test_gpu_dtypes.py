"""fp8, int8 and tf32 on the GPU: every schedule against a reference of its own, on ragged and batched shapes.

fp8 and tf32 against fp32 or fp64 products of the same operands, int8 to the bit.
"""

from collections.abc import Iterator

import pytest
import torch

from tunegemm.artifacts import ArtifactStore
from tunegemm.compile import CompilePool
from tunegemm.device import Device, find_device
from tunegemm.families.cublaslt import FAMILY as LIBRARY
from tunegemm.families.cublaslt import TORCH_MM
from tunegemm.families.cute_sm90 import FAMILY
from tunegemm.measure import operands as data
from tunegemm.problem import DTYPE_BYTES, Problem
from tunegemm.space import Candidate

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


@pytest.fixture(scope="module")
def device() -> Device:
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    return find_device("cuda:0")


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


def pairs() -> Iterator[tuple[tuple[str, str, str], tuple[str | int, ...]]]:
    for kind in KINDS:
        for kernel in KERNELS:
            if not (kind[2] == "two_level" and kernel[-1] == 2):  # those promote every 128 of k
                yield kind, kernel


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CompilePool]:
    with CompilePool(ArtifactStore(tmp_path_factory.mktemp("objects"))) as pool:
        for kind, kernel in pairs():  # all at once, on all cores
            problem = problem_of(kind, SHAPES[0])
            chosen = candidate(kernel, problem)
            pool.submit("cute_sm90", FAMILY.kernel_key(problem, chosen, find_device("cuda:0")))
        yield pool


@pytest.mark.parametrize(("kind", "kernel"), pairs(), ids=lambda value: "-".join(map(str, value)))
def test_right_on_every_shape(
    device: Device, pool: CompilePool, kind: tuple[str, str, str], kernel: tuple[str | int, ...]
) -> None:
    for i, shape in enumerate(SHAPES):
        problem = problem_of(kind, shape)
        chosen = candidate(kernel, problem, LAUNCHES[i % len(LAUNCHES)])
        verdict = FAMILY.check(problem, chosen, device)
        assert verdict or verdict.rule in FAMILY.extent_rules, (problem, verdict)
        result = pool.submit("cute_sm90", FAMILY.kernel_key(problem, chosen, device)).result()
        assert result.artifact is not None, result.failure
        launch = FAMILY.load(problem, chosen, device, result.artifact.path)
        operands = data.make_operands(problem, torch.device("cuda"), seed=i)
        expected = data.reference(operands.a, operands.b)
        for _ in range(2):
            data.restore(operands)
            launch(operands.a, operands.b, operands.out)
            torch.cuda.synchronize()
            objection = data.check(operands, expected).objection(data.tolerance(problem))
            assert objection is None, (problem, FAMILY.label(chosen), objection)


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
@pytest.mark.parametrize("shape", [(1001, 1003, 1007, 1), (7, 9, 11, 1), (40, 30, 50, 2)])
def test_right_on_operands_that_tma_refuses(
    device: Device, pool: CompilePool, kind: tuple[str, str, str], shape: tuple[int, int, int, int]
) -> None:
    problem = problem_of(kind, shape)
    chosen = candidate(KERNELS[2], problem)
    result = pool.submit("cute_sm90", FAMILY.kernel_key(problem, chosen, device)).result()
    assert result.artifact is not None, result.failure
    operands = data.make_operands(problem, torch.device("cuda"), seed=0)
    FAMILY.load(problem, chosen, device, result.artifact.path)(operands.a, operands.b, operands.out)
    expected = data.reference(operands.a, operands.b)
    assert data.check(operands, expected).objection(data.tolerance(problem)) is None


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
@pytest.mark.parametrize("shape", [*SHAPES, (1001, 1003, 1007, 1), (5, 24, 40, 1)])
def test_the_baseline_is_right(
    device: Device, kind: tuple[str, str, str], shape: tuple[int, int, int, int]
) -> None:
    problem = problem_of(kind, shape)
    operands = data.make_operands(problem, torch.device("cuda"), seed=0)
    LIBRARY.load(problem, TORCH_MM, device, None)(operands.a, operands.b, operands.out)
    expected = data.reference(operands.a, operands.b)
    assert data.check(operands, expected).objection(data.tolerance(problem)) is None, problem
    assert torch.backends.cuda.matmul.fp32_precision == "ieee", "the program's choice is left as it was"


@pytest.mark.parametrize("accumulation", ["fast", "two_level"])
@pytest.mark.parametrize("epilogue", ["scale_tensor", "scale_rowwise", "scale_rowwise+bias_n+gelu+amax"])
@pytest.mark.parametrize("out_dtype", ["bf16", "fp16", "fp8_e4m3"])
@pytest.mark.parametrize("swapped", [False, True])
def test_scales_are_applied(
    device: Device, pool: CompilePool, out_dtype: str, epilogue: str, accumulation: str, swapped: bool
) -> None:
    """By our kernel and by torch alike, on extents that the library takes and on ragged ones."""
    for shape in ("256x512x1024", "100x264x400"):
        problem = Problem.parse(
            shape, dtype="fp8_e4m3_e5m2", out_dtype=out_dtype, epilogue=epilogue, accumulation=accumulation
        )
        kernel = ("cooperative", 128, 96, 4, 1, 1, 32, swapped, 1)
        chosen = candidate(kernel, problem)
        verdict = FAMILY.check(problem, chosen, device)
        assert verdict or verdict.rule in FAMILY.extent_rules, (problem, verdict)
        result = pool.submit("cute_sm90", FAMILY.kernel_key(problem, chosen, device)).result()
        assert result.artifact is not None, result.failure
        operands = data.make_operands(problem, torch.device("cuda"), seed=1)
        wanted = data.expected(problem, operands)
        for name, launch in {
            "ours": FAMILY.load(problem, chosen, device, result.artifact.path),
            "torch": LIBRARY.load(problem, TORCH_MM, device, None),
        }.items():
            data.restore(operands)
            launch(operands.a, operands.b, operands.out, *operands.fused)
            objection = data.check(operands, wanted).objection(data.tolerance(problem))
            assert objection is None, (problem, name, objection)


SCALED = [
    ("scale_tensor", "bf16"), ("scale_rowwise", "fp16"), ("scale_rowwise+bias_n", "bf16"),
    ("alpha+scale_tensor+bias_n+gelu_tanh+residual", "bf16"), ("scale_rowwise+silu+amax", "fp32"),
    ("scale_rowwise+residual", "fp32"), ("scale_rowwise+bias_n+swiglu", "bf16"),
]  # fmt: skip


@pytest.mark.parametrize("kernel", [KERNELS[0], KERNELS[7], (*KERNELS[2][:7], True, 1)])
def test_int8_products_are_scaled(device: Device, pool: CompilePool, kernel: tuple[str | int, ...]) -> None:
    """By our kernel, whole and in parts of k, and by torch alike; m as of a decode step, too."""
    cases = []
    for epilogue, out_dtype in SCALED:
        for shape, parts in (("256x512x1024", 1), ("100x272x400", 1), ("3x528x144", 1), ("264x272x2048", 3)):
            problem = Problem.parse(shape, dtype="int8", out_dtype=out_dtype, epilogue=epilogue)
            chosen = candidate(kernel, problem, ("along_m", 1, "all", parts, "none"))
            verdict = FAMILY.check(problem, chosen, device)
            if verdict.rule == "fused_store":
                assert "swiglu" in epilogue
                continue
            assert verdict or verdict.rule in FAMILY.extent_rules, (problem, verdict)
            key = FAMILY.kernel_key(problem, chosen, device)
            cases.append((problem, chosen, pool.submit("cute_sm90", key)))
    for problem, chosen, submitted in cases:
        result = submitted.result()
        assert result.artifact is not None, result.failure
        operands = data.make_operands(problem, torch.device("cuda"), seed=1)
        wanted = data.expected(problem, operands)
        assert 0.1 < wanted.float().std() < 10, "of a size where activations bend"
        for name, launch in {
            "ours": FAMILY.load(problem, chosen, device, result.artifact.path),
            "torch": LIBRARY.load(problem, TORCH_MM, device, None),
        }.items():
            data.restore(operands)
            launch(*operands.arguments)
            objection = data.check(operands, wanted).objection(data.tolerance(problem))
            assert objection is None, (problem, name, objection)


def test_two_level_sums_are_closer_than_fast_ones(device: Device, pool: CompilePool) -> None:
    """What the accumulation is for: over a long k, and with an fp32 output that shows it."""
    errors = {}
    for accumulation in ("fast", "two_level"):
        problem = problem_of(("fp8_e4m3", "fp32", accumulation), (256, 512, 16384, 1))
        chosen = candidate(KERNELS[0], problem)
        artifact = pool.submit("cute_sm90", FAMILY.kernel_key(problem, chosen, device)).result().artifact
        assert artifact is not None
        operands = data.make_operands(problem, torch.device("cuda"), seed=0)
        FAMILY.load(problem, chosen, device, artifact.path)(operands.a, operands.b, operands.out)
        checked = data.check(operands, data.reference(operands.a, operands.b))
        assert checked.objection(data.tolerance(problem)) is None, accumulation
        errors[accumulation] = checked.relative_error
    print(f"relative errors of 256x512x16384: {errors}")
    assert errors["two_level"] < errors["fast"] / 4


def test_int8_is_exact_at_its_extremes(device: Device, pool: CompilePool) -> None:
    problem = problem_of(("int8", "int32", "fast"), (128, 128, 4096, 1))
    artifact = pool.submit("cute_sm90", FAMILY.kernel_key(problem, candidate(KERNELS[0], problem), device))
    stored = artifact.result().artifact
    assert stored is not None
    launch = FAMILY.load(problem, candidate(KERNELS[0], problem), device, stored.path)
    a = torch.full((128, 4096), -128, dtype=torch.int8, device="cuda")
    out = torch.empty(128, 128, dtype=torch.int32, device="cuda")
    launch(a, a.t(), out)
    assert (out == 128 * 128 * 4096).all()


def test_fp8_output_saturates(device: Device, pool: CompilePool) -> None:
    """As torch._scaled_mm's does: beyond 448 is 448, not NaN."""
    problem = problem_of(("fp8_e4m3_e5m2", "fp8_e4m3", "fast"), (128, 128, 4096, 1))
    chosen = candidate(KERNELS[0], problem)
    artifact = pool.submit("cute_sm90", FAMILY.kernel_key(problem, chosen, device)).result().artifact
    assert artifact is not None
    launch = FAMILY.load(problem, chosen, device, artifact.path)
    a = torch.ones(128, 4096, device="cuda").to(torch.float8_e4m3fn)
    b = torch.ones(128, 4096, device="cuda").to(torch.float8_e5m2).t()
    out = torch.empty(128, 128, dtype=torch.float8_e4m3fn, device="cuda")
    launch(a, b, out)
    assert (out.float() == 448).all()
