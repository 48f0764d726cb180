"""Size and speed of a large tuning database, on this machine's CPU and disk; no GPU is needed.

    python -m benchmarks.database [--folder FOLDER] [--out FILE.json]

A million synthetic measurements and 100,000 records, written into the store's tables: the file's size, and
how long the leaderboard of all shapes and dispatch's snapshot take. tests/store/test_durability.py shows what
concurrent and killed processes leave.
"""

from __future__ import annotations

import json
import os
import platform
import random
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from benchmarks.command import parser_of
from benchmarks.results import RESULTS, command_line
from tunegemm.describe.architectures import PARTS
from tunegemm.describe.device import Device, Fingerprint, device_from_part, package_version
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.describe.stored import document_of
from tunegemm.store import Database
from tunegemm.store.schema import FASTEST

OUT = RESULTS / "cpu" / "database.json"

SHAPES, TOOLCHAINS, MEASURED = 5_000, 10, 10
#: As many as in a screen; every tenth row belongs to a final race.
_SCREEN_SAMPLES, _FINAL_SAMPLES = 7, 21


def device(part: str = "h200", driver: str = "580.0") -> Device:
    """A device to publish under. Nothing is measured on it: the rows are synthetic, in files of their own."""
    known = PARTS[part]
    capability = ".".join(map(str, known.capability))
    fingerprint = Fingerprint(
        known.device_name, known.sm_count, capability, "", known.sm_count, driver,
        "13.0", "2.11.0", "4.8.1", "3.6.0",
    )  # fmt: skip
    return device_from_part("cuda:0", known, fingerprint)


def build(path: Path, shapes: int = SHAPES, toolchains: int = TOOLCHAINS, measured: int = MEASURED) -> int:
    """Fills a new database; how many measurements it has. Two GPUs, each with `toolchains` fingerprints."""
    Database.open(path, create=True).close()
    chance = random.Random(0)
    fingerprints = [
        device(part, f"580.{number}").fingerprint
        for number in range(toolchains)
        for part in ("h200", "h100-sxm")
    ]
    with closing(sqlite3.connect(path)) as connection, connection:
        rows: Any = (
            each.asdict() | {"id": i, "digest": each.digest} for i, each in enumerate(fingerprints, 1)
        )
        _insert(connection, "fingerprints", rows)
        _insert(connection, "candidates", _candidates())
        rows = (document_of(each) | {"id": i} for i, each in enumerate(_problems(shapes), 1))
        _insert(connection, "problems", rows)
        records: list[dict[str, Any]] = []
        rows = _measurements(chance, shapes, len(fingerprints), measured, records)
        _insert(connection, "measurements", rows)
        _insert(connection, "records", records)
        _insert(connection, "choices", ({name: r[name] for name in _CHOICE} for r in records))
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return shapes * len(fingerprints) * measured


_CHOICE = ("id", "problem_id", "fingerprint_id", "policy", "measurement_id", "confirmed", "chosen_at")
_KERNELS, _VENDORS = 2_000, 10


