"""Portable kernels compile for every architecture: without spills, into the shared memory that was planned.

`TUNEGEMM_TEST_SAMPLE=N` compiles 2 N of each; `python -m benchmarks.compiled` counts them.
"""

from __future__ import annotations

import pytest

from benchmarks.compiled import DEVICES, PORTABLE, compiled
from tunegemm.compile.pool import CompilePool
from tunegemm.describe.problem import Problem
from tunegemm.generate import families
from tunegemm.testing.suite import SAMPLE, accepted

#: Not compiled by the DSL's build for CUDA 12, which calls Thor sm_101.
_NOT_HERE = {("cute_sm80", "sm_110")}


@pytest.mark.parametrize("architecture", DEVICES)
@pytest.mark.parametrize("family", PORTABLE)
def test_there_are_kernels_for_16_bits_at_every_alignment(family: str, architecture: str) -> None:
    for text in ("4096x4096x4096", "4097x4095x1001", "16x4096x4096", "64x64x64"):
        assert accepted(family, Problem.parse(text), DEVICES[architecture], 1), (text, families.get(family))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("architecture", DEVICES)
@pytest.mark.parametrize("family", PORTABLE)
def test_they_compile_clean(pool: CompilePool, family: str, architecture: str) -> None:
    if (family, architecture) in _NOT_HERE:
        pytest.skip("the DSL has no such target with CUDA 12")
    found = compiled(pool, family, DEVICES[architecture], 2 * SAMPLE)
    assert found["kernels"] and found["clean"] == found["kernels"], found
