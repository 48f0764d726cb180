"""Policies in dispatch: plans of one never serve another; who sets them."""

from __future__ import annotations

import pytest
import torch

import tunegemm
from tests.choose.test_neighbours import kernel
from tests.support.serving import BF16, Kernel, Row, operands, quietly
from tunegemm.choose.policies import FASTEST, Policy
from tunegemm.choose.snapshot import Snapshot
from tunegemm.describe.device import Device, find_device
from tunegemm.describe.problem import Problem
from tunegemm.errors import PolicyError, TunegemmWarning
from tunegemm.serve import api
from tunegemm.serve.dispatcher import Dispatcher
from tunegemm.serve.launchers import Prepared
from tunegemm.serve.planning import Planner
from tunegemm.store.record import Record


@pytest.fixture
def device() -> Device:
    return find_device("model:h200")


@pytest.fixture
def dispatcher(device, request):
    """Two launchers: whose kernel is called tells which candidate serves."""
    kernels = {name: Kernel() for name in ("plain", "split")}
    problem = Problem(32, 48, 64)
    split = kernel(split_k=2)
    rival = Record(
        problem, kernel(), device.fingerprint, "plain", ratio=1.1, noise=0.003, relative_error=1e-3,
        kernel_source=Row(problem, device.fingerprint).kernel_source, samples_us=(10.0,) * 3,
        baseline_us=(11.0,) * 3,
    )  # fmt: skip
    made = Dispatcher(
        Planner(
            device_type="cpu",
            read=lambda: Snapshot([Row(problem, device.fingerprint, split)]),
            find=lambda spec: device,
            prepare=lambda record, device: Prepared(
                kernels["split" if record.candidate["split_k"] > 1 else "plain"], tma=True
            ),
            rivals=lambda problem: [rival],
        )
    )
    return made, kernels


def test_each_policy_has_plans_of_its_own(dispatcher):
    made, kernels = dispatcher
    a, b = operands()
    counts = lambda: (len(kernels["split"].calls), len(kernels["plain"].calls))  # noqa: E731
    quietly(made.matmul, a, b)
    assert counts() == (1, 0)
    assert made.planner.use(Policy("no_workspace")) == FASTEST
    for _ in range(2):
        quietly(made.matmul, a, b)
    assert counts() == (1, 2)
    made.planner.use(FASTEST)
    plans = dict(made.planner.state.plans)
    quietly(made.matmul, a, b)
    assert counts() == (2, 2) and made.planner.state.plans == plans, "they were kept"
    made.planner.refresh()
    assert made.planner.policy == FASTEST


def test_policy_is_a_call_and_a_context(monkeypatch, dispatcher):
    made, _ = dispatcher
    monkeypatch.setattr(api, "dispatcher", made)
    with tunegemm.policy("deterministic", max_sms=120):
        assert made.planner.policy == Policy("deterministic", 120)
        with pytest.raises(ZeroDivisionError), tunegemm.policy("no_workspace"):
            raise ZeroDivisionError
        assert made.planner.policy == Policy("deterministic", 120)
    assert made.planner.policy == FASTEST
    tunegemm.policy("min_energy")
    assert made.planner.policy == Policy("min_energy")
    with pytest.raises(PolicyError, match="use one of fastest, deterministic"):
        tunegemm.policy("quickest")


def test_the_environment_sets_the_first_policy(monkeypatch, dispatcher):
    made, kernels = dispatcher
    monkeypatch.setenv("TUNEGEMM_POLICY", "no_workspace")
    assert made.planner.policy == Policy("no_workspace")  # before any product, too: `explain` asks
    quietly(made.matmul, *operands())
    assert made.planner.policy == Policy("no_workspace") and len(kernels["plain"].calls) == 1


def test_an_unknown_policy_in_the_environment_is_a_warning(monkeypatch, dispatcher):
    made, _ = dispatcher
    monkeypatch.setenv("TUNEGEMM_POLICY", "quickest")
    with pytest.warns(TunegemmWarning, match="TUNEGEMM_POLICY: policy 'quickest' is not known"):
        made.matmul(*operands())
    assert made.planner.policy == FASTEST


def test_deterministic_torch_stays_deterministic(dispatcher):
    """What torch promises under its own switch, torch keeps."""
    made, kernels = dispatcher
    a, b = operands()
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.equal(made.matmul(a, b), torch.matmul(a, b))
    finally:
        torch.use_deterministic_algorithms(False)
    assert a.dtype is BF16 and not kernels["split"].calls
