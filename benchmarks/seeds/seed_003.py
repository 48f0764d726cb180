"""Measures anew the tables of the Gluon tutorial on WGMMA, and our answer to the exercise it leaves.

    python -m benchmarks.seeds.seed_003

The tutorial times each kernel by itself; here all of a problem's kernels and torch.mm are timed in one
interleave. Its first table's kernel adds a matrix C and is launched alone; ours only multiplies, in a graph.
Compiles what the object store lacks, on all cores, then needs the GPU for about a minute. Writes
results/GPU/seed-003.json: a row per problem, with the tutorial's figures beside ours.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.results import Results, meta, problem_fields, results_path
from tunegemm.compile.artifacts import ArtifactStore
from tunegemm.compile.pool import CompilePool
from tunegemm.describe.device import Device, find_device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate, Value
from tunegemm.errors import TunegemmError
from tunegemm.generate import families

if TYPE_CHECKING:
    from benchmarks.interleave import Interleave, Run
    from tunegemm.measure.backend import Backend

SMALL = Problem.parse("64x128x128", dtype="fp16", out_dtype="fp32", layout="tt")
LARGE = Problem.parse("8192x8192x16384", dtype="fp16", layout="tt")
FINALISTS = 3
_LAUNCH: dict[str, Value] = {"raster_order": "along_m", "swizzle_size": 1, "ctas": "all"}

# (LHS in registers, instruction N): microseconds in the tutorial.
LHS_AND_N = {
    (False, 16): 9.47, (False, 32): 8.48, (False, 64): 8.32, (False, 128): 8.32,
    (True, 16): 9.32, (True, 32): 8.60, (True, 64): 8.37, (True, 128): 8.36,
}  # fmt: skip
# (tile_m, tile_n, tile_k, warps, occupancy): TFLOP/s in the tutorial.
BLOCKING = {
    (128, 256, 256, 8, 1): 412.14, (256, 128, 256, 8, 1): 387.74, (64, 256, 128, 4, 2): 474.03,
    (64, 128, 256, 4, 2): 355.60, (128, 128, 128, 4, 2): 441.88, (128, 128, 128, 8, 2): 380.08,
}  # fmt: skip
PIPELINED = {
    (128, 256, 128, 8, 1): 426.06, (256, 128, 128, 8, 1): 385.85, (64, 256, 64, 4, 2): 417.50,
    (64, 128, 128, 4, 2): 384.98, (128, 128, 64, 4, 2): 495.31, (128, 128, 64, 8, 2): 446.81,
    (64, 256, 128, 4, 1): 363.36,
}  # fmt: skip
# (schedule, tile_m, tile_n, tile_k, stages, warps, occupancy): answers to the exercise, at several launches.
EXERCISE = (
    ("cooperative", 128, 256, 64, 4, 8, 1),
    ("cooperative", 256, 128, 64, 4, 8, 1),
    ("cooperative", 128, 256, 64, 3, 8, 1),
    ("cooperative", 256, 128, 64, 3, 8, 1),
    ("pingpong", 128, 128, 64, 6, 8, 1),
    ("pingpong", 64, 256, 64, 4, 8, 1),
    ("multistage", 128, 256, 64, 4, 8, 1),
    ("multistage", 128, 128, 64, 3, 4, 2),
)


@dataclass(frozen=True)
class Contender:
    """One kernel of one table."""

    table: str
    candidate: Candidate
    published: Mapping[str, float]
    """The tutorial's figure for it, such as ``tutorial_tflops``; empty where it has none."""


def contenders() -> Iterator[tuple[Problem, Contender]]:
    """All kernels of all tables."""
    for (lhs, instr_n), us in LHS_AND_N.items():
        kernel = _kernel("blocking", 64, 128, 128, 1, 4, 2, instr_n=instr_n, lhs_in_registers=lhs)
        yield SMALL, Contender("lhs_and_n", kernel.with_launch(**_LAUNCH), {"tutorial_us": us})
    for schedule, stages, rows in (("blocking", 1, BLOCKING), ("pipelined", 2, PIPELINED)):
        for (tile_m, tile_n, tile_k, warps, occupancy), tflops in rows.items():
            kernel = _kernel(schedule, tile_m, tile_n, tile_k, stages, warps, occupancy)
            yield LARGE, Contender(schedule, kernel.with_launch(**_LAUNCH), {"tutorial_tflops": tflops})
    for shape in EXERCISE:
        for raster, swizzle in itertools.product(("along_m", "along_n"), (4, 8, 16)):
            launch: dict[str, Value] = {"raster_order": raster, "swizzle_size": swizzle}
            kernel = _kernel(*shape)
            yield LARGE, Contender("exercise", kernel.with_launch(**_LAUNCH | launch), {})


def _kernel(
    schedule: str,
    tile_m: int,
    tile_n: int,
    tile_k: int,
    stages: int,
    warps: int,
    occupancy: int,
    **more: Value,
) -> Candidate:
    values: dict[str, Value] = {
        "schedule": schedule, "tile_m": tile_m, "tile_n": tile_n, "tile_k": tile_k, "stages": stages,
        "warps": warps, "occupancy": occupancy, "instr_n": 256, "lhs_in_registers": False, "swap_ab": False,
    }  # fmt: skip
    return Candidate.make("gluon_wgmma", values | more)


