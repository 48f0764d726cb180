"""benchmarks/campaign.py: which records ship. What it tunes is tested with the tuner."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.campaign import best
from tests.store.test_packs import RECORDS


def test_one_record_ships_of_each_product_on_each_gpu() -> None:
    first = RECORDS[0]
    faster, slower = replace(first, ratio=first.ratio + 0.1), replace(first, ratio=first.ratio - 0.1)
    elsewhere = replace(slower, fingerprint=replace(first.fingerprint, device_name="NVIDIA H100 80GB HBM3"))
    assert best([first, elsewhere, slower, *RECORDS[1:]]) == [first, elsewhere, *RECORDS[1:]]
    assert best([slower, first, faster]) == [faster]
