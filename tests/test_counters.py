"""Nsight Compute's table, read from its CSV as version 2025.3 prints it."""

from __future__ import annotations

import pytest

from benchmarks import counters

_HEADER = ",".join(f'"{name}"' for name in ("ID", "Process ID", "Kernel Name", *counters.METRICS.values()))
_UNITS = ",".join('""' for _ in range(3 + len(counters.METRICS)))
OUTPUT = f"""==PROF== Connected to process 312
LABEL co128x128x64 s5 c1x2 e32 rm w16 all k8 second
==PROF== Disconnected from process 312
{_HEADER}
{_UNITS}
"0","312","gemm","50,000","80000","70.5","1000","2000","50.25","134217728","1024"
"1","312","sums","4000","6400","0","100","300","90","2048","524288"
"""


def test_the_kernels_of_a_product_are_added_up() -> None:
    kernels = counters.rows_of(OUTPUT)
    assert [kernel["duration_us"] for kernel in kernels] == [50.0, 4.0]
    total = counters.summed(kernels)
    assert total["duration_us"] == 54.0
    assert total["tensor_percent"] == 70.5 and total["l2_hit_percent"] == 50.25
    assert total["dram_write_bytes"] == 1024 + 524288
    assert total["sm_clock_mhz"] == 1600.0


def test_output_without_a_table_has_no_kernels() -> None:
    assert counters.rows_of("==ERROR== ERR_NVGPUCTRPERM\n") == []


def test_without_ncu_the_command_says_so(monkeypatch: pytest.MonkeyPatch, capsys, tmp_path) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(counters.shutil, "which", lambda *_, **__: None)
    arguments = ["--shapes", "512x512x512", "--device", "model:h200", "--out", str(tmp_path)]
    assert counters.main(arguments) == 2
    assert "ncu is not on PATH" in capsys.readouterr().err
