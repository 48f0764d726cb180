"""Launches beside each other on the GPU: threads on one stream, captures, and what memory stays."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator

import pytest
import torch

import tunegemm
from benchmarks.threads import Case, Product, cases, prepare
from tests.support.numerics import difference
from tunegemm.describe.device import Device, find_device
from tunegemm.dispatch import api

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def _own_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TUNEGEMM_CACHE_DIR", str(tmp_path_factory.mktemp("kernels")))
        yield


def _cases() -> list[Case]:
    return cases(find_device("cuda:0")) if torch.cuda.is_available() else []


@pytest.fixture(params=_cases(), ids=lambda case: f"{case.family}-{case.reduction}")
def case(request: pytest.FixtureRequest, device: Device) -> Iterator[Case]:
    """A kernel that serves its problem."""
    prepare(request.param, device)
    before = api.dispatcher
    yield request.param
    api.serve_by(before)


@pytest.mark.parametrize("streams", [1, 4])
def test_threads_get_their_own_products_while_graphs_are_captured(
    case: Case, device: Device, streams: int
) -> None:
    assert Product(case, device).wrong(1000, streams, captures=True) == 0


def test_no_memory_stays_with_a_kernel(case: Case, device: Device) -> None:
    """But for a block of counters, and that once for each stream."""
    trial = Product(case, device)
    trial.wrong(50, 1, captures=False)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    trial.wrong(100, 1, captures=True)
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before <= 1 << 16


def test_a_threads_first_call_is_served(case: Case, device: Device) -> None:
    """It has no context of CUDA's yet."""
    assert Product(case, device).wrong(50, 1, captures=False) == 0


@pytest.mark.parametrize("mode", ["reduce-overhead", "default"])
def test_compiled_code_with_graphs_of_its_own_is_served(case: Case, device: Device, mode: str) -> None:
    """Its warm-up sends allocations to the graph's pool, where nothing may stay; also on a stream's first."""
    Product(case, device)
    m, n, k = case.problem.m, case.problem.n, case.problem.k
    torch.manual_seed(1)
    a, weight = (torch.randn(rows, k, device="cuda").bfloat16() for rows in (m, n))
    expected = 2 * (a.float() @ weight.float().t())
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: tunegemm.matmul(x, weight.t()) * 2, mode=mode)
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            result = compiled(a).clone()
            assert difference(result, expected) < 6e-3
    torch.cuda.synchronize()


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="its threads do not know the context of the caller")
def test_a_backward_pass_has_the_policy_of_the_task_that_calls_it() -> None:
    """In autograd's own thread, while a block of another task of the caller's thread holds, too."""
    caller = threading.get_ident()

    async def in_turns(prefer: str) -> list[tuple[bool, str]]:
        seen: list[tuple[bool, str]] = []

        def see(_: torch.Tensor) -> None:
            seen.append((threading.get_ident() == caller, api.dispatcher.planner.state.policy.prefer))

        x = torch.ones(8, device="cuda", requires_grad=True)
        x.register_hook(see)
        with tunegemm.policy(prefer):
            for _ in range(2):
                await asyncio.sleep(0)
                x.square().sum().backward()
        return seen

    async def both() -> list[list[tuple[bool, str]]]:
        return await asyncio.gather(in_turns("deterministic"), in_turns("no_workspace"))

    assert asyncio.run(both()) == [[(False, prefer)] * 2 for prefer in ("deterministic", "no_workspace")]
