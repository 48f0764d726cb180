"""Which tiles cuBLASLt's heuristic chooses for a product, asked as torch asks it.

Of 582 products of an H200 it names the kernel that torch.mm launches each time
(benchmarks/results/h200/choices.json.xz). The library is the one that torch has loaded, and the handle
torch's own: nothing is loaded or created. nvmath-python's bindings would take 0.3 s to import.
"""

from __future__ import annotations

import ctypes
import re
from ctypes import POINTER, byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tunegemm.describe.problem import MAX_ALIGNMENT, Problem
from tunegemm.generate.cublaslt.operands import Matrix, column_major, packed_strides

# cublasLt.h and library_types.h: values that are part of CUDA's binary interface.
_R_32F, _COMPUTE_32F = 0, 68
_TYPES = {"bf16": 14, "fp16": 2}
_TRANSA, _TRANSB = 3, 4
_MAX_WORKSPACE_BYTES, _MIN_ALIGNMENTS = 1, (5, 6, 7, 8)
_TILE_ID, _SPLITK_NUM, _CLUSTER_SHAPE_ID = 1, 2, 8
#: That torch gives the library on Hopper.
_WORKSPACE_BYTES = 32 << 20


@dataclass(frozen=True)
class LibraryChoice:
    """How the library cuts a product into tiles."""

    tile_m: int
    """Rows of D, here and below as torch has it."""
    tile_n: int
    cluster_m: int
    cluster_n: int
    split_k: int


class _Result(ctypes.Structure):
    _fields_ = (
        ("algorithm", c_uint64 * 8), ("workspace_bytes", c_size_t), ("state", c_int),
        ("waves", c_float), ("reserved", c_int * 4),
    )  # fmt: skip


def of_label(label: str) -> LibraryChoice | None:
    """From a label such as ``cublaslt a66 t64x8 s64xAUTO c4x1x1 splitk2 compute_type``."""
    tile = re.search(r" t(\d+)x(\d+)\b", label)
    cluster = re.search(r" c(\d+)x(\d+)x1\b", label)
    split = re.search(r" splitk(\d+)\b", label)
    if tile is None or cluster is None:
        return None
    # The library's product is D^T: its rows are columns of ours.
    return LibraryChoice(
        int(tile[2]), int(tile[1]), int(cluster[2]), int(cluster[1]), int(split[1]) if split else 1
    )


def first_choice(problem: Problem, device_index: int) -> LibraryChoice | None:
    """For packed operands on a device; None where the library cannot be asked or names no tile."""
    import torch

    library = _library()
    if library is None or problem.in_dtype not in _TYPES or not torch.cuda.is_initialized():
        return None
    made: list[tuple[Any, c_void_p]] = []
    try:
        with torch.cuda.device(device_index):
            handle = c_void_p(torch.cuda.current_blas_handle())
            return _ask(library, handle, problem, made)
    except (RuntimeError, OSError, AttributeError, ctypes.ArgumentError):
        return None
    finally:
        for destroy, value in made:
            destroy(value)