def measure(device: Device, backend: Backend, pool: CompilePool, *, rounds: int = 15) -> list[dict[str, Any]]:
    """One row per problem. `backend` has been opened.

    Of the exercise's kernels the fastest few are timed again, with torch.mm, and only that is their figure.
    """
    family = families.generator("gluon_wgmma")
    everything = list(contenders())
    objects = [
        pool.submit("gluon_wgmma", family.kernel_key(problem, c.candidate, device))
        for problem, c in everything
    ]
    found: dict[Problem, list[tuple[Contender, Run]]] = {SMALL: [], LARGE: []}
    for (problem, contender), future in zip(everything, objects, strict=True):
        result = future.result()
        if result.artifact is None:
            raise TunegemmError(f"{family.label(contender.candidate)}: {result.failure}")
        launcher = family.load(problem, contender.candidate, device, result.artifact.path)
        found[problem].append((contender, launcher))
    rows = []
    for problem, pairs in found.items():
        known = [pair for pair in pairs if pair[0].table != "exercise"]
        tried = [pair for pair in pairs if pair[0].table == "exercise"]
        if tried:
            screened = _interleave(problem, tried, device, backend, 5, turn_ms=0)
            medians = {label: timing.median_us for label, timing in screened.timings.items()}
            tried.sort(key=lambda pair: medians.get(family.label(pair[0].candidate), float("inf")))
        before = backend.telemetry()
        timed = _interleave(problem, known + tried[:FINALISTS], device, backend, rounds)
        rows.append(
            problem_fields(problem)
            | {
                "out_dtype": problem.out_dtype,
                "epilogue": "none",
                "providers": described(problem, timed, known + tried[:FINALISTS]),
                "tried": len(tried),
                "noise": round(timed.noise, 5),
                "rounds": timed.rounds,
                "turn_ms": timed.turn_ms,
                "operand_sets": timed.operand_sets,
                "products_per_replay": timed.products_per_replay,
                "clocks": {"before": before, "after": backend.telemetry()},
            }
        )
    return rows


def _interleave(
    problem: Problem, pairs: list[tuple[Contender, Run]], device: Device, backend: Backend, rounds: int,
    turn_ms: float = 160,
) -> Interleave:  # fmt: skip
    from benchmarks.interleave import interleave
    from tunegemm.generate.cublaslt.eager import torch_mm

    label = families.get("gluon_wgmma").label
    runs = {"torch": torch_mm(problem)} | {label(contender.candidate): run for contender, run in pairs}
    return interleave(problem, runs, backend, l2_bytes=device.l2_bytes, rounds=rounds, turn_ms=turn_ms)


def described(
    problem: Problem, timed: Interleave, pairs: list[tuple[Contender, Run]]
) -> dict[str, dict[str, Any]]:
    label = families.get("gluon_wgmma").label
    facts: dict[str, dict[str, Any]] = {"torch": {}}
    for contender, _ in pairs:
        facts[label(contender.candidate)] = {"table": contender.table} | dict(contender.published)
    for name, entry in facts.items():
        if name not in timed.timings:
            entry["skipped"] = timed.skipped[name]
            continue
        timing = timed.timings[name]
        entry |= {
            "median_us": round(timing.median_us, 3),
            "iqr_us": round(timing.iqr_us, 3),
            "tflops": round(problem.flops / timing.median_us / 1e6, 2),
            "ratio": round(timing.ratio_to(timed.timings["torch"]), 4),
            "relative_error": timing.relative_error,
        }
    return facts


def tables(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown, a line per kernel."""
    lines = []
    for row in rows:
        lines += [
            f"{row['m']}x{row['n']}x{row['k']} {row['dtype']}, torch "
            f"{row['providers']['torch']['tflops']:.1f} TFLOP/s; of {row['tried']} answers to the exercise "
            "the fastest:",
            "",
            "| table | kernel | us | TFLOP/s | of torch.mm | tutorial |",
            "|---|---|---|---|---|---|",
        ]
        for name, got in row["providers"].items():
            us, tflops = got.get("tutorial_us"), got.get("tutorial_tflops")
            published = f"{us} us" if us else f"{tflops} TFLOP/s" if tflops else ""
            if "skipped" in got:
                lines.append(f"| {got['table']} | {name} | skipped: {got['skipped']} | | | {published} |")
            elif name != "torch":
                lines.append(
                    f"| {got['table']} | {name} | {got['median_us']:.2f} | {got['tflops']:.1f} "
                    f"| {got['ratio']:.3f} | {published} |"
                )
        lines.append("")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; 2 for bad input or no GPU, with one line that says so."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.seeds.seed_003", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds (default: 15)")
    parser.add_argument("--out", type=Path, help="folder of the result file (default: results/GPU)")
    parser.add_argument("--device", default="cuda:0")
    options = parser.parse_args(arguments)
    try:
        device = find_device(options.device)
        from benchmarks.interleave import METHOD
        from tunegemm.measure.backend import CudaBackend

        results = Results(results_path(options.out, device, "seed-003.json"), meta(device, METHOD))
        with CompilePool(ArtifactStore()) as pool:
            backend = CudaBackend(device)
            backend.open()
            for row in measure(device, backend, pool, rounds=options.rounds):
                results.put(row)
    except TunegemmError as error:
        print(error, file=sys.stderr)
        return 2
    print(tables(results.rows))
    print(f"written: {results.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
