"""Launches whose bytes are counted: which are drawn, how counts become rows, and what is said of them."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import moved_bytes
from benchmarks.results import Results
from benchmarks.tables import power
from tunegemm.describe.device import find_device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate.cublaslt import TORCH_MM
from tunegemm.generate.terms import Columns, terms

PROBLEM = Problem.parse("4096x14336x4096")
LAUNCH = Candidate.make(
    "cute_sm90",
    {"tile_m": 256, "tile_n": 160, "tile_k": 64, "cluster_m": 1, "cluster_n": 2, "schedule": "cooperative"},
    {"raster_order": "along_n", "swizzle_size": 8},
)


def row(candidate: Candidate, **moved: float) -> dict[str, Any]:
    return {"m": PROBLEM.m, "n": PROBLEM.n, "k": PROBLEM.k, "candidate": candidate.to_json(), **moved}


def test_the_seed_draws_likely_launches_of_each_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 20 whose joules are 1, 1.1, ... times the fewest, the first five are likely."""
    every = [LAUNCH.with_launch(split_k=number + 1) for number in range(20)]
    found = SimpleNamespace(candidates=every, mj=np.arange(20) / 10 + 1)
    monkeypatch.setattr(moved_bytes, "launches", lambda *_: found)
    options = argparse.Namespace(inside="own", seed=1, launches=4)
    device = find_device("model:h200")
    chosen = moved_bytes.chosen([PROBLEM], device, options)
    assert chosen == moved_bytes.chosen([PROBLEM], device, options)
    assert len(set(chosen[PROBLEM])) == 4 and set(chosen[PROBLEM]) <= set(every[:5])
    assert chosen != moved_bytes.chosen([PROBLEM], device, argparse.Namespace(**{**vars(options), "seed": 2}))
    options.launches = 9
    assert set(moved_bytes.chosen([PROBLEM], device, options)[PROBLEM]) == set(every[:5])
    options.inside = "torch"
    assert moved_bytes.chosen([PROBLEM], device, options) == {PROBLEM: [TORCH_MM]}


def test_counts_become_rows_in_the_order_of_the_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = {
        "l2_read_bytes": 9e9, "l2_read_sectors": 1e6, "l2_fabric_sectors": 2e6, "dram_read_bytes": 3e8,
        "dram_write_bytes": 1e8,
    }  # fmt: skip
    found: tuple[Any, ...] = [kernel], {"launches": [row(LAUNCH)]}
    monkeypatch.setattr(moved_bytes, "counted_kernels", lambda *_: found)
    options = argparse.Namespace(shapes=PROBLEM.shape, launches=1, seed=0, device="cuda:0")
    assert moved_bytes.counted("own", options) == [
        row(LAUNCH, l2_read=32_000_000, crossing=64_000_000, dram=400_000_000)
    ]
    found = [kernel, kernel], {"launches": [row(LAUNCH)]}
    with pytest.raises(moved_bytes.MeasureError, match="counted 2 kernels of 1 launches"):
        moved_bytes.counted("own", options)


def test_the_summary_says_how_far_the_model_is_off(tmp_path: Path) -> None:
    device = find_device("model:h200")
    told = terms(PROBLEM, Columns.of([LAUNCH]), device)
    moved = {
        "l2_read": float(told.l2_bytes[0]), "crossing": 2 * float(told.crossing_bytes[0]),
        "dram": float(told.dram_bytes[0]) / 2,
    }  # fmt: skip
    torch = row(TORCH_MM, l2_read=1.0, crossing=1.0, dram=1.0)
    found = moved_bytes.summary([torch, row(LAUNCH, **moved)], device)
    assert found["launches"] == 1
    assert [found[name]["model_to_counted"] for name in moved_bytes.BYTES] == [1.0, 0.5, 2.0]
    assert "Nothing measured yet" in power.moved_bytes(tmp_path)
    results = Results(tmp_path / "moved_bytes.json", {"gpu": "NVIDIA H200", "command": ""})
    results.rows, results.summary = [torch | {"dram": 7e8}, row(LAUNCH, **moved)], found
    results.put()
    assert "| 4096x14336x4096 | 1 | 0 | 0 | 700 |" in power.moved_bytes(tmp_path)
