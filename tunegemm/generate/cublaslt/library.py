"""Lists the algorithms that cuBLASLt names for a problem, and makes a launcher of one.

A candidate stores the names of an algorithm's attributes, never the library's 64-byte structure. After an
update the library still understands the names, or refuses them with an error; the bytes of a structure might
silently mean something else.
"""

from __future__ import annotations

import itertools
import math
from contextlib import suppress
from ctypes import byref, c_float, c_size_t, c_void_p
from typing import TYPE_CHECKING, Any, cast

from tunegemm.describe.driver import ensure_context
from tunegemm.describe.problem import MAX_ALIGNMENT, Problem
from tunegemm.describe.space import Candidate, Value
from tunegemm.generate.cublaslt import binding
from tunegemm.generate.cublaslt.binding import LibraryError, Plan
from tunegemm.generate.cublaslt.names import name_of, number_of
from tunegemm.generate.cublaslt.operands import Strides, packed_strides
from tunegemm.generate.launching import (
    AddressLaunch,
    AddressLauncher,
    Launcher,
    never_unloaded,
    words_reader,
)
from tunegemm.generate.takes import not_aligned
from tunegemm.generate.workspace import Workspace

if TYPE_CHECKING:
    import torch

#: The attributes of an algorithm, other than its id.
COMPILE_ATTRIBUTES = ("tile", "stages", "inner_shape", "cluster_shape", "custom_option")
LAUNCH_ATTRIBUTES = ("split_k", "reduction_scheme", "cta_swizzling")

_ALPHA, _NOT_ADDED, _ADDED = c_float(1), c_float(0), c_float(1)


def algorithms(problem: Problem, device_index: int, requested: int, workspace_bytes: int) -> list[Candidate]:
    """Up to `requested` distinct algorithms that the heuristic names for packed operands, best guess first.

    Empty if the library has no algorithm for the problem. Raises RuntimeError if the library fails.
    """
    plan = Plan(problem, packed_strides(problem))
    results = binding.heuristic(device_index, plan, requested, workspace_bytes)
    named = dict.fromkeys(candidate_of(one.algorithm, int(one.workspace_bytes)) for one in results)
    return [candidate for candidate in named if is_whole(device_index, problem, plan, candidate)]


def one_of_each_id(problem: Problem, device_index: int, workspace_bytes: int) -> list[Candidate]:
    """One candidate for each algorithm id that the library accepts for packed operands, with the tile and
    stages that leave the least of the last wave empty. Empty if the library lists no ids.
    """
    plan = Plan(problem, packed_strides(problem))
    candidates: list[Candidate] = []
    numbers: list[int] = []
    with suppress(LibraryError):
        numbers = binding.algorithm_ids(device_index, problem)
    for number in numbers:
        best: tuple[float, Candidate] | None = None
        with suppress(LibraryError):  # some ids have no product of these types on this GPU
            algorithm = initial(device_index, problem, number)
            lists = [binding.listed(algorithm, name) for name in binding.LISTED]
            for tile, stages in itertools.product(*lists):
                binding.write(algorithm, "tile", tile)
                binding.write(algorithm, "stages", stages)
                with suppress(LibraryError):
                    result = check_for(device_index, plan, algorithm)
                    empty = math.ceil(result.waves) / result.waves if result.waves > 0 else math.inf
                    if result.workspace_bytes <= workspace_bytes and (best is None or empty < best[0]):
                        best = empty, candidate_of(algorithm, int(result.workspace_bytes))
        if best is not None:
            candidates.append(best[1])
    return [candidate for candidate in candidates if is_whole(device_index, problem, plan, candidate)]


def is_whole(device_index: int, problem: Problem, plan: Plan, candidate: Candidate) -> bool:
    """Whether the library accepts the algorithm rebuilt from its names. It need not: its heuristic names some
    algorithms that need workspace although none is allowed."""
    try:
        rebuilt(device_index, problem, plan, candidate)
    except (ValueError, LibraryError):
        return False
    return True


