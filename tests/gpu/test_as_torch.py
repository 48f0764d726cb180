"""As tests/dispatch/test_as_torch.py, by real kernels: cute_sm90 serves each problem that its rules admit.

Every case is run twice: first to see which kernels are asked for, which are compiled together, then by them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from typing import Any

import pytest
import torch

import tunegemm
from tests.support.as_torch import (
    BUILT_ON,
    OURS,
    PAIRS,
    SECOND,
    TAKEN,
    agree,
    check,
    compare,
    operators,
    strange_operands,
)
from tests.support.fusing import Recorded
from tests.support.kernels import Kernels
from tests.support.serving import Row
from tunegemm.describe.device import Device, find_device
from tunegemm.describe.precision import computing_fp32_in
from tunegemm.describe.problem import Problem
from tunegemm.dispatch import api
from tunegemm.dispatch.dispatcher import Dispatcher
from tunegemm.dispatch.launchers import Prepared
from tunegemm.dispatch.planning import Planner
from tunegemm.errors import ArtifactError
from tunegemm.generate import families
from tunegemm.generate.launching import Launcher, tma_takes
from tunegemm.report.explain import candidate_of
from tunegemm.store.record import Record

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CANDIDATE = candidate_of("cute_sm90")
MOST_SAMPLES = 6


class Everything(Recorded):
    """A record of that kernel for each problem that it runs."""

    def find(self, problem: Any, fingerprint: Any) -> Record:
        return Row(problem, fingerprint, CANDIDATE, ratio=9.0)


class Planted:
    """Serves what was compiled, and remembers what was not."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels
        self.wanted: set[Problem] = set()
        self.loaded: dict[Problem, Launcher] = {}
        snapshot = Everything()
        self.planner = Planner(read=lambda: snapshot, find=cache(find_device), prepare=self.prepare)
        self.calls = self

    def prepare(self, record: Record, device: Device) -> Prepared:
        problem, family = record.problem, families.get(CANDIDATE.family)
        if not family.check(problem, CANDIDATE, device).runs:
            raise ArtifactError("it does not run")
        if problem not in self.loaded:
            self.wanted.add(problem)
            raise ArtifactError("it is not compiled yet")
        return Prepared(self.loaded[problem], tma=family.tma and tma_takes(problem), record=record)

    def compile(self) -> None:
        """All that was asked for, on all cores."""
        for problem in self.wanted:
            self.kernels.begin(problem, CANDIDATE)
        self.loaded |= {problem: self.kernels.load(problem, CANDIDATE) for problem in self.wanted}
        self.wanted.clear()

    # As `calls` of a stand-in: whether a plan has a kernel since the last time it was cleared.
    def clear(self) -> None:
        self.planner.refresh()

    def __bool__(self) -> bool:
        return any(plan is not None for plan in self.planner.state.plans.values())


@pytest.fixture(scope="module")
def known() -> dict[str, list[Any]]:
    pytest.importorskip("expecttest", reason="torch.testing._internal imports it: pip install expecttest")
    return operators((*TAKEN, *BUILT_ON))


@pytest.fixture(scope="module", autouse=True)
def planted(kernels: Kernels, known: dict[str, list[Any]]) -> Iterator[Planted]:
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(), computing_fp32_in("tf32"):
        warnings.simplefilter("ignore")
        patch.setenv("TUNEGEMM_COMPILE", "0")
        found = Planted(kernels)
        earlier = api.serve_by(Dispatcher(found.planner))
        with suppress(AssertionError):  # the test says what differs
            for name in (*TAKEN, *BUILT_ON):
                for dtype in DTYPES:
                    _samples(found, known, name, dtype)
            for name in OURS:
                _cast(found, known, name)
            for name in PAIRS:
                _pairs(found, name)
            for name in ("addmm", "baddbmm"):
                _triples(found, name)
        found.compile()
        found.planner.refresh()
        yield found
        api.serve_by(earlier)


def _samples(planted: Planted, known: dict[str, list[Any]], name: str, dtype: torch.dtype) -> list[Any]:
    return [
        compare(planted, "cuda", op, dtype, None if name in TAKEN else MOST_SAMPLES)
        for op in known[name]
        if dtype in op.supported_dtypes("cuda")
    ]


def _cast(planted: Planted, known: dict[str, list[Any]], name: str) -> list[Any]:
    return [compare(planted, "cuda", op, torch.float32, MOST_SAMPLES, cast=True) for op in known[name]]


def _pairs(planted: Planted, name: str) -> int:
    operands = strange_operands("cuda", torch.bfloat16)
    call, ours = PAIRS[name]
    return sum(agree(planted, call, ours, a, operands[b]) for a in operands.values() for b in SECOND)


def _triples(planted: Planted, name: str) -> int:
    operands = strange_operands("cuda", torch.bfloat16)
    call, ours = getattr(torch, name), getattr(tunegemm, name)
    right = operands["4x4" if name == "addmm" else "2x4x4"]
    lefts = ("4x4", "3x4", "0x4") if name == "addmm" else ("2x4x4", "1x4x4")
    return sum(
        agree(planted, call, ours, c, operands[a], right, beta=beta, alpha=alpha)
        for c in operands.values()
        for a in lefts
        for beta, alpha in ((1, 1), (0, 0.5), (2, 1))
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", TAKEN)
def test_products_mean_what_torchs_mean(planted, known, name, dtype):
    # WGMMA takes operands of tf32 in layout tn only, which fewer of the samples have.
    share = 0.1 if dtype == torch.float32 else 0.2
    for found in _samples(planted, known, name, dtype):
        check(found, share)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", BUILT_ON)
def test_what_is_built_on_products(planted, known, name, dtype):
    for found in _samples(planted, known, name, dtype):
        check(found, 0.0)


@pytest.mark.parametrize("name", OURS)
def test_products_under_autocast_have_its_dtype(planted, known, name):
    for found in _cast(planted, known, name):
        check(found, 0.2)


@pytest.mark.parametrize("name", [*PAIRS, "addmm", "baddbmm"])
def test_operands_of_every_rank(planted, name):
    run: Callable[[Planted, str], int] = _pairs if name in PAIRS else _triples
    assert run(planted, name) >= 3
    assert not planted.wanted
