"""The benchmark of layers without a GPU: its results and rows; no times."""

from __future__ import annotations

import pytest
import torch

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
    expected = {"torch_ms": 2.4, "ratio": 1.2, "ratio_to_merged": 1.1, "noise": 0.0, "rounds": 3}
    assert found == expected
    samples["graph", "liger"] = [2300.0] * 3
    assert layers.times(samples, "graph") == expected | {"ratio_to_liger": 1.15}


def test_ligers_layers_have_the_same_weights() -> None:
    pytest.importorskip("liger_kernel")
    model = layers.build(layers.Size(64, 96, 4, 2, 16), torch.device("cpu"), 0)
    other = layers.by_liger(model)
    assert {id(each) for each in other.parameters()} == {id(each) for each in model.parameters()}
    assert type(other[0].before).__name__ == "LigerRMSNorm" and type(model[0].before) is torch.nn.RMSNorm


@pytest.mark.filterwarnings("ignore::tunegemm.errors.TunegemmWarning")
def test_a_row_that_fails_is_a_line_and_the_next_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    build = layers.build

    def small(size: layers.Size, place: torch.device, sequences: int) -> torch.nn.Sequential:
        if not sequences:
            raise torch.OutOfMemoryError("Tried to allocate 64.00 GiB")
        return build(size, place, sequences)

    monkeypatch.setattr(layers, "build", small)
    assert layers.main([*CPU, "--models", "llama-3-8b", "--rows", "256,d4"]) == 1
    failed, measured = capsys.readouterr().out.splitlines()
    assert failed == "llama-3-8b 256 eager: Tried to allocate 64.00 GiB"
    assert measured.startswith("llama-3-8b d4 eager: error")


def test_the_reference_is_that_of_all_heads_at_once() -> None:
    for sequences, x in ((0, torch.randn(1, 40, 64)), (3, torch.randn(3, 1, 64))):
        torch.manual_seed(0)
        attention = layers.Attention(layers.Size(64, 0, 4, 2, 16), sequences)
        found = attention(x)
        expected = attention.double()(x.double())
        assert torch.allclose(found.double(), expected, atol=1e-5)


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
    assert "served  0.mlp.down_proj" in capsys.readouterr().out
    assert layers.main([*words, "--within", "-1"]) == 0
    assert "no time is left" in capsys.readouterr().out
