from __future__ import annotations

import ctypes
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tunegemm.describe.device import find_device
from tunegemm.describe.problem import LAYOUTS, OUTPUT_DTYPES, Problem
from tunegemm.describe.space import Candidate, SearchSpace
from tunegemm.errors import SpaceError
from tunegemm.generate import families
from tunegemm.generate.cublaslt import FAMILY, TORCH_MM, binding, library, reduces_in_16_bits, splits_k
from tunegemm.generate.cublaslt.eager import composed, step_of, torch_mm
from tunegemm.generate.cublaslt.names import name_of, number_of, tables
from tunegemm.generate.cublaslt.operands import Matrix, column_major, packed_strides
from tunegemm.generate.takes import NotTaken
from tunegemm.measure import operands as data
from tunegemm.measure.operands import make_operands
from tunegemm.store.shipped import read_shipped

DEVICE = find_device("model:h200")
ALGORITHM = Candidate.make(
    "cublaslt",
    {
        "algorithm": "cublaslt", "algo_id": 66, "tile": "128x256", "stages": "128xAUTO",
        "inner_shape": "UNDEFINED", "cluster_shape": "2x1x1", "custom_option": 3,
    },
    {"split_k": 2, "reduction_scheme": "COMPUTE_TYPE", "cta_swizzling": 1, "workspace_bytes": 1 << 20},
)  # fmt: skip


def memory(matrix: Matrix, tensor: torch.Tensor, entry: int) -> torch.Tensor:
    """What a column-major library sees of one batch entry."""
    offset = tensor.storage_offset() + entry * matrix.batch_stride
    seen = tensor.as_strided((matrix.rows, matrix.columns), (1, matrix.leading), offset)
    return seen.mT if matrix.transpose else seen


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("out_major", ["n", "m"])
@pytest.mark.parametrize("shape", [(5, 7, 11, 1), (5, 7, 11, 3), (1, 7, 11, 1), (5, 1, 11, 2), (5, 7, 1, 1)])
def test_the_column_major_product_is_the_product(layout: str, out_major: str, shape: tuple[int, ...]) -> None:
    a_major, b_major = LAYOUTS[layout]
    problem = Problem(*shape, "bf16", "fp32", a_major, b_major, out_major)
    operands = make_operands(problem, torch.device("cpu"), seed=1)
    tensors = {"a": operands.a, "b": operands.b, "out": operands.out}
    strides = (operands.a.stride(), operands.b.stride(), operands.out.stride())
    for given in (strides, packed_strides(problem)):
        operands.out.fill_(float("nan"))
        left, right, to = column_major(problem, given)
        for matrix in (left, right, to):
            assert matrix.leading >= matrix.rows, "the library refuses anything else"
        for entry in range(problem.batch):
            first = memory(left, tensors[left.operand], entry).float()
            second = memory(right, tensors[right.operand], entry).float()
            memory(to, operands.out, entry).copy_(first @ second)
        expected = operands.a.float() @ operands.b.float()
        torch.testing.assert_close(operands.out, expected, rtol=1e-5, atol=1e-5)


def test_views_keep_their_leading_dimension() -> None:
    problem = Problem(5, 7, 11)
    a, b, out = torch.rand(5, 20)[:, 4:15], torch.rand(7, 16)[:, :11].mT, torch.zeros(5, 9)[:, :7]
    left, right, to = column_major(problem, (a.stride(), b.stride(), out.stride()))
    assert (left.leading, right.leading, to.leading) == (16, 20, 9)
    memory(to, out, 0).copy_(memory(left, b, 0) @ memory(right, a, 0))
    torch.testing.assert_close(out, a @ b)


def test_candidates_are_stored_by_names() -> None:
    stored = json.loads(ALGORITHM.to_json())
    assert stored["compile"]["tile"] == "128x256" and stored["launch"]["reduction_scheme"] == "COMPUTE_TYPE"
    assert Candidate.from_json(ALGORITHM.to_json()) == ALGORITHM
    assert FAMILY.label(ALGORITHM) == "cublaslt a66 t128x256 s128xAUTO c2x1x1 splitk2 compute_type sw1 o3"
    assert FAMILY.label(TORCH_MM) == "torch.mm"


