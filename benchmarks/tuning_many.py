"""100 products tuned as one job, by `tunegemm tune --from`; and what peers take for some of them.

    python -m benchmarks.tuning_many --nothing-compiled          # on a GPU
    python -m benchmarks.tuning_many                             # with the kernels that ship (`make kernels`)
    python -m benchmarks.tuning_many --peers 10                  # quack's and Inductor's own tuning
    python -m benchmarks.campaign --db tuning_many/nothing_compiled/tuning.sqlite --records db/records

The list is benchmarks/many.toml. A process of its own, in an empty folder, so without a database and without
kernels of the user's, tunes it at the defaults. Writes results/GPU/tuning_many.json: for each product a row
`{mode, seconds, ended_s, compiled, measured, at_cap, ratio, best}`; and under the mode `{total_s, first_s}`,
from the start of the process to its end and to its first measurement, imports included. The file is written
after each product; ended by SIGTERM or Ctrl-C, what there is stays. Databases are kept in the folder
tuning_many, which names them by mode. Rows of mode peers have what each peer's first call took and the speed
that it reaches, beside that of the database of this mode, if there is one.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks import shapes
from benchmarks.results import Results, meta, problem_fields, results_path
from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.workload import Product, Workload
from tunegemm.describe.workload.products import Kind
from tunegemm.errors import TunegemmError
from tunegemm.store import Database, packs
from tunegemm.tuning.tuner import open_gpu

LIST = Path(__file__).with_name("many.toml")
METHOD = "wall time of one process of `tunegemm tune --from`; see benchmarks/tuning_many.py"

#: The real command line; the first one as in a package that no kernels were compiled into.
_COMMANDS = {
    "nothing_compiled": "from tunegemm.store import packs; packs.shipped = lambda: None; "
    "from tunegemm.cli.app import main; main()",
    "installed": "from tunegemm.cli.app import main; main()",
}
#: How long a process that was interrupted may take to say what it has.
_STOP_S = 15.0
_PEERS = ("quack", "inductor")


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; 2 for bad input or no GPU, with one line that says so, 130 if it was ended."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tuning_many", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--nothing-compiled", action="store_true", help="without the kernels that ship")
    parser.add_argument("--peers", type=int, metavar="N", help="time the peers on N of the products instead")
    parser.add_argument(
        "--peer-cap", type=float, default=120.0, help="seconds that a peer may tune a product"
    )
    parser.add_argument(
        "--shapes", action="append", default=[], help="a group of many.toml, MxNxK or pattern"
    )
    parser.add_argument("--work", type=Path, default=Path("tuning_many"), help="folder of the databases")
    parser.add_argument("--out", type=Path, help="folder of the result file (default: results/GPU)")
    parser.add_argument("--device", default="cuda:0")
    options = parser.parse_args(arguments)
    mode = "nothing_compiled" if options.nothing_compiled else "installed"
    work = options.work.absolute() / mode
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        problems = shapes.select(options.shapes, shapes.load(LIST))
        device = open_gpu(options.device)
        results = Results(results_path(options.out, device, "tuning_many.json"), meta(device, METHOD))
        results.summary = results.earlier_summary
        if options.peers is not None:
            time_peers(some(problems, options.peers), device, results, work, options.peer_cap)
        else:
            tune(problems, device.spec, mode, results, work)
    except TunegemmError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def tune(problems: list[Problem], spec: str, mode: str, results: Results, work: Path) -> None:
    """Tunes all, and writes a row of each as it ends. Raises TunegemmError where `work` is not empty."""
    if mode == "installed" and packs.shipped() is None:
        raise TunegemmError("no kernels ship with this checkout; `make kernels` compiles them")
    if work.exists():
        raise TunegemmError(f"{work} is there already, and this begins with nothing; name another --work")
    work.mkdir(parents=True)
    listed, database = work / "products.json", work / "tuning.sqlite"
    workload(problems).write(listed)
    started, first_s, rows = time.time(), None, 0
    summary: dict[str, Any] = {}
    results.summary = {**results.summary, mode: summary}
    words = ["tune", "--from", str(listed), "--db", str(database), "--device", spec, "--json"]
    for document in documents(_COMMANDS[mode], words, work):
        ended_s = time.time() - started
        if document is not None:
            row = row_of(document) | {"mode": mode, "ended_s": round(ended_s, 2)}
            rows += 1
            if first_s is None:
                first_s = _first_measured(database, started)
        summary |= {
            "products": rows,
            "of": len(problems),
            "total_s": round(ended_s, 2),
            "first_s": first_s,
            "ended": document is None,
        }
        results.put(*([row] if document is not None else []))
        if document is not None:
            print(rows, json.dumps({name: row[name] for name in _PRINTED}), flush=True)
    print(json.dumps({mode: summary}), f"written: {results.path}, {database}", sep="\n")


_PRINTED = ("m", "n", "k", "seconds", "ended_s", "compiled", "measured", "at_cap", "ratio", "best")


def workload(problems: list[Problem]) -> Workload:
    """What `tunegemm record` would write of a program that computes each once."""
    names = [field.name for field in fields(Kind) if hasattr(problems[0], field.name)]
    kinds = [Kind(**{name: getattr(problem, name) for name in names}) for problem in problems]
    return Workload(tuple(Product(kind, calls=1) for kind in kinds))


def documents(code: str, words: list[str], work: Path) -> Iterator[dict[str, Any] | None]:
    """What a `tunegemm` command prints, line by line, then None; when this is interrupted, what the command
    says of that, and then KeyboardInterrupt.

    Raises TunegemmError where it ends otherwise.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TUNEGEMM_DB"} | {
        "TUNEGEMM_CACHE_DIR": str(work / "cache"),
        "XDG_DATA_HOME": str(work / "data"),
        "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path),
    }
    log = work / "log.txt"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-c", code, *words],
            cwd=work, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True,
            start_new_session=True,  # so that `timeout` ends this, which then ends it
        )  # fmt: skip
        assert process.stdout is not None
        try:
            yield from map(json.loads, process.stdout)
            if code_of_exit := process.wait():
                raise TunegemmError(f"tuning ended with exit code {code_of_exit}: {log.read_text()[-2000:]}")
            yield None
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            signal.signal(signal.SIGALRM, lambda *_: process.kill())
            signal.setitimer(signal.ITIMER_REAL, _STOP_S)
            yield from (
                document for document in map(json.loads, process.stdout) if not document["interrupted"]
            )
            raise
        finally:
            process.kill()
            process.wait()
            signal.setitimer(signal.ITIMER_REAL, 0)


