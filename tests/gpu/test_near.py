"""Near hits and an SM budget on a GPU: one compiled kernel serves every m."""

from __future__ import annotations

import pytest
import torch

from tests.choose.test_neighbours import Row, kernel
from tunegemm.choose.policies import FASTEST, Policy
from tunegemm.choose.snapshot import Snapshot
from tunegemm.describe.problem import Problem
from tunegemm.dispatch.dispatcher import Dispatcher
from tunegemm.dispatch.planning import Planner
from tunegemm.measure.outcome import Measurement
from tunegemm.tuning.tuner import Tuner, open_device

pytestmark = pytest.mark.gpu

N, K = 1024, 2048


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    """Records of two m whose kernel is compiled; their ratios are planted, so that they vouch."""
    device = open_device("cuda:0")
    with Tuner(device) as tuner:
        assert any(
            isinstance(one, Measurement) and one.candidate == kernel()
            for one in tuner.race(Problem(64, N, K), [kernel()]).outcomes
        )
    return [Row(Problem(m, N, K), device.fingerprint, kernel(), 1.5) for m in (64, 256)]


def operands(m: int) -> tuple[torch.Tensor, torch.Tensor]:
    a = torch.randn(m, K, dtype=torch.bfloat16, device="cuda")
    return a, torch.randn(N, K, dtype=torch.bfloat16, device="cuda").t()


@pytest.mark.parametrize("policy", [FASTEST, Policy("no_workspace"), Policy(max_sms=16), Policy(max_sms=1)])
def test_one_kernel_serves_every_m(rows: list[Row], policy: Policy) -> None:
    dispatcher = Dispatcher(Planner(read=lambda: Snapshot(rows)))
    dispatcher.planner.use(policy)
    for m in range(65, 256, 10):
        a, b = operands(m)
        result = dispatcher.matmul(a, b)
        torch.testing.assert_close(result, torch.matmul(a, b), rtol=2e-2, atol=1.0)
        plans = dispatcher.planner.state.plans.values()
    assert len(plans) == 20 and None not in plans, "all are near hits"


def test_near_plans_are_not_made_during_capture(rows: list[Row]) -> None:
    dispatcher, graph = Dispatcher(Planner(read=lambda: Snapshot(rows))), torch.cuda.CUDAGraph()
    a, b = operands(100)
    torch.matmul(a, b)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        result = dispatcher.matmul(a, b)
    graph.replay()
    torch.testing.assert_close(result, torch.matmul(a, b))
    assert not dispatcher.planner.state.plans