def _ask(
    library: Any, handle: c_void_p, problem: Problem, made: list[tuple[Any, c_void_p]]
) -> LibraryChoice | None:
    product = column_major(problem, packed_strides(problem))
    description = c_void_p()
    _must(library.cublasLtMatmulDescCreate(byref(description), _COMPUTE_32F, _R_32F))
    made.append((library.cublasLtMatmulDescDestroy, description))
    for attribute, matrix in ((_TRANSA, product.first), (_TRANSB, product.second)):
        value = c_int32(matrix.transpose)
        _must(library.cublasLtMatmulDescSetAttribute(description, attribute, byref(value), 4))

    def layout(matrix: Matrix) -> c_void_p:
        found = c_void_p()
        kind = _TYPES[problem.in_dtype]
        _must(
            library.cublasLtMatrixLayoutCreate(
                byref(found), kind, matrix.rows, matrix.columns, matrix.leading
            )
        )
        made.append((library.cublasLtMatrixLayoutDestroy, found))
        return found

    first, second, out = layout(product.first), layout(product.second), layout(product.out)
    preference = c_void_p()
    _must(library.cublasLtMatmulPreferenceCreate(byref(preference)))
    made.append((library.cublasLtMatmulPreferenceDestroy, preference))
    room = c_uint64(_WORKSPACE_BYTES)
    _must(library.cublasLtMatmulPreferenceSetAttribute(preference, _MAX_WORKSPACE_BYTES, byref(room), 8))
    for attribute in _MIN_ALIGNMENTS:
        least = c_uint32(MAX_ALIGNMENT)
        _must(library.cublasLtMatmulPreferenceSetAttribute(preference, attribute, byref(least), 4))
    result, count = _Result(), c_int()
    _must(
        library.cublasLtMatmulAlgoGetHeuristic(
            handle, description, first, second, out, out, preference, 1, byref(result), byref(count)
        )
    )
    if count.value < 1 or result.state != 0:
        return None

    def read(attribute: int) -> int:
        value, written = c_uint64(0), c_size_t()  # attributes have 2 or 4 bytes, little-endian
        size = 2 if attribute == _CLUSTER_SHAPE_ID else 4
        _must(
            library.cublasLtMatmulAlgoConfigGetAttribute(
                byref(result.algorithm), attribute, byref(value), size, byref(written)
            )
        )
        return value.value

    tile, cluster = _tiles().get(read(_TILE_ID)), _CLUSTERS.get(read(_CLUSTER_SHAPE_ID))
    if tile is None or cluster is None:
        return None
    return LibraryChoice(tile[1], tile[0], cluster[1], cluster[0], max(1, read(_SPLITK_NUM)))


def _must(status: int) -> None:
    if status != 0:
        raise RuntimeError(f"cuBLASLt: status {status}")


@cache
def _library() -> Any:
    """The library that torch has loaded, its functions declared; None where there is none."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
        path = next(
            (line.split(maxsplit=5)[5] for line in maps.splitlines() if "/libcublasLt.so" in line), None
        )
        if path is None:
            return None
        library = ctypes.CDLL(path)
        pointer, handle = POINTER(c_void_p), c_void_p
        for name, arguments in {
            "cublasLtMatmulDescCreate": (pointer, c_int, c_int),
            "cublasLtMatmulDescSetAttribute": (handle, c_int, c_void_p, c_size_t),
            "cublasLtMatmulDescDestroy": (handle,),
            "cublasLtMatrixLayoutCreate": (pointer, c_int, c_uint64, c_uint64, c_int64),
            "cublasLtMatrixLayoutDestroy": (handle,),
            "cublasLtMatmulPreferenceCreate": (pointer,),
            "cublasLtMatmulPreferenceSetAttribute": (handle, c_int, c_void_p, c_size_t),
            "cublasLtMatmulPreferenceDestroy": (handle,),
            "cublasLtMatmulAlgoGetHeuristic": (*[handle] * 7, c_int, POINTER(_Result), POINTER(c_int)),
            "cublasLtMatmulAlgoConfigGetAttribute": (c_void_p, c_int, c_void_p, c_size_t, POINTER(c_size_t)),
        }.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, c_int
        return library
    except (OSError, AttributeError, IndexError):
        return None


#: Of `cublasLtClusterShape_t` those that its heuristic has named.
_CLUSTERS = {
    2: (1, 1), 3: (2, 1), 4: (4, 1), 5: (1, 2), 6: (2, 2), 7: (4, 2), 8: (1, 4), 9: (2, 4), 10: (4, 4),
    11: (8, 1), 12: (1, 8), 13: (8, 2), 14: (2, 8), 15: (16, 1), 16: (1, 16),
}  # fmt: skip


@cache
def _tiles() -> dict[int, tuple[int, int]]:
    """Rows and columns of the library's D that a tile has, by its number in ``cublasLtMatmulTile_t``."""
    words = Path(__file__).with_name("tiles.txt").read_text(encoding="utf-8").split()
    sizes = (word.split("x") for word in words)
    return {number: (int(rows), int(columns)) for number, (rows, columns) in enumerate(sizes, 1)}