def test_space_lists_algorithms_and_refuses_other_keys(tmp_path) -> None:
    space = families.load_space("cublaslt")
    assert space.compile_values["algorithm"] == ("torch.mm", "heuristic")
    verdicts = {
        kernel["algorithm"]: FAMILY.check(Problem(8, 8, 8), kernel, DEVICE) for kernel in space.kernels()
    }
    assert verdicts["torch.mm"].feasible
    assert verdicts["heuristic"].rule == "named_algorithm"
    bad = tmp_path / "space.toml"
    bad.write_text(
        'family = "cublaslt"\n[compile]\nalgoritm = ["torch.mm"]\n[launch]\nrequested=[1]\nworkspace_mib=[1]'
    )
    with pytest.raises(SpaceError, match="did you mean 'algorithm'"):
        SearchSpace.load(bad, parameters=FAMILY.parameters)


def test_discover_asks_no_library_where_there_is_no_gpu() -> None:
    assert FAMILY.discover(Problem(64, 64, 64), DEVICE) == [TORCH_MM]


def test_what_the_library_cannot_do_is_a_verdict() -> None:
    assert FAMILY.check(Problem(64, 64, 64), ALGORITHM, DEVICE)
    crossed = Problem(64, 64, 64, in_dtype="bf16", out_dtype="fp16")
    assert "no bf16 product with fp16" in str(FAMILY.check(crossed, ALGORITHM, DEVICE))
    ragged = Problem(7, 7, 7, batch=2)
    assert "98 B" in str(FAMILY.check(ragged, ALGORITHM, DEVICE))
    assert FAMILY.check(crossed, TORCH_MM, DEVICE) and FAMILY.check(ragged, TORCH_MM, DEVICE)


def test_the_library_adds_a_residual_and_a_bias_before_it_and_nothing_else() -> None:
    for epilogue in ("residual", "bias_n+residual"):
        assert FAMILY.check(Problem.parse("64x64x64", epilogue=epilogue), ALGORITHM, DEVICE)
    upright = Problem(64, 64, 64, out_major="m", epilogue="bias_n+residual")
    assert "contiguous, not m" in str(FAMILY.check(upright, ALGORITHM, DEVICE))
    for words in ({"epilogue": "bias_m+residual"}, {"epilogue": "swiglu"}, {"epilogue": "beta_c"}):
        assert words["epilogue"] in str(FAMILY.check(Problem.parse("64x64x64", **words), ALGORITHM, DEVICE))
    ragged = Problem(64, 63, 64, epilogue="residual", alignment=2)
    many = Problem(64, 64, 64, batch=2, epilogue="residual")
    for problem in (ragged, many):
        assert "whole 16 B" in str(FAMILY.check(problem, ALGORITHM, DEVICE))


def test_an_incomplete_record_is_refused_in_words() -> None:
    half = Candidate.make("cublaslt", {"algorithm": "cublaslt", "algo_id": 66})
    with pytest.raises(ValueError, match="parameter 'tile'"):
        FAMILY.load(Problem(64, 64, 64), half, DEVICE, None)


def test_without_the_library_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "library", lambda: None)
    monkeypatch.setattr("torch.version.cuda", None)
    assert FAMILY.unavailable() is None, "a torch for CPUs lacks nothing"
    with pytest.raises(ValueError, match="a torch for CPUs has no cuBLASLt; install one for CUDA"):
        FAMILY.load(Problem(64, 64, 64), ALGORITHM, DEVICE, None)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    assert "pip install torch" in str(FAMILY.unavailable())
    with pytest.raises(ValueError, match="pip install torch"):
        FAMILY.load(Problem(64, 64, 64), ALGORITHM, DEVICE, None)


def test_names_and_numbers_are_each_others() -> None:
    for attribute, names in tables().items():
        assert attribute in binding.ATTRIBUTES and len(names) == len(set(names.values()))
        for number, name in names.items():
            assert name_of(attribute, number) == name and number_of(attribute, name) == number
    assert name_of("tile", 9999) == 9999 and number_of("tile", 9999) == 9999, "of a newer library"
    assert name_of("cluster_shape", 1) == 1, "a gap in the library's numbers"


