"""Quick tunings beside the search of another day: the list, the rows, and what is said of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import quality
from benchmarks.results import Results
from benchmarks.tables import programs
from tests.tuning.planted import DEVICE, PROBLEM, Timed, kernels, launches, planted_tuner
from tunegemm.describe.device import find_device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate import families
from tunegemm.tuning.tuner import Tuner


def test_the_winners_of_that_day_can_still_be_launched() -> None:
    device, listed = find_device("model:h200"), json.loads(quality.WINNERS.read_text())
    assert len({one["shape"] for one in listed}) == 20
    for one in listed:
        candidate = families.completed(Candidate.from_json(json.dumps(one["candidate"])))
        verdict = families.get(candidate.family).check(Problem.parse(one["shape"]), candidate, device)
        assert verdict.feasible, one


def test_both_winners_race(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = launches(kernels(64)[0])[0]
    monkeypatch.setattr(
        Tuner, "measurer_for", lambda *_: Timed(lambda candidate, _: 9.5 if candidate == slow else 9.0)
    )
    with planted_tuner(DEVICE, cache=tmp_path, families=["cute_sm90", "cublaslt"]) as tuner:
        row = quality.raced(tuner, PROBLEM, slow)
    assert row["ratio"] == pytest.approx(9.5 / 9.0, abs=1e-3)
    assert row["quick_to_torch"] > row["before_to_torch"] > 1


def test_the_table_has_each_product_and_the_mean(tmp_path: Path) -> None:
    assert "Nothing measured yet" in programs.quality(tmp_path)
    results = Results(tmp_path / "quality.json", {"gpu": "NVIDIA H200", "command": ""})
    rows: list[dict[str, Any]] = [
        {"m": 64, "n": 64, "k": k, "at_cap": False, "quick": "a", "before": "b", "ratio": ratio}
        for k, ratio in ((64, 1.0), (128, 0.98), (192, None))
    ]
    results.rows, results.summary = rows, quality.summary(rows)
    results.put()
    assert results.summary == {"products": 2, "geometric_mean": 0.9899, "worst": 0.98, "under_0985": 1}
    text = programs.quality(tmp_path)
    assert "| 64x64x128 | below it | `a` | `b` | 0.980 |" in text and "geometric mean of 2" in text
    assert quality.summary([]) == {}
