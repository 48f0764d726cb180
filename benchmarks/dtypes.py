"""Every dtype beside torch's own call for it, one interleave per shape.

    python -m benchmarks.dtypes                            # all dtypes, all shapes: minutes on one GPU
    python -m benchmarks.dtypes --dtypes int8,tf32 --shapes 4096x4096x4096 --trials 24

Tunes each product first, with an empty database, and times the best kernel of `cute_sm90` that it found.
Writes results/GPU/dtypes.json after each product and adds to what is there, so that it can run in slices.
Kernels stay in the user's object store: a second run compiles little.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.results import Results, geometric_mean, meta, problem_fields, ratio, results_path
from tunegemm.device import Device, find_device
from tunegemm.errors import ProblemError, TunegemmError
from tunegemm.problem import Problem

if TYPE_CHECKING:
    from tunegemm.measure.backend import Backend
    from tunegemm.tuning import Tuner

#: Squares, DeepSeek-V3's projections, and of Llama-3-8B QKV, the output at decode and gate with up.
SHAPES = (
    "8192x8192x8192", "4096x4096x4096", "4096x7168x2048", "128x7168x16384", "4096x2112x7168", "512x6144x4096",
    "64x4096x4096", "4096x28672x4096",
)  # fmt: skip

#: Input dtype and how sums are kept. torch's calls: `torch.mm` for fp16 and, where it is allowed, tf32;
#: `torch._scaled_mm` with one scale of 1, fast accumulation or not; `torch._int_mm`.
KINDS = {
    "fp16": ("fp16", "fast"),
    "fp8": ("fp8_e4m3", "fast"),
    "fp8_two_level": ("fp8_e4m3", "two_level"),
    "tf32": ("tf32", "fast"),
    "int8": ("int8", "fast"),
}


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; 2 for bad input or no GPU, with one line that says so."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.dtypes", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--dtypes", default=",".join(KINDS), help=f"of {', '.join(KINDS)} (default: all)")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="MxNxK,... (default: the eight)")
    parser.add_argument("--trials", type=int, default=40, help="candidates per product (default: 40)")
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds per product")
    parser.add_argument("--out", type=Path, help="folder of the result file (default: results/GPU)")
    parser.add_argument("--device", default="cuda:0")
    options = parser.parse_args(arguments)
    try:
        if unknown := [name for name in options.dtypes.split(",") if name not in KINDS]:
            raise ProblemError(f"dtypes {unknown[0]!r} is not known; use {', '.join(KINDS)}")
        problems = [
            Problem.parse(shape, dtype=KINDS[kind][0], accumulation=KINDS[kind][1])
            for kind in options.dtypes.split(",")
            for shape in options.shapes.split(",")
        ]
        run(problems, find_device(options.device), options)
    except TunegemmError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def run(problems: list[Problem], device: Device, options: argparse.Namespace) -> None:
    """Tunes and times all products, writes their rows and prints a line for each and the means."""
    from benchmarks.interleave import METHOD
    from tunegemm.measure.backend import CudaBackend
    from tunegemm.tuning import Tuner

    method = f"{METHOD}; int8 against its exact product; ours tuned first, with {options.trials} trials"
    results = Results(results_path(options.out, device, "dtypes.json"), meta(device, method))
    backend = CudaBackend(device)
    backend.open()
    with Tuner(device, None, families=["cute_sm90"]) as tuner:
        for problem in problems:
            row = measure(problem, device, backend, tuner, options)
            results.put(row)
            ours = row["providers"].get("tunegemm_cute", {})
            print(
                f"{problem}: torch {row['providers']['torch']['tflops']:.0f}, ours {ours.get('tflops', '-')} "
                f"TFLOP/s, ratio {ours.get('ratio', '-')}  {ours.get('label', '')} {row['skipped'] or ''}",
                flush=True,
            )
    print()
    for kind, key in KINDS.items():
        rows = [row for row in results.rows if (row["dtype"], row["accumulation"]) == key]
        speeds = [speed for row in rows if (speed := ratio(row, "tunegemm_cute")) is not None]
        if speeds:
            print(f"{kind}: geometric mean {geometric_mean(speeds):.3f} of torch over {len(speeds)} shapes")
    print(f"written: {results.path}")


def measure(
    problem: Problem, device: Device, backend: Backend, tuner: Tuner, options: argparse.Namespace
) -> dict[str, Any]:
    """The row of one product: torch's call and the best kernel that tuning found."""
    from benchmarks.interleave import Run, interleave
    from tunegemm import families
    from tunegemm.families.cublaslt import TORCH_MM
    from tunegemm.outcome import Measurement

    tuned = tuner.tune(problem, effort="quick", trials=options.trials)
    own = [o for o in tuned.outcomes if isinstance(o, Measurement) and o.candidate.family == "cute_sm90"]
    library = families.get(TORCH_MM.family)
    runs: dict[str, Run] = {"torch": library.load(problem, TORCH_MM, device, None)}
    labels = {"torch": ""}
    # The three best by their latest samples: closer than noise, the screening does not order them.
    latest = {o.candidate: o for o in own}
    family = families.get("cute_sm90")
    for found in sorted(latest.values(), key=lambda o: -o.ratio)[:3]:
        key = family.kernel_key(problem, found.candidate, device)
        artifact = tuner.pool.store.find(key)
        if artifact is not None:
            name = f"tunegemm_cute {len(runs)}"
            runs[name] = family.load(problem, found.candidate, device, artifact.path)
            labels[name] = family.label(found.candidate)
    before = backend.telemetry()
    timed = interleave(problem, runs, backend, l2_bytes=device.l2_bytes, rounds=options.rounds, settle_s=0.5)
    providers: dict[str, dict[str, Any]] = {}
    for name, timing in timed.timings.items():
        provider = name.split()[0]
        speed = round(timing.ratio_to(timed.timings["torch"]), 4)
        if provider not in providers or speed > providers[provider]["ratio"]:
            providers[provider] = {
                "median_us": round(timing.median_us, 3),
                "tflops": round(problem.flops / timing.median_us / 1e6, 1),
                "ratio": speed,
                "iqr_us": round(timing.iqr_us, 3),
                "relative_error": timing.relative_error,
                "label": labels[name],
            }
    return problem_fields(problem) | {
        "epilogue": "none",
        "out_dtype": problem.out_dtype,
        "accumulation": problem.accumulation,
        "providers": providers,
        "skipped": dict(timed.skipped),
        "noise": round(timed.noise, 5),
        "rounds": timed.rounds,
        "operand_sets": timed.operand_sets,
        "clocks_before": before,
        "clocks_after": backend.telemetry(),
        "tune_seconds": round(tuned.seconds, 2),
        "measured": len(latest),
    }


if __name__ == "__main__":
    sys.exit(main())
