"""The benchmark of layers without a GPU: its results and rows; no times."""

from __future__ import annotations

import pytest
import torch

from benchmarks import harness, layers

CPU = ("--device", "cpu", "--tiny", "--modes", "backend")


@pytest.mark.filterwarnings("ignore::tunegemm.errors.TunegemmWarning")
@pytest.mark.slow
def test_every_kind_of_model_gives_torchs_results(capsys: pytest.CaptureFixture[str]) -> None:
    """Tiny models differ in their activation, in whether they have an MLP, and in how they are written."""
    kinds = {
        (size.activation, size.intermediate > 0, name.endswith("-whole")): name
        for name, size in layers.SIZES.items()
    }
    assert len(kinds) == 4
    assert layers.main([*CPU, "--models", ",".join(kinds.values()), "--rows", "256,d16"]) == 0
    said = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert said == [f"{model} {rows} backend" for rows in ("256", "d16") for model in kinds.values()]


def test_a_rows_ratios_are_to_torch_and_to_merged_weights() -> None:
    names = ("torch", harness.AGAIN, "merged", "tunegemm")
    samples = {("graph", name): [us] * 3 for name, us in zip(names, (2400, 2400, 2200, 2000), strict=True)}
    expected = {"torch_ms": 2.4, "ratio": 1.2, "ratio_to_merged": 1.1, "noise": 0.0, "rounds": 3}
    assert layers.times(samples, "graph") == expected
    samples["graph", "inductor"] = [2300.0] * 3
    assert layers.times(samples, "graph") == expected | {"ratio_to_inductor": 1.15}
    samples["graph", "unguarded"] = [1920.0] * 3
    assert layers.times(samples, "graph") == expected | {"ratio_to_inductor": 1.15, "unguarded_ratio": 1.25}


def test_all_in_one_forward_is_the_same_layer() -> None:
    model = layers.build(layers.Size(64, 96, 4, 2, 16), torch.device("cpu"), 0)
    x = torch.randn(1, 8, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(layers.Whole(model[0])(x), model[0](x))


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
    assert layers.main([*CPU, "--models", "llama-3-8b", "--rows", "256,d16"]) == 1
    failed, measured = capsys.readouterr().out.splitlines()
    assert failed == "llama-3-8b 256 backend: Tried to allocate 64.00 GiB"
    assert measured.startswith("llama-3-8b d16 backend: error")


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
def test_it_says_when_no_time_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    assert layers.main([*CPU, "--models", "llama-3-8b", "--rows", "256", "--within", "-1"]) == 0
    assert "no time is left" in capsys.readouterr().out
