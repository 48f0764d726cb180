"""ptxas's own report of a kernel: registers, spills, and warnings that its WGMMAs were serialized."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_WARNING = re.compile(r"\bC75\d\d\b")


@dataclass(frozen=True)
class Resources:
    """The compiler's report on one kernel."""

    registers: int
    """Registers per thread at launch."""
    spill_bytes: int
    """Stack plus spill stores plus spill loads; 0 for every feasible candidate."""
    smem_bytes: int
    """Dynamic shared memory of one block."""
    warnings: tuple[str, ...] = ()
    """Codes of performance warnings, such as ``C7510`` (WGMMA serialized)."""
    compile_seconds: float = 0.0


def read_report(log: str, *, smem_bytes: int, compile_seconds: float) -> Resources:
    """The report in a compiler's output, with the other figures. Raises RuntimeError if there is none.

    With several kernels: the most registers of any, and the sum of all spills.
    """
    text = " ".join(log.split())  # compilers wrap long lines
    spills, registers = _SPILLS.findall(text), _REGISTERS.findall(text)
    if not spills or not registers:
        raise RuntimeError("ptxas reported neither registers nor spills; is this a tested compiler version?")
    return Resources(
        registers=max(map(int, registers)),
        spill_bytes=sum(int(group) for kernel in spills for group in kernel),
        smem_bytes=smem_bytes,
        warnings=tuple(sorted(set(_WARNING.findall(text)))),
        compile_seconds=compile_seconds,
    )


@contextmanager
def output_to(log: Path) -> Iterator[None]:
    """Everything written to stdout and stderr, by C code too, goes to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    try:
        with log.open("w") as file, redirect_stdout(file), redirect_stderr(file):
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            yield
    finally:
        for number, descriptor in enumerate(saved, start=1):
            os.dup2(descriptor, number)
            os.close(descriptor)
