"""Predictions for fp8 and fused products, by the kernels that ship for their kind."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from typing import Any

import pytest

from fit.kind_choices import drawn, kinds_of
from tunegemm.choose import predictions
from tunegemm.choose.invariance import ASKED, best_ranked, features_of
from tunegemm.choose.predictions import Fitted, outlook
from tunegemm.choose.selection import select
from tunegemm.choose.snapshot import Snapshot
from tunegemm.describe.device import Device, find_device
from tunegemm.describe.problem import Problem
from tunegemm.generate import families
from tunegemm.generate.cublaslt.choice import LibraryChoice
from tunegemm.model import shortlist
from tunegemm.model.features import OF_GAIN
from tunegemm.report.explain import explain_problem

H200 = "NVIDIA H200"
ROWWISE: dict[str, Any] = {"dtype": "fp8_e4m3", "epilogue": "scale_rowwise"}
SERVED = Problem.parse("8x6160x4112", **ROWWISE)


def problems(count: int, kinds: str = "") -> list[Problem]:
    found = drawn("tests", kinds_of(kinds))
    return [next(found) for _ in range(count)]


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (SERVED, (1, 0, 0)),
        (Problem.parse("8x6160x4112", epilogue="swiglu"), (0, 1, 0)),
        (Problem.parse("8x6160x4112", epilogue="bias_n+residual"), (0, 0, 1)),
    ],
    ids=str,
)
def test_features_say_what_a_product_is(device: Device, problem: Problem, expected: tuple[int, ...]) -> None:
    rows = features_of(problem, best_ranked(problem, device), device, None)
    places = [OF_GAIN.index(name) for name in ("one_byte", "gated", "adds")]
    assert len(rows) and (rows[:, places] == expected).all()


def test_every_option_is_legal_and_passes_its_margin(device: Device) -> None:
    count = 0
    for problem in problems(90):
        found = select(Snapshot(), problem, device)
        assert found.outcome in ("predicted", "miss")
        expected = [option.expected for option in found.offers]
        assert expected == sorted(expected, reverse=True)
        for option in found.offers:
            candidate = option.record.candidate
            assert families.get(candidate.family).check(problem, candidate, device).runs, (problem, candidate)
            large = [one.kernel for one in shortlist.large_kernels(problem)]
            assert candidate.kernel in [*shortlist.ordered_kernels(problem), *large]
            assert 1 < option.bound < option.expected and option.record.ratio == option.bound
        count += found.outcome == "predicted"
    assert 90 * 0.2 < count < 90 * 0.9


def test_few_rows_of_fp8_are_served(device: Device) -> None:
    found = select(Snapshot(), SERVED, device)
    assert found.outcome == "predicted" and found.offers[0].bound > 1.1
    told = explain_problem(SERVED, device)
    assert "x torch expected, at least" in str(told)
    facts = json.loads(json.dumps(told.asdict(), allow_nan=False))
    assert facts["predicted"]["least_ratio"] == pytest.approx(found.offers[0].bound)
    assert select(Snapshot(), SERVED, device, near=False).outcome == "miss"


def test_gates_and_residuals_of_many_rows_are_served_where_they_were_measured(device: Device) -> None:
    tanh = Problem.parse("4096x18432x2560", epilogue="geglu_tanh")
    assert select(Snapshot(), tanh, device).outcome == "predicted"
    assert "no predictions" in select(Snapshot(), tanh, find_device("model:h100-sxm")).why
    stream = Problem.parse("4096x3072x4096", epilogue="residual")
    assert select(Snapshot(), stream, device).offers[0].bound > 1
    wide = Problem.parse("2048x57344x2560", epilogue="swiglu")
    assert "N from 256 to 28672" in select(Snapshot(), wide, device).why
    halves = {problem.n > 28672 for problem in problems(400, "swiglu")}
    assert halves == {False, True}, "gates are drawn as wide as two weights"


def test_between_ends_that_are_surely_refused_nothing_passes(device: Device, monkeypatch) -> None:
    """Ranges of rows are decided by their ends; each of their rows would be told the same by itself."""
    source = random.Random(7)
    rows = [int(2 ** source.uniform(8.1, 13.9)) for _ in range(24)]
    asked = [Problem.parse(f"{m}x{n}x{k}", **ROWWISE) for m in rows for n, k in ((6144, 4096), (28672, 4096))]
    by_ends = [outlook(problem, device) for problem in asked]
    monkeypatch.setattr(predictions, "SURELY", math.inf)
    by_itself = [outlook(problem, device) for problem in asked]
    assert [each.options for each in by_ends] == [each.options for each in by_itself]
    shut = [each.rows for each in by_ends if each.rows]
    assert len(shut) > len(asked) / 2, "most are decided so"
    for problem, each in zip(asked, by_ends, strict=True):
        assert each.rows is None or each.rows[0] <= problem.m <= each.rows[1]


def test_what_torch_launches_counts(device: Device) -> None:
    """Of a product whose library was measured as a feature: the answer for another one is another."""
    gains = Fitted.of("fused", H200)
    assert gains is not None
    problem = Problem.parse("8x9216x4608", epilogue="bias_n+gelu_tanh")
    found, real = best_ranked(problem, device), replace(device, spec="cuda:0")
    tables = [
        features_of(problem, found, real, choice)
        for choice in (None, LibraryChoice(8, 64, 1, 4, 1), LibraryChoice(64, 64, 1, 1, 1))
    ]
    assert len(found) == ASKED and len({tuple(gains.forest(table)) for table in tables}) == 3


def test_parts_of_a_gpu_and_other_gpus_are_not_predicted(device: Device) -> None:
    part = replace(device, fingerprint=replace(device.fingerprint, mig="1g.18gb"))
    for other in (part, find_device("model:a100-sxm-80gb"), device.with_sm_budget(60)):
        assert not outlook(SERVED, other, lambda *_: "").options


def test_a_policy_may_refuse_all(device: Device) -> None:
    found = outlook(SERVED, device, lambda *_: "not that one")
    assert not found.options and found.refusal.count("not that one") >= 1
