"""Device memory of launches: what is lent, and how much a candidate may ask for. The rest wants a GPU."""

from __future__ import annotations

import pytest

from tests.support.hopper import hopper
from tunegemm.describe.device import find_device
from tunegemm.describe.problem import Problem
from tunegemm.generate import families
from tunegemm.generate.workspace import MAX_WORKSPACE_BYTES, Workspace, exceeded_workspace
from tunegemm.store.shipped import read_shipped

H200 = find_device("model:h200")


def test_lent_memory_serves_every_stream() -> None:
    workspace = Workspace(partial_bytes=512, counter_bytes=64, index=0)
    assert workspace.num_bytes == 576
    workspace.lend(4096)
    assert workspace.take(0) == workspace.take(7) == (4096, 4608, None)
    workspace.lend(1 << 20)
    assert workspace.take(0) == (1 << 20, (1 << 20) + 512, None)


def test_a_workspace_has_a_greatest_size() -> None:
    assert exceeded_workspace(None) is None
    assert exceeded_workspace(Workspace(MAX_WORKSPACE_BYTES - 8, 8, 0)) is None
    reason = exceeded_workspace(Workspace(MAX_WORKSPACE_BYTES, 8, 0))
    assert reason is not None and "workspace 268435464 B > 268435456 B" in reason


@pytest.mark.parametrize("scheduler", ["static", "stream_k"])
def test_a_candidate_that_asks_for_gigabytes_does_not_run(scheduler: str) -> None:
    """Also where the rule on splits, which is of speed, is all that objects to it."""
    problem, family = Problem.parse("65536x8192x4096"), families.get("cute_sm90")
    split = {"split_k": 8} if scheduler == "static" else {}
    candidate = hopper({"tile_m": 256, "tile_scheduler": scheduler}, split)
    verdict = family.check(problem, candidate, H200)
    assert (verdict.rule == "workspace") == (not verdict.runs) == (scheduler == "static"), verdict
    if scheduler == "static":
        assert "workspace 17180917760 B" in verdict.reason


def test_an_algorithm_of_the_library_is_bounded_as_well() -> None:
    record = next(r for r in read_shipped()[0] if r.candidate.params.get("workspace_bytes", 0))
    family = families.get("cublaslt")
    assert family.check(record.problem, record.candidate, H200)
    greedy = record.candidate.with_launch(workspace_bytes=MAX_WORKSPACE_BYTES + 1)
    assert family.check(record.problem, greedy, H200).rule == "workspace"


def test_what_ships_is_far_below_it() -> None:
    asked = [
        memory.num_bytes
        for record in read_shipped()[0]
        if (memory := families.get(record.candidate.family).workspace(record.problem, record.candidate, H200))
    ]
    assert len(asked) > 50 and max(asked) < MAX_WORKSPACE_BYTES // 4
