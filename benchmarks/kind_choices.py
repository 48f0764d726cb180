"""Shipped kernels of fp8 and fused products beside torch: what their expected gains are fitted to.

    python -m benchmarks.kind_choices --budget 120          # on a GPU, with the kernels of `make kernels`
    python -m benchmarks.kind_choices --least-rows 257 --most-rows 8192 --budget 280
    python -m benchmarks.kind_choices --seed 1 --count 100 --out build/other

Of kinds of db/invariant.toml products are drawn: N and K as `benchmarks.choices` draws them, M mostly up to
256 rows. The kernels that `choose.invariance` expects to be best race torch's own operations in one
interleave; of over 256 rows, where the chip lowers its clocks, in steady state. Writes
results/GPU/kind_choices.json: a row for each product with `launches`, the best expected first.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Container, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.choices import extent_of
from benchmarks.interleave import METHOD, interleave
from benchmarks.results import Results, meta, problem_fields, results_path
from tunegemm.choose.invariance import ranked
from tunegemm.describe.device import Device, find_device
from tunegemm.describe.problem import Problem
from tunegemm.errors import TunegemmError
from tunegemm.generate import families
from tunegemm.generate.cublaslt.choice import first_choice
from tunegemm.generate.cublaslt.eager import torch_mm
from tunegemm.model import shortlist

#: Launches that are timed of a product, with few rows and with many.
FEW, MANY, FEW_ROWS = 4, 2, 256
ROUNDS, TURNS, TURN_MS = 7, 3, 120.0
#: Dense work after which the chip says whether it has lowered its clocks, where there are many rows.
SETTLE_S = 0.25
#: fp8 rows are whole multiples of 16 bytes; gates and all others follow.
UNIT = 16
MAX_FLOP, MAX_BYTES = 1e12, 2e9
#: cuBLASLt takes these scales itself: of 30 products its kernels were 3 % ahead of these, and behind in few.
LEFT_OUT = "scale_tensor"


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; 2 for bad input or no GPU, with one line that says so."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kind_choices", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--budget", type=float, default=120, help="seconds; begin no product later than that")
    parser.add_argument("--count", type=int, default=100_000, help="most products")
    parser.add_argument("--seed", default="train", help="of the products")
    parser.add_argument("--least-rows", type=int, default=1, help="of the products that are timed")
    parser.add_argument("--most-rows", type=int, default=256, help="of the products that are timed")
    parser.add_argument("--epilogues", default="", help="of the kinds to draw, such as bias_n,swiglu")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--out", type=Path, help="folder of the result file (default: results/GPU)")
    options = parser.parse_args(arguments)
    try:
        run(find_device(options.device), options)
    except TunegemmError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def drawn(seed: str, epilogues: Container[str] = ()) -> Iterator[Problem]:
    """Products without end, of one kind after the other; the same for each seed and choice of kinds."""
    chance = random.Random(f"kinds {seed}")
    kinds = [kind for kind in shortlist.ordered_lists() if kind.epilogue and kind.epilogue != LEFT_OUT]
    kinds = [kind for kind in kinds if kind.epilogue in epilogues] or kinds

    def extent() -> int:
        return max(UNIT, extent_of(chance) // UNIT * UNIT)

    while True:
        for kind in kinds:
            low, high = chance.choices(((0, 6), (6, 8), (8, 13)), (0.6, 0.2, 0.2))[0]
            problem = replace(kind, m=round(2 ** chance.uniform(low, high)), n=extent(), k=extent())
            if problem.flops <= MAX_FLOP and problem.bytes <= MAX_BYTES:
                yield problem


def run(device: Device, options: argparse.Namespace) -> None:
    """Times products until the budget is spent, and writes a row of each."""
    from tunegemm.measure.backend import CudaBackend

    results = Results(results_path(options.out, device, "kind_choices.json"), meta(device, METHOD))
    backend = CudaBackend(device)
    backend.open()
    started, done = time.monotonic(), 0
    for problem in drawn(options.seed, options.epilogues.split(",")):
        if not options.least_rows <= problem.m <= options.most_rows:
            continue
        if done == options.count or time.monotonic() - started > options.budget:
            break
        begun = time.monotonic()
        row = measure(problem, device, backend)
        results.put(row | {"seconds": round(time.monotonic() - begun, 2)})
        done += 1
        if done <= 12 or done % 25 == 0:
            print(f"{done}: {problem} {row['launches']} {time.monotonic() - begun:.2f} s", flush=True)
    print(f"{done} products in {time.monotonic() - started:.0f} s; written: {results.path}")


def measure(problem: Problem, device: Device, backend: Any) -> dict[str, Any]:
    """The row of one product. Its `launches`: place among the kind's kernels, whether tiles go along n,
    swizzle size, how far behind the best it is expected to be, in log, and its ratio to torch."""
    from tunegemm.store import packs

    kernels = shortlist.ordered_kernels(problem)
    found = sorted(ranked(problem, kernels, device), key=lambda one: -one.expected)
    runs: dict[str, Any] = {"torch": torch_mm(problem)}
    launches: dict[str, list[Any]] = {}
    for one in found:
        family = families.generator(one.candidate.family)
        if len(launches) == (FEW if problem.m <= FEW_ROWS else MANY):
            break
        if not family.check(problem, one.candidate, device).runs:
            continue
        artifact = packs.find(family.kernel_key(problem, one.candidate, device))
        if artifact is None:
            raise TunegemmError(f"{family.label(one.candidate)} is not compiled; run `make kernels`")
        runs[str(len(launches))] = family.load(problem, one.candidate, device, artifact.path)
        along_n = one.candidate["raster_order"] == "along_n"
        launches[str(len(launches))] = [
            kernels.index(one.kernel), int(along_n), one.candidate["swizzle_size"], round(one.expected, 4)
        ]  # fmt: skip
    timed = interleave(
        problem, runs, backend, l2_bytes=device.l2_bytes, rounds=ROUNDS, turns=TURNS,
        turn_ms=0.0 if problem.m <= FEW_ROWS else TURN_MS,
        min_replay_ms=0.35, settle_s=0.0 if problem.m <= FEW_ROWS else SETTLE_S,
    )  # fmt: skip
    library = first_choice(replace(problem, epilogue=""), device.index)
    backend.release()
    baseline = timed.timings["torch"]
    for name in launches:
        ratio = timed.timings[name].ratio_to(baseline) if name in timed.timings else math.nan
        launches[name].append(None if math.isnan(ratio) else round(ratio, 4))
    return problem_fields(problem) | {
        "epilogue": problem.epilogue,
        "launches": list(launches.values()),
        "library": None if library is None else [
            library.tile_m, library.tile_n, library.cluster_m, library.cluster_n, library.split_k
        ],
        "torch_us": round(baseline.median_us, 3),
        "noise": round(timed.noise, 5),
        "turn_ms": timed.turn_ms,
        "wrong": dict(timed.skipped),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
