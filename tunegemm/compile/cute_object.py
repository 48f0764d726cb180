"""CuTe DSL kernels as objects, compiled in a worker process that sees no GPU.

The families' kernels share one signature (`cute_sm90.kernel.gemm.Arguments`), apart from the number of launch
parameters. All arguments are run-time integers, so that one object serves every problem of its dtypes
and majors.

With a linker, an object is a shared library. `tunegemm.generate.cute_launch` then loads it in a millisecond,
with only the DSL's runtime library and TVM-FFI. Unlinked objects need the whole compiler, a second of
imports, to link them in memory.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tunegemm.compile.artifacts import Key
from tunegemm.compile.ptxas import Resources, output_to, read_report
from tunegemm.describe import driver
from tunegemm.describe.device import package_version
from tunegemm.describe.epilogue import MAX_WORDS, define

FUNCTION_NAME = "tunegemm_gemm"
"""Exported symbol of every compiled object."""

RUNTIME = "libcute_dsl_runtime.so"
"""The DSL's library by which objects call CUDA."""

#: The architecture that a compiling process reports for its own GPU. It must differ from the target, else the
#: DSL would link and load each kernel in order to run it, a seventh of the compile time. It must not be
#: empty, else the DSL would ask the driver, which shows no GPU to a worker; the text of that error needs the
#: architecture again, until Python's stack is full. Sixteen workers did so for over 50 s (H200, driver 580,
#: DSL 4.8.1, 2026-11-23).
_OWN_ARCHITECTURE = "sm_80"

_log = logging.getLogger(__name__)


def import_dsl() -> None:
    """Import the CuTe DSL for compiling alone. Raises ImportError where it is not installed."""
    os.environ["CUTE_DSL_ARCH"] = _OWN_ARCHITECTURE  # read once, at the import
    importlib.import_module("cutlass.cute")


def compiler(
    config: Any, module: str, launch_parameters: int, *, addresses: int = 2, words: int | None = None
) -> Callable[[Key, Path], Resources]:
    """The `compile` of a family whose kernel is the class `Gemm` of a module, made from a config.

    launch_parameters: 32-bit arguments after the strides. addresses: 64-bit arguments after them: of the
    workspace and of other device memory. words: 64-bit arguments of the epilogue, last; by default as many as
    it needs.
    """

    def compile_kernel(key: Key, out: Path) -> Resources:
        """Write the object of a key for its target, such as ``sm_90a``; the report is ptxas's.

        Raises any error of the compiler; some configurations abort the process.
        """
        if source := key.get("epilogue_source"):
            define(str(source))
        chosen = config.from_mapping(key)
        fused_words = MAX_WORDS if key.get("epilogue") and chosen.fused.words else 0
        last = addresses + (fused_words if words is None else words)
        import_dsl()
        import cutlass.cute as cute
        from cutlass import Int32, Int64

        start = time.perf_counter()
        kernel = importlib.import_module(module).Gemm(chosen)
        with tempfile.TemporaryDirectory() as dumps:
            log = Path(dumps, "ptxas.log")
            with output_to(log), _without_locations():
                # A dump folder of its own: parallel compiles overwrite each other's files in a shared one.
                options = f"--gpu-arch={key['target']} --dump-dir={shlex.quote(dumps)} --remarks{{ptx}}"
                compiled = cute.compile(
                    kernel,
                    *[Int64(0)] * 3,
                    *[Int32(1)] * 4,
                    *[Int64(16)] * 6,
                    *[Int32(1)] * launch_parameters,
                    *[Int64(16)] * last,
                    cute.runtime.make_fake_stream(),
                    options=f"--enable-tvm-ffi {options}",
                )
                compiled.export_to_c(object_file_path=str(out), function_name=FUNCTION_NAME)
                link(out)
            report = log.read_text()
        seconds = time.perf_counter() - start
        return read_report(report, smem_bytes=kernel.smem_bytes, compile_seconds=seconds)

    return compile_kernel


@contextmanager
def _without_locations() -> Iterator[None]:
    """Stops the DSL from looking up the source line of each instruction.

    The DSL does so as soon as remarks are requested, and ptxas's report is one: a third of a compile's time,
    for the same code and report. It has no option against that. Versions without this switch are left
    unchanged.
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
    """The compiler properties that an object depends on: part of every kernel key."""
    return {"cutlass_dsl": dsl_version()}


def dsl_version() -> str:
    """The DSL's version and the build that compiles here, as in ``4.8.1+cu13``."""
    version = package_version("nvidia-cutlass-dsl")
    return f"{version}+{build}" if version and (build := dsl_build()) else version


@functools.cache
def dsl_build() -> str | None:
    """The DSL's build for one CUDA version, such as ``cu13``, with its own ptxas; None if it has no builds.

    The name comes from the build's runtime library, without importing the compiler. Compile workers use the
    same build: it depends on the driver, not on the GPUs that are hidden from them.
    """
    return None if (runtime := find_runtime()) is None else runtime.parts[-3]


def find_linker() -> str | None:
    """The system's linker, which comes with any C compiler; None if it is missing."""
    return shutil.which("ld") or shutil.which("ld.lld")


def link(compiled: Path) -> None:
    """Link the compiler's output to a shared library; without a linker it stays an object file.

    The library names the two libraries that it needs, so that these need not be visible to the whole process.
    """
    from cutlass.cute.runtime import find_runtime_libraries

    if (linker := find_linker()) is None:
        _log.info("%s: no linker here, so its first launch will import the compiler", compiled)
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


def find_runtime() -> Path | None:
    """The DSL's runtime library: there is a folder for each CUDA version, and the DSL uses the newest that
    the driver supports. None if it is not in its usual place.
    """
    spec = find_spec("cutlass")
    if spec is None or spec.origin is None:
        return None
    root = next((parent for parent in Path(spec.origin).parents if parent.name == "nvidia_cutlass_dsl"), None)
    if root is None:
        return None
    result = {int(path.parts[-3][2:]): path for path in root.glob(f"cu[0-9]*/lib/{RUNTIME}")}
    newest = driver.cuda_version()[0] or max(result, default=0)
    return result.get(max((major for major in result if major <= newest), default=0))