def launcher(
    problem: Problem, candidate: Candidate, device_index: int, workspace: Workspace | None
) -> Launcher:
    """A launcher of one algorithm. It makes descriptors once for each set of strides.

    Raises ValueError, which names the candidate, if this version of the library refuses it.
    """
    pointer, first_is_b = c_void_p.from_param, problem.out_major == "n"

    def make(*strides: tuple[int, ...]) -> AddressLaunch:
        try:
            plan = Plan(problem, cast(Strides, strides))
            algorithm = rebuilt(device_index, problem, plan, candidate)
            handle = pointer(binding.handle(device_index).value)
        except LibraryError as error:
            refused = f"cuBLASLt refuses {label(candidate)} for {problem}, strides {strides}"
            raise ValueError(f"{refused}: {error}") from None
        from torch._C import _cuda_getCurrentRawStream as current_stream

        matmul = binding.library().cublasLtMatmul
        # Constant arguments are converted once. `byref` keeps its object alive.
        description, of_first, of_second, _, of_out = (pointer(one.value) for one in plan.descriptors)
        alpha, chosen = byref(_ALPHA), byref(algorithm)
        beta = byref(_ADDED if "residual" in problem.epilogue else _NOT_ADDED)
        room = c_size_t.from_param(int(candidate["workspace_bytes"]))

        def launch(a: int, b: int, out: int, added: int = 0, leading: int = 0, *rest: int) -> None:
            """added: the address of a residual. leading: elements from one of its lines to the next."""
            if (a | b | out | added) & (MAX_ALIGNMENT - 1):
                raise not_aligned(a=a, b=b, out=out, residual=added)
            stream = current_stream(device_index)
            address, _, memory = (None, 0, None) if workspace is None else workspace.take(stream)
            first, second = (b, a) if first_is_b else (a, b)
            to = pointer(out)
            c, of_c = to, of_out
            if added:
                c, of_c = pointer(added), pointer(plan.added(leading).value)
            arguments = (
                handle, description, alpha, pointer(first), of_first, pointer(second), of_second,
                beta, c, of_c, to, of_out, chosen, pointer(address), room, pointer(stream),
            )  # fmt: skip
            status = matmul(*arguments)
            if status and ensure_context(device_index):
                status = matmul(*arguments)
            del memory  # the launch is queued
            if status:
                raise RuntimeError(f"{label(candidate)}: {binding.status_name(status)}")

        def biased(a: int, b: int, out: int, bias: int, *words: int) -> None:
            if bias & (MAX_ALIGNMENT - 1):
                raise not_aligned(bias=bias)
            with plan.lock:
                plan.set_bias(bias)
                launch(a, b, out, *words)

        launch.plan = plan  # type: ignore[attr-defined]  # its descriptors are read at each launch
        return biased if problem.epilogue.startswith("bias") else launch

    def read(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> tuple[Any, ...]:
        addresses = a.data_ptr(), b.data_ptr(), out.data_ptr()
        if any(address % MAX_ALIGNMENT for address in addresses):
            raise ValueError(
                f"{label(candidate)} needs operands aligned to {MAX_ALIGNMENT} B; copy the view first"
            )
        return *addresses, a.stride(), b.stride(), out.stride()

    make(*packed_strides(problem))  # raises now, not at the first launch
    words = words_reader(problem) if problem.epilogue else None
    return AddressLauncher(read, make, words, keep=never_unloaded)


def label(candidate: Candidate) -> str:
    """A short name, such as ``cublaslt a66 t128x256 s64xAUTO c2x1x1 splitk2``."""
    p = candidate.params
    parts = ["cublaslt", f"a{p['algo_id']}", f"t{p['tile']}"]
    parts += [f"s{p['stages']}"] if p["stages"] != "UNDEFINED" else []
    parts += [f"c{p['cluster_shape']}"] if p["cluster_shape"] != "AUTO" else []
    parts += [f"i{p['inner_shape']}"] if p["inner_shape"] != "UNDEFINED" else []
    parts += [f"splitk{p['split_k']}", str(p["reduction_scheme"]).lower()] if p["split_k"] != 1 else []
    parts += [f"sw{p['cta_swizzling']}"] if p["cta_swizzling"] else []
    parts += [f"o{p['custom_option']}"] if p["custom_option"] else []
    return " ".join(parts)


def candidate_of(algorithm: Any, workspace_bytes: int) -> Candidate:
    """The candidate that names an algorithm. An attribute without a name here keeps its number."""

    def named(attributes: tuple[str, ...]) -> dict[str, Value]:
        return {name: name_of(name, binding.read(algorithm, name)) for name in attributes}

    compile_params = named(COMPILE_ATTRIBUTES) | {
        "algorithm": "cublaslt",
        "algo_id": binding.read(algorithm, "algo_id"),
    }
    launch_params = named(LAUNCH_ATTRIBUTES) | {"workspace_bytes": workspace_bytes}
    return Candidate.make("cublaslt", compile_params, launch_params)


def configure(algorithm: Any, candidate: Candidate) -> None:
    """Sets the attributes of an algorithm to those that a candidate names.

    Raises ValueError for an unknown name, LibraryError for a value that the library refuses.
    """
    for name in (*COMPILE_ATTRIBUTES, *LAUNCH_ATTRIBUTES):
        binding.write(algorithm, name, number_of(name, candidate[name]))


def rebuilt(device_index: int, problem: Problem, plan: Plan, candidate: Candidate) -> Any:
    """The library's structure, rebuilt from the names and checked by the library for the plan."""
    algorithm = initial(device_index, problem, number_of("algo_id", candidate["algo_id"]))
    configure(algorithm, candidate)
    needed = int(check_for(device_index, plan, algorithm).workspace_bytes)
    if needed > (stored := int(candidate["workspace_bytes"])):
        raise ValueError(f"{label(candidate)} needs {needed} B of workspace here, its record has {stored} B")
    return algorithm


def initial(device_index: int, problem: Problem, algo_id: int) -> Any:
    """The library's structure for an algorithm id. Raises LibraryError, and ValueError like `number_as`."""
    algorithm = binding.Algorithm()
    binding.call(
        "MatmulAlgoInit", binding.handle(device_index), *binding.types_of(problem),
        binding.number_as("algo_id", algo_id), byref(algorithm),
    )  # fmt: skip
    return algorithm


def check_for(device_index: int, plan: Plan, algorithm: Any) -> binding.HeuristicResult:
    """The library's check of an algorithm for a plan. Raises LibraryError if the library refuses it."""
    result = binding.HeuristicResult()
    handle = binding.handle(device_index)
    binding.call("MatmulAlgoCheck", handle, *plan.descriptors, byref(algorithm), byref(result))
    return result
