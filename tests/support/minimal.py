"""Compiles the kernel that readers begin with, in a process of its own that sees no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tunegemm.compile.ptxas import Resources, output_to, read_report


def compile_minimal(folder: Path) -> tuple[Path, Resources]:
    """An object in `folder` that `cute_launch.load_function` loads, and what ptxas says of it."""
    hidden = {"CUDA_VISIBLE_DEVICES": "", "CUTE_DSL_ARCH": "sm_90a"}
    paths = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.minimal", str(folder)],
        env=os.environ | hidden | paths, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    log = (folder / "ptxas.log").read_text()
    return folder / "minimal.o", read_report(log, smem_bytes=0, compile_seconds=0.0)


def main(folder: Path) -> None:
    from tunegemm.generate.cute_sm90.kernel_minimal import compile_into

    with output_to(folder / "ptxas.log"):
        compile_into(folder, "--remarks{ptx}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
