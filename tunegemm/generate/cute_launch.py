"""Loads kernels of `tunegemm.compile.cute_object`, and launches them."""

from __future__ import annotations

import ctypes
import functools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from tunegemm.compile import cute_object
from tunegemm.describe.device import Device
from tunegemm.describe.problem import DTYPE_BYTES, Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate.launching import (
    AddressLaunch,
    AddressLauncher,
    Launcher,
    operand_reader,
    words_reader,
)
from tunegemm.generate.takes import UNIT_BYTES, not_aligned
from tunegemm.generate.tiles import persistent_grid, seen_by_kernel
from tunegemm.generate.workspace import Workspace

SHARED_LIBRARY = b"\3\0"
"""The ELF file type of a shared library, in bytes 16 and 17 of the file."""

AnyConfig = TypeVar("AnyConfig")


@dataclass(frozen=True)
class LoadedKernel(Generic[AnyConfig]):
    """A compiled kernel, ready to launch on the device that was current when it was loaded."""

    config: AnyConfig
    function: Callable[..., None]

    @classmethod
    def load(cls, config: AnyConfig, artifact: Path) -> Self:
        """The kernel of an object file. Raises RuntimeError if it cannot be loaded here."""
        return cls(config, load_function(artifact))


def load_function(artifact: Path):  # type: ignore[no-untyped-def]
    """The launch function in a compiled object, for the current device.

    Launchers of one kernel share the function: they differ only in numbers, and a decoding program has
    hundreds of them. Raises RuntimeError if the object cannot be loaded here.
    """
    key = _key(artifact)
    return kept[key] if key in kept else _load(*key)


def _key(artifact: Path) -> tuple[str, int, int]:
    import torch

    device = torch.cuda.current_device() if torch.cuda.is_initialized() else -1
    return str(artifact), artifact.stat().st_mtime_ns, device


#: Functions that stay loaded until the process ends.
kept: dict[tuple[str, int, int], Any] = {}


def prepare_loading(artifact: Path) -> None:
    """Import the modules that load an object, so that the later load need not. Does not call CUDA."""
    with artifact.open("rb") as file:
        is_library = file.read(18)[16:] == SHARED_LIBRARY
    if is_library:
        import tvm_ffi  # noqa: F401

        _open_runtime()
    else:
        import cutlass.cute  # noqa: F401


def load_launcher(
    problem: Problem,
    candidate: Candidate,
    device: Device,
    artifact: Path,
    workspace: Workspace | None,
    schedule: Sequence[int],
    addresses: Sequence[int] = (),
    *,
    unit_bytes: tuple[int, int] = (UNIT_BYTES, UNIT_BYTES),
) -> AddressLauncher:
    """A launcher of an object.

    schedule: the arguments after the strides. addresses: the arguments after the workspace's. unit_bytes: the
    alignment of A and B, and of D; a launch raises NotTaken for other addresses.
    """
    from torch._C import _cuda_getCurrentRawStream as current_stream  # 0.1 us, torch.cuda.current_stream 0.5

    function, index, seen = load_function(artifact), device.index, seen_by_kernel(problem, candidate)
    extents = seen.m, seen.n, seen.k, seen.batch
    swap, (in_mask, out_mask) = bool(candidate.params.get("swap_ab", False)), (n - 1 for n in unit_bytes)

    def make(lda: int, ldb: int, ldd: int, a_step: int, b_step: int, d_step: int) -> AddressLaunch:
        strides = (ldb, lda, ldd, b_step, a_step, d_step) if swap else (lda, ldb, ldd, a_step, b_step, d_step)
        fixed = (*extents, *strides, *schedule)
        if workspace is None:
            everything = (*fixed, 0, 0, *addresses)

            def launch(a: int, b: int, d: int, *words: int) -> None:
                if (a | b) & in_mask or d & out_mask:
                    raise not_aligned(a=a, b=b, out=d)
                if swap:
                    a, b = b, a
                function(a, b, d, *everything, *words, current_stream(index))

        else:

            def launch(a: int, b: int, d: int, *words: int) -> None:
                if (a | b) & in_mask or d & out_mask:
                    raise not_aligned(a=a, b=b, out=d)
                if swap:
                    a, b = b, a
                stream = current_stream(index)
                partials, counters, memory = workspace.take(stream)
                function(a, b, d, *fixed, partials, counters, *addresses, *words, stream)
                del memory  # the launch is queued

        return launch

    words = words_reader(problem) if problem.fused.words else None
    keep = functools.partial(kept.setdefault, _key(artifact), function)
    return AddressLauncher(operand_reader(problem, *unit_bytes), make, words, keep)


def vector_launcher(
    problem: Problem, candidate: Candidate, device: Device, artifact: Path, workspace: Workspace | None
) -> Launcher:
    """A launcher of a kernel that reads A and B by vectors of `vector_bytes`."""
    order: tuple[int, ...] = ()
    if "raster_order" in candidate.params:
        order = int(candidate["raster_order"] == "along_m"), int(candidate["swizzle_size"])
    schedule = (*order, persistent_grid(problem, candidate, device), int(candidate["split_k"]))
    units = int(candidate["vector_bytes"]), DTYPE_BYTES[problem.out_dtype]
    return load_launcher(problem, candidate, device, artifact, workspace, schedule, unit_bytes=units)


def forget() -> None:
    """Forget loaded objects, so that they are loaded again, as in a new process."""
    _open_runtime.cache_clear()
    _load.cache_clear()


@functools.lru_cache(maxsize=256)  # a search loads thousands of kernels once, and must not keep them
def _load(path: str, modified_ns: int, device: int):  # type: ignore[no-untyped-def]
    content = Path(path).read_bytes()
    if content[16:18] == SHARED_LIBRARY:
        return load_library(content, Path(path).parent)
    import cutlass.cute as cute

    return cute.runtime.load_module(path, enable_tvm_ffi=True)[cute_object.FUNCTION_NAME]


def load_library(content: bytes, beside: Path) -> Any:
    """Loads an object from a temporary file and deletes the file; if that fails, tries one in `beside`.

    An object keeps its state for the device of its first launch, and a process loads a file only once, even
    if it opens the file again. So each device needs its own file.
    """
    import tvm_ffi

    reasons = []
    for folder in (None, beside):
        try:
            _open_runtime()
            with tempfile.NamedTemporaryFile(prefix="tunegemm-", suffix=".so", dir=folder) as file:
                file.write(content)
                file.flush()
                return tvm_ffi.load_module(file.name, keep_module_alive=False)[cute_object.FUNCTION_NAME]
        except (OSError, RuntimeError, AttributeError) as error:
            reasons.append(" ".join(str(error).split()))
    raise RuntimeError(
        f"a compiled kernel cannot be loaded ({reasons[0]}); if temporary files may not be executed, name "
        "another folder for them in TMPDIR"
    )


@functools.cache
def _open_runtime() -> ctypes.CDLL:
    """The DSL's runtime library, through which objects call CUDA; opens it without the DSL if possible."""
    if (path := cute_object.find_runtime()) is not None:
        return ctypes.CDLL(str(path))
    from cutlass.cute.runtime import find_runtime_libraries

    for name in find_runtime_libraries():
        if name.endswith(cute_object.RUNTIME):
            return ctypes.CDLL(name)
    raise RuntimeError(f"nvidia-cutlass-dsl has no {cute_object.RUNTIME}; install it anew")
