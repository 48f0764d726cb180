"""The Ampere multistage kernel at 128x128x32 with 3 stages, 4096^3 fp16, against cuBLAS, with its roofline.

    python -m benchmarks.seeds.seed_001            # writes results/GPU/seed-001.json

The kernel that the seed describes (cp.async ring of 3 stages, 2x2 warps, MMA tile of two atoms along n,
swizzled shared memory) with fp16 accumulators, as there, and with fp32 ones; the same with tiles
visited in groups; and torch.mm, all in one interleave. fp16 accumulators round at every step of k: over 4096
they are off by some 2e-3, twice what the tuner lets pass, so that they are checked against 4e-3 here and
their row says how far they are off.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.results import Results, meta, problem_fields, results_path
from tunegemm.describe.device import Device, find_device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate, Value
from tunegemm.errors import TunegemmError

PROBLEM = Problem(4096, 4096, 4096, in_dtype="fp16", out_dtype="fp16")
KERNEL: dict[str, Value] = {
    "tile_m": 128, "tile_n": 128, "tile_k": 32, "stages": 3, "warps_m": 2, "warps_n": 2, "atoms_n": 2,
    "smem_swizzle": 2, "vector_bytes": 16, "ctas_per_sm": 1, "acc_dtype": "fp32",
}  # fmt: skip
LAUNCH: dict[str, Value] = {"raster_order": "along_m", "swizzle_size": 1, "ctas": "tiles", "split_k": 1}
HALF_TOLERANCE = 4e-3
#: Name in the table -> changes to kernel and launch.
CONTENDERS: dict[str, tuple[dict[str, Value], dict[str, Value]]] = {
    "seed": ({"acc_dtype": "fp16"}, {}),
    "seed, fp32 accumulators": ({}, {}),
    "seed, fp32, bands of 8": ({}, {"swizzle_size": 8}),
}


def candidates() -> dict[str, Candidate]:
    """The kernels that are timed beside torch.mm."""
    return {
        name: Candidate.make("cute_sm80", KERNEL | kernel, LAUNCH | launch)
        for name, (kernel, launch) in CONTENDERS.items()
    }


def roofline_columns(problem: Problem, device: Device, median_us: float) -> dict[str, float]:
    """What a time means: rate, and parts of the arithmetic peak and of the roofline, in percent."""
    tflops = problem.flops / median_us / 1e6
    return {
        "median_us": round(median_us, 3),
        "tflops": round(tflops, 2),
        "percent_of_peak": round(100 * tflops / device.peak_tflops, 2),
        "percent_of_roofline": round(100 * device.roofline_us(problem) / median_us, 2),
    }


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; 2 for bad input or no GPU, with one line that says so."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.seeds.seed_001", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds")
    parser.add_argument("--out", type=Path, help="folder of the result file (default: results/GPU)")
    parser.add_argument("--device", default="cuda:0")
    options = parser.parse_args(arguments)
    try:
        run(find_device(options.device), options)
    except TunegemmError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def run(device: Device, options: argparse.Namespace) -> None:
    """Times the kernels, writes the row and prints it."""
    import torch

    from benchmarks.interleave import METHOD, Run, interleave
    from tunegemm.compile.artifacts import ArtifactStore
    from tunegemm.compile.pool import CompilePool
    from tunegemm.generate import families
    from tunegemm.measure.backend import CudaBackend
    from tunegemm.report.explain import explain_problem

    results = Results(results_path(options.out, device, "seed-001.json"), meta(device, METHOD))
    family = families.generator("cute_sm80")
    backend = CudaBackend(device)
    backend.open()
    runs: dict[str, Run] = {"torch": lambda a, b, out: torch.mm(a, b, out=out)}
    skipped: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as store, CompilePool(ArtifactStore(store)) as pool:
        compiling = {
            name: pool.submit("cute_sm80", family.kernel_key(PROBLEM, candidate, device))
            for name, candidate in candidates().items()
        }
        for name, candidate in candidates().items():
            compiled = compiling[name].result()
            if compiled.artifact is None:
                skipped[name] = compiled.failure
            else:
                runs[name] = family.load(PROBLEM, candidate, device, compiled.artifact.path)
        found = interleave(
            PROBLEM, runs, backend, l2_bytes=device.l2_bytes, rounds=options.rounds,
            tolerances={name: HALF_TOLERANCE for name, c in candidates().items() if c["acc_dtype"] == "fp16"},
        )  # fmt: skip
    skipped |= found.skipped
    providers: dict[str, dict[str, Any]] = {name: {"skipped": why} for name, why in skipped.items()}
    for name, timing in found.timings.items():
        providers[name] = roofline_columns(PROBLEM, device, timing.median_us) | {
            "iqr_us": round(timing.iqr_us, 3),
            "ratio": round(timing.ratio_to(found.timings["torch"]), 4),
            "relative_error": timing.relative_error,
        }
    facts = explain_problem(PROBLEM, device, candidate=candidates()["seed, fp32 accumulators"])
    assert facts.tile is not None
    results.put(
        problem_fields(PROBLEM)
        | {
            "epilogue": "none",
            "providers": providers,
            "roofline": {
                "flops_per_byte": round(facts.flops_per_byte, 1),
                "flops_per_smem_byte": facts.tile.flops_per_smem_byte,
                "ridge_flops_per_byte": round(facts.ridge_flops_per_byte, 1),
                "peak_tflops": device.peak_tflops,
                "bandwidth_gbps": device.bandwidth_gbps,
                "tile_tflops": round(facts.tile.tile_tflops, 1),
            },
            "noise": round(found.noise, 5),
            "rounds": found.rounds,
            "turn_ms": found.turn_ms,
            "operand_sets": found.operand_sets,
            "products_per_replay": found.products_per_replay,
        }
    )
    for name, row in providers.items():
        print(f"{name}: {row}")
    print(f"written: {results.path}")


if __name__ == "__main__":
    sys.exit(main())
