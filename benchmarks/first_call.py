"""Measures the cost of `import tunegemm` and of its first product, in separate processes.

A part of `benchmarks.dispatch`.

Each process imports torch, starts CUDA and runs one `torch.mm` before the clock starts. Modules are compiled
to bytecode beforehand, as by an installer, and files are in the page cache.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from typing import Any

from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.errors import TunegemmError

RECORDS = 10_000
PROCESSES = 5

_IMPORT = """
import json, time, torch
start = time.perf_counter()
import tunegemm
print(json.dumps({"import_ms": 1e3 * (time.perf_counter() - start)}))
"""

#: Prints milliseconds of each part; then whether a tuned kernel was launched.
_FIRST_CALL = """
import json, sys, time, torch
m, n, k, spec = *map(int, sys.argv[1:4]), sys.argv[4]
a = torch.rand(m, k, dtype=torch.bfloat16, device=spec)
b = torch.rand(n, k, dtype=torch.bfloat16, device=spec).t()
torch.mm(a, b)  # CUDA and cuBLAS start up, as they do in any program
torch.cuda.synchronize() if torch.cuda.is_available() else None
parts = {}

def timed(name, call):
    def run(*given):
        begin = time.perf_counter()
        try:
            return call(*given)
        finally:
            parts[name] = 1e3 * (time.perf_counter() - begin)
    return run

times = [time.perf_counter()]
import tunegemm
tunegemm.matmul
times.append(time.perf_counter())
from tunegemm.describe.device import find_device
from tunegemm.dispatch import api
from tunegemm.dispatch.dispatcher import Dispatcher
from tunegemm.dispatch.launchers import prepare
from tunegemm.dispatch.planning import Planner
from tunegemm.choose.snapshot import read_snapshot
planner = Planner(
    find=timed("device_ms", find_device),
    read=timed("records_ms", read_snapshot),
    prepare=timed("kernel_ms", prepare),
)
serving = Dispatcher(planner)
api.serve_by(serving)
for _ in range(2):
    times.append(time.perf_counter())
    tunegemm.matmul(a, b)
    times.append(time.perf_counter())
kept = [plan for plan in serving.planner.state.plans.values() if plan is not None]
steps = [1e3 * (end - begin) for begin, end in zip(times, times[1:])]
print(json.dumps({
    "import_and_matmul_ms": steps[0], **parts, "first_call_ms": steps[2],
    "import_and_first_call_ms": steps[0] + steps[2], "second_call_ms": steps[4],
    "tuned": bool(kept), "modules": len(sys.modules),
}))
"""

_MEMORY = """
import gc, json, tracemalloc
import tunegemm.dispatch
from tunegemm.choose.snapshot import read_snapshot
read_snapshot()
gc.collect()
tracemalloc.start()
snapshot = read_snapshot()
gc.collect()
print(json.dumps({"bytes": tracemalloc.get_traced_memory()[0], "records": len(snapshot)}))
"""


def fresh_processes(problem: Problem, device: Device, records: int = RECORDS) -> dict[str, Any]:
    """Medians of `PROCESSES` processes each; with the existing records, then with `records` more."""
    extents = (str(problem.m), str(problem.n), str(problem.k), device.spec)
    _python(_FIRST_CALL, *extents)  # compiles the bytecode
    imports = [_python(_IMPORT) for _ in range(PROCESSES)]
    few = [_python(_FIRST_CALL, *extents) for _ in range(PROCESSES)]
    add_records(records)
    many = [_python(_FIRST_CALL, *extents) for _ in range(PROCESSES)]
    memory = _python(_MEMORY)
    warm = _medians(many)
    return {
        **_medians(imports),
        **{name: warm[name] for name in ("import_and_matmul_ms", "first_call_ms", "second_call_ms")},
        "first_call_few_records_ms": _medians(few)["first_call_ms"],
        "first_call_parts": {"warm": warm},
        "first_call_is_tuned": all(sample["tuned"] for sample in (*few, *many)),
        "records": memory["records"],
        "bytes_per_record": round(memory["bytes"] / memory["records"], 1),
    }


def add_records(count: int) -> None:
    """Synthetic records of two GPUs and two toolchains, in the user's layer of this process's folder."""
    from benchmarks import database
    from tunegemm.store.locations import user_location

    location = user_location()
    location.parent.mkdir(parents=True, exist_ok=True)
    database.build(location, shapes=-(-count // 4), toolchains=2, measured=1)


def _medians(samples: list[dict[str, Any]]) -> dict[str, float]:
    numbers = [name for name, value in samples[0].items() if isinstance(value, float) or name.endswith("_ms")]
    return {
        name: round(statistics.median(sample.get(name, 0.0) for sample in samples), 3) for name in numbers
    }


def _python(code: str, *arguments: str) -> dict[str, Any]:
    """The object that a program prints on its last line; Python may write bytecode, as by default."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise TunegemmError(f"a measuring process failed: {lines[-1]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))
