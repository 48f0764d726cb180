"""What cuBLASLt's heuristic names, read without its bindings."""

from __future__ import annotations

import pytest
import torch

from tunegemm.describe.problem import Problem
from tunegemm.generate.cublaslt import choice
from tunegemm.generate.cublaslt.choice import LibraryChoice, first_choice, of_label

cublaslt = pytest.importorskip("nvmath.bindings.cublasLt")


def test_numbers_are_those_of_the_librarys_header() -> None:
    """As the bindings, which are made of it, have them."""
    tiles = {int(tile): tile.name.removeprefix("TILE_") for tile in cublaslt.MatmulTile if int(tile)}
    ours = {number: f"{rows}x{columns}" for number, (rows, columns) in choice._tiles().items()}
    assert {number: name for number, name in ours.items() if number in tiles} == tiles
    shapes = {int(one): one.name.removeprefix("SHAPE_") for one in cublaslt.ClusterShape}
    for number, (rows, columns) in choice._CLUSTERS.items():
        assert shapes[number] == f"{rows}x{columns}x1"
    names = cublaslt.MatmulAlgoConfigAttribute
    assert (choice._TILE_ID, choice._SPLITK_NUM, choice._CLUSTER_SHAPE_ID) == (
        names.TILE_ID, names.SPLITK_NUM, names.CLUSTER_SHAPE_ID,
    )  # fmt: skip
    for attribute, size in ((names.TILE_ID, 4), (names.SPLITK_NUM, 4), (names.CLUSTER_SHAPE_ID, 2)):
        assert cublaslt.get_matmul_algo_config_attribute_dtype(attribute)().nbytes == size
    limits = cublaslt.MatmulPreferenceAttribute
    assert choice._MAX_WORKSPACE_BYTES == limits.MAX_WORKSPACE_BYTES
    assert tuple(getattr(limits, f"MIN_ALIGNMENT_{one}_BYTES") for one in "ABCD") == choice._MIN_ALIGNMENTS
    of_product = cublaslt.MatmulDescAttribute
    assert (choice._TRANSA, choice._TRANSB) == (of_product.TRANSA, of_product.TRANSB)
    result = cublaslt.matmul_heuristic_result_dtype
    assert result.itemsize == choice.ctypes.sizeof(choice._Result)
    for ours_name, theirs in (("workspace_bytes", "workspace_size"), ("state", "state")):
        assert getattr(choice._Result, ours_name).offset == result.fields[theirs][1]


def test_a_label_has_the_same_as_torch_has_rows_and_columns() -> None:
    label = "cublaslt a66 t64x8 s64xAUTO c4x1x1 splitk2 compute_type o1"
    assert of_label(label) == LibraryChoice(8, 64, 1, 4, 2)
    assert of_label("cublaslt a66 t256x144 s64xAUTO c1x2x1 o7") == LibraryChoice(144, 256, 2, 1, 1)
    assert of_label("unknown: error") is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a library to ask")
def test_without_a_gpu_nothing_is_known() -> None:
    assert first_choice(Problem.parse("64x4096x4096"), 0) is None


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["1x4096x4096", "24x9216x4608", "64x11008x2304", "300x2880x7680"])
def test_on_a_gpu_it_is_what_the_bindings_say(shape: str) -> None:
    from tunegemm.generate.cublaslt import library

    problem = Problem.parse(shape)
    torch.zeros(1, device="cuda")
    wanted = library.label(library.algorithms(problem, 0, 1, 32 << 20)[0])
    assert first_choice(problem, 0) == of_label(wanted)
