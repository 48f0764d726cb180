"""The decode whose bits are compared, without a GPU: the parts, and where a difference is found."""

from __future__ import annotations

from collections.abc import Iterator
from types import MethodType

import pytest
import torch

import tunegemm
from benchmarks import decode_bits
from tunegemm import serve as dispatch

CPU = ("--device", "cpu", "--tiny", "--modes", "eager", "--sequences", "2,5")


@pytest.fixture(autouse=True)
def _dispatch_anew() -> Iterator[None]:
    yield
    dispatch.refresh()


def test_what_depends_on_the_batch_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here a layer that adds the number of sequences."""

    def spoil(model: torch.nn.Module) -> int:
        layer = model.get_submodule("model.layers.1.mlp.up_proj")

        def forward(self: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(x, self.weight) + len(x)

        layer.forward = MethodType(forward, layer)
        return 1

    monkeypatch.setattr(tunegemm, "patch", spoil)
    assert decode_bits.main([*CPU]) == 0, "a CPU's bits are torch's"
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].lstrip().startswith("first differs from model.layers.1.mlp.up_proj (")
    assert lines[0].startswith("2 eager: ") and not lines[0].startswith("2 eager: 0 logits")
    assert lines[2].startswith("5 eager: 0 logits differ (fastest 0, torch 0)")


@pytest.mark.filterwarnings("ignore::tunegemm.errors.TunegemmWarning")  # of products on a CPU
def test_all_but_the_products_is_as_transformers_computes_it() -> None:
    place = torch.device("cpu")
    models = decode_bits.variants(decode_bits.Size.tiny(1), place)
    assert {id(each) for each in models["usual"].parameters()} == {
        id(each) for each in models["ours"].parameters()
    }
    found = {
        name: decode_bits.clients.decode(3, model, decode_bits.Size.tiny(1), place)().float()
        for name, model in models.items()
    }
    for name in ("torch", "ours"):
        error = (found[name] - found["usual"]).norm() / found["usual"].norm()
        assert error < 2e-2, name


@pytest.mark.parametrize("words", [("--modes", "fast"), ("--sequences", "0")])
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    assert decode_bits.main([*CPU, *words]) == 2
    assert f"{words[0]} {words[1]!r} is not known" in capsys.readouterr().err
