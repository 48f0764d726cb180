"""fit/campaign.py: what is tuned, and which records ship. How it is tuned is tested with the tuner."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fit.campaign import best, products
from tests.store.test_packs import RECORDS
from tunegemm.errors import TunegemmError


def test_one_record_ships_of_each_product_on_each_gpu() -> None:
    first = RECORDS[0]
    faster, slower = replace(first, ratio=first.ratio + 0.1), replace(first, ratio=first.ratio - 0.1)
    elsewhere = replace(slower, fingerprint=replace(first.fingerprint, device_name="NVIDIA H100 80GB HBM3"))
    assert best([first, elsewhere, slower, *RECORDS[1:]]) == [first, elsewhere, *RECORDS[1:]]
    assert best([slower, first, faster]) == [faster]


def test_gates_are_of_the_layers_that_have_them() -> None:
    gated = {one.shape for one in products([16], "swiglu")}
    assert {"16x28672x4096", "16x36864x7168", "16x4096x7168"} <= gated, "the last is of DeepSeek's experts"
    assert not gated & {"16x6144x4096", "16x4096x14336", "16x8192x4096", "16x32768x512"}
    assert all(one.epilogue == "swiglu" for one in products([16], "swiglu"))


def test_logits_are_of_few_rows() -> None:
    few, many = ([one.shape for one in products([m])] for m in (16, 512))
    assert "16x256000x4608" in few and "512x256000x4608" not in many
    assert len(few) == len(set(few)), "a layer of several models is tuned once"


def test_a_kind_that_is_none_is_named() -> None:
    with pytest.raises(TunegemmError, match="--kinds fp4: use bf16"):
        next(products([16], "fp4"))
