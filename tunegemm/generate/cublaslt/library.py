"""cuBLASLt through nvmath-python's bindings: which algorithms it names, and one of them as a launcher.

An algorithm is kept by the names of its attributes, never as the library's 64-byte blob: names survive
an update of the library, or are refused by it in words; a blob silently means something else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from tunegemm.describe.problem import MAX_ALIGNMENT, Problem
from tunegemm.describe.space import Candidate, Value
from tunegemm.generate.cublaslt.operands import Matrix, Product, Strides, column_major, packed_strides
from tunegemm.generate.launching import AddressLaunch, AddressLauncher, Launcher, Workspace

if TYPE_CHECKING:
    import torch

#: Attributes of an algorithm: our name, the library's, the prefix of the enum's members (None: a number).
COMPILE_ATTRIBUTES = {
    "tile": ("TILE_ID", "MatmulTile", "TILE_"),
    "stages": ("STAGES_ID", "MatmulStages", "STAGES_"),
    "inner_shape": ("INNER_SHAPE_ID", "MatmulInnerShape", ""),
    "cluster_shape": ("CLUSTER_SHAPE_ID", "ClusterShape", "SHAPE_"),
    "custom_option": ("CUSTOM_OPTION", None, ""),
}
LAUNCH_ATTRIBUTES = {
    "split_k": ("SPLITK_NUM", None, ""),
    "reduction_scheme": ("REDUCTION_SCHEME", "ReductionScheme", ""),
    "cta_swizzling": ("CTA_SWIZZLING", None, ""),
}
_ATTRIBUTES = COMPILE_ATTRIBUTES | LAUNCH_ATTRIBUTES

# library_types.h and cublas_api.h: values that are part of CUDA's binary interface.
_CUDA_TYPES = {"bf16": 14, "fp16": 2, "fp32": 0}
_COMPUTE_32F = 68


def algorithms(problem: Problem, device_index: int, requested: int, workspace_bytes: int) -> list[Candidate]:
    """What the heuristic names for packed operands, best guess first, at most `requested` distinct ones.

    Empty when the library has no algorithm for the problem. Raises RuntimeError when it fails.
    """
    lt = _bindings()
    with _errors("cuBLASLt heuristic", RuntimeError):
        handle = _handle(device_index)
        plan = _Plan(problem, packed_strides(problem))
        preference = lt.matmul_preference_create()
        try:
            names = lt.MatmulPreferenceAttribute
            limits: dict[str, np.generic] = {"MAX_WORKSPACE_BYTES": np.uint64(workspace_bytes)}
            limits |= {f"MIN_ALIGNMENT_{operand}_BYTES": np.uint32(MAX_ALIGNMENT) for operand in "ABCD"}
            for name, limit in limits.items():
                _set(lt.matmul_preference_set_attribute, preference, getattr(names, name), limit)
            results = np.zeros(requested, dtype=lt.matmul_heuristic_result_dtype)
            count = np.zeros(1, dtype=np.int32)
            try:
                lt.matmul_algo_get_heuristic(
                    handle, plan.description, plan.first, plan.second, plan.out, plan.out, preference,
                    requested, results.ctypes.data, count.ctypes.data,
                )  # fmt: skip
            except lt.cuBLASLtError as error:
                if "NOT_SUPPORTED" in str(error):
                    return []
                raise
        finally:
            lt.matmul_preference_destroy(preference)
        named = [_candidate(result) for result in results[: int(count[0])] if result["state"] == 0]
        return [
            candidate for candidate in dict.fromkeys(named) if _is_whole(handle, problem, plan, candidate)
        ]


def _is_whole(handle: int, problem: Problem, plan: _Plan, candidate: Candidate) -> bool:
    """Whether the names bring the algorithm back: asked for none without workspace, it names some with."""
    try:
        _algorithm(handle, problem, plan, candidate, int(candidate["workspace_bytes"]))
    except (ValueError, _bindings().cuBLASLtError):
        return False
    return True


def launcher(
    problem: Problem, candidate: Candidate, device_index: int, workspace: Workspace | None
) -> Launcher:
    """A launcher of one named algorithm. Descriptors are made once per set of strides.

    Raises ValueError, which names the candidate, where this version of the library refuses it.
    """
    from torch._C import _cuda_getCurrentRawStream as current_stream

    lt = _bindings()
    alpha, beta = np.ones(1, np.float32), np.zeros(1, np.float32)
    alpha_pointer, beta_pointer = alpha.ctypes.data, beta.ctypes.data
    workspace_bytes = int(candidate["workspace_bytes"])
    first_is_b = problem.out_major == "n"

    with _errors(f"cuBLASLt refuses {label(candidate)} for {problem}", ValueError):
        handle = _handle(device_index)

    def make(*strides: tuple[int, ...]) -> AddressLaunch:
        with _errors(f"cuBLASLt refuses {label(candidate)} for {problem}, strides {strides}", ValueError):
            plan = _Plan(problem, cast(Strides, strides))
            algorithm = _algorithm(handle, problem, plan, candidate, workspace_bytes)
        description, algorithm_pointer = plan.description, algorithm.ctypes.data

        def launch(a: int, b: int, out: int) -> None:
            stream = current_stream(device_index)
            workspace_pointer = 0 if workspace is None else workspace.addresses(stream)[0]
            first, second = (b, a) if first_is_b else (a, b)
            try:
                lt.matmul(
                    handle, description, alpha_pointer, first, plan.first, second, plan.second,
                    beta_pointer, out, plan.out, out, plan.out,
                    algorithm_pointer, workspace_pointer, workspace_bytes, stream,
                )  # fmt: skip
            except lt.cuBLASLtError as error:
                raise RuntimeError(f"{label(candidate)}: {_status(error)}") from None

        # The library reads them at each launch.
        launch.keep = (alpha, beta, algorithm)  # type: ignore[attr-defined]
        return launch

    def read(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> tuple[Any, ...]:
        addresses = a.data_ptr(), b.data_ptr(), out.data_ptr()
        if any(address % MAX_ALIGNMENT for address in addresses):
            raise ValueError(
                f"{label(candidate)} needs operands aligned to {MAX_ALIGNMENT} B; copy the view first"
            )
        return *addresses, a.stride(), b.stride(), out.stride()

    make(*packed_strides(problem))  # a refusal is to be heard now
    return AddressLauncher(read, make)


def label(candidate: Candidate) -> str:
    """Short name, such as ``cublaslt a66 t128x256 s64xAUTO c2x1x1 splitk2``."""
    p = candidate.params
    parts = ["cublaslt", f"a{p['algo_id']}", f"t{p['tile']}"]
    parts += [f"s{p['stages']}"] if p["stages"] != "UNDEFINED" else []
    parts += [f"c{p['cluster_shape']}"] if p["cluster_shape"] != "AUTO" else []
    parts += [f"i{p['inner_shape']}"] if p["inner_shape"] != "UNDEFINED" else []
    parts += [f"splitk{p['split_k']}", str(p["reduction_scheme"]).lower()] if p["split_k"] != 1 else []
    parts += [f"sw{p['cta_swizzling']}"] if p["cta_swizzling"] else []
    parts += [f"o{p['custom_option']}"] if p["custom_option"] else []
    return " ".join(parts)


class _Plan:
    """Descriptors of one product over operands with given strides. They live as long as the plan."""

    def __init__(self, problem: Problem, strides: Strides) -> None:
        lt = _bindings()
        product: Product = column_major(problem, strides)
        self._destroy = (lt.matmul_desc_destroy, lt.matrix_layout_destroy)
        self._layouts: list[int] = []
        self.description = lt.matmul_desc_create(_COMPUTE_32F, _CUDA_TYPES["fp32"])
        for attribute, matrix in (("TRANSA", product.first), ("TRANSB", product.second)):
            _set(
                lt.matmul_desc_set_attribute, self.description,
                getattr(lt.MatmulDescAttribute, attribute), np.int32(matrix.transpose),
            )  # fmt: skip
        self.first = self._layout(problem, product.first, problem.in_dtype)
        self.second = self._layout(problem, product.second, problem.in_dtype)
        self.out = self._layout(problem, product.out, problem.out_dtype)

    def _layout(self, problem: Problem, matrix: Matrix, dtype: str) -> int:
        lt = _bindings()
        layout = lt.matrix_layout_create(_CUDA_TYPES[dtype], matrix.rows, matrix.columns, matrix.leading)
        self._layouts.append(layout)
        if problem.batch > 1:
            names, change = lt.MatrixLayoutAttribute, lt.matrix_layout_set_attribute
            _set(change, layout, names.BATCH_COUNT, np.int32(problem.batch))
            _set(change, layout, names.STRIDED_BATCH_OFFSET, np.int64(matrix.batch_stride))
        return int(layout)

    def __del__(self) -> None:
        destroy_description, destroy_layout = self._destroy
        for layout in self._layouts:
            destroy_layout(layout)
        if hasattr(self, "description"):
            destroy_description(self.description)


def _algorithm(
    handle: int, problem: Problem, plan: _Plan, candidate: Candidate, workspace_bytes: int
) -> np.ndarray[Any, Any]:
    """The library's structure rebuilt from the names, and checked by the library for this plan."""
    lt = _bindings()
    algorithm = np.zeros(8, dtype=np.uint64)  # cublasLtMatmulAlgo_t
    in_type, out_type = _CUDA_TYPES[problem.in_dtype], _CUDA_TYPES[problem.out_dtype]
    lt.matmul_algo_init(
        handle, _COMPUTE_32F, _CUDA_TYPES["fp32"], in_type, in_type, out_type, out_type,
        int(candidate["algo_id"]), algorithm.ctypes.data,
    )  # fmt: skip
    for name, value in _encode(candidate.params):
        attribute = getattr(lt.MatmulAlgoConfigAttribute, name)
        dtype = lt.get_matmul_algo_config_attribute_dtype(attribute)
        _set(lt.matmul_algo_config_set_attribute, algorithm.ctypes.data, attribute, dtype(value))
    result = np.zeros(1, dtype=lt.matmul_heuristic_result_dtype)
    lt.matmul_algo_check(
        handle, plan.description, plan.first, plan.second, plan.out, plan.out,
        algorithm.ctypes.data, result.ctypes.data,
    )  # fmt: skip
    needed = int(result["workspace_size"][0])
    if needed > workspace_bytes:
        raise ValueError(
            f"{label(candidate)} needs {needed} B of workspace here, stored were {workspace_bytes} B"
        )
    return algorithm


