"""Products of many rows that are timed for predictions of them. No GPU needed: the CPU multiplies."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest

from benchmarks import row_choices
from benchmarks.choices import torch_mm
from benchmarks.first_use import DIMENSIONS
from tests.support.planted.cpu_backend import CpuBackend, ThrottledBackend
from tunegemm.describe.device import find_device
from tunegemm.describe.problem import Problem
from tunegemm.generate import families
from tunegemm.generate.cublaslt import library
from tunegemm.store.shipped import read_shipped


def test_drawn_products_have_many_rows_and_no_dimensions_of_first_use() -> None:
    found = list(islice(row_choices.drawn("a"), 300))
    assert found == list(islice(row_choices.drawn("a"), 300))
    assert found != list(islice(row_choices.drawn("b"), 300))
    for problem in found:
        assert row_choices.LEAST_ROWS <= problem.m <= row_choices.MOST_ROWS
        assert not {problem.n, problem.k} & set(DIMENSIONS)
    for least in (129, 1024, 4096):
        assert sum(least <= problem.m < 4 * least for problem in found) > 60


@pytest.mark.parametrize("backend", [CpuBackend, ThrottledBackend])
@pytest.mark.parametrize("shape", ["200x256x512", "600x256x128"])
def test_a_row_has_every_source_and_ratios_of_finalists(
    backend: Any, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, device = Problem.parse(shape), find_device("model:h200")
    named = {
        record.candidate
        for record in read_shipped()[0]
        if record.candidate.family == "cublaslt" and record.candidate.params.get("algorithm") == "cublaslt"
    }
    algorithms = sorted(named, key=str)[:4]
    monkeypatch.setattr(library, "algorithms", lambda *_: algorithms)
    monkeypatch.setattr(row_choices, "object_of", lambda *_: None)
    monkeypatch.setattr(row_choices, "SETTLE_S", 0.0)
    monkeypatch.setattr(row_choices, "SETTLE_STEADY_S", 0.0)
    for name in ("cute_sm90", "gluon_wgmma", "triton_tma", "cublaslt"):
        monkeypatch.setattr(type(families.get(name)), "load", lambda *_: torch_mm)
    row = row_choices.measure(problem, device, backend(device))
    assert not row["failed"] and not row["wrong"]
    assert bool(row["turn_ms"]) == (backend is ThrottledBackend)
    launches = row["launches"]
    sources = {launch[0] for launch in launches}
    assert sources == {row_choices.LARGE, row_choices.LIBRARY} | (
        {row_choices.LISTED} if problem.m <= row_choices.LISTED_ROWS else set()
    )
    assert sum(launch[8] is not None for launch in launches) == row_choices.FINALISTS
    screened = row_choices.measure(problem, device, backend(device), is_final=False)
    assert [launch[:7] for launch in screened["launches"]] == [launch[:7] for launch in launches]
    assert all(launch[7] > 0 and launch[8] is None for launch in screened["launches"])
    assert len(row["algorithms"]) == 4
    assert {launch[1] for launch in launches if launch[0] == row_choices.LIBRARY} == {1, 2, 3}
