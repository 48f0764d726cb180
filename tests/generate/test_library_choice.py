"""What cuBLASLt's heuristic names, and the numbers and names by which it is read."""

from __future__ import annotations

import ctypes

import pytest
import torch

from tests.support.forks import Forks
from tests.support.processes import environment
from tunegemm.describe.problem import Problem
from tunegemm.generate.cublaslt import binding, names
from tunegemm.generate.cublaslt.choice import LibraryChoice, adds_fast, first_choice, parse_label


def test_numbers_and_names_are_those_of_the_librarys_header() -> None:
    """As the bindings of nvmath-python, which are made of it, have them."""
    theirs = pytest.importorskip("nvmath.bindings.cublasLt")
    enums = {
        "tile": (theirs.MatmulTile, "TILE_"),
        "stages": (theirs.MatmulStages, "STAGES_"),
        "inner_shape": (theirs.MatmulInnerShape, ""),
        "cluster_shape": (theirs.ClusterShape, "SHAPE_"),
        "reduction_scheme": (theirs.ReductionScheme, ""),
    }
    assert names.tables() == {
        name: {int(one): one.name.removeprefix(prefix) for one in enum}
        for name, (enum, prefix) in enums.items()
    }
    of_algorithm = theirs.MatmulAlgoConfigAttribute
    header = {"tile", "stages", "inner_shape", "cluster_shape", "algo"}
    for name, (number, kind) in binding.ATTRIBUTES.items():
        word = "splitk_num" if name == "split_k" else name.removeprefix("algo_")
        attribute = of_algorithm[(f"{word}_id" if word in header else word).upper()]
        assert attribute == number
        dtype = theirs.get_matmul_algo_config_attribute_dtype(attribute)
        assert dtype(-1 if kind(-1).value < 0 else 1) == kind(-1 if kind(-1).value < 0 else 1).value
        assert dtype().nbytes == ctypes.sizeof(kind)
    limits = theirs.MatmulPreferenceAttribute
    assert binding.MAX_WORKSPACE_BYTES == limits.MAX_WORKSPACE_BYTES
    assert tuple(getattr(limits, f"MIN_ALIGNMENT_{one}_BYTES") for one in "ABCD") == binding.MIN_ALIGNMENTS
    of_product, of_layout = theirs.MatmulDescAttribute, theirs.MatrixLayoutAttribute
    assert (binding.TRANSA, binding.TRANSB) == (of_product.TRANSA, of_product.TRANSB)
    assert (binding.EPILOGUE, binding.BIAS_POINTER) == (of_product.EPILOGUE, of_product.BIAS_POINTER)
    of_epilogue = theirs.Epilogue
    theirs_added = [of_epilogue[name] for name in ("DEFAULT", "BIAS", "RELU_BIAS", "GELU_BIAS")]
    assert [*names.ADDED.values()] == theirs_added
    assert binding.BATCH_COUNT == of_layout.BATCH_COUNT
    assert binding.STRIDED_BATCH_OFFSET == of_layout.STRIDED_BATCH_OFFSET
    result = theirs.matmul_heuristic_result_dtype
    assert result.itemsize == ctypes.sizeof(binding.HeuristicResult)
    for ours, member in (("algorithm", "algo"), ("workspace_bytes", "workspace_size"), ("state", "state")):
        assert getattr(binding.HeuristicResult, ours).offset == result.fields[member][1]


def test_a_number_has_its_name_if_it_has_one() -> None:
    assert names.name_of("tile", 24) == "256x128" and names.name_of("cluster_shape", 5) == "1x2x1"
    assert (names.name_of("tile", 0), names.name_of("cluster_shape", 0)) == ("UNDEFINED", "AUTO")
    assert names.name_of("tile", 9999) == 9999


def test_a_label_has_the_same_as_torch_has_rows_and_columns() -> None:
    label = "cublaslt a66 t64x8 s64xAUTO c4x1x1 splitk2 compute_type o1"
    assert parse_label(label) == LibraryChoice(8, 64, 1, 4, 2)
    assert parse_label("cublaslt a66 t256x144 s64xAUTO c1x2x1 o7") == LibraryChoice(144, 256, 2, 1, 1)
    assert parse_label("unknown: error") is None


def test_before_torch_has_begun_on_a_gpu_nothing_is_known(forks: Forks) -> None:
    program = (
        "from tunegemm.describe.problem import Problem\n"
        "from tunegemm.generate.cublaslt.choice import first_choice\n"
        "assert first_choice(Problem.parse('64x4096x4096'), 0) is None\n"
    )
    run = forks.run(program, env=environment())
    assert run.returncode == 0, run.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["1x4096x4096", "24x9216x4608", "64x11008x2304", "300x2880x7680"])
def test_on_a_gpu_it_is_what_the_label_of_the_first_algorithm_says(shape: str) -> None:
    from tunegemm.generate.cublaslt import library

    problem = Problem.parse(shape)
    torch.zeros(1, device="cuda")
    wanted = library.label(library.algorithms(problem, 0, 1, 32 << 20)[0])
    assert first_choice(problem, 0) == parse_label(wanted)


@pytest.mark.parametrize(
    ("tile", "fast"),
    [("128x272", False), ("272x128", False), ("128x184", False), ("128x256", True), ("192x128", True),
     ("320x128", True), ("128x176", True), ("256x136", True), ("64x208", True), ("UNDEFINED", True)],
)  # fmt: skip
def test_tiles_that_add_a_residual_fast(tile: str, fast: bool) -> None:
    assert adds_fast(tile) == fast
