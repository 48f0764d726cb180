"""Nsight Compute's table, read from its CSV as version 2025.3 prints it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import counters
from tunegemm.describe.device import find_device
from tunegemm.describe.problem import Problem
from tunegemm.generate import families
from tunegemm.generate.cublaslt import TORCH_MM
from tunegemm.generate.families import load_space
from tunegemm.measure.outcome import Measurement
from tunegemm.store import Database

_HEADER = ",".join(f'"{name}"' for name in ("ID", "Process ID", "Kernel Name", *counters.METRICS.values()))
_UNITS = ",".join('""' for _ in range(3 + len(counters.METRICS)))
OUTPUT = f"""==PROF== Connected to process 312
LABEL co128x128x64 s5 c1x2 e32 rm w16 all k8 second
==PROF== Disconnected from process 312
{_HEADER}
{_UNITS}
"0","312","gemm","50,000","80000","70.5","1000","2000","62","10","50.25","134217728","1024"
"1","312","sums","4000","6400","0","100","300","9","1","90","2048","524288"
"""


def test_the_kernels_of_a_product_are_added_up() -> None:
    kernels = counters.rows_of(OUTPUT)
    assert [kernel["duration_us"] for kernel in kernels] == [50.0, 4.0]
    total = counters.summed(kernels)
    assert total["duration_us"] == 54.0
    assert total["tensor_percent"] == 70.5 and total["l2_hit_percent"] == 50.25
    assert total["dram_write_bytes"] == 1024 + 524288
    assert (total["l2_read_sectors"], total["l2_fabric_sectors"]) == (71, 11)
    assert total["sm_clock_mhz"] == 1600.0


def test_a_counter_that_ncu_does_not_know_is_left_out() -> None:
    kernels = counters.rows_of(OUTPUT.replace(counters.METRICS["l2_fabric_sectors"], "renamed"))
    total = counters.summed(kernels)
    assert "l2_fabric_sectors" not in total and total["l2_read_sectors"] == 71


def test_output_without_a_table_has_no_kernels() -> None:
    assert counters.rows_of("==ERROR== ERR_NVGPUCTRPERM\n") == []


def test_without_ncu_the_command_says_so(monkeypatch: pytest.MonkeyPatch, capsys, tmp_path) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(counters.shutil, "which", lambda *_, **__: None)
    arguments = ["--shapes", "512x512x512", "--device", "model:h200", "--out", str(tmp_path)]
    assert counters.main(arguments) == 2
    assert "ncu is not on PATH" in capsys.readouterr().err


def test_a_candidate_is_found_by_its_label(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    problem, device = Problem.parse("512x512x512"), replace(find_device("model:h200"), spec="cuda:0")
    monkeypatch.setenv("TUNEGEMM_DB", str(tmp_path / "tuning.sqlite"))
    monkeypatch.setenv("TUNEGEMM_CACHE_DIR", str(tmp_path))
    kernel = next(
        k for k in load_space("cute_sm90").kernels() if families.get("cute_sm90").check(problem, k, device)
    )
    with Database.open() as database:
        for candidate, label in ((TORCH_MM, "torch.mm"), (kernel, "one of ours")):
            database.publish(problem, device, Measurement(candidate, (1.0,), (1.0,), 1e-3, 0.01), label=label)
    contender = counters.stored(problem, device, "torch.mm")
    a, b = torch.rand(8, 4), torch.rand(4, 8)
    contender.run(a, b, out := torch.empty(8, 8))
    assert torch.equal(out, a @ b) and contender.label == "torch.mm"
    with pytest.raises(counters.CountersError, match="the object of one of ours is not in the store"):
        counters.stored(problem, device, "one of ours")
    with pytest.raises(counters.CountersError, match="no candidate 'nothing' of 512x512x512"):
        counters.stored(problem, device, "nothing")
