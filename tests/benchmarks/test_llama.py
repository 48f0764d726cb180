"""The benchmark of a transformers' model without a GPU: its results and lines; no times."""

from __future__ import annotations

import pytest

from benchmarks import llama

CPU = ("--device", "cpu", "--tiny", "--layers", "1")


@pytest.mark.filterwarnings("ignore::tunegemm.errors.TunegemmWarning")
@pytest.mark.slow
def test_a_forward_is_compared_with_fp32_and_tokens_with_torchs(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    words = ("--workloads", "forward-256,generate-1", "--first-calls", "")
    assert llama.main([*CPU, *words]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if " of 1 layers" in line]
    assert [line.split(":")[0] for line in said] == [
        f"{workload} of 1 layers, {mode}"
        for workload in ("forward-256", "generate-1")
        for mode in ("patch", "backend")
    ]
    assert all("error " in line for line in said[:2]) and all("100 % of" in line for line in said[2:])


@pytest.mark.parametrize("words", [("--workloads", "train"), ("--first-calls", "8,x")])
def test_what_cannot_run_is_one_line(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    assert llama.main([*CPU, *words]) == 2
    assert capsys.readouterr().err.count("\n") == 1
