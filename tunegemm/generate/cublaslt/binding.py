"""Declares the functions of the cuBLASLt that torch has loaded, for calls through ctypes.

It loads nothing else and uses torch's handle. Another package's bindings, such as nvmath-python's, take 0.3 s
to import.
"""

from __future__ import annotations

import ctypes
import threading
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint16, c_uint32, c_uint64, c_void_p
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from tunegemm.describe.driver import ensure_context
from tunegemm.describe.problem import MAX_ALIGNMENT, Problem
from tunegemm.generate.cublaslt.names import ADDED
from tunegemm.generate.cublaslt.operands import Matrix, Strides, column_major

# cublasLt.h and library_types.h: values that are part of CUDA's binary interface.
R_32F, COMPUTE_32F = 0, 68
TYPES = {"bf16": 14, "fp16": 2, "fp32": R_32F}
TRANSA, TRANSB, EPILOGUE, BIAS_POINTER = 3, 4, 7, 8
BATCH_COUNT, STRIDED_BATCH_OFFSET = 5, 6
MAX_WORKSPACE_BYTES, MIN_ALIGNMENTS = 1, (5, 6, 7, 8)
NOT_SUPPORTED = 15
_MOST_IDS = 512

#: The attributes of an algorithm: the name in candidates, the library's number, the type.
ATTRIBUTES: dict[str, tuple[int, Any]] = {
    "algo_id": (0, c_int32),
    "tile": (1, c_uint32),
    "split_k": (2, c_int32),
    "reduction_scheme": (3, c_uint32),
    "cta_swizzling": (4, c_uint32),
    "custom_option": (5, c_uint32),
    "stages": (6, c_uint32),
    "inner_shape": (7, c_uint16),
    "cluster_shape": (8, c_uint16),
}

#: The attributes whose possible numbers an algorithm lists, with the library's numbers for the lists.
LISTED = {"tile": 6, "stages": 13}

Algorithm = c_uint64 * 8


class HeuristicResult(ctypes.Structure):
    """``cublasLtMatmulHeuristicResult_t``."""

    _fields_ = (
        ("algorithm", Algorithm), ("workspace_bytes", c_size_t), ("state", c_int),
        ("waves", c_float), ("reserved", c_int * 4),
    )  # fmt: skip


class LibraryError(RuntimeError):
    """A call of the library failed, or there is no library to call."""

    def __init__(self, message: str, status: int = -1) -> None:
        super().__init__(message)
        self.status = status


_ATTRIBUTE = (c_void_p, c_int, c_void_p, c_size_t)
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "MatmulDescCreate": (c_void_p, c_int, c_int),
    "MatmulDescSetAttribute": _ATTRIBUTE,
    "MatmulDescDestroy": (c_void_p,),
    "MatrixLayoutCreate": (c_void_p, c_int, c_uint64, c_uint64, c_int64),
    "MatrixLayoutSetAttribute": _ATTRIBUTE,
    "MatrixLayoutDestroy": (c_void_p,),
    "MatmulPreferenceCreate": (c_void_p,),
    "MatmulPreferenceSetAttribute": _ATTRIBUTE,
    "MatmulPreferenceDestroy": (c_void_p,),
    "MatmulAlgoGetHeuristic": (*[c_void_p] * 7, c_int, c_void_p, c_void_p),
    "MatmulAlgoGetIds": (c_void_p, *[c_int] * 7, c_void_p, c_void_p),
    "MatmulAlgoCapGetAttribute": (*_ATTRIBUTE, c_void_p),
    "MatmulAlgoInit": (c_void_p, *[c_int] * 7, c_void_p),
    "MatmulAlgoCheck": (*[c_void_p] * 7, c_void_p),
    "MatmulAlgoConfigSetAttribute": _ATTRIBUTE,
    "MatmulAlgoConfigGetAttribute": (*_ATTRIBUTE, c_void_p),
}


