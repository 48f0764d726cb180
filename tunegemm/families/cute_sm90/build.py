"""Compiles one `KernelConfig` into an object file. Runs in a worker process that sees no GPU."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from tunegemm.families.cute_sm90.config import KernelConfig
from tunegemm.families.ptxas import output_to, read_report
from tunegemm.outcome import Resources


def build(config: KernelConfig, out: Path) -> Resources:
    """Compile for sm_90a and write the object `out`; the resources are ptxas's own report.

    Extents, strides and launch parameters are run-time integers: one object serves every problem of its
    dtypes and majors. Raises whatever the compiler raises; some configurations abort the process.
    """
    os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
    import cutlass.cute as cute
    from cutlass import Int32, Int64

    from tunegemm.families.cute_sm90 import FUNCTION_NAME
    from tunegemm.families.cute_sm90.kernel import Gemm

    start = time.perf_counter()
    gemm = Gemm(config)
    with tempfile.TemporaryDirectory() as dumps:
        log = Path(dumps, "ptxas.log")
        with output_to(log):
            # A dump folder of its own: parallel compiles overwrite each other's files in a shared one.
            compiled = cute.compile(
                gemm,
                *[Int64(0)] * 3,
                *[Int32(1)] * 4,
                *[Int64(16)] * 6,
                *[Int32(1)] * 5,
                *[Int64(16)] * 2,
                cute.runtime.make_fake_stream(),
                options=f"--enable-tvm-ffi --dump-dir={dumps} --remarks{{ptx}}",
            )
            compiled.export_to_c(object_file_path=str(out), function_name=FUNCTION_NAME)
        report = read_report(log.read_text())
    return Resources(
        registers=report.registers,
        spill_bytes=report.spill_bytes,
        smem_bytes=gemm.smem_bytes,
        warnings=report.warnings,
        compile_seconds=time.perf_counter() - start,
    )
