"""Kernel families whose compile misbehaves; a compile worker imports this module by name."""

import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from tunegemm.compile.ptxas import Resources


class _Planted:
    def compile(self, key: Mapping[str, str | int | bool], out: Path) -> Resources:
        what = key["what"]
        if what == "abort":
            os.abort()
        if what == "leave":
            os._exit(0)
        if what == "hang":
            tempfile.mkdtemp()
            out.write_bytes(b"begun")  # so that a test may wait for it
            time.sleep(3600)  # hangs: who compiles is to be killed
        if what == "memory":
            raise MemoryError
        if what.startswith("errno "):
            number = int(what.removeprefix("errno "))
            raise OSError(number, os.strerror(number))
        if what == "import":
            raise ImportError("libnvrtc.so.13: cannot open shared object file")
        if what == "raise":
            raise ValueError("a tile that the compiler\nrefuses: fatal register shortage")
        if what == "print":
            print("noise on stdout", flush=True)
        out.write_bytes(f"object of {key['name']}".encode())
        return Resources(128, 64 if what == "spill" else 0, 1024, ("C7510",) if what == "warn" else (), 0.1)


class _Own(_Planted):
    """Its kernels come from another file beside this one."""

    sources = (Path(__file__).with_name("triton_kernels.py"),)


def compiler(name: str) -> _Planted:
    return _Own() if name == "own" else _Planted()


def import_compiler() -> None:
    """There is none."""