@pytest.mark.parametrize(("attribute", "value"), [("tile", "3x5"), ("tile", "-"), ("split_k", "two")])
def test_an_unknown_name_is_refused_with_a_remedy(attribute: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{attribute}='{value}' is not a name .*upgrade it or tune again"):
        number_of(attribute, value)


def test_a_number_that_does_not_fit_is_refused() -> None:
    for attribute, number in (("cluster_shape", 1 << 16), ("tile", -1), ("algo_id", 1 << 32)):
        with pytest.raises(ValueError, match=f"{attribute}={number} does not fit .*tune again"):
            binding.number_as(attribute, number)


def test_every_shipped_algorithm_has_known_names_and_its_label() -> None:
    records, warnings = read_shipped()
    named = [one for one in records if one.candidate.params.get("algorithm") == "cublaslt"]
    assert named and not warnings
    for record in named:
        assert FAMILY.label(record.candidate) == record.label
        for attribute in tables():
            assert isinstance(number_of(attribute, record.candidate[attribute]), int), record.label


@pytest.mark.skipif(binding.library() is None, reason="there is no cuBLASLt")
def test_an_algorithm_of_the_library_comes_back_by_its_names() -> None:
    algorithm = binding.Algorithm()
    library.configure(algorithm, ALGORITHM)
    numberless = dict(ALGORITHM.compile_params) | {"algo_id": 0}
    expected = Candidate.make("cublaslt", numberless, dict(ALGORITHM.launch_params))
    assert library.candidate_of(algorithm, 1 << 20) == expected
    with pytest.raises(binding.LibraryError, match=r"CUBLAS_STATUS_INVALID_VALUE \(7\)"):
        binding.call("MatmulAlgoConfigSetAttribute", algorithm, 99, None, ctypes.c_size_t(4))


def test_nothing_to_compile() -> None:
    assert not FAMILY.compiled and not hasattr(FAMILY, "compile") and not hasattr(FAMILY, "kernel_key")
    assert FAMILY.reduction_class(Problem(64, 64, 64), TORCH_MM) == ""


@pytest.mark.parametrize("shape", ["32x48x64", "33x50x65", "5x24x40x2"])
@pytest.mark.parametrize(
    ("in_dtype", "out_dtype"), [(one, out) for one in OUTPUT_DTYPES for out in OUTPUT_DTYPES[one]]
)
def test_torchs_product_of_every_dtype(in_dtype: str, out_dtype: str, shape: str) -> None:
    """On a CPU, which has them too: where torch refuses extents, on padded copies."""
    if out_dtype == "fp32" and in_dtype in ("bf16", "fp16"):
        pytest.skip("torch.mm with an out_dtype is for CUDA")
    problem = Problem.parse(shape, dtype=in_dtype, out_dtype=out_dtype)
    operands = make_operands(problem, torch.device("cpu"), 0)
    FAMILY.load(problem, TORCH_MM, DEVICE, None)(operands.a, operands.b, operands.out)
    wanted = data.expected(problem, operands)
    assert data.check(operands, wanted).objection(data.tolerance(problem)) is None
    if in_dtype == "fp8_e5m2":  # a number that e4m3 has not, and one that comes to a small product with it
        operands.a.fill_(1024), operands.b.fill_(2**-10)
        FAMILY.load(problem, TORCH_MM, DEVICE, None)(operands.a, operands.b, operands.out)
        assert operands.out.float().unique().tolist() == [
            torch.tensor(float(problem.k)).to(operands.out.dtype)
        ]


@pytest.mark.parametrize("shape", ["32x48x64", "33x50x65", "32x48x64x2"])
@pytest.mark.parametrize("out_dtype", ["bf16", "fp32", "fp8_e4m3"])
@pytest.mark.parametrize("epilogue", ["scale_tensor", "scale_rowwise", "scale_rowwise+bias_n+gelu+amax"])
def test_torchs_scaled_products(shape: str, out_dtype: str, epilogue: str) -> None:
    problem = Problem.parse(shape, dtype="fp8_e4m3", out_dtype=out_dtype, epilogue=epilogue)
    operands = make_operands(problem, torch.device("cpu"), 0)
    launch = FAMILY.load(problem, TORCH_MM, DEVICE, None)
    launch(operands.a, operands.b, operands.out, *operands.fused)
    wanted = data.expected(problem, operands)
    assert data.check(operands, wanted).objection(data.tolerance(problem)) is None


def test_single_algorithms_are_of_16_bit_operands() -> None:
    verdict = FAMILY.check(Problem.parse("64x64x64", dtype="int8"), ALGORITHM, DEVICE)
    assert verdict.rule == "library_dtypes" and not verdict
    assert FAMILY.discover(Problem.parse("64x64x64", dtype="int8"), DEVICE) == [TORCH_MM]


#: Steps that torch's own calls take, and those that follow one by one.
COMPOSED = [
    "bias_n", "bias_m", "beta_c", "alpha+beta_c", "alpha", "alpha+beta_c+relu", "residual",
    "bias_n+gelu_tanh", "bias_n+gelu+residual", "silu+residual", "swiglu", "bias_n+geglu_tanh",
    "beta_c+reglu+residual", "alpha+beta_c+bias_n+gelu+residual+amax", "relu+amax",
]  # fmt: skip


@pytest.mark.parametrize("epilogue", COMPOSED)
@pytest.mark.parametrize(("dtype", "batch"), [("bf16", 1), ("fp16", 3)])
def test_torch_composes_what_an_epilogue_says(dtype: str, batch: int, epilogue: str) -> None:
    problem = Problem(16, 48, 64, batch, in_dtype=dtype, out_dtype=dtype, epilogue=epilogue)
    operands = make_operands(problem, torch.device("cpu"), seed=1)
    expected = data.expected(problem, operands)
    operands.out.fill_(float("nan"))
    torch_mm(problem)(*operands.arguments)
    torch.testing.assert_close(operands.out.float(), expected.float(), rtol=4e-2, atol=4e-2)
    if "amax" in epilogue:
        torch.testing.assert_close(operands.fused[-1].reshape(()), operands.out.float().abs().amax())
    if "beta_c" in epilogue:
        names = [operand.name for operand in problem.fused.operands]
        given = dict(zip(names, operands.fused, strict=True)) | {"beta": 0.0}
        given["c"] = torch.full_like(given["c"], float("nan"))
        result = composed(problem)(operands.a, operands.b, *given.values())
        assert result.isfinite().all(), "C is not read where beta is 0"


@pytest.mark.parametrize(
    ("params", "splits", "reduces"),
    [
        ({"split_k": 1, "reduction_scheme": "NONE"}, False, False),
        ({"split_k": 0, "reduction_scheme": 0}, False, False),
        ({"split_k": 2, "reduction_scheme": "NONE"}, True, False),
        ({"split_k": 2, "reduction_scheme": 0}, True, False),
        ({"split_k": 1, "reduction_scheme": "INPLACE"}, True, True),
        ({"split_k": 2, "reduction_scheme": "OUTPUT_TYPE"}, True, True),
        ({"split_k": 2, "reduction_scheme": "COMPUTE_TYPE"}, True, False), ({}, False, False),
    ],
)  # fmt: skip
def test_which_algorithms_add_up_splits_and_how(
    params: dict[str, int | str], splits: bool, reduces: bool
) -> None:
    one = Candidate.make("cublaslt", {"algorithm": "cublaslt"}, params)
    assert splits_k(one) == splits and not splits_k(TORCH_MM)
    problem = Problem(64, 64, 64)
    assert reduces_in_16_bits(problem, one) == reduces
    assert not reduces_in_16_bits(replace(problem, out_dtype="fp32"), one)


class Algorithm:
    """An algorithm of a planted library: ids 3 and 5, some tiles and stages; tile 9 is refused."""

    def __init__(self, number: int) -> None:
        self.number, self.given = number, dict[str, int]()


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, int, int], tuple[float, int]]:
    """Waves and workspace by id, tile and stages."""
    results: dict[tuple[int, int, int], tuple[float, int]] = {}

    def check(index: int, plan: object, algorithm: Algorithm) -> SimpleNamespace:
        key = algorithm.number, algorithm.given["tile"], algorithm.given["stages"]
        if key not in results:
            raise binding.LibraryError("planted", 15)
        waves, workspace_bytes = results[key]
        return SimpleNamespace(waves=waves, workspace_bytes=workspace_bytes)

    def candidate_of(algorithm: Algorithm, size: int) -> Candidate:
        return Candidate.make("cublaslt", {"algo_id": algorithm.number, **algorithm.given}, {"size": size})

    monkeypatch.setattr(library, "Plan", lambda *_: None)
    monkeypatch.setattr(binding, "algorithm_ids", lambda *_: [3, 5])
    monkeypatch.setattr(library, "initial", lambda index, problem, number: Algorithm(number))
    monkeypatch.setattr(binding, "listed", lambda algorithm, name: [1, 2, 9])
    monkeypatch.setattr(
        binding, "write", lambda algorithm, name, number: algorithm.given.__setitem__(name, number)
    )
    monkeypatch.setattr(library, "check_for", check)
    monkeypatch.setattr(library, "candidate_of", candidate_of)
    monkeypatch.setattr(library, "is_whole", lambda index, problem, plan, candidate: True)
    return results


