"""Size and speed of a large tuning database, on this machine's CPU and disk; no GPU is needed.

    python -m benchmarks.database [--folder FOLDER] [--out FILE.json]

A million synthetic measurements and 100,000 records, written into the store's tables: the file's size, and
how long the leaderboard of all shapes and dispatch's snapshot take. tests/store/test_durability.py shows what
concurrent and killed processes leave.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import random
import sqlite3
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import insert

from benchmarks.command import parser_of
from benchmarks.results import RESULTS, command_line
from tunegemm.compile.ptxas import Resources
from tunegemm.describe.device import Device, find_device, package_version
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.describe.stored import document_of
from tunegemm.measure.evidence import FINAL, SCREEN
from tunegemm.measure.outcome import Measurement
from tunegemm.report.leaderboard import Leaderboard
from tunegemm.store import Database
from tunegemm.store.codec import encode_outcome
from tunegemm.store.models import Base
from tunegemm.store.queries import latest_records
from tunegemm.store.schema import FASTEST

OUT = RESULTS / "cpu" / "database.json"

SHAPES, TOOLCHAINS, MEASURED = 5_000, 10, 10
#: As many as in a screen; every tenth row belongs to a final race.
_SAMPLES = {SCREEN: 7, FINAL: 21}


def device(part: str = "h200", driver: str = "580.0") -> Device:
    """A device to publish under. Nothing is measured on it: the rows are synthetic, in files of their own."""
    known = find_device(f"model:{part}")
    return replace(known, spec="cuda:0", fingerprint=replace(known.fingerprint, driver=driver))


def build(path: Path, shapes: int = SHAPES, toolchains: int = TOOLCHAINS, measured: int = MEASURED) -> int:
    """Fills a new database; how many measurements it has. Two GPUs, each with `toolchains` fingerprints."""
    devices = itertools.product(range(toolchains), ("h200", "h100-sxm"))
    fingerprints = [device(part, f"580.{number}").fingerprint for number, part in devices]
    problems = (Problem(16 * (1 + number % 512), 64 * (1 + number // 512), 4096) for number in range(shapes))
    kernels = range(_VENDORS + 1, _VENDORS + _KERNELS + 1)
    counts: Counter[str] = Counter()
    chance = random.Random(0)
    # Drawing all anew takes minutes.
    pools = {method: [_cells(chance, method) for _ in range(1000)] for method in _SAMPLES}
    with Database.open(path, create=True) as database, database.writing() as connection:

        def add(table: str, rows: list[dict[str, Any]]) -> None:
            """Numbers them behind those that are there."""
            for row in rows:
                row["id"] = counts[table] = counts[table] + 1
            connection.execute(insert(Base.metadata.tables[table]), rows)

        add("problems", [document_of(each) for each in problems])
        add("fingerprints", [{"digest": each.digest, **each.asdict()} for each in fingerprints])
        add("candidates", [
            {"digest": each.digest, "family": each.family, "json": each.to_json(), "label": str(each)}
            for each in map(_candidate, range(_VENDORS + _KERNELS))
        ])  # fmt: skip
        chosen = {"policy": FASTEST, "confirmed": True, "measured_by": FINAL, "chosen_at": _DATE}
        for fingerprint in range(1, len(fingerprints) + 1):
            rows = [
                chance.choice(pools[FINAL if position == measured - 1 else SCREEN]) | {
                    "problem_id": problem, "fingerprint_id": fingerprint, "created_at": _DATE,
                    "candidate_id": position + 1 if position < 2 else chance.choice(kernels),
                    "kernel_source": "" if position < 2 else "0123456789abcdef",
                }
                for problem in range(1, shapes + 1) for position in range(measured)
            ]  # fmt: skip
            add("measurements", rows)
            finals = [row | chosen | {"measurement_id": row["id"]} for row in rows if row["policy"] == FINAL]
            for table in ("records", "choices"):
                columns = Base.metadata.tables[table].columns.keys()
                add(table, [{name: row[name] for name in columns if name != "id"} for row in finals])
    with closing(sqlite3.connect(path)) as file:
        file.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return counts["measurements"]


_DATE = datetime(2026, 1, 1, tzinfo=UTC)
_KERNELS, _VENDORS = 2_000, 10


def _candidate(number: int) -> Candidate:
    """The vendor's come first."""
    if number < _VENDORS:
        return Candidate.make("cublaslt", {"algorithm": f"heuristic-{number}" if number else "torch.mm"})
    return Candidate.make(
        "cute_sm90",
        {"tile_m": 128, "tile_n": 8 * (number % 32 + 1), "tile_k": 64, "stages": 4, "cluster_m": 2,
         "cluster_n": 1, "pingpong": bool(number % 2), "epilogue_n": 32, "swap_ab": False},
        {"raster_order": "along_m", "swizzle_size": 1 << number % 4, "max_active_clusters": number,
         "split_k": 1},
    )  # fmt: skip


