"""Measures how long tuning the products of several models takes: `tunegemm tune --from benchmarks/many.json`.

    python -m benchmarks.tuning_many --devices all --without-library --budget 500
    python -m benchmarks.tuning_many --only-peers --peers 10 --peer-s 60

Runs the command in a separate process, with an empty kernel cache and an empty database, from which it reads
the results; the command's output is in a .log beside it. Writes results/GPU/tuning_many.json, a summary and
rows for each `mode`. `first_s` and `last_s` of a product are the times of its first and last measurement
since the process started; `seconds` is the time since the previous product was done (null if several GPUs
work). Rows of `inductor` and `quack` are a separate process for each product: `seconds` is the first call,
which tunes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import command, parser_of
from benchmarks.results import Results, geometric_mean, own_environment, problem_fields
from tunegemm.compile.artifacts import ArtifactStore
from tunegemm.describe.device import Device, find_device
from tunegemm.describe.problem import Problem
from tunegemm.describe.workload import read
from tunegemm.errors import TunegemmError
from tunegemm.measure.evidence import STEADY_METHODS
from tunegemm.store import Database, packs
from tunegemm.tuning.tuner import open_device

LIST = Path(__file__).with_name("many.json")
METHOD = (
    "wall time of `tunegemm tune --from` in a process of its own, and of peers' first calls; see "
    "benchmarks/tuning_many.py"
)
PEERS = ("inductor", "quack")

#: Most seconds for the command to end after SIGINT: it finishes measuring a batch.
_ENDING_S = 60.0
#: Most seconds for a peer's process besides its tuning: imports, torch.mm, the interleave.
_BESIDE_S = 60.0

#: As if the package had no compiled kernels. The tuning process alone looks for them.
_WITHOUT = (
    "from tunegemm.store import packs; packs.shipped = lambda: None; from tunegemm.cli import main; main()"
)
_PEER = "import sys; from benchmarks.tuning_many import print_peer; print_peer(*sys.argv[1:])"


@command
def main(arguments: Sequence[str] | None = None) -> int | None:
    parser = parser_of("benchmarks.tuning_many", __doc__)
    parser.add_argument("--list", type=Path, default=LIST, help="what --from takes (default: %(default)s)")
    parser.add_argument("--budget", type=float, metavar="S", help="seconds; then the command is interrupted")
    parser.add_argument("--without-library", action="store_true", help="leave the package's kernels out")
    parser.add_argument("--devices", metavar="all|0,1", help="several GPUs, as tunegemm tune has it")
    parser.add_argument("--database", type=Path, help="a new one (default: tuning_many.sqlite in the folder)")
    parser.add_argument("--peers", type=int, default=0, metavar="N", help="peers on so many of the products")
    parser.add_argument("--peer-s", type=float, default=120.0, help="seconds a peer may tune one product")
    parser.add_argument("--only-peers", action="store_true", help="tune nothing")
    options = parser.parse_args(arguments)
    problems = [demand.problem for demand in read(options.list)[0]]
    device = open_device(options.device)
    if not device.is_real and options.out is None:
        raise TunegemmError(f"device {options.device!r} measures nothing; give --out to try it anyway")
    if options.without_library and options.devices:
        raise TunegemmError(
            "--without-library with --devices: other workers find the package's kernels; "
            "give --device, or move db/kernels away"
        )
    results = Results.of(options.out, device, "tuning_many.json", METHOD)
    ended = 0
    if not options.only_peers:
        ended = run(problems, device, results, options)
    for name in PEERS if options.peers else ():
        run_peer(name, spread(problems, options.peers), device, results, options.peer_s)
    print(f"written: {results.path}")
    return ended


def run(problems: Sequence[Problem], device: Device, results: Results, options: argparse.Namespace) -> int:
    """Runs the command and writes its results; returns 1 if the command failed."""
    database = (options.database or results.path.with_suffix(".sqlite")).absolute()
    if database.exists():
        raise TunegemmError(f"{database} exists, but this needs a new database; remove it or give another")
    database.parent.mkdir(parents=True, exist_ok=True)
    mode = "without library" if options.without_library or packs.shipped() is None else "as installed"
    where = ["--device", options.device]
    if options.devices:
        mode, where = f"{mode}, devices {options.devices}", ["--devices", options.devices]
    program = ("-c", _WITHOUT) if options.without_library else ("-m", "tunegemm")
    words = [sys.executable, *program, "tune", "--from", str(options.list.absolute()), *where]
    with tempfile.TemporaryDirectory(prefix="tunegemm-", ignore_cleanup_errors=True) as folder:
        cache = Path(folder) / "cache"
        own = {"TUNEGEMM_CACHE_DIR": str(cache), "TUNEGEMM_DB": str(database)}
        environment = own_environment(Path(folder)) | own
        started = time.time()
        with database.with_suffix(".log").open("w") as log:
            code = interrupted_after(options.budget, words, environment, Path(folder), log)
        seconds = time.time() - started
        compiled = len(ArtifactStore(cache).names())
    rows = stored_rows(database, started, is_one_gpu=not options.devices)
    results.rows = [row for row in results.rows if row.get("mode") != mode]
    results.summary[mode] = {
        "products": len(problems), "reached": len(rows), "done": sum(row["done"] for row in rows),
        "seconds": round(seconds, 1), "budget_s": options.budget, "exit_code": code,
        "first_s": min((row["first_s"] for row in rows), default=None), "compiled": compiled,
        "measured": sum(row["measured"] for row in rows),
        **_speeds([row["ratio"] for row in rows if row["done"]]),
    }  # fmt: skip
    results.put(*(row | {"mode": mode} for row in rows))
    print(f"{mode}: " + ", ".join(f"{name} {value}" for name, value in results.summary[mode].items()))
    if code not in (0, 130):
        print(f"the command ended with {code}: see {database.with_suffix('.log')}", file=sys.stderr)
        return 1
    return 0


def interrupted_after(
    budget: float | None, words: Sequence[str], environment: Mapping[str, str], folder: Path, log: Any
) -> int:
    """The exit code of a process that gets SIGINT when its time is over, and SIGKILL if it continues."""
    # A shell starts background processes with SIGINT ignored, which children inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(words, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        return process.wait(budget)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.send_signal(signal.SIGINT)
        return process.wait(_ENDING_S)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def stored_rows(location: Path, started: float, *, is_one_gpu: bool) -> list[dict[str, Any]]:
    """A row for each product that has a measurement, in the order in which they ended.

    started: of the process, by time.time().
    """
    if not location.exists():  # on a device that measures nothing
        return []
    with Database.open(location, read_only=True) as database:
        records = {record.problem: record for record in database.records()}
        entries: dict[Problem, list[Any]] = {}
        for entry in database.measurements():
            entries.setdefault(entry.problem, []).append(entry)
    rows, before_s = [], 0.0
    for problem, own in sorted(entries.items(), key=lambda item: max(e.measured_at for e in item[1])):
        times = [entry.measured_at.timestamp() - started for entry in own]
        record = records.get(problem)
        rows.append({
            **problem_fields(problem), "done": record is not None and record.confirmed,
            "ratio": round(record.ratio, 4) if record else None, "best": record.label if record else "",
            "at_cap": any(entry.method in STEADY_METHODS for entry in own),
            "measured": len({entry.candidate for entry in own}),
            "first_s": round(min(times), 2), "last_s": round(max(times), 2),
            "seconds": round(max(times) - before_s, 2) if is_one_gpu else None,
        })  # fmt: skip
        before_s = max(times)
    return rows


def spread(problems: Sequence[Problem], count: int) -> list[Problem]:
    """So many of them, at equal distances."""
    count = min(count, len(problems))
    return [problems[place * len(problems) // count] for place in range(count)]


def run_peer(name: str, problems: Sequence[Problem], device: Device, results: Results, most_s: float) -> None:
    """Times a peer on the products, and writes its rows as they come."""
    rows = []
    for problem in problems:
        rows.append(problem_fields(problem) | {"mode": name} | peer(name, problem, device, most_s))
        timed = [row for row in rows if row["seconds"] is not None]
        results.summary[name] = {
            "products": len(rows), "done": len(timed), "limit_s": most_s,
            "median_s": statistics.median(row["seconds"] for row in timed) if timed else None,
            **_speeds([row["ratio"] for row in timed]),
        }  # fmt: skip
        results.put(rows[-1])
        print(json.dumps(rows[-1]), flush=True)


def peer(name: str, problem: Problem, device: Device, most_s: float) -> dict[str, Any]:
    """Seconds and speed of a peer's first choice, in a separate process; or why there are none."""
    none = {"seconds": None, "ratio": None}
    with tempfile.TemporaryDirectory(prefix="tunegemm-", ignore_cleanup_errors=True) as folder:
        places = (
            "HOME", "QUACK_HOME", "QUACK_CACHE_DIR", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR",
            "TRITON_HOME", "CUTE_DSL_CACHE_DIR", "XDG_CACHE_HOME",
        )  # fmt: skip
        environment = own_environment(Path(folder)) | dict.fromkeys(places, folder)
        words = [sys.executable, "-c", _PEER, name, problem.shape, device.spec, str(most_s)]
        started = time.monotonic()
        process = subprocess.Popen(
            words, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            out, errors = process.communicate(timeout=most_s + _BESIDE_S)
        except subprocess.TimeoutExpired:
            return none | {"skipped": f"still running {_BESIDE_S:g} s after the limit of {most_s:g} s"}
        finally:
            with contextlib.suppress(ProcessLookupError):  # with its compile workers, which may outlive it
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        process_s = round(time.monotonic() - started, 2)
    if process.returncode:
        last = errors.strip().splitlines()[-1:] or [f"exit code {process.returncode}"]
        return none | {"process_s": process_s, "skipped": last[0][:160]}
    return none | {"process_s": process_s} | json.loads(out.splitlines()[-1])


def print_peer(name: str, shape: str, spec: str, most_s: str) -> None:
    """Runs in the peer's process: its tuning, then one interleave with torch.mm, as one line of JSON."""
    from benchmarks.peers import measure
    from benchmarks.providers import PROVIDERS, Options, max_autotune
    from tunegemm.measure.backend import CudaBackend

    device = find_device(spec)
    backend = CudaBackend(device)
    backend.open()
    known = {**PROVIDERS, "inductor": max_autotune}
    options = Options(tune_cap=float(most_s), database=None)
    row = measure(Problem.parse(shape), device, backend, ["torch", name], options, 15, known)
    timed = row["providers"][name]
    document = {"seconds": timed.get("tune_seconds"), "ratio": timed.get("ratio"), "noise": row["noise"]}
    print(json.dumps(document | {key: timed[key] for key in ("skipped",) if key in timed}), flush=True)


def _speeds(ratios: Sequence[float]) -> dict[str, float | None]:
    if not ratios:
        return {"geometric_mean": None, "worst": None}
    return {"geometric_mean": round(geometric_mean(ratios), 4), "worst": min(ratios)}


if __name__ == "__main__":
    sys.exit(main())
