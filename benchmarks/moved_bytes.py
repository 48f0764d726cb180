"""What L2 and device memory move for launches of our kernels on large products, counted by Nsight Compute.

    python -m benchmarks.moved_bytes                 # writes results/GPU/moved_bytes.json, some two minutes
    python -m benchmarks.moved_bytes --summary FILE  # the model's bytes anew, into that file; needs no GPU

The launches are drawn by seed among those of kernels that ship compiled, in all orders of tiles, of which
the model expects no more than so many times the least joules; torch.mm is counted beside them. Each is run
once on the last of its operand sets, after the others, as in use. The model's formulas
(tunegemm/generate/terms.py) were chosen by such rows.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.large_kernels import Product, launches, told, told_bytes
from benchmarks.power_roof import counted_bytes, counted_kernels
from benchmarks.results import Results, meta, opened, results_path
from tunegemm.describe.device import Device, find_device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.errors import MeasureError, TunegemmError
from tunegemm.generate.cublaslt import TORCH_MM

METHOD = (
    "Nsight Compute, one launch on the last operand set after one on each of the others, caches not flushed; "
    "dram: read and written, crossing: between the halves of L2"
)
SHAPES = (
    "8192x8192x8192", "4096x28672x4096", "4096x14336x4096", "4096x4096x14336", "8448x9216x2048",
    "2048x7168x8192", "4096x6144x4096", "4096x4096x4096", "8192x3584x3584", "6144x6144x6144",
    "16384x4096x4096", "2048x24576x4096", "1024x8192x8192", "1024x28672x4096", "512x14336x4096",
    "8192x8192x1024",
)  # fmt: skip
#: Launches of a product, and the most joules of the model's that one may have, relative to the fewest.
LAUNCHES, MOST_MJ = 26, 1.4
BYTES = ("l2_read", "crossing", "dram")


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; 2 for bad input, no GPU, no compiled kernels or no ncu, with one line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.moved_bytes", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--shapes", default=",".join(SHAPES), help="MxNxK,...")
    parser.add_argument("--launches", type=int, default=LAUNCHES, help="of each product")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder of the result file (default: results/GPU)")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--summary", type=Path, metavar="FILE", help="count nothing; the model's bytes anew")
    # What the process runs that ncu profiles.
    parser.add_argument("--inside", choices=["own", "torch"], help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        device = find_device(options.device)
        if options.summary is not None:
            results = opened(options.summary)
            results.summary = summary(results.rows, device)
            results.put()
            print(json.dumps(results.summary, indent=1))
            return 0
        problems = [Problem.parse(text) for text in options.shapes.split(",")]
        if options.inside:
            run_for_counters(device, chosen(problems, device, options))
            return 0
        results = Results(results_path(options.out, device, "moved_bytes.json"), meta(device, METHOD))
        results.rows = [row for which in ("torch", "own") for row in counted(which, options)]
        results.summary = summary(results.rows, device)
        results.put()
        print(f"{len(results.rows)} launches {results.summary}; written: {results.path}")
    except (TunegemmError, OSError, ValueError, KeyError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def chosen(
    problems: Iterable[Problem], device: Device, options: argparse.Namespace
) -> dict[Problem, list[Candidate]]:
    """What is run of each product."""
    if options.inside == "torch":
        return {problem: [TORCH_MM] for problem in problems}
    found = {}
    for problem in problems:
        every = launches(problem, device)
        likely = [
            c for c, mj in zip(every.candidates, every.mj, strict=True) if mj <= MOST_MJ * every.mj.min()
        ]
        found[problem] = random.Random(f"{options.seed} {problem}").sample(
            likely, min(options.launches, len(likely))
        )
    return found


def counted(which: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each launch. Raises MeasureError where ncu is not there or saw something else."""
    arguments = ["--inside", which, "--shapes", options.shapes, "--launches", str(options.launches)]
    arguments += ["--seed", str(options.seed), "--device", options.device]
    kernels, printed = counted_kernels("benchmarks.moved_bytes", arguments)
    ran = printed.get("launches", [])
    if not ran or len(kernels) != len(ran):
        raise MeasureError(f"ncu counted {len(kernels)} kernels of {len(ran)} launches; a launch is one here")
    rows = []
    for row, kernel in zip(ran, kernels, strict=True):
        moved = counted_bytes(kernel, 1)
        rows.append(row | {name: round(moved[f"{name}_bytes"]) for name in BYTES})
    return rows


def run_for_counters(device: Device, chosen: Mapping[Problem, Sequence[Candidate]]) -> None:
    """In the process that ncu profiles: each launch once, and then what was launched, as a line of JSON."""
    from tunegemm.measure.backend import CudaBackend

    backend = CudaBackend(device)
    backend.open()
    ran = []
    for problem, candidates in chosen.items():
        product = Product(problem, device, backend)
        for candidate in candidates:
            product.launch_for_counters(candidate)
            ran.append({"m": problem.m, "n": problem.n, "k": problem.k, "candidate": candidate.to_json()})
        del product
        backend.release()
    print(json.dumps({"launches": ran}), flush=True)


def summary(rows: Sequence[Mapping[str, Any]], device: Device) -> dict[str, Any]:
    """Of each kind of bytes: the model's over those counted, geometric mean and spread of logarithms."""
    ratios: dict[str, list[float]] = {name: [] for name in BYTES}
    for row in rows:
        candidate = Candidate.from_json(row["candidate"])
        if candidate == TORCH_MM:
            continue
        problem = Problem(row["m"], row["n"], row["k"])
        for name, model in told_bytes(told(problem, candidate, device)).items():
            ratios[name].append(math.log(model / row[name]))
    return {"launches": len(ratios["dram"])} | {
        name: {
            "model_to_counted": round(math.exp(statistics.mean(logs)), 4),
            "spread": round(statistics.pstdev(logs), 4),
        }
        for name, logs in ratios.items()
        if logs
    }


if __name__ == "__main__":
    sys.exit(main())
