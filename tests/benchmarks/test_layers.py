"""The benchmark of layers without a GPU: its results and rows; no times."""

from __future__ import annotations

import pytest

from benchmarks import clients, layers

CPU = ("--device", "cpu", "--tiny", "--modes", "eager")


@pytest.mark.filterwarnings("ignore::tunegemm.errors.TunegemmWarning")
def test_every_model_gives_torchs_results(capsys: pytest.CaptureFixture[str]) -> None:
    assert layers.main([*CPU, "--rows", "256,d4"]) == 0
    said = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert said == [f"{model} {rows} eager" for rows in ("256", "d4") for model in layers.SIZES]


def test_a_rows_ratios_are_to_torch_and_to_merged_weights() -> None:
    names = ("torch", clients.AGAIN, "merged", "tunegemm")
    samples = {("graph", name): [us] * 3 for name, us in zip(names, (2400, 2400, 2200, 2000), strict=True)}
    found = layers.times(samples, "graph")
    assert found == {"torch_ms": 2.4, "ratio": 1.2, "ratio_to_merged": 1.1, "noise": 0.0, "rounds": 3}


@pytest.mark.parametrize(
    "words", [("--rows", "7"), ("--models", "gpt"), ("--modes", "graph", "--rows", "d1")]
)
def test_what_cannot_run_is_one_line(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    assert layers.main([*CPU, *words]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.filterwarnings("ignore::tunegemm.errors.TunegemmWarning")
def test_fused_models_of_clients_give_torchs_results() -> None:
    pytest.importorskip("transformers")
    words = ("--fuse", "--workloads", "prefill,decode-1,train", "--layers", "1")
    assert clients.main([*CPU, *words]) == 0


@pytest.mark.filterwarnings("ignore::tunegemm.errors.TunegemmWarning")
def test_it_says_why_and_when_no_time_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    words = (*CPU, "--models", "llama-3-8b", "--rows", "256")
    assert layers.main([*words, "--why"]) == 0
    assert "fused   0.mlp.down_proj" in capsys.readouterr().out
    assert layers.main([*words, "--within", "-1"]) == 0
    assert "no time is left" in capsys.readouterr().out
