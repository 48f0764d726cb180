"""benchmarks/search.py runs on a sweep and reports what each strategy found. Its times are made up."""

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.sweep_files import write_sweep
from tests.support.processes import environment
from tunegemm.describe.device import PARTS, Fingerprint, device_from_part
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.measure.outcome import Failure, Measurement, Outcome

ROOT = Path(__file__).parents[2]


def test_compares_strategies(tmp_path: Path) -> None:
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
    write_sweep(tmp_path, "h200", device, problem, rows, recorded_at=datetime.now(UTC), command="x")
    out = tmp_path / "results" / "search.json"
    command = [sys.executable, "benchmarks/search.py", "--sweeps", tmp_path, "--seeds", "2", "--out", out]
    text = subprocess.run(
        command, cwd=ROOT, env=environment(), check=True, capture_output=True, text=True
    ).stdout
    assert text.count("512x6144x4096 bf16 tn") == 4 and "geometric mean" in text
    (row,) = json.loads(out.read_text())["rows"]
    assert row["candidates"] == 48
    assert set(row["found"]) == {"random", "model", "tpe", "search"}
    for found in row["found"].values():
        assert list(found.values()) == sorted(found.values())  # more trials never find less
        assert found["96"] == 1.0  # every candidate was asked for
