"""compute-sanitizer on a sample of the Hopper schedules and on grouped kernels, where it is installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import processes, sanitized
from tests.support.kernels import Kernels
from tunegemm.generate import quantize
from tunegemm.model.grouped import kinds, listed_along_k
from tunegemm.store.provided import provide_blocks, provide_grouped, provide_joined

pytestmark = pytest.mark.gpu

SANITIZER = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
#: What the tool is told to exit with where it found something.
FOUND = 9


@pytest.fixture(scope="module")
def compiled(kernels: Kernels) -> Path:
    """A store's folder with the kernels, so that the compiler does not run under the sanitizer."""
    if SANITIZER is None:
        pytest.skip("needs compute-sanitizer, of CUDA's toolkit; there is none on PATH")
    operations = [*sanitized.operations()]
    for operation in operations:
        assert (verdict := operation.can_implement()), (operation.problem, verdict)
        kernels.begin(operation.problem, operation.candidate)
    for operation in operations:
        kernels.compiled(operation.problem, operation.candidate)
    for kind in (*kinds(), "along_k", "routing"):
        assert not provide_grouped(kind).failures
    assert not provide_joined().failures and not provide_blocks().failures
    return kernels.pool.store.root.parent


def sanitize(tool: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    assert SANITIZER is not None
    command = [SANITIZER, "--tool", tool, "--error-exitcode", str(FOUND)]
    # What libraries ask the driver for and do not get, they do without.
    command += ["--report-api-errors", "no", sys.executable, "-m"]
    # torch's allocator hands out parts of large allocations, whose ends the sanitizer could not know.
    environment = processes.environment(PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    return subprocess.run(
        [*command, "tests.support.sanitized", *arguments],
        cwd=processes.ROOT, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_nothing_is_found(compiled: Path, tool: str) -> None:
    done = sanitize(tool, str(compiled), *(["once"] if tool == "racecheck" else []))
    if "Device not supported" in done.stdout:
        pytest.skip("compute-sanitizer does not support the device of this machine")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert done.stdout.count(" right") == len(sanitized.CASES)
    assert done.stdout.count("grouped") == len([*sanitized.grouped_kernels()])
    assert done.stdout.count("along k") == len(listed_along_k())
    assert "\naround\n" in done.stdout
    assert done.stdout.count("joined") == len(sanitized.joined_kernels())
    assert done.stdout.count("blocks") == len(sanitized.block_kernels())
    assert done.stdout.count("scaled groups") == len(sanitized.listed_of_block_groups())
    assert done.stdout.count("quantize") == len(quantize.CONFIGS)


def test_memory_that_is_too_small_is_found(compiled: Path) -> None:
    done = sanitize("memcheck", str(compiled), "planted")
    if "Device not supported" in done.stdout:
        pytest.skip("compute-sanitizer does not support the device of this machine")
    assert done.returncode == FOUND, done.stdout[-3000:]
