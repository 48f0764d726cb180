"""The shipped families pass what `tunegemm.testing` asks of every family."""

from __future__ import annotations

import pytest

from tests.generate import (
    test_cute_sm80,
    test_cute_sm90,
    test_gluon_wgmma,
    test_grouped,
    test_skinny,
    test_triton,
    test_triton_tma,
)
from tests.support.sampled import sampled
from tunegemm.compile.pool import CompilePool
from tunegemm.generate import families
from tunegemm.testing import CompileTests, FamilyTests, GeneratorTests


class SharedPool:
    """What other tests of this run have compiled is there."""

    @pytest.fixture
    def compile_pool(self, pool: CompilePool) -> CompilePool:
        return pool


class TestCublasLt(FamilyTests):
    family = "cublaslt"


class TestCuteSm80(SharedPool, GeneratorTests):
    examples = test_cute_sm80.EXAMPLES


class TestCuteSm90(SharedPool, GeneratorTests):
    examples = test_cute_sm90.EXAMPLES


class TestGluonWgmma(SharedPool, GeneratorTests):
    examples = test_gluon_wgmma.EXAMPLES


class TestGrouped(SharedPool, GeneratorTests):
    """And no `CompileTests`: of some of its kernels ptxas serialises WGMMAs (C7511), by no law that was
    found. A search finds that out, as of any kernel that does not compile.
    """

    examples = test_grouped.EXAMPLES


class TestSkinny(SharedPool, GeneratorTests):
    examples = test_skinny.EXAMPLES


class TestTriton(SharedPool, GeneratorTests):
    examples = test_triton.EXAMPLES


class TestTritonTma(SharedPool, GeneratorTests):
    examples = test_triton_tma.EXAMPLES


@pytest.mark.slow
@pytest.mark.long
class TestKernelsOfCuteSm80(SharedPool, CompileTests):
    examples = sampled(test_cute_sm80.EXAMPLES)


@pytest.mark.slow
@pytest.mark.long
class TestKernelsOfCuteSm90(SharedPool, CompileTests):
    examples = sampled(test_cute_sm90.EXAMPLES)


@pytest.mark.slow
@pytest.mark.long
class TestKernelsOfGluonWgmma(SharedPool, CompileTests):
    examples = sampled(test_gluon_wgmma.EXAMPLES)


@pytest.mark.slow
@pytest.mark.long
class TestKernelsOfSkinny(SharedPool, CompileTests):
    examples = sampled(test_skinny.EXAMPLES)


@pytest.mark.slow
@pytest.mark.long
class TestKernelsOfTriton(SharedPool, CompileTests):
    examples = sampled(test_triton.EXAMPLES)


@pytest.mark.slow
@pytest.mark.long
class TestKernelsOfTritonTma(SharedPool, CompileTests):
    examples = sampled(test_triton_tma.EXAMPLES)


def test_every_shipped_family_is_tried() -> None:
    tried = [TestCublasLt.family]
    tried += [
        one.examples.family
        for one in (
            TestCuteSm80,
            TestCuteSm90,
            TestGluonWgmma,
            TestGrouped,
            TestSkinny,
            TestTriton,
            TestTritonTma,
        )
    ]
    assert sorted(tried) == sorted(families.SHIPPED)
