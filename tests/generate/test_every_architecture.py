"""Portable kernels compile for every architecture: without spills, into the shared memory that was planned.

One of each generation; all of them in `make test-kernels`. `TUNEGEMM_TEST_SAMPLE=N` compiles N of each;
`python -m benchmarks.compiled` counts them.
"""

from __future__ import annotations

import pytest

from benchmarks.compiled import DEVICES, PORTABLE, compiled
from tests.support.sampled import first_of_each
from tunegemm.compile.pool import CompilePool
from tunegemm.describe.device import package_version
from tunegemm.describe.problem import Problem
from tunegemm.generate import families
from tunegemm.generate.triton_tma import rules
from tunegemm.testing.suite import SAMPLE, accepted

#: Not compiled by the DSL's build for CUDA 12, which calls Thor sm_101.
_NOT_HERE = ("cute_sm80", "sm_110")
PAIRS = [
    (family, name)
    for family in PORTABLE
    for name, device in DEVICES.items()
    if not families.refusal_here(family, device)
]


@pytest.mark.parametrize(("family", "architecture"), PAIRS)
def test_there_are_kernels_for_16_bits(family: str, architecture: str) -> None:
    odd = () if family == "triton_tma" else ("4097x4095x1001",)
    for text in ("4096x4096x4096", "16x4096x4096", "64x64x64", *odd):
        assert accepted(family, Problem.parse(text), DEVICES[architecture], 1), text


def test_where_they_are() -> None:
    where = {family: sum(one == family for one, _ in PAIRS) for family in PORTABLE}
    of_tma = 4 if package_version("triton").startswith("3.6.") else 6
    assert where == {"triton": 10, "triton_tma": of_tma, "cute_sm80": 10}


@pytest.mark.parametrize(("version", "refused"), [("3.6.0", True), ("3.7.1", False), ("", False)])
def test_a_triton_whose_kernels_use_local_memory_has_none(
    version: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "package_version", lambda _: version)
    for name, device in DEVICES.items():
        reason = families.refusal_here("triton_tma", device)
        assert bool(reason) == (not device.architecture.tma or (refused and name in ("sm_120", "sm_121")))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "architecture"), first_of_each(PAIRS, kind=lambda pair: (pair[0], pair[1][:-1]))
)
def test_they_compile_clean(pool: CompilePool, family: str, architecture: str) -> None:
    if (family, architecture) == _NOT_HERE:
        pytest.skip("the DSL has no such target with CUDA 12")
    found = compiled(pool, family, DEVICES[architecture], SAMPLE)
    assert found["kernels"] and found["clean"] == found["kernels"], found
