"""Measures a tuning's time: a process tunes one product without compiled kernels, another one with them.

    python -m benchmarks.tuning_time --shapes 16x4096x4096 --shapes 8192x8192x8192

Writes results/GPU/tuning_time.json. Both run in empty folders, without the shipped kernels and with an empty
database: `cold_s` is the first process from start to end, including imports. The second tries the kernels of
the first only: `first_s` from its start to the first measurements of our own kernels (the library's
algorithms are measured before); `warm_s` its tuning without its own imports; `ready_s` from its start until
the measuring process has a CUDA context; `searched_s`, which is `imports_s + warm_s - ready_s`, the tuning
without the imports of both; `next_s` a second tuning in that process. `measured` and `compiled` belong to
the first process.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import command, parser_of
from benchmarks.results import Results, own_environment, problem_fields, report
from benchmarks.shapes import LISTED, select
from tunegemm.describe.device import Device, find_device
from tunegemm.describe.problem import Problem
from tunegemm.errors import TunegemmError

METHOD = "wall time of processes of their own, quick; see benchmarks/tuning_time.py"

#: Prints times since the process was started (argv[4], by time.time()), and the results.
_PROCESS = """
import json, sys, threading, time
from tunegemm.measure.worker import Child
child = Child() if sys.argv[2].startswith("cuda") else None  # first of all, as the command does
ready = []
if child:  # its first message says that it has a device
    def wait():
        if child.connection.poll(60):
            ready.append(time.time())

    threading.Thread(target=wait, daemon=True).start()
from pathlib import Path
from tunegemm.describe.problem import Problem
from tunegemm.measure.outcome import Measurement
from tunegemm.store import Database
from tunegemm.tuning.tuner import Tuner, open_device
imported = time.time()
shape, spec, warm, started = sys.argv[1], sys.argv[2], sys.argv[3] == "warm", float(sys.argv[4])
first = []

def on_progress(progress):
    if progress.measured and not first:
        first.append(time.time())

found = {}
with Tuner(open_device(spec), compiled_only=warm, child=child) as tuner:
    for name in ("seconds", "next_s") if warm else ("seconds",):
        begin = imported if name == "seconds" else time.time()
        with Database.open(Path(f"{name}.sqlite"), create=True) as tuner.database:
            result = tuner.tune(Problem.parse(shape), on_progress=on_progress)
        found[name] = round(time.time() - begin, 2)
measured = [one for one in result.outcomes if isinstance(one, Measurement)]
print(json.dumps(found | {
    "first_s": round(first[0] - started, 2) if first else None,
    "imports_s": round(imported - started, 2),
    "ready_s": round(ready[0] - started, 2) if ready else None,
    "at_cap": any(one.is_steady for one in measured),
    "measured": len({one.candidate for one in measured}),
    "failed": len(result.outcomes) - len(measured),
    "compiled": result.compiled,
    "ratio": round(result.best.ratio, 4) if result.best else None,
    "best": result.labels.get(result.best.candidate.digest, "") if result.best else "",
    "note": result.note,
}))
"""


@command
def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("benchmarks.tuning_time", __doc__)
    parser.add_argument("--shapes", action="append", default=[], help="a group, MxNxK or pattern")
    options = parser.parse_args(arguments)
    problems = (
        select(options.shapes) if options.shapes else [*map(Problem.parse, LISTED["shapes"]["tuning_time"])]
    )
    device = find_device(options.device)
    results = Results.of(options.out, device, "tuning_time.json", METHOD)
    report(results, (timed(problem, device) for problem in problems))


def timed(problem: Problem, device: Device) -> dict[str, Any]:
    """The row of one product."""
    with tempfile.TemporaryDirectory(prefix="tunegemm-") as folder:
        begin = time.time()
        cold = process(problem, device, "cold", Path(folder))
        cold_s = time.time() - begin
        warm = process(problem, device, "warm", Path(folder))
    return {
        **problem_fields(problem),
        **{name: cold[name] for name in ("at_cap", "measured", "compiled", "ratio", "best")},
        **{name: warm[name] for name in ("first_s", "next_s", "imports_s", "ready_s")},
        "warm_s": warm["seconds"], "cold_s": round(cold_s, 2), "warm_ratio": warm["ratio"],
        "searched_s": round(warm["imports_s"] + warm["seconds"] - (warm["ready_s"] or warm["imports_s"]), 2),
        "note": cold["note"] or warm["note"],
    }  # fmt: skip


def process(problem: Problem, device: Device, name: str, root: Path) -> dict[str, Any]:
    """The process's output. Its databases are its own; the next process shares the kernels under `root`."""
    work = root / name
    work.mkdir()
    own = {"TUNEGEMM_CACHE_DIR": str(root / "cache"), "TUNEGEMM_DB": str(work / "none.sqlite")}
    environment = own_environment(root) | own
    words = [sys.executable, "-c", _PROCESS, problem.shape, device.spec, name, str(time.time())]
    ran = subprocess.run(words, cwd=work, env=environment, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise TunegemmError(f"tuning {problem} in a separate process ended with:\n{ran.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return result


if __name__ == "__main__":
    sys.exit(main())
