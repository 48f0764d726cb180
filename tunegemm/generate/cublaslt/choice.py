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

#: The workspace that torch allows the library on Hopper.
_WORKSPACE_BYTES = 32 << 20
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
    """The first algorithm named for a product with a residual whose tile adds it fast, else the first of all;
    None if the library cannot be asked."""
    import torch

    if binding.missing() is not None or not torch.cuda.is_initialized():
        return None
    found: list[Candidate] = []
    for requested in (1, _ASKED):  # mostly the first adds fast, and each of the others costs host time
        try:
            found = library.algorithms(problem, device_index, requested, _WORKSPACE_BYTES)
        except RuntimeError:
            return None
        for candidate in found:
            if adds_fast(str(candidate["tile"])):
                return candidate
    return found[0] if found else None


def adds_fast(tile: str) -> bool:
    """Whether algorithms with a tile, such as ``256x128``, add a matrix in about the time of reading it.

    The others take three times as long and more, longer than torch's addition. The heuristic does not know
    it: it mostly names the same algorithm first with and without a residual (`first_added` beside `added` in
    benchmarks/results/h200/kind_choices.json).
    """
    sides = [int(side) for side in re.findall(r"\d+", tile)]
    other = sum(sides) - _SIDE
    return _SIDE not in sides or other in (192, 256) or not 176 < other < 320