def _cells(chance: random.Random, method: str) -> dict[str, Any]:
    """Of a measurement by chance, of a realistic size."""
    ratio = chance.uniform(0.8, 1.15)
    baseline = tuple(100 * chance.gauss(1, 0.003) for _ in range(_SAMPLES[method]))
    own = tuple(value / ratio * chance.gauss(1, 0.003) for value in baseline)
    telemetry = {
        "sm_clock_mhz": 1755.0, "power_w": 612.5, "temperature_c": 55.0, "throttle_reasons": ["sw_power_cap"],
        "aa_ratio": 1.0021334, "interleaved": 32, "l2_bytes": 62914560, "operand_bytes": 402653184,
        "operand_sets": 4, "power_w_before": 512.331, "products_per_replay": 13, "rounds": 7, "seed": 0,
        "sm_clock_mhz_before": 1755.0, "temperature_c_before": 51.0,
    }  # fmt: skip
    outcome = Measurement(_candidate(_VENDORS), own, baseline, 0.0017, 0.005, telemetry)
    return encode_outcome(outcome, Resources(168, 0, 213016, (), 1.25), method)


def scale(path: Path) -> list[dict[str, Any]]:
    """Rows on the size and the speed of a large database, each time the median of five, after a first."""
    begin = time.perf_counter()
    count = build(path)
    built_s = time.perf_counter() - begin
    size = path.stat().st_size
    with Database.open(path, read_only=True) as database:
        board = Leaderboard.best_of_all(latest_records(database))
        leaderboard_s = _median_s(lambda: Leaderboard.best_of_all(latest_records(database)))
        records = len(database.lookup())
        snapshot_s = _median_s(database.lookup)
    rows = {"measurements": count, "records": records, "problems": SHAPES}
    return [
        {"name": "size", **rows, "bytes": size, "bytes_per_measurement": round(size / count),
         "built_s": round(built_s, 1)},
        {"name": "leaderboard", **rows, "rows": len(board.frame), **leaderboard_s},
        {"name": "snapshot", **rows, **snapshot_s},
    ]  # fmt: skip


def _median_s(call: Callable[[], Any]) -> dict[str, float]:
    """Wall and CPU time of a call, seconds; if they differ, the machine did other work."""
    walls, cpus = [], []
    for _ in range(5):
        wall, cpu = time.perf_counter(), time.process_time()
        call()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return {"seconds": round(statistics.median(walls), 3), "cpu_seconds": round(statistics.median(cpus), 3)}


def meta() -> dict[str, Any]:
    """How the figures were measured."""
    cpus = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")]  # fmt: skip
    return {
        "command": command_line(sys.argv),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": f"{os.cpu_count()} x {cpus[0] if cpus else platform.machine()}",
        "load_before": round(os.getloadavg()[0], 2),
        "packages": {name: package_version(name) for name in ("sqlalchemy", "pandas")}
        | {"sqlite": sqlite3.sqlite_version, "python": platform.python_version()},
    }


def main() -> None:
    parser = parser_of("benchmarks.database", __doc__, gpu=False)
    parser.add_argument("--folder", type=Path, help="where databases are made; 2 GB (default: temporary)")
    parser.add_argument("--out", type=Path, default=OUT, help=f"JSON file to write (default: {OUT})")
    arguments = parser.parse_args()
    about = meta()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        rows = scale(Path(name) / "scale.sqlite")
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    arguments.out.write_text(f'{{"meta": {json.dumps(about, indent=1)},\n"rows": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
