"""benchmarks/search.py runs on sweeps and reports what each strategy found. Their times are made up."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from benchmarks import search
from fit.sweep_files import write_sweep
from tunegemm.describe.architectures import PARTS
from tunegemm.describe.device import Fingerprint, device_from_part
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.measure.outcome import Failure, Measurement, Outcome


def recording(folder: Path) -> None:
    """Sweeps of 40 candidates in an interleave, and of 20 in steady state."""
    device = device_from_part(
        "cuda:0", PARTS["h200"], Fingerprint("NVIDIA H200", 132, "9.0", "", 132, "", "", "", "", "")
    )
    rows: list[Outcome] = []
    for tile_m in (64, 128):
        for tile_n in range(32, 257, 32):
            for swizzle in (1, 4, 8):
                params = {
                    "schedule": "pingpong",
                    "tile_m": tile_m,
                    "tile_n": tile_n,
                    "tile_k": 64,
                    "stages": 4,
                }
                candidate = Candidate.make("cute_sm90", params, {"swizzle_size": swizzle})
                if tile_m * tile_n > 128 * 208:
                    rows.append(Failure(candidate, "compile", "spills"))
                    continue
                us = 40.0 + abs(tile_m - 128) / 8 + abs(tile_n - 160) / 16 + abs(swizzle - 4) / 4
                rows.append(Measurement(candidate, (us,), (40.0,), 0.002, 0.004))
    problem = Problem.parse("512x6144x4096")
    now = datetime.now(UTC)
    write_sweep(folder, "h200", device, problem, rows[-40:], recorded_at=now, command="x")
    write_sweep(folder, "h200-steady", device, problem, rows[:20], recorded_at=now, command="x")


@pytest.mark.slow
def test_compares_strategies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recording(tmp_path)

    def compared(strategies: str, code: int = 0) -> str:
        folder = str(tmp_path)
        given = ["--sweeps", folder, "--seeds", "2", "--out", folder, "--strategies", strategies]
        assert search.main(given) == code
        return capsys.readouterr().err

    names = ["chance", "model", "roofline", "tpe"]
    compared(",".join(names))
    told = json.loads((tmp_path / "search.json").read_text())
    assert [(row["timing"], row["strategy"]) for row in told["rows"]] == [
        (timing, name) for timing in ("interleaved", "steady") for name in names
    ]
    assert {row["candidates"] for row in told["rows"]} == {40, 20}
    for row in told["rows"]:
        for asked in zip(*row["regret"].values(), strict=True):
            assert list(asked) == sorted(asked, reverse=True) and asked[-1] >= 0, "more never find less"
    by_chance, by_default = (
        next(one for one in told["strategies"] if one["strategy"] == name) for name in ("chance", "roofline")
    )
    assert by_default["median_32"] == 0.0 < by_chance["median_8"]
    compared("random")
    kept = json.loads((tmp_path / "search.json").read_text())["rows"]
    assert {row["strategy"] for row in kept} == {*names, "random"}, "one strategy after the other"
    assert [row for row in kept if row["strategy"] != "random"] == told["rows"]
    assert compared("luck", 2).startswith("--strategies 'luck' is not known; use some of chance")