def test_of_each_id_the_tile_that_fills_its_waves_is_taken(
    planted: dict[tuple[int, int, int], tuple[float, int]],
) -> None:
    planted |= {(3, 1, 1): (1.5, 64), (3, 1, 2): (0.0, 0), (3, 2, 1): (1.9, 100), (3, 2, 2): (1.9, 0),
                (3, 9, 1): (2.0, 101)}  # fmt: skip
    (found,) = library.one_of_each_id(Problem(64, 64, 64), 0, 100)
    assert found == Candidate.make("cublaslt", {"algo_id": 3, "tile": 2, "stages": 1}, {"size": 100})
    planted[5, 9, 9] = (0.0, 100)
    assert [one["algo_id"] for one in library.one_of_each_id(Problem(64, 64, 64), 0, 100)] == [3, 5]
    planted.clear()
    assert library.one_of_each_id(Problem(64, 64, 64), 0, 100) == []


ACTIVATED = {
    "relu": torch.relu, "silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}  # fmt: skip


@pytest.mark.parametrize("out", ["none", "contiguous", "transposed"])
@pytest.mark.parametrize("name", ACTIVATED)
def test_activations_and_gates_are_torchs_to_the_bit(name: str, out: str) -> None:
    x = torch.linspace(-4, 4, 48).view(6, 8)
    gate = {"relu": "reglu", "silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh"}[name]
    for step, expected in ((name, ACTIVATED[name](x)), (gate, ACTIVATED[name](x[:, ::2]) * x[:, 1::2])):
        room = {
            "none": None,
            "contiguous": torch.empty_like(expected),
            "transposed": torch.empty_like(expected.t()).t(),
        }
        result = step_of(step, torch.float32)(x, {}, room[out])
        assert torch.equal(result, expected) and (out == "none" or result is room[out])


@pytest.mark.parametrize(
    ("statuses", "has_context", "calls", "raised"),
    [([0], True, 1, False), ([7, 0], True, 2, False), ([7, 7], True, 2, True), ([7], False, 1, True)],
)
@pytest.mark.parametrize("out_major", ["n", "m"])
def test_a_librarys_launch_makes_a_context_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
    statuses: list[int], has_context: bool, calls: int, raised: bool, out_major: str,
) -> None:  # fmt: skip
    launched: list[tuple[int, ...]] = []

    def matmul(*given: Any) -> int:
        launched.append(tuple(each.value if hasattr(each, "value") else 0 for each in given))
        return statuses[len(launched) - 1]

    plan = SimpleNamespace(
        descriptors=[ctypes.c_void_p(number) for number in range(1, 6)], added=ctypes.c_void_p
    )
    monkeypatch.setattr(library, "Plan", lambda *_: plan)
    monkeypatch.setattr(library, "rebuilt", lambda *_: binding.Algorithm())
    monkeypatch.setattr(library, "ensure_context", lambda index: has_context)
    monkeypatch.setattr(binding, "handle", lambda index: ctypes.c_void_p(9))
    monkeypatch.setattr(binding, "library", lambda: SimpleNamespace(cublasLtMatmul=matmul))
    monkeypatch.setattr(binding, "status_name", lambda status: f"status {status}")
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 70, raising=False)
    problem = Problem(64, 64, 64, out_major=out_major)
    launch = library.launcher(problem, ALGORITHM, 0, None).of(
        *(torch.zeros(64, 64).bfloat16() for _ in range(3))
    )  # type: ignore[attr-defined]
    if raised:
        with pytest.raises(RuntimeError, match="status 7"):
            launch(16, 32, 48)
    else:
        launch(16, 32, 48)
    assert len(launched) == calls
    for addresses in ((8, 32, 48), (16, 40, 48), (16, 32, 56)):
        with pytest.raises(NotTaken):
            launch(*addresses)
