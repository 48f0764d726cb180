"""Asks cuBLASLt's heuristic, as torch does, which tiles it chooses for a product.

For each of 582 products on an H200 it named the kernel that torch.mm launched
(benchmarks/results/h200/choices.json.xz).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate.cublaslt import binding, library
from tunegemm.generate.cublaslt.operands import packed_strides

#: The workspaces that torch allows the library on Hopper: for a product alone, and for one with a bias, as
#: its times show. In more of it, algorithms split k, which made 56 of 481 products with a bias and a residual
#: slower than 0.99 of torch (H200).
_WORKSPACE_BYTES, _BIASED_BYTES = 32 << 20, 1 << 20
#: Algorithms to choose from for a residual, and the side of the tiles that may add one slowly.
_ASKED, _SIDE = 8, 128


@dataclass(frozen=True)
class LibraryChoice:
    """How the library cuts a product into tiles."""

    tile_m: int
    """Rows of D; rows and columns here and below are those of torch's row-major D."""
    tile_n: int
    cluster_m: int
    cluster_n: int
    split_k: int


def parse_label(label: str) -> LibraryChoice | None:
    """Read a choice from a label such as ``cublaslt a66 t64x8 s64xAUTO c4x1x1 splitk2 compute_type``."""
    tile = re.search(r" t(\d+)x(\d+)\b", label)
    cluster = re.search(r" c(\d+)x(\d+)x1\b", label)
    split = re.search(r" splitk(\d+)\b", label)
    if tile is None or cluster is None:
        return None
    # The library computes D^T: its rows are our columns.
    split_k = max(1, int(split[1])) if split else 1
    return LibraryChoice(int(tile[2]), int(tile[1]), int(cluster[2]), int(cluster[1]), split_k)


def first_choice(problem: Problem, device_index: int) -> LibraryChoice | None:
    """The library's choice for packed operands; None if it cannot be asked or names no tile."""
    import torch

    if not {problem.in_dtype, problem.out_dtype} <= binding.TYPES.keys() or not torch.cuda.is_initialized():
        return None
    try:
        plan = binding.Plan(problem, packed_strides(problem))
        results = binding.heuristic(device_index, plan, 1, _WORKSPACE_BYTES)
        labels = [library.label(library.candidate_of(result.algorithm, 0)) for result in results]
    except RuntimeError:
        return None
    return parse_label(labels[0]) if labels else None


def algorithm_to_add(problem: Problem, device_index: int) -> Candidate | None:
    """The algorithm for a product with one of the epilogues that the library has; None if it cannot be asked,
    or names none.

    It is the first one named whose tile adds a residual fast, else the first of all. With a bias, it is the
    one that torch's own product with a bias runs, and None if that adds a residual slowly: the next ones are
    for other shapes.
    """
    import torch

    if binding.missing() is not None or not torch.cuda.is_initialized():
        return None
    steps = problem.fused.steps
    has_bias, adds = "bias_n" in steps, "residual" in steps
    found: list[Candidate] = []
    # Mostly the first adds fast, and each of the others costs host time.
    for requested in (1,) if has_bias else (1, _ASKED):
        try:
            found = library.algorithms(
                problem, device_index, requested, _BIASED_BYTES if has_bias else _WORKSPACE_BYTES
            )
        except RuntimeError:
            return None
        for candidate in found:
            if not adds or adds_fast(str(candidate["tile"]), has_bias=has_bias):
                return candidate
    return found[0] if found and not has_bias else None


def adds_fast(tile: str, *, has_bias: bool = False) -> bool:
    """Whether algorithms with a tile, such as ``256x128``, add a matrix in about the time of reading it.

    The others take three times as long and more, longer than torch's addition. The heuristic does not know
    it: it names the same algorithm with and without a residual (`first_added` beside `added` in
    benchmarks/results/h200/kind_choices.json).
    """
    sides = [int(side) for side in re.findall(r"\d+", tile)]
    other = sum(sides) - _SIDE
    least = 140 if has_bias else 176
    return _SIDE not in sides or other in (192, 256) or not least < other < 320
