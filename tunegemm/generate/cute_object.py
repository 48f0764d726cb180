"""CuTe DSL kernels as objects: compiled in a worker process that sees no GPU, loaded where they run.

The families' kernels share one signature (`cute_sm90.kernel.gemm.Arguments`) but for the number of their
launch parameters. All arguments are run-time integers, so that one object serves every problem of its dtypes
and majors.

Where there is a linker, an object is a shared library. It then loads in a millisecond with the DSL's runtime
library and TVM-FFI alone; what the compiler exports wants the whole compiler, a second of imports, to link it
in memory.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import logging
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tunegemm.describe.device import Device, package_version
from tunegemm.describe.space import Candidate
from tunegemm.generate.launching import AddressLaunch
from tunegemm.generate.ptxas import Resources, output_to, read_report
from tunegemm.generate.workspace import Workspace

FUNCTION_NAME = "tunegemm_gemm"
"""Exported symbol of every compiled object."""

_RUNTIME = "libcute_dsl_runtime.so"
_SHARED = b"\3\0"
"""Type of an ELF file that is a shared library, at its bytes 16 and 17."""

#: What a process that compiles says its own GPU is. Not the target: the DSL would link and load each kernel
#: to be run, a seventh of the compile time. And not nothing: the DSL would ask the driver, which shows no
#: GPU to a worker; its text for that error names the architecture, for which it asks again, until Python's
#: stack is full. Sixteen workers did so for 50 s and more (H200, driver 580, DSL 4.8.1, 2026-11-23).
_OWN_ARCHITECTURE = "sm_80"

_log = logging.getLogger(__name__)


def import_dsl() -> None:
    """Import the CuTe DSL for compiling alone. Raises ImportError where it is not installed."""
    os.environ["CUTE_DSL_ARCH"] = _OWN_ARCHITECTURE  # read once, at the import
    importlib.import_module("cutlass.cute")


def compile_object(
    make_kernel: Callable[[], Any],
    launch_parameters: int,
    target: str,
    out: Path,
    *,
    addresses: int = 2,
    words: int = 0,
) -> Resources:
    """Compile for an architecture such as ``sm_90a`` and write the object `out`; the report is ptxas's.

    make_kernel: imports the kernel and makes it, once the compiler is imported.
    launch_parameters: 32-bit arguments behind the strides.
    addresses: 64-bit arguments behind them: of the workspace, and what else lies in device memory.
    words: 64-bit arguments of the epilogue behind those.

    Raises whatever the compiler raises; some configurations abort the process.
    """
    import_dsl()
    import cutlass.cute as cute
    from cutlass import Int32, Int64

    start = time.perf_counter()
    kernel = make_kernel()
    with tempfile.TemporaryDirectory() as dumps:
        log = Path(dumps, "ptxas.log")
        with output_to(log), _without_locations():
            # A dump folder of its own: parallel compiles overwrite each other's files in a shared one.
            compiled = cute.compile(
                kernel,
                *[Int64(0)] * 3,
                *[Int32(1)] * 4,
                *[Int64(16)] * 6,
                *[Int32(1)] * launch_parameters,
                *[Int64(16)] * (addresses + words),
                cute.runtime.make_fake_stream(),
                options=f"--enable-tvm-ffi --gpu-arch={target} --dump-dir={dumps} --remarks{{ptx}}",
            )
            compiled.export_to_c(object_file_path=str(out), function_name=FUNCTION_NAME)
            link(out)
        report = log.read_text()
    seconds = time.perf_counter() - start
    return read_report(report, smem_bytes=kernel.smem_bytes, compile_seconds=seconds)


@contextmanager
def _without_locations() -> Iterator[None]:
    """The DSL does not look up, for each instruction, the line of source that it came of.

    It does so as soon as remarks are asked for, of which ptxas's report is one: a third of a compile's time,
    for the same code and the same report. There is no option for it. A version without this switch stays so.
    """
    from cutlass.base_dsl import dsl

    name = "_set_enable_frame_filtering"
    switch = getattr(dsl, name, None)
    if switch is None:
        yield
        return
    setattr(dsl, name, lambda _: switch(False))
    try:
        yield
    finally:
        setattr(dsl, name, switch)


def toolchain() -> dict[str, str | int]:
    """What of the compiler an object depends on: part of every kernel key."""
    return {"cutlass_dsl": dsl_version()}


def dsl_version() -> str:
    """The DSL's version and the build that compiles here, as in ``4.8.1+cu13``."""
    version = package_version("nvidia-cutlass-dsl")
    return f"{version}+{build}" if version and (build := dsl_build()) else version


