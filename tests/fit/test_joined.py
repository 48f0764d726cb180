"""fit/joined.py: the speeds behind a race's times are found again, and a kernel that never wins leaves."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from fit import joined as fit
from tunegemm.errors import TunegemmError
from tunegemm.model.joined import candidates
from tunegemm.resources import data_path

SPEEDS = {"128x96": 0.95, "128x128": 0.8, "pp128x160n": 1.0, "pp128x192": 0.95, "pp64x256n": 0.5}


@pytest.fixture
def race(tmp_path: Path) -> Path:
    """Times of known speeds, with noise of 2 %."""
    chance = random.Random(5)
    kernels = {each.choice.name: each for each in candidates()}
    rows = []
    for count in (64, 96, 384, 640, 1536):
        for ns in ((4096, 1024, 1024), (3584, 512, 512), (5120, 5120, 5120)):
            us = {
                name: kernels[name].estimate(count, ns, 0, "") * kernels[name].relative / speed / 100
                for name, speed in SPEEDS.items()
            }
            us = {name: time * chance.uniform(0.98, 1.02) for name, time in us.items()}
            row = {
                "model": "A model qkv",
                "rows": count,
                "k": 100,
                "ns": ns,
                "wrong": ["128x96"] * (count == 96),
            }
            rows.append(row | {"us": us | {"separate": 2 * max(us.values()), "merged": 1.0}})
    path = tmp_path / "joined.json"
    table = data_path("db", "joined.toml").read_text(encoding="utf-8")
    path.write_text(json.dumps({"table": table, "rows": rows}))
    return path


def test_speeds_are_found_again_and_what_never_wins_leaves(race: Path) -> None:
    kernels, cells = fit.read(race)
    assert {cell.rows for cell in cells["qkv"]} == {96, 384, 640, 1536} and not cells["gate"]
    assert all(("128x96" in cell.us) == (cell.rows != 96) for cell in cells["qkv"])
    found = fit.Race(kernels["qkv"], cells["qkv"])
    assert found.relative == pytest.approx(SPEEDS, rel=0.02)
    assert found.loss({*SPEEDS}) < 0.01 < found.loss({"pp64x256n"})
    assert found.without(SPEEDS) == "pp64x256n"
    assert found.loss({"128x96"}) == float("inf")


def test_it_says_what_is_kept_and_what_that_gains(race: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit.main([str(race), "--keep", "3"])
    said = capsys.readouterr().out
    assert "qkv: 12 products, 5 kernels lose" in said and "without pp64x256n: 4 lose" in said
    assert "pp128x160n: relative = 1.00" in said and "384 rows: " in said and "least 3." in said


def test_a_file_without_its_table_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "joined.json"
    path.write_text('{"rows": []}')
    with pytest.raises(TunegemmError, match="has no table"):
        fit.read(path)
