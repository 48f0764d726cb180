"""What the hardware counters say of our kernels beside torch.mm's, by Nsight Compute.

    tunegemm tune --shape 512x512x65536          # there must be a kernel to look at
    python -m benchmarks.counters --shapes 512x512x65536,5000x3000x7000
    python -m benchmarks.counters --shapes 4096x28672x4096 --label 'pp128x176x64 s5 c2x1 e16 sk rn w4 all' \
        --label 'cublaslt a66 t176x128 s64xAUTO c1x2x1 o2'

Each kernel is run alone on cold caches, several times, a group of counters each time: its duration is neither
that of an interleave nor of a busy chip. What is to be compared is where bytes come from and how busy the
tensor cores are. Writes results/GPU/counters.json; needs `ncu`, of CUDA's toolkit, on PATH.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.results import Results, meta, problem_fields, results_path
from tunegemm.describe.device import Device, find_device
from tunegemm.describe.problem import Problem
from tunegemm.errors import TunegemmError

if TYPE_CHECKING:
    from benchmarks.providers import Contender

METHOD = (
    "ncu --clock-control none, one launch after three to warm up, caches flushed before each pass; a product "
    "of several kernels has their durations and bytes added up, of shares those of the longest"
)
#: Counters by the names of our columns.
METRICS = {
    "duration_us": "gpu__time_duration.sum",
    "sm_cycles": "sm__cycles_elapsed.max",
    "tensor_percent": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "instructions": "sm__inst_executed.sum",
    "l2_read_bytes": "l1tex__m_xbar2l1tex_read_bytes.sum",
    # What of those was read in L2: a multicast's bytes once, and once what a GPC asks for at the same time.
    "l2_read_sectors": "lts__t_sectors_srcunit_tex_op_read.sum",
    "l2_fabric_sectors": "lts__t_sectors_srcunit_ltcfabric.sum",
    "l2_hit_percent": "lts__t_sector_hit_rate.pct",
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_write_bytes": "dram__bytes_write.sum",
}
_ADDED = (
    "duration_us", "sm_cycles", "instructions", "l2_read_bytes", "l2_read_sectors", "l2_fabric_sectors",
    "dram_read_bytes", "dram_write_bytes",
)  # fmt: skip
_PROVIDERS = ("torch", "tunegemm_cute")
_TIMEOUT_SECONDS = 120


class CountersError(TunegemmError):
    """Nothing can be counted here."""


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; 2 for bad input, no GPU or no ncu, with one line that says so."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.counters", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--shapes", required=True, help="MxNxK,...")
    parser.add_argument(
        "--label", action="append", default=[],
        help="a candidate in the database, by its label, in place of torch.mm and our best; may be repeated",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, help="folder of the result file (default: results/GPU)")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--inside", help=argparse.SUPPRESS)  # the provider that the profiled process runs
    options = parser.parse_args(arguments)
    try:
        problems = [Problem.parse(shape) for shape in options.shapes.split(",")]
        device = find_device(options.device)
        if options.inside:
            _inside(options.inside, problems[0], device)
            return 0
        ncu = shutil.which("ncu") or shutil.which("ncu", path="/usr/local/cuda/bin")
        if ncu is None:
            raise CountersError("ncu is not on PATH; install Nsight Compute, of CUDA's toolkit")
        results = Results(results_path(options.out, device, "counters.json"), meta(device, METHOD))
        for problem in problems:
            names = options.label or _PROVIDERS
            found = {name: _profile(ncu, name, problem, options.device) for name in names}
            results.put(problem_fields(problem) | {"providers": found})
            for name, counted in found.items():
                print(f"{problem} {name}: {counted}", flush=True)
    except TunegemmError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"written: {results.path}")
    return 0


def _inside(name: str, problem: Problem, device: Any) -> None:
    """Runs in the profiled process: one launch between the profiler's start and stop."""
    import torch

    from benchmarks.providers import PROVIDERS, Options
    from tunegemm.measure.operands import make_operands

    if name in _PROVIDERS:
        (contender,) = PROVIDERS[name](problem, device, Options(0.0, None))
    else:
        contender = stored(problem, device, name)
    operands = make_operands(problem, torch.device("cuda", device.index), 0)
    for _ in range(3):
        contender.run(operands.a, operands.b, operands.out)
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    contender.run(operands.a, operands.b, operands.out)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()
    print(f"LABEL {contender.label}")


def stored(problem: Problem, device: Device, label: str) -> Contender:
    """The candidate that the database has under a label, ready to run."""
    from benchmarks.providers import Contender
    from tunegemm.generate import families
    from tunegemm.generate.artifacts import ArtifactStore
    from tunegemm.store import Database

    with Database.open(read_only=True) as database:
        found = {entry.label: entry.candidate for entry in database.entries(problem)}
    if label not in found:
        raise CountersError(
            f"no candidate {label!r} of {problem} is in the database; `tunegemm leaderboard` has labels"
        )
    family = families.get(found[label].family)
    artifact = None
    if family.compiled:
        artifact = ArtifactStore().find(family.kernel_key(problem, found[label], device))
        if artifact is None:
            raise CountersError(f"the object of {label} is not in the store; tune {problem} to compile it")
    return Contender(family.load(problem, found[label], device, artifact.path if artifact else None), label)


def _profile(ncu: str, name: str, problem: Problem, device: str) -> dict[str, Any]:
    shape = f"{problem.m}x{problem.n}x{problem.k}"
    command = [
        ncu, "--clock-control", "none", "--profile-from-start", "off", "--csv", "--page", "raw",
        "--print-units", "base", "--metrics", ",".join(METRICS.values()),
        sys.executable, "-m", "benchmarks.counters", "--shapes", shape, "--device", device, "--inside", name,
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, env=os.environ, check=False
    )
    kernels = rows_of(done.stdout)
    if done.returncode or not kernels:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise CountersError(f"ncu on {name} of {shape} failed: {last}")
    label = [line.removeprefix("LABEL ").strip() for line in done.stdout.splitlines() if "LABEL " in line]
    return summed(kernels) | {"kernels": len(kernels), "label": label[-1] if label else ""}


def rows_of(output: str) -> list[dict[str, float]]:
    """The counters of each kernel from ncu's CSV, which other lines may surround."""
    lines = output.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return []
    table = csv.DictReader(io.StringIO("\n".join(line for line in lines[start:] if line.startswith('"'))))
    found = []
    for row in table:
        if not row["ID"]:  # the line of units
            continue
        # Names of counters change between versions of ncu: what it does not know is not in its table.
        known = {ours: theirs for ours, theirs in METRICS.items() if theirs in row}
        values = {ours: float(row[theirs].replace(",", "")) for ours, theirs in known.items()}
        values["duration_us"] /= 1e3  # base units: ns
        found.append(values)
    return found


def summed(kernels: list[dict[str, float]]) -> dict[str, Any]:
    """Of the kernels of one product: durations and bytes added up, shares of the longest."""
    longest = max(kernels, key=lambda kernel: kernel["duration_us"])
    added = [name for name in _ADDED if name in longest]
    total = longest | {name: sum(kernel[name] for kernel in kernels) for name in added}
    total["sm_clock_mhz"] = total["sm_cycles"] / total["duration_us"]
    return {name: round(value, 2) for name, value in total.items()}


if __name__ == "__main__":
    sys.exit(main())