@functools.cache
def dsl_build() -> str | None:
    """The DSL's build for one CUDA, such as ``cu13``, with a ptxas of its own; None where it has no builds.

    The runtime library that comes with it says so: the compiler is not imported. Compile workers take the
    same one, which depends on the driver, not on the GPUs that they are kept from seeing.
    """
    return None if (runtime := _find_runtime()) is None else runtime.parts[-3]


def find_linker() -> str | None:
    """The system's linker, which comes with any C compiler; None where there is none."""
    return shutil.which("ld") or shutil.which("ld.lld")


def link(compiled: Path) -> None:
    """Make a shared library of what the compiler exported; without a linker it stays what it is.

    It names the two libraries that it needs, so that these need not be visible to the whole process.
    """
    from cutlass.cute.runtime import find_runtime_libraries

    if (linker := find_linker()) is None:
        _log.info("%s: no linker here, so that its first launch will import the compiler", compiled)
        return
    linked = compiled.with_name(f"{compiled.name}.so")
    options = ["-shared", "-s", "--eh-frame-hdr"]
    options += ["-z", "now", "-z", "defs", "-z", "noexecstack", "-z", "noseparate-code"]
    files = [str(compiled), *find_runtime_libraries(enable_tvm_ffi=True)]
    done = subprocess.run(
        [linker, *options, "-o", str(linked), *files], capture_output=True, text=True, check=False
    )
    if done.returncode:
        _log.warning("%s: %s cannot link it: %s", compiled, linker, done.stderr.strip().partition("\n")[0])
        linked.unlink(missing_ok=True)
    else:
        linked.replace(compiled)


def load_function(artifact: Path):  # type: ignore[no-untyped-def]
    """The launch function in a compiled object, for the current device.

    Launchers of one kernel share it: they differ in numbers only, and a program that decodes has hundreds.
    Raises RuntimeError for what cannot be loaded here.
    """
    key = _key(artifact)
    return kept[key] if key in kept else _load(*key)


def _key(artifact: Path) -> tuple[str, int, int]:
    import torch

    device = torch.cuda.current_device() if torch.cuda.is_initialized() else -1
    return str(artifact), artifact.stat().st_mtime_ns, device


#: Functions that live for as long as the process.
kept: dict[tuple[str, int, int], Any] = {}


def prepare_loading(artifact: Path) -> None:
    """Import what loads an object, so that the call which loads it need not. CUDA is not called."""
    with artifact.open("rb") as file:
        is_library = file.read(18)[16:] == _SHARED
    if is_library:
        import tvm_ffi  # noqa: F401

        _open_runtime()
    else:
        import cutlass.cute  # noqa: F401