def _encode(params: Mapping[str, Value]) -> Iterator[tuple[str, int]]:
    """The library's attributes and their numbers. ValueError for a name that it does not know."""
    lt = _bindings()
    for name, (attribute, enum_name, prefix) in _ATTRIBUTES.items():
        value = params[name]
        if enum_name is not None and isinstance(value, str):
            members = getattr(lt, enum_name).__members__
            if prefix + value not in members:
                raise ValueError(
                    f"{name}={value!r} is not known to this nvmath-python; upgrade it or tune again"
                )
            value = members[prefix + value]
        yield attribute, int(value)


def _candidate(result: Any) -> Candidate:
    """The names of one heuristic result. An enum value newer than the bindings stays a number."""
    lt = _bindings()
    algorithm = np.ascontiguousarray(result["algo"]["data_"])

    def decode(attributes: Mapping[str, tuple[str, str | None, str]]) -> dict[str, Value]:
        values: dict[str, Value] = {}
        for name, (attribute, enum_name, prefix) in attributes.items():
            number = _get(algorithm, getattr(lt.MatmulAlgoConfigAttribute, attribute))
            values[name] = number
            if enum_name is not None:
                enum = getattr(lt, enum_name)
                if number in enum._value2member_map_:
                    values[name] = enum(number).name.removeprefix(prefix)
        return values

    compile_params = decode(COMPILE_ATTRIBUTES)
    compile_params |= {"algorithm": "cublaslt", "algo_id": _get(algorithm, lt.MatmulAlgoConfigAttribute.ID)}
    launch_params = decode(LAUNCH_ATTRIBUTES) | {"workspace_bytes": int(result["workspace_size"])}
    return Candidate.make("cublaslt", compile_params, launch_params)


