"""benchmarks/other_dsl.py: what it says of products whose kernel is really compiled meanwhile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import other_dsl
from tests.support.serving import Kernel, Row, operands
from tunegemm.choose.snapshot import Snapshot
from tunegemm.describe.device import find_device
from tunegemm.describe.problem import Problem
from tunegemm.report.explain import candidate_of
from tunegemm.serve.dispatcher import Dispatcher
from tunegemm.serve.launchers import Prepared, prepare
from tunegemm.serve.planning import Planner
from tunegemm.store import packs
from tunegemm.store.shipped import read_shipped

PROBLEM = Problem(128, 128, 64)


def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float) -> dict:
    monkeypatch.setenv("TUNEGEMM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TUNEGEMM_MODE", "exact")
    monkeypatch.setattr(packs, "shipped", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    device = find_device("model:h200")
    rows = [Row(PROBLEM, device.fingerprint, candidate_of("cute_sm90"))]

    def on_the_cpu(record, device) -> Prepared:
        assert prepare(record, device).launch is not None
        return Prepared(Kernel(), tma=True)

    loaded = other_dsl.Loaded(on_the_cpu)
    dispatcher = Dispatcher(
        Planner(device_type="cpu", read=lambda: Snapshot(rows), find=lambda _: device, prepare=loaded.prepare)
    )
    return other_dsl.watch({PROBLEM: operands(128, 128, 64)}, dispatcher.matmul, loaded, seconds)


@pytest.mark.slow
def test_it_sees_torchs_product_and_then_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNEGEMM_COMPILE", "1")
    rows = watched(tmp_path, monkeypatch, 60)
    row = rows[PROBLEM]
    assert row["calls"] > 1 and row["served_s"] > 0 and row["torch_meanwhile"] and row["right"]
    assert row["swap_ms"] <= row["worst_ms"] and row["first_ms"] <= row["worst_ms"] and not row["warnings"]
    assert other_dsl.summary(rows)["all_served_s"] == row["served_s"]


def test_it_says_what_was_never_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNEGEMM_COMPILE", "0")
    rows = watched(tmp_path, monkeypatch, 0.1)
    row = rows[PROBLEM]
    assert row["served_s"] is None and row["swap_ms"] is None and row["torch_meanwhile"] and row["right"]
    assert len(row["warnings"]) == 1 and "not in the object store" in row["warnings"][0]
    assert other_dsl.summary(rows)["all_served_s"] is None


@pytest.mark.parametrize("software", [{}, {"cutlass_dsl": "4.9.0", "triton": "3.8.0", "driver": "570.1"}])
def test_products_are_those_of_our_shipped_kernels(software: dict[str, str]) -> None:
    """Under the software of the records, and under any other."""
    device = find_device("model:h200")
    there = next(one.fingerprint for one in read_shipped()[0] if one.fingerprint.device_name == device.name)
    found = other_dsl.of_ours(replace(device, fingerprint=replace(there, **software)))
    assert len(found) >= 300


def test_without_a_gpu_it_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.environ", {**other_dsl.os.environ})
    assert other_dsl.main(["--device", "cuda:7"]) == 2
    assert "cuda:7" in capsys.readouterr().err