@cache
def library() -> Any:
    """The library that torch has loaded, with its functions declared; None if torch has loaded none.

    `Matmul` has no declared arguments. Callers pass each one as a `from_param` of its type, the fastest call
    that ctypes has: 0.6 us instead of 1.1 us (CPython 3.11 on a CPU host, 2026-11-23).
    """
    import torch  # noqa: F401  # loads the library

    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
        lines = [line for line in maps.splitlines() if "/libcublasLt.so" in line]
        if not lines:
            return None
        loaded = ctypes.CDLL(lines[0].split(maxsplit=5)[5])
        for name, arguments in _FUNCTIONS.items():
            function = getattr(loaded, f"cublasLt{name}")
            function.argtypes, function.restype = arguments, c_int
        loaded.cublasLtMatmul.restype = c_int
        loaded.cublasLtGetStatusName.restype = ctypes.c_char_p
        return loaded
    except (OSError, AttributeError, IndexError):
        return None


def missing() -> str | None:
    """Why the library's algorithms cannot be launched; None if they can.

    Also None for torch without CUDA, which has no GPU to launch them on.
    """
    import torch

    if torch.version.cuda is None or library() is not None:
        return None
    return (
        "torch has loaded no libcublasLt.so, or one that is too old: install torch from its wheels "
        "(pip install torch)"
    )


def call(name: str, *arguments: Any) -> None:
    """Calls ``cublasLt`` + name. Raises LibraryError, which names the status, if the call fails."""
    if (loaded := library()) is None:
        raise LibraryError(missing() or "a torch for CPUs has no cuBLASLt; install one for CUDA")
    if status := getattr(loaded, f"cublasLt{name}")(*arguments):
        raise LibraryError(f"cublasLt{name}: {status_name(status)}", status)


def status_name(status: int) -> str:
    """The library's name of a status, such as ``CUBLAS_STATUS_NOT_SUPPORTED (15)``."""
    return f"{library().cublasLtGetStatusName(status).decode()} ({status})"


@cache
def handle(device_index: int) -> c_void_p:
    """torch's handle for the first thread that calls this. A cublasHandle_t is also a cublasLtHandle_t.

    All threads share the handle: no product here changes its state, each launch passes its own stream and
    workspace, and torch destroys handles only when the process exits. Our own handle would need a context,
    which may not exist yet, and would add its time and memory to a process's first product.
    """
    import torch

    with torch.cuda.device(device_index):
        ensure_context(device_index)  # torch warns if a thread has no context
        return c_void_p(torch.cuda.current_blas_handle())


class Plan:
    """The descriptors of one product for operands with certain strides. They live as long as the plan."""

    def __init__(self, problem: Problem, strides: Strides) -> None:
        self._made: list[tuple[Any, c_void_p]] = []
        first, second, out = column_major(problem, strides)
        self.description = self._make("MatmulDesc", COMPUTE_32F, R_32F)
        for attribute, matrix in ((TRANSA, first), (TRANSB, second)):
            _set("MatmulDesc", self.description, attribute, c_int32(matrix.transpose))
        self.lock = threading.Lock()
        """Held from `set_bias` to the end of the call that launches: threads share the description."""
        if problem.epilogue.startswith("bias"):
            _set("MatmulDesc", self.description, EPILOGUE, c_uint32(ADDED[problem.epilogue]))
            self.set_bias(MAX_ALIGNMENT)  # an address, for a heuristic that does not read there
        self.first = self._layout(problem, first, problem.in_dtype)
        self.second = self._layout(problem, second, problem.in_dtype)
        self.out = self._layout(problem, out, problem.out_dtype)
        self._problem, self._of_out = problem, out
        self._added = {out.leading: self.out}

    def added(self, leading: int) -> c_void_p:
        """The descriptor of an added matrix: D's, with another leading dimension."""
        if (layout := self._added.get(leading)) is None:
            matrix = replace(self._of_out, leading=leading)
            layout = self._added[leading] = self._layout(self._problem, matrix, self._problem.out_dtype)
        return layout

    def set_bias(self, address: int) -> None:
        """Let the next launch add the bias at an address. Hold `lock`."""
        _set("MatmulDesc", self.description, BIAS_POINTER, c_void_p(address))

    @property
    def descriptors(self) -> tuple[c_void_p, ...]:
        """The descriptors of the product, A, B, C and D, in the library's order."""
        return self.description, self.first, self.second, self.out, self.out

    def _layout(self, problem: Problem, matrix: Matrix, dtype: str) -> c_void_p:
        layout = self._make("MatrixLayout", TYPES[dtype], matrix.rows, matrix.columns, matrix.leading)
        if problem.batch > 1:
            _set("MatrixLayout", layout, BATCH_COUNT, c_int32(problem.batch))
            _set("MatrixLayout", layout, STRIDED_BATCH_OFFSET, c_int64(matrix.batch_stride))
        return layout

    def _make(self, what: str, *arguments: int) -> c_void_p:
        made = c_void_p()
        call(f"{what}Create", byref(made), *arguments)
        self._made.append((getattr(library(), f"cublasLt{what}Destroy"), made))
        return made

    def __del__(self) -> None:
        for destroy, made in self._made:
            destroy(made)


