"""The race of the portable families, without a GPU: its products, its means, and a row in one line."""

from __future__ import annotations

from collections import Counter
from typing import Any

from benchmarks.portable import GENERATORS, SHAPES, brief, first_kernels, is_aligned, main, means
from tunegemm.describe.device import find_device
from tunegemm.describe.problem import Problem
from tunegemm.tuning.kernels import Kernels


def row(shape: str, **ratios: float) -> dict[str, Any]:
    m, n, k = map(int, shape.split("x"))
    providers: dict[str, Any] = {"torch": {"ratio": 1.0}, "cublaslt": {"skipped": "no algorithm"}}
    providers |= {name: {"ratio": ratio} for name, ratio in ratios.items()}
    facts = {"m": m, "n": n, "k": k, "dtype": "bf16", "layout": "tn", "wrong": ["triton 64x64x32: differs"]}
    return facts | {"providers": providers}


def test_there_are_forty_products_of_both_kinds() -> None:
    assert len(dict.fromkeys(map(Problem.parse, SHAPES))) == 40
    odd = [shape for shape in SHAPES if not is_aligned(row(shape))]
    assert len(odd) == 14 and {"4096x4096x4095", "2048x2047x2048", "4096x4098x4096"} <= {*odd}


def test_means_tell_whole_vectors_from_others() -> None:
    rows = [
        row("64x64x64", triton=0.5, cute_sm80=0.8),
        row("64x64x128", triton=2.0),
        row("64x64x65", triton=0.3),
    ]
    assert means(rows) == {
        "means": {"cute_sm80, aligned": [0.8, 1], "triton, aligned": [1.0, 2], "triton, other": [0.3, 1]}
    }


def test_a_wrong_kernel_shows_in_its_line() -> None:
    text = brief(row("64x64x64", triton=0.5))
    assert text == "cublaslt: no algorithm  triton 0.500  WRONG triton 64x64x32: differs"


def test_each_generator_has_kernels_that_differ_for_every_product() -> None:
    kernels = Kernels(find_device("h100"), GENERATORS)
    for shape in ("4096x4096x4096", "16x6144x4096", "1024x1024x1001", "4096x4098x4096"):
        found = first_kernels(Problem.parse(shape), kernels, 3)
        assert Counter(one.family for one in found) == dict.fromkeys(GENERATORS, 3), shape
        assert len({one.kernel for one in found}) == 6


def test_without_a_gpu_it_says_so(capsys: Any) -> None:
    assert main(["--device", "cuda:99"]) == 2
    assert "cuda:99" in capsys.readouterr().err
