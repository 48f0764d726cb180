"""What trees read of a launch: worked out by hand, and what the shipped trees were fitted to."""

from __future__ import annotations

import json
import math

import pytest

from tunegemm.describe.device import find_device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate.cublaslt.choice import LibraryChoice
from tunegemm.model.features import NAMES, OF_GAIN, OF_ORDER, OF_TORCH, UNKNOWN, family_numbers, features
from tunegemm.model.terms import Columns, terms
from tunegemm.resources import data_path

DEVICE = find_device("model:h200")
PROBLEM = Problem.parse("100x1000x520")
LAUNCH = Candidate.make(
    "triton_tma",
    {"tile_m": 128, "tile_n": 32, "tile_k": 64, "stages": 4, "cluster_m": 1, "cluster_n": 2, "swap_ab": True,
     "schedule": "pingpong"},
    {"split_k": 3},
)  # fmt: skip
COLUMNS = Columns.of([LAUNCH])
TERMS = terms(PROBLEM, COLUMNS, DEVICE)


def row(library: LibraryChoice | None) -> dict[str, float]:
    """Of the launch, which computes the transpose: 32 rows and 128 columns a tile."""
    table = features(
        NAMES, PROBLEM, COLUMNS, TERMS, family_numbers([LAUNCH]), DEVICE, library,
        splits=COLUMNS.split_k, second=COLUMNS.second, place=7,
    )  # fmt: skip
    return dict(zip(NAMES, table[0].tolist(), strict=True))


def test_features_of_a_launch() -> None:
    us, sms = TERMS.total_us[0], DEVICE.sm_count
    floor_us = 3 + PROBLEM.bytes / (DEVICE.bandwidth_gbps * 1e3)
    assert row(None) == pytest.approx({
        "log_m": math.log2(100), "log_n": math.log2(1000), "log_k": math.log2(520),
        "log_bytes": math.log2(PROBLEM.bytes), "n_beyond": 40, "k_beyond": 8, "half_sectors": 1,
        "rows": 32, "columns": 128, "tile_k": 64, "stages": 4, "ring": 4 * 64 * 160, "cluster": 2,
        "cluster_rows": 2, "swapped": 1, "pingpong": 1, "streams": 0, "splits": 3, "second": 0, "family": 2,
        "to_floor": math.log(us / floor_us), "log_us": math.log(us), "waves": TERMS.tiles[0] / sms,
        "fill": TERMS.wave_efficiency[0], "compute": math.log(TERMS.compute_us[0] / TERMS.dram_us[0]),
        "l2": math.log(TERMS.l2_us[0] / TERMS.dram_us[0]), "epilogue": TERMS.epilogue_us[0] / us,
        "steps": math.log2(9 / 3), "ctas": TERMS.ctas[0] / sms, "rows_all": 1.28, "columns_all": 1.024,
        "empty": 28 / 32, "place": 7, **dict.fromkeys(OF_TORCH, UNKNOWN),
    })  # fmt: skip


def test_features_of_torchs_product() -> None:
    """Of 64x128 tiles in clusters of 2x1, k in four parts."""
    found = row(LibraryChoice(64, 128, 2, 1, 4))
    assert [found[name] for name in OF_TORCH] == pytest.approx([
        64, 128, 2, 1, 4, 2 * 8 * 4 / 132, 2 * 8 * 4 / 132, math.log2(520 / 64 / 4), 1.28, 1.0,
    ])  # fmt: skip
    many = row(LibraryChoice(8, 8, 1, 1, 1))
    assert many["torch_waves"] == 13 * 125 / 132 and many["torch_fill"] == many["torch_waves"] / 13
    assert many["rows_to_torch"] == 128 / 104


def test_shipped_trees_compare_these_features() -> None:
    folder = data_path("db")
    assert json.loads((folder / "order.json").read_text())["features"] == list(OF_ORDER)
    expected = {"plain": list(NAMES), "wide": list(NAMES), "fused": list(OF_GAIN)}
    files = list(folder.glob("predictions-*.jsonl"))
    assert len(files) == 2
    for path in files:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert {line["model"]: line["features"] for line in lines} == expected
