"""What is read of ptxas's reports."""

from __future__ import annotations

import pytest

from tunegemm.compile.ptxas import Resources, read_report

SPILLS = "  {} bytes stack frame, {} bytes spill stores,\n  {} bytes spill loads\n"
USED = "ptxas info : Used {} registers, used 1 barriers\n"


def test_of_several_kernels_the_most_registers_and_all_spills() -> None:
    log = SPILLS.format(1, 2, 4) + USED.format(90) + SPILLS.format(8, 16, 32) + USED.format(168)
    log += "ptxas warning : (C7512) here\nptxas warning : (C7510) there\nptxas warning : (C7512) again\n"
    assert read_report(log, smem_bytes=64, compile_seconds=1.5) == Resources(
        168, 63, 64, ("C7510", "C7512"), 1.5
    )


@pytest.mark.parametrize("log", ["", SPILLS.format(0, 0, 0), USED.format(90)])
def test_half_a_report_is_none(log: str) -> None:
    with pytest.raises(RuntimeError, match="neither registers nor spills"):
        read_report(log, smem_bytes=0, compile_seconds=0.0)