def heuristic(device_index: int, plan: Plan, requested: int, workspace_bytes: int) -> list[HeuristicResult]:
    """The library's choices for a plan, its best guess first; empty if it has no algorithm.

    Raises LibraryError.
    """
    import torch

    preference, count, results = c_void_p(), c_int(), (HeuristicResult * requested)()
    call("MatmulPreferenceCreate", byref(preference))
    try:
        _set("MatmulPreference", preference, MAX_WORKSPACE_BYTES, c_uint64(workspace_bytes))
        for attribute in MIN_ALIGNMENTS:
            _set("MatmulPreference", preference, attribute, c_uint32(MAX_ALIGNMENT))
        with torch.cuda.device(device_index):
            call(
                "MatmulAlgoGetHeuristic", handle(device_index), *plan.descriptors, preference,
                requested, byref(results), byref(count),
            )  # fmt: skip
    except LibraryError as error:
        if error.status == NOT_SUPPORTED:
            return []
        raise
    finally:
        call("MatmulPreferenceDestroy", preference)
    return [result for result in results[: count.value] if result.state == 0]


def types_of(problem: Problem) -> tuple[int, ...]:
    """The library's numbers for the types of a product: compute, scale, A, B, C and D."""
    in_type, out_type = TYPES[problem.in_dtype], TYPES[problem.out_dtype]
    return COMPUTE_32F, R_32F, in_type, in_type, out_type, out_type


def algorithm_ids(device_index: int, problem: Problem) -> list[int]:
    """The numbers of the algorithms that the library has for a product's types. Raises LibraryError."""
    ids, count = (c_int * _MOST_IDS)(), c_int()
    call("MatmulAlgoGetIds", handle(device_index), *types_of(problem), _MOST_IDS, byref(ids), byref(count))
    return sorted(ids[: count.value])


def listed(algorithm: Any, name: str) -> list[int]:
    """The possible numbers of an algorithm's attribute; [0], which leaves it open, if it lists none."""
    size, what = c_size_t(), LISTED[name]
    call("MatmulAlgoCapGetAttribute", byref(algorithm), what, None, 0, byref(size))
    numbers = (c_uint32 * (size.value // ctypes.sizeof(c_uint32)))()
    if num_bytes := ctypes.sizeof(numbers):
        call("MatmulAlgoCapGetAttribute", byref(algorithm), what, byref(numbers), num_bytes, byref(size))
    return list(numbers) or [0]


def read(algorithm: Any, name: str) -> int:
    """The number of an algorithm's attribute. Raises LibraryError."""
    attribute, c_type = ATTRIBUTES[name]
    value, written = c_type(), c_size_t()
    call(
        "MatmulAlgoConfigGetAttribute", byref(algorithm), attribute, byref(value), ctypes.sizeof(c_type),
        byref(written),
    )  # fmt: skip
    return int(value.value)


def write(algorithm: Any, name: str, number: int) -> None:
    """Sets an algorithm's attribute to a number. Raises LibraryError, and ValueError like `number_as`."""
    _set("MatmulAlgoConfig", byref(algorithm), ATTRIBUTES[name][0], number_as(name, number))


def number_as(name: str, number: int) -> Any:
    """A number in the type of an attribute. Raises ValueError if the type cannot hold it."""
    value = ATTRIBUTES[name][1](number)
    if value.value != number:
        raise ValueError(f"{name}={number} does not fit in {ctypes.sizeof(value)} B; tune again")
    return value


def _set(what: str, target: Any, attribute: int, value: Any) -> None:
    call(f"{what}SetAttribute", target, attribute, byref(value), ctypes.sizeof(value))