def _problems(shapes: int) -> Iterator[Problem]:
    for number in range(shapes):
        yield Problem(16 * (1 + number % 512), 64 * (1 + number // 512), 4096)


def _candidates() -> Iterator[dict[str, Any]]:
    for key in range(1, _KERNELS + _VENDORS + 1):
        algorithm = "torch.mm" if key == 1 else f"heuristic-{key}"
        candidate = Candidate.make("cublaslt", {"algorithm": algorithm})
        if key > _VENDORS:
            candidate = Candidate.make(
                "cute_sm90",
                {"tile_m": 128, "tile_n": 8 * (key % 32 + 1), "tile_k": 64, "stages": 4, "cluster_m": 2,
                 "cluster_n": 1, "pingpong": bool(key % 2), "epilogue_n": 32, "swap_ab": False},
                {"raster_order": "along_m", "swizzle_size": 1 << key % 4, "max_active_clusters": key,
                 "split_k": 1},
            )  # fmt: skip
        yield {
            "id": key, "digest": candidate.digest, "family": candidate.family, "json": candidate.to_json(),
            "label": candidate.params.get("algorithm", f"pp128x{8 * (key % 32 + 1)}x64 s4 c2x1 e32 rm {key}"),
        }  # fmt: skip


def _measurements(
    chance: random.Random, shapes: int, fingerprints: int, measured: int, records: list[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Rows of realistic sizes; also fills the records."""
    evidence = json.dumps(
        {"aa_ratio": 1.0021334, "interleaved": 32, "l2_bytes": 62914560, "operand_bytes": 402653184,
         "operand_sets": 4, "power_w_before": 512.331, "products_per_replay": 13, "rounds": 7, "seed": 0,
         "sm_clock_mhz_before": 1755.0, "temperature_c_before": 51.0},
        sort_keys=True, separators=(",", ":"),
    )  # fmt: skip
    start, key = datetime(2026, 1, 1, tzinfo=UTC), 0
    for fingerprint in range(1, fingerprints + 1):
        for problem in range(1, shapes + 1):
            best: dict[str, Any] = {}
            for position in range(measured):
                key += 1
                final = position == measured - 1
                vendor = position < 2
                candidate = position + 1 if vendor else _VENDORS + 1 + (key * 7) % _KERNELS
                samples, baseline, ratio = _samples(chance, _FINAL_SAMPLES if final else _SCREEN_SAMPLES)
                row = {
                    "id": key, "problem_id": problem, "candidate_id": candidate,
                    "fingerprint_id": fingerprint, "kernel_source": "" if vendor else "0123456789abcdef",
                    "origin": "", "policy": "final" if final else "screen",
                    "samples_us": samples, "baseline_us": baseline,
                    "median_us": 100.0 / ratio, "baseline_median_us": 100.0, "ratio": ratio, "spread": 0.004,
                    "baseline_spread": 0.003, "noise": 0.005, "relative_error": 0.0017,
                    "sm_clock_mhz": 1755.0, "power_w": 612.5, "temperature_c": 55.0,
                    "throttle_reasons": '["sw_power_cap"]',
                    "evidence": evidence, "registers": 168, "spill_bytes": 0, "smem_bytes": 213016,
                    "warnings": "[]", "compile_seconds": 1.25,
                    "created_at": (start + timedelta(seconds=key)).isoformat(timespec="microseconds"),
                }  # fmt: skip
                if final or not best or ratio > best["ratio"]:
                    best = row
                yield row
            records.append(
                {"id": len(records) + 1, "problem_id": problem, "fingerprint_id": fingerprint,
                 "policy": FASTEST, "measurement_id": best["id"], "confirmed": True,
                 "measured_by": best["policy"], "chosen_at": best["created_at"]}
                | {name: best[name] for name in ("candidate_id", "ratio", "kernel_source")}
            )  # fmt: skip


_POOL: dict[int, list[tuple[str, str, float]]] = {}


def _samples(chance: random.Random, count: int) -> tuple[str, str, float]:
    """One of a thousand pairs of sample lists as JSON, and its ratio; drawing all anew takes minutes."""
    if count not in _POOL:
        draws = []
        for _ in range(1000):
            ratio = chance.uniform(0.8, 1.15)
            baseline = [100 * chance.gauss(1, 0.003) for _ in range(count)]
            own = [value / ratio * chance.gauss(1, 0.003) for value in baseline]
            median = statistics.median(b / s for b, s in zip(baseline, own, strict=True))
            first, second = (json.dumps(values, separators=(",", ":")) for values in (own, baseline))
            draws.append((first, second, median))
        _POOL[count] = draws
    return chance.choice(_POOL[count])


def _insert(connection: sqlite3.Connection, table: str, rows: Any) -> None:
    iterator = iter(rows)
    first = next(iterator)
    names = list(first)
    statement = f"INSERT INTO {table} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"
    connection.execute(statement, list(first.values()))
    connection.executemany(statement, ([row[name] for name in names] for row in iterator))


def scale(path: Path) -> list[dict[str, Any]]:
    """Rows on the size and the speed of a large database, each time the median of five, after a first."""
    from tunegemm.report.leaderboard import VENDOR_FAMILY, Leaderboard
    from tunegemm.store.queries import latest_records

    begin = time.perf_counter()
    count = build(path)
    built_s = time.perf_counter() - begin
    size = path.stat().st_size
    with Database.open(path, read_only=True) as database:
        board = Leaderboard.best_of_all(latest_records(database, VENDOR_FAMILY))
        leaderboard_s = _median_s(lambda: Leaderboard.best_of_all(latest_records(database, VENDOR_FAMILY)))
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
