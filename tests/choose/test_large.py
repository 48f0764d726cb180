"""Launches for products of many rows: by GPC, and by the clock that the power cap leaves each."""

from __future__ import annotations

import pytest

from tunegemm.choose.invariance import FEW_ROWS, best_ranked, large_ranked, ranked
from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.generate import families
from tunegemm.model.shortlist import large_kernels, large_lists, launched, ordered_kernels, ordered_lists


def goes_by_gpc(problem: Problem, device: Device) -> list[bool]:
    return [one.candidate["cluster_order"] == "gpc" for one in best_ranked(problem, device)]


@pytest.mark.parametrize("epilogue", ["residual", "bias_n+residual"])
def test_many_rows_may_go_by_gpc_and_few_do_not(device: Device, epilogue: str) -> None:
    assert any(goes_by_gpc(Problem.parse("4096x8192x4096", epilogue=epilogue), device))
    few = Problem.parse(f"{FEW_ROWS}x8192x4096", epilogue=epilogue)
    assert not any(goes_by_gpc(few, device)) and not any(one.slowed for one in best_ranked(few, device))


def test_kinds_that_were_not_measured_by_gpc_do_without(device: Device) -> None:
    for epilogue in ("swiglu", "bias_n+gelu_tanh"):
        problem = Problem.parse("4096x8192x4096", epilogue=epilogue)
        assert not large_kernels(problem) and not any(goes_by_gpc(problem, device))
        assert not any(one.slowed for one in best_ranked(problem, device))


def test_all_are_legal_ship_compiled_and_are_in_order(device: Device) -> None:
    """`make kernels` compiles what both lists say, at the launches that they say."""
    kind = Problem.parse("64x4096x4096", epilogue="residual")
    ships = [*(launched(kind, one) for one in ordered_lists()[kind]), *large_lists()[kind]]
    shipped = [families.generator(one.family).kernel_key(kind, one, device) for one in ships]
    for shape in ("300x1024x512", "2048x4096x14336", "16384x8192x1024"):
        problem = Problem.parse(shape, epilogue="residual")
        listed = ranked(problem, ordered_kernels(problem), device)
        found = large_ranked(problem, listed, device)
        assert len(found) > len(listed)
        best = best_ranked(problem, device)
        assert [one.score for one in best] == sorted((one.score for one in best), reverse=True)
        for one in best:
            family = families.generator(one.candidate.family)
            assert family.check(problem, one.candidate, device).runs
            assert family.kernel_key(problem, one.candidate, device) in shipped
