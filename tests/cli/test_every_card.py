"""First use on a card of each architecture: the whole command, compiled for it, with a model's times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.cards import CARDS, plug_in
from tests.support.commands import here
from tunegemm.describe.architectures import ARCHITECTURES
from tunegemm.describe.device import find_device

#: Small: the best tiles of a large product take the compilers ten times as long.
SHAPE = ("--shape", "128x128x128")


def test_there_is_one_of_each_architecture_but_hopper() -> None:
    found = [find_device(name).architecture for name in CARDS]
    assert found == [one for one in ARCHITECTURES.values() if not one.wgmma]


@pytest.mark.parametrize(
    "card",
    [
        pytest.param(card, marks=[] if card == "rtx4060" else [pytest.mark.slow, pytest.mark.long])
        for card in (*CARDS, "h100")
    ],
)
@pytest.mark.usefixtures("tuning_pool")
def test_tune_leaderboard_explain_report_and_doctor(
    card: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plug_in(monkeypatch, card)
    monkeypatch.setenv("TUNEGEMM_DB", str(tmp_path / "tuning.sqlite"))
    device = find_device("cuda:0")
    # tests/generate/test_every_architecture.py compiles each family for each card.
    families = "triton,cute_sm80,cublaslt" if card == "a100" else "triton,cublaslt"
    brief = ("--families", families, "--trials", "2" if card == "a100" else "1", "--workers", "1", "--json")
    result = json.loads(here("tune", *SHAPE, *brief).stdout)
    assert result["device"] == "cuda:0" and result["source"] == "measured"
    assert result["best"] is not None, result
    listed = json.loads(here("leaderboard", "--format", "json").stdout)
    assert device.name in json.dumps(listed)
    explained = here("explain", *SHAPE).stdout
    assert device.name in explained and "torch.mm" in explained
    page = tmp_path / "report.html"
    here("report", "--out", page)
    assert device.name in page.read_text()
    found = here("doctor", code=None).stdout
    assert device.architecture.short_name in found and device.architecture.name in found
    assert ("no kernels for the GPUs here" in " ".join(found.split())) == (card != "h100")


def test_families_of_another_card_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch, "a100")
    refused = here("tune", *SHAPE, "--families", "cute_sm90", code=2)
    assert (
        refused.stderr.strip()
        .splitlines()[-1]
        .startswith("tunegemm: family 'cute_sm90' has no kernels for NVIDIA A100")
    )


def test_of_two_unlike_cards_each_has_its_own_families(monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch, "h100", "a100")
    refused = here("tune", *SHAPE, "--device", "cuda:1", "--families", "cute_sm90", code=2)
    assert "cuda:1" not in refused.stdout and refused.stderr.strip().endswith(
        "has no kernels for NVIDIA A100-SXM4-80GB: sm_80 has no WGMMA; cute_sm90 needs sm_90a; "
        "use triton, cute_sm80, skinny, cublaslt"
    )
    lines = here("doctor", code=None).stdout.splitlines()
    assert [line for line in lines if line.startswith("ok    family cute_sm90")], "cuda:0 has it"
    assert "Hopper" in next(line for line in lines if "cuda:0" in line)
    assert "Ampere" in next(line for line in lines if "cuda:1" in line)


@pytest.mark.parametrize("card", CARDS)
def test_a_record_of_hopper_is_named_and_not_served(card: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch, card)
    text = " ".join(here("explain", "--shape", "4096x4096x4096").stdout.split())
    name = find_device(card).name
    assert f"dispatch torch: its record is foreign: capability 9.0 (here {here_is(card)})" in text
    assert f"there are no predictions for {name}, which was not measured" in text


def here_is(card: str) -> str:
    return "{}.{}".format(*find_device(card).architecture.capability)


@pytest.mark.usefixtures("tuning_pool")
def test_a_model_is_a_ranking_that_never_ran() -> None:
    one = ("--families", "triton", "--trials", "1", "--workers", "1", "--json")
    done = here("tune", *SHAPE, "--device", "model:rtx4090", *one)
    result = json.loads(done.stdout)
    assert result["best"] is None and "a model's ranking, never run" in result["note"]