def load_launch(
    artifact: Path,
    candidate: Candidate,
    device: Device,
    workspace: Workspace | None,
    extents: Sequence[int],
    schedule: Sequence[int],
    addresses: Sequence[int] = (),
) -> Callable[..., AddressLaunch]:
    """A function of the six strides, as in `launching.Places`, that gives the launch for them.

    extents, schedule: arguments before and behind the strides. addresses: those behind the workspace's.
    """
    from torch._C import _cuda_getCurrentRawStream as current_stream  # 0.1 us, torch.cuda.current_stream 0.5

    function, index = load_function(artifact), device.index
    swap = bool(candidate.params.get("swap_ab", False))

    def make(lda: int, ldb: int, ldd: int, a_step: int, b_step: int, d_step: int) -> AddressLaunch:
        strides = (ldb, lda, ldd, b_step, a_step, d_step) if swap else (lda, ldb, ldd, a_step, b_step, d_step)
        fixed = (*extents, *strides, *schedule)
        if workspace is None:
            everything = (*fixed, 0, 0, *addresses)

            def launch(a: int, b: int, d: int, *words: int) -> None:
                if swap:
                    a, b = b, a
                function(a, b, d, *everything, *words, current_stream(index))

        else:

            def launch(a: int, b: int, d: int, *words: int) -> None:
                if swap:
                    a, b = b, a
                stream = current_stream(index)
                partials, counters, memory = workspace.take(stream)
                function(a, b, d, *fixed, partials, counters, *addresses, *words, stream)
                del memory  # the launch is queued

        return launch

    make.keep = functools.partial(kept.setdefault, _key(artifact), function)  # type: ignore[attr-defined]
    return make


@functools.lru_cache(maxsize=256)  # a search loads thousands of kernels once, and must not keep them
def _load(path: str, modified_ns: int, device: int):  # type: ignore[no-untyped-def]
    content = Path(path).read_bytes()
    if content[16:18] == _SHARED:
        return _load_library(content, Path(path).parent)
    import cutlass.cute as cute

    return cute.runtime.load_module(path, enable_tvm_ffi=True)[FUNCTION_NAME]


def _load_library(content: bytes, beside: Path) -> Any:
    """Loads an object from a temporary file, which is then deleted; from one in `beside` if need be.

    An object keeps what it set up for the device of its first launch, and a file is loaded into a process
    once, however often it is opened: each device has its own.
    """
    import tvm_ffi

    reasons = []
    for folder in (None, beside):
        try:
            _open_runtime()
            with tempfile.NamedTemporaryFile(prefix="tunegemm-", suffix=".so", dir=folder) as file:
                file.write(content)
                file.flush()
                return tvm_ffi.load_module(file.name, keep_module_alive=False)[FUNCTION_NAME]
        except (OSError, RuntimeError, AttributeError) as error:
            reasons.append(" ".join(str(error).split()))
    raise RuntimeError(
        f"a compiled kernel cannot be loaded ({reasons[0]}); if temporary files may not be executed, name "
        "another folder for them in TMPDIR"
    )


@functools.cache
def _open_runtime() -> ctypes.CDLL:
    """The DSL's runtime library, by which objects call CUDA; opened without importing the DSL if possible."""
    if (path := _find_runtime()) is not None:
        return ctypes.CDLL(str(path))
    from cutlass.cute.runtime import find_runtime_libraries

    for name in find_runtime_libraries():
        if name.endswith(_RUNTIME):
            return ctypes.CDLL(name)
    raise RuntimeError(f"nvidia-cutlass-dsl has no {_RUNTIME}; install it anew")


def _find_runtime() -> Path | None:
    """Where the DSL's packages have it: in a folder for each CUDA, of which the DSL takes the newest that the
    driver supports. None where it is not where it is known to be.
    """
    spec = find_spec("cutlass")
    if spec is None or spec.origin is None:
        return None
    root = next((parent for parent in Path(spec.origin).parents if parent.name == "nvidia_cutlass_dsl"), None)
    if root is None:
        return None
    found = {int(path.parts[-3][2:]): path for path in root.glob(f"cu[0-9]*/lib/{_RUNTIME}")}
    newest = _driver_major() or max(found, default=0)
    return found.get(max((major for major in found if major <= newest), default=0))


def _driver_major() -> int | None:
    """The CUDA of the driver; None where there is no driver."""
    version = ctypes.c_int(0)
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) == 0:
            return version.value // 1000
    except (OSError, AttributeError):
        pass
    return None
