"""Products of groups are tuned on a GPU, stored, and served by their records, other rows of a bucket, too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tunegemm
from tunegemm.choose.snapshot import Snapshot
from tunegemm.describe.problem import Problem
from tunegemm.dispatch import api
from tunegemm.dispatch.dispatcher import Dispatcher
from tunegemm.dispatch.planning import Planner
from tunegemm.generate.cublaslt import TORCH_MM
from tunegemm.generate.grouped import config_of
from tunegemm.groups import grouped
from tunegemm.measure import operands as data
from tunegemm.measure.outcome import Measurement
from tunegemm.measure.settings import SKEWS
from tunegemm.store import Database
from tunegemm.tuning.tuner import Tuner, open_device

pytestmark = pytest.mark.gpu

KINDS: list[dict[str, str]] = [
    {}, {"gate": "swiglu"}, {"gate": "geglu_tanh"}, {"dtype": "fp16"}, {"dtype": "fp16", "gate": "swiglu"},
    {"b_major": "n"}, {"dtype": "fp8_e4m3"},
]  # fmt: skip


@pytest.fixture(scope="module")
def tuner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tuner]:
    device = open_device("cuda:0")
    path: Path = tmp_path_factory.mktemp("groups") / "tuning.sqlite"
    with Database.open(path, create=True) as database, Tuner(device, database) as tuner:
        yield tuner


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: " ".join(kind.values()) or "plain")
def test_what_is_tuned_serves(tuner: Tuner, monkeypatch: pytest.MonkeyPatch, kind: dict[str, str]) -> None:
    problem, database = Problem.of_groups(300, 512, 1024, 6, **kind), tuner.database
    assert database is not None
    result = tuner.tune(problem, trials=4)
    measured = [one for one in result.outcomes if isinstance(one, Measurement)]
    assert any(one.candidate == TORCH_MM for one in measured), [str(one) for one in result.outcomes]
    ours = [one for one in measured if one.candidate != TORCH_MM]
    assert ours, [str(one) for one in result.outcomes]
    assert all(set(one.telemetry["skews"]) == set(SKEWS) for one in measured)
    # Whichever won: what a record names is served.
    best = max(ours, key=lambda one: one.ratio)
    database.confirm(problem, tuner.device, best, label="planted", resources=None)
    served = [record for record in database.records() if record.problem == problem]
    if best.ratio < 1:  # no record
        pytest.skip(f"torch's is faster here: {best.ratio:.3f}")
    groups, asked = grouped.Groups(), list[Any]()
    load = groups.load
    monkeypatch.setattr(groups, "load", lambda choice, place: asked.append(choice) or load(choice, place))
    monkeypatch.setattr(grouped, "groups", groups)
    before = api.serve_by(Dispatcher(Planner(read=lambda: Snapshot(served))))
    try:
        for rows in (300, 500):
            made = data.make_operands(
                Problem.of_groups(rows, 512, 1024, 6, **kind), torch.device("cuda"), seed=0
            )
            ends = torch.tensor([0, 100, 101, 101, 250, 280], device="cuda", dtype=torch.int32)
            given = data.Operands(made.a, made.b, made.out[:280], (), (ends, *made.fused))
            wanted = data.expected(problem, given)
            for found in called(problem, given):
                assert found.shape == (rows, problem.out_n)
                checked = data.check(data.Operands(made.a, made.b, found[:280], made.guards), wanted)
                assert checked.objection(data.tolerance(problem)) is None, checked
        assert {choice.config for choice in asked} == {config_of(problem, served[0].candidate)}
    finally:
        api.serve_by(before)


def called(problem: Problem, given: data.Operands) -> Iterator[Any]:
    """By the calls that a record of the problem serves."""
    a, b, _, ends, *scales = given.arguments
    if scales:
        yield tunegemm.scaled_grouped_mm(
            a, b, *scales, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    elif problem.gate:
        yield grouped.groups(a, b, ends, None, problem.gate)
        turns = b.unflatten(2, (2, -1)).transpose(2, 3).flatten(2)
        yield grouped.groups(a, turns.mT.contiguous().mT, ends, None, problem.gate, True)
    else:
        yield tunegemm.grouped_mm(a, b, offs=ends)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_groups_on_a_device_that_is_not_current() -> None:
    a = torch.randn(64, 512, device="cuda:1", dtype=torch.bfloat16)
    b = torch.randn(4, 256, 512, device="cuda:1", dtype=torch.bfloat16).mT
    ends = torch.tensor([16, 32, 48, 64], device="cuda:1", dtype=torch.int32)
    with torch.cuda.device(0):
        for _ in range(3):
            result = tunegemm.grouped_mm(a, b, offs=ends)
            assert result.device == a.device and torch.cuda.current_device() == 0
            wanted = torch.nn.functional.grouped_mm(a, b, offs=ends)
            torch.testing.assert_close(result, wanted, rtol=2e-2, atol=0.5)