def row_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """One product of `tunegemm tune --json`."""
    timed = [outcome for outcome in document["outcomes"] if "ratio" in outcome]
    best = document["best"]
    return problem_fields(Problem(**document["problem"])) | {
        "seconds": round(document["seconds"], 2),
        "compiled": document["compiled"],
        "measured": len({outcome["digest"] for outcome in timed}),
        "failed": len(document["outcomes"]) - len(timed),
        "at_cap": any(outcome["steady"] for outcome in timed),
        "ratio": round(best["ratio"], 4) if best else None,
        "best": best["label"] if best else "",
        "note": document["note"],
    }


def _first_measured(path: Path, started: float) -> float | None:
    """Seconds from the start to when the first measurement was published."""
    with Database.open(path, read_only=True) as database:
        times = [entry.measured_at.timestamp() for entry in database.entries()]
    return round(min(times) - started, 2) if times else None


def some(problems: list[Problem], count: int) -> list[Problem]:
    """So many of them: one of each group of rows in turn, evenly over the list."""
    if not 0 < count <= len(problems):
        raise TunegemmError(f"--peers {count}: give a number from 1 to {len(problems)}")
    ordered = sorted(problems, key=lambda problem: (problem.m, problem.n * problem.k))
    return [ordered[(2 * number + 1) * len(ordered) // (2 * count)] for number in range(count)]


def time_peers(problems: list[Problem], device: Device, results: Results, work: Path, cap_s: float) -> None:
    """What the peers' own tuning takes in this process, their caches empty, and what it reaches."""
    with tempfile.TemporaryDirectory(prefix="tunegemm-") as empty:
        for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "QUACK_HOME", "QUACK_CACHE_DIR"):
            os.environ[name] = str(Path(empty, name.lower()))
        os.environ.pop("QUACK_CACHE_AUTOTUNING", None)
        tuned = work / "tuning.sqlite"
        if tuned.exists():
            os.environ |= {"TUNEGEMM_DB": str(tuned), "TUNEGEMM_CACHE_DIR": str(work / "cache")}
        from benchmarks.peers import measure
        from benchmarks.providers import PROVIDERS, Options, inductor_with_library
        from tunegemm.measure.backend import CudaBackend

        chosen = ["torch", *_PEERS, *(["tunegemm"] if tuned.exists() else [])]
        known = {**PROVIDERS, "inductor": inductor_with_library}
        options = Options(cap_s, tuned)
        backend = CudaBackend(device)
        backend.open()
        for problem in problems:
            started = time.perf_counter()
            measured = measure(problem, device, backend, chosen, options, rounds=15, known=known)
            row = problem_fields(problem) | {"mode": "peers"}
            row |= {name: measured[name] for name in ("providers", "noise", "turn_ms", "clocks")}
            results.put(row)
            found = {
                name: (got.get("tune_seconds"), got.get("ratio")) for name, got in row["providers"].items()
            }
            print(problem.shape, json.dumps(found), f"{time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
