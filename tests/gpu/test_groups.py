"""A grouped product is tuned on a GPU, stored, and served by its record, other rows of its bucket, too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tunegemm
from tunegemm.choose.snapshot import Snapshot
from tunegemm.describe.problem import Problem
from tunegemm.generate.cublaslt import TORCH_MM
from tunegemm.generate.grouped import config_of
from tunegemm.measure.groups import SKEWS
from tunegemm.measure.outcome import Measurement
from tunegemm.serve import api, grouped
from tunegemm.serve.dispatcher import Dispatcher
from tunegemm.serve.planning import Planner
from tunegemm.store import Database
from tunegemm.tuning.tuner import Tuner, open_device

pytestmark = pytest.mark.gpu

PROBLEM = Problem.parse("300x512x1024", groups=6)


def test_what_is_tuned_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = open_device("cuda:0")
    with Database.open(tmp_path / "tuning.sqlite") as database, Tuner(device, database) as tuner:
        result = tuner.tune(PROBLEM, trials=4)
        ours = [one for one in result.outcomes if isinstance(one, Measurement) and one.candidate != TORCH_MM]
        assert ours, [str(one) for one in result.outcomes]
        assert all(set(one.telemetry["skews"]) == set(SKEWS) for one in ours)
        # Whichever won: what a record names is served.
        best = max(ours, key=lambda one: one.ratio)
        database.confirm(PROBLEM, device, best, label="planted", resources=None)
        records = database.records()
    served = [record for record in records if record.problem == PROBLEM]
    if best.ratio < 1:  # no record
        pytest.skip(f"torch's is faster here: {best.ratio:.3f}")
    groups = grouped.Groups()
    monkeypatch.setattr(grouped, "groups", groups)
    before = api.serve_by(Dispatcher(Planner(read=lambda: Snapshot(served))))
    try:
        for rows in (300, 500):
            a = torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16)
            weights = torch.randn(6, 512, 1024, device="cuda", dtype=torch.bfloat16) / 32
            ends = torch.tensor([0, 100, 101, 101, 250, 280], device="cuda", dtype=torch.int32)
            result = tunegemm.grouped_mm(a, weights.mT, offs=ends)
            wanted = torch._grouped_mm(a, weights.mT, offs=ends)
            torch.testing.assert_close(result[:280], wanted[:280], rtol=2e-2, atol=2e-2)
        ((choice, _),) = groups.launches
        assert choice.config == config_of(PROBLEM, served[0].candidate)
    finally:
        api.serve_by(before)
