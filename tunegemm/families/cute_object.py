"""CuTe DSL kernels as objects: compiled in a worker process that sees no GPU, loaded where they run.

The families' kernels share one signature (`cute_sm90.kernel.Gemm.__call__`) but for the number of their
launch parameters. All arguments are run-time integers, so that one object serves every problem of its dtypes
and majors.
"""

from __future__ import annotations

import functools
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tunegemm.families.ptxas import output_to, read_report
from tunegemm.outcome import Resources

FUNCTION_NAME = "tunegemm_gemm"
"""Exported symbol of every compiled object."""


def compile_object(
    make_kernel: Callable[[], Any], launch_parameters: int, target: str, out: Path, *, words: int = 0
) -> Resources:
    """Compile for an architecture such as ``sm_90a`` and write the object `out`; the report is ptxas's.

    make_kernel: imports the kernel and makes it, once the compiler knows the architecture.
    launch_parameters: 32-bit arguments between the strides and the workspace.
    words: 64-bit arguments behind the workspace.

    Raises whatever the compiler raises; some configurations abort the process.
    """
    os.environ["CUTE_DSL_ARCH"] = target
    import cutlass.cute as cute
    from cutlass import Int32, Int64

    start = time.perf_counter()
    kernel = make_kernel()
    with tempfile.TemporaryDirectory() as dumps:
        log = Path(dumps, "ptxas.log")
        with output_to(log):
            # A dump folder of its own: parallel compiles overwrite each other's files in a shared one.
            compiled = cute.compile(
                kernel,
                *[Int64(0)] * 3,
                *[Int32(1)] * 4,
                *[Int64(16)] * 6,
                *[Int32(1)] * launch_parameters,
                *[Int64(16)] * (2 + words),
                cute.runtime.make_fake_stream(),
                options=f"--enable-tvm-ffi --gpu-arch={target} --dump-dir={dumps} --remarks{{ptx}}",
            )
            compiled.export_to_c(object_file_path=str(out), function_name=FUNCTION_NAME)
        report = read_report(log.read_text())
    return Resources(
        registers=report.registers,
        spill_bytes=report.spill_bytes,
        smem_bytes=kernel.smem_bytes,
        warnings=report.warnings,
        compile_seconds=time.perf_counter() - start,
    )


def load_function(artifact: Path):  # type: ignore[no-untyped-def]
    """The launch function in a compiled object, for the current device.

    Launchers of one kernel share it: they differ in numbers only, and a program that decodes has hundreds.
    """
    import torch

    device = torch.cuda.current_device() if torch.cuda.is_initialized() else -1
    return _load(str(artifact), artifact.stat().st_mtime_ns, device)


@functools.lru_cache(maxsize=64)  # a search loads thousands of kernels once, and must not keep them
def _load(path: str, modified_ns: int, device: int):  # type: ignore[no-untyped-def]
    import cutlass.cute as cute

    return cute.runtime.load_module(path, enable_tvm_ffi=True)[FUNCTION_NAME]
