"""Compiles one `KernelConfig` into an object file. Runs in a worker process that sees no GPU."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tunegemm.families.cute_sm90.config import KernelConfig
from tunegemm.outcome import Resources

_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_WARNING = re.compile(r"\bC75\d\d\b")


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
        with _output_to(log):
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
        report = " ".join(log.read_text().split())  # the compiler wraps long lines
    spills, registers = _SPILLS.search(report), _REGISTERS.search(report)
    if spills is None or registers is None:
        raise RuntimeError("ptxas reported neither registers nor spills; is this nvidia-cutlass-dsl 4.8?")
    return Resources(
        registers=int(registers[1]),
        spill_bytes=sum(int(group) for group in spills.groups()),
        smem_bytes=gemm.smem_bytes,
        warnings=tuple(sorted(set(_WARNING.findall(report)))),
        compile_seconds=time.perf_counter() - start,
    )


@contextmanager
def _output_to(log: Path) -> Iterator[None]:
    """Everything written to stdout and stderr, by C code too, goes to a file: ptxas's report is in it."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, descriptor in enumerate(saved, start=1):
            os.dup2(descriptor, number)
            os.close(descriptor)
