"""The kernel that readers begin with compiles as written; tests/gpu/test_kernel_minimal.py runs it."""

import os
from pathlib import Path

import pytest

from tests.support.forks import Forks
from tests.support.minimal import compile_minimal
from tunegemm.generate.cute_launch import load_function
from tunegemm.generate.cute_sm90 import kernel_minimal


@pytest.mark.slow
def test_it_compiles_without_spills_or_warnings(tmp_path: Path) -> None:
    path, report = compile_minimal(tmp_path)
    assert report.spill_bytes == 0 and report.warnings == ()
    assert report.registers == 168  # 65536 / 384 threads, in units of 8: what setmaxnreg hands out
    assert callable(load_function(path))


def test_it_fits_shared_memory() -> None:
    assert kernel_minimal.Storage.size_in_bytes() <= 232448


@pytest.mark.slow
def test_without_a_gpu_it_says_so_in_one_line(forks: Forks) -> None:
    program = (
        "import runpy; runpy.run_module('tunegemm.generate.cute_sm90.kernel_minimal', run_name='__main__')"
    )
    done = forks.run(program, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 1 and not done.stdout
    assert done.stderr.splitlines() == [
        "kernel_minimal wants a Hopper GPU (compute capability 9.0), and there is none here"
    ]
