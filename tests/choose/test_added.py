"""Residuals that torch's library adds. That it does is shown on a GPU (tests/gpu/test_epilogue.py)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tunegemm.choose import predictions
from tunegemm.choose.policies import Policy
from tunegemm.choose.selection import select
from tunegemm.choose.snapshot import Snapshot
from tunegemm.describe.device import Device, find_device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.store.record import Record

PROBLEM = Problem.parse("4096x8192x3584", epilogue="residual")
ALGORITHM = Candidate.make(
    "cublaslt",
    {
        "algorithm": "cublaslt", "algo_id": 66, "tile": "128x256", "stages": "128xAUTO",
        "inner_shape": "UNDEFINED", "cluster_shape": "2x1x1", "custom_option": 3,
    },
    {"split_k": 1, "reduction_scheme": "NONE", "cta_swizzling": 1, "workspace_bytes": 0},
)  # fmt: skip


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """One whose library names an algorithm."""
    monkeypatch.setattr(predictions, "algorithm_to_add", lambda problem, index: ALGORITHM)
    return replace(find_device("model:h200"), spec="cuda:0")


def product(ratio: float, device: Device) -> Record:
    """What serves the product alone."""
    return Record(replace(PROBLEM, epilogue=""), ALGORITHM, device.fingerprint, ratio=ratio)


def test_a_residual_that_no_kernel_of_ours_gains_is_added_by_the_library(device: Device) -> None:
    found = select(Snapshot(), PROBLEM, device)
    assert found.outcome == "predicted" and found.options[0].candidate == ALGORITHM
    assert 1.0 < found.options[0].ratio < 1.2 and "one kernel fewer" in found.why
    assert select(Snapshot(), PROBLEM, device, near=False).outcome == "miss"
    assert select(Snapshot(), PROBLEM, find_device("model:h200")).outcome == "miss"


def test_a_bias_before_the_residual_is_added_too(device: Device) -> None:
    problem = replace(PROBLEM, epilogue="bias_n+residual")
    assert select(Snapshot(), problem, device).options[0].candidate == ALGORITHM
    biased = Record(replace(PROBLEM, epilogue="bias_n"), ALGORITHM, device.fingerprint, ratio=1.3)
    found = select(Snapshot([biased]), problem, device)
    assert found.outcome == "miss" and "leaves the library's sum" in found.why
    deep = Problem.parse("104x8576x13680", epilogue="bias_n+residual")
    assert predictions.by_the_library(deep, device, []).options


@pytest.mark.parametrize("activation", ["relu", "gelu_tanh", "gelu", "silu"])
def test_an_activation_of_the_library_follows_a_bias(device: Device, activation: str) -> None:
    problem = Problem.parse("20000x8192x3584", epilogue=f"bias_n+{activation}")  # more rows than predictions
    found = select(Snapshot(), problem, device)
    assert (found.outcome == "predicted") == (activation in ("relu", "gelu_tanh"))
    if found.options:
        assert found.options[0].candidate == ALGORITHM and 1.0 < found.options[0].ratio < 1.2
        before = replace(problem, epilogue="bias_n")
        fast = Snapshot([Record(before, ALGORITHM, device.fingerprint, ratio=1.3)])
        assert select(fast, problem, device).outcome == "miss"


def test_a_faster_product_with_torchs_sum_behind_it_stays(device: Device) -> None:
    assert predictions.by_the_library(PROBLEM, device, [product(1.01, device)]).options
    assert "leaves" in predictions.by_the_library(PROBLEM, device, [product(1.3, device)]).refusal
    records = Snapshot([product(1.3, device)])
    found = select(records, PROBLEM, device)
    assert found.outcome == "miss" and "leaves the library's sum" in found.why and found.rows is None
    assert select(Snapshot([product(1.01, device)]), PROBLEM, device).outcome == "predicted"


def test_policies_judge_the_algorithm(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    assert select(Snapshot(), PROBLEM, device, policy=Policy("deterministic")).outcome == "predicted"
    assert select(Snapshot(), PROBLEM, device, policy=Policy(max_sms=100)).outcome == "miss"
    splits = ALGORITHM.with_launch(**{**dict(ALGORITHM.launch_params), "split_k": 4})
    monkeypatch.setattr(predictions, "algorithm_to_add", lambda problem, index: splits)
    found = select(Snapshot(), PROBLEM, device, policy=Policy("deterministic"))
    assert found.outcome == "miss" and "splits k" in found.why


def test_a_library_that_names_nothing_is_a_miss(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictions, "algorithm_to_add", lambda problem, index: None)
    found = select(Snapshot(), PROBLEM, device)
    assert found.outcome == "miss" and "has no algorithm" in found.why