def _get(algorithm: np.ndarray[Any, Any], attribute: Any) -> int:
    lt = _bindings()
    value = np.zeros(1, dtype=lt.get_matmul_algo_config_attribute_dtype(attribute))
    written = np.zeros(1, dtype=np.uint64)
    lt.matmul_algo_config_get_attribute(
        algorithm.ctypes.data, attribute, value.ctypes.data, value.nbytes, written.ctypes.data
    )
    return int(value[0])


def _set(function: Any, target: int, attribute: Any, value: np.generic) -> None:
    buffer = np.array([value])
    function(target, int(attribute), buffer.ctypes.data, buffer.nbytes)


class _errors:
    """Turns the bindings' own exception class into a standard one, with what was attempted in front."""

    def __init__(self, doing: str, raises: type[Exception]) -> None:
        self._doing, self._raises = doing, raises

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, _bindings().cuBLASLtError):
            raise self._raises(f"{self._doing}: {_status(error)}") from None


def _status(error: Exception) -> str:
    return str(error).split(" You can set")[0]


@cache
def _bindings() -> Any:
    from nvmath.bindings import cublasLt

    return cublasLt


@cache
def _handle(device_index: int) -> int:
    """One library handle per device and process; it lives as long as the process."""
    import torch

    with torch.cuda.device(device_index):
        torch.cuda.current_stream().synchronize()  # the handle belongs to the current context: make one
        return int(_bindings().create())
