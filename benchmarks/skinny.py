"""Products of few rows beside torch.mm and beside what memory gives: the family `skinny`.

    python -m benchmarks.skinny --compile-only --objects build/skinny   # no GPU needed; then, with one:
    python -m benchmarks.skinny --objects build/skinny
    python -m benchmarks.skinny --objects build/skinny --sample 24 --seed 1 --out /tmp/look

Of the family's kernels a list races torch.mm for each product, all in one interleave; the best of them do so
again for longer. `--sample` adds kernels that are drawn from the search space by seed. Writes
results/GPU/skinny.json: a row `{m, n, k, ratio, bandwidth_share, kernel}` each, where bandwidth_share is the
product's bytes by its time, of what copying in device memory moves, read and written, in the same run.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.carried import Carried, CarriedError, compile_into
from benchmarks.results import Results, geometric_mean, meta, problem_fields, results_path
from tunegemm.describe.device import Device, find_device
from tunegemm.describe.problem import DTYPE_BYTES, Problem
from tunegemm.describe.space import Candidate
from tunegemm.errors import TunegemmError
from tunegemm.generate import families

METHOD = (
    "the family's kernels and torch.mm(out=) in one CUDA graph each over operand sets that together pass 3x "
    "the L2, in shuffled order in each round: {screen} rounds with all kernels, then {rounds} with the best "
    "{finalists}; median over the rounds; copy bandwidth: 2 x 1 GiB by the median of 9 copies of a tensor of "
    "1 GiB, before and after, the larger"
)
#: N x K of the projections of published models, and of one's logits.
PROJECTIONS = (
    "6144x4096", "4096x4096", "28672x4096", "4096x14336", "8192x8192", "57344x8192", "128256x4096",
)  # fmt: skip
ROWS = (1, 2, 4, 8, 16)
#: tile_n, warps along n and k, chunks of k for a warp in one step, stages, CTAs of a multiprocessor.
KERNELS = (
    (16, 1, 4, 2, 4, 4), (16, 1, 8, 1, 4, 4), (16, 1, 8, 2, 4, 2), (16, 1, 8, 4, 3, 2), (16, 1, 16, 1, 4, 2),
    (16, 1, 16, 2, 4, 1), (32, 1, 4, 2, 4, 2), (32, 1, 8, 1, 4, 2), (32, 1, 8, 2, 4, 1), (32, 2, 4, 1, 4, 3),
    (32, 2, 4, 2, 3, 2), (32, 1, 4, 4, 4, 1),
    (48, 1, 8, 1, 5, 1), (48, 1, 8, 2, 3, 1), (48, 1, 4, 4, 3, 1),
    (64, 1, 4, 1, 4, 2), (64, 1, 8, 1, 4, 1), (64, 2, 4, 1, 4, 2),
    (64, 2, 2, 2, 4, 2), (64, 4, 1, 2, 4, 3), (64, 4, 2, 1, 4, 2), (128, 4, 2, 1, 4, 1), (128, 4, 1, 2, 4, 1),
)  # fmt: skip
#: What each is launched with; those that the rules reject are left out.
LAUNCHES = (("tiles", 1), ("all", 1), ("tiles", 2), ("tiles", 4))


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; 2 for bad input or no GPU, with one line that says so."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.skinny", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--shapes", default=",".join(PROJECTIONS), help="NxK,...; default: %(default)s")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="M,...; default: %(default)s")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp16"))
    parser.add_argument("--objects", type=Path, required=True, help="folder of compiled kernels")
    parser.add_argument("--compile-only", action="store_true", help="fill that folder and end; no GPU needed")
    parser.add_argument("--sample", type=int, default=0, help="further kernels drawn from the space, each M")
    parser.add_argument("--seed", type=int, default=0, help="of --sample")
    parser.add_argument("--screen", type=int, default=5, help="rounds with all kernels")
    parser.add_argument("--rounds", type=int, default=21, help="rounds with the best")
    parser.add_argument("--finalists", type=int, default=4)
    parser.add_argument("--budget-s", type=float, default=220, help="begin no product later than that")
    parser.add_argument("--device", default="cuda:0", help="with --compile-only model:h200 will do")
    parser.add_argument("--out", type=Path, help="folder of the result file (default: results/GPU)")
    options = parser.parse_args(arguments)
    try:
        problems = [
            Problem.parse(f"{int(m)}x{text}", dtype=options.dtype)
            for text in options.shapes.split(",")
            for m in options.rows.split(",")
        ]
        device = find_device(options.device)
        if options.compile_only:
            wanted = [(one, candidate) for one in problems for candidate in candidates(one, device, options)]
            for name, reason in compile_into(options.objects, wanted, device).items():
                print(f"{name}: {reason}")
        else:
            run(problems, device, options)
    except TunegemmError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def candidates(problem: Problem, device: Device, options: argparse.Namespace) -> list[Candidate]:
    """The listed kernels and those of the sample with their feasible launches."""
    tile_m = -(-problem.m // 8) * 8
    kernels = [
        Candidate.make(
            "skinny",
            {
                "tile_m": tile_m, "tile_n": tile_n, "tile_k": warps_k * unroll * 32, "warps_n": warps_n,
                "warps_k": warps_k, "stages": stages, "vector_bytes": 16, "ctas_per_sm": ctas,
            },
        )
        for tile_n, warps_n, warps_k, unroll, stages, ctas in KERNELS
    ]  # fmt: skip
    kernels += drawn(problem, tile_m, device, options.sample, options.seed)
    launches = [
        kernel.with_launch(ctas=ctas, split_k=split_k) for kernel in kernels for ctas, split_k in LAUNCHES
    ]
    family = families.get("skinny")
    return [one for one in dict.fromkeys(launches) if family.check(problem, one, device)]


def drawn(problem: Problem, tile_m: int, device: Device, count: int, seed: int) -> Iterator[Candidate]:
    """So many kernels of the space that are feasible for a product of these rows; the same for each n and k.

    Those of fewer than four warps on a multiprocessor are left out: they cannot ask for enough.
    """
    values, chance = families.load_space("skinny").compile_values, random.Random(f"{seed} {tile_m}")
    usual = Problem.parse(f"{tile_m}x8192x8192", dtype=problem.in_dtype)
    while count > 0:
        kernel = Candidate.make("skinny", {name: chance.choice(list_) for name, list_ in values.items()})
        kernel = Candidate.make("skinny", dict(kernel.compile_params) | {"tile_m": tile_m})
        few = kernel["warps_n"] * kernel["warps_k"] * kernel["ctas_per_sm"] < 4
        if not few and families.get("skinny").check(usual, kernel, device):
            count -= 1
            yield kernel


def run(problems: list[Problem], device: Device, options: argparse.Namespace) -> None:
    """Times the products and writes a row of each as it comes."""
    from tunegemm.measure.backend import CudaBackend

    method = METHOD.format(screen=options.screen, rounds=options.rounds, finalists=options.finalists)
    results = Results(results_path(options.out, device, "skinny.json"), meta(device, method))
    carried = Carried(options.objects)
    backend = CudaBackend(device)
    backend.open()
    started, copied = time.monotonic(), [copy_bandwidth(backend)]
    rows: list[dict[str, Any]] = []
    left_out = []
    for problem in problems:
        if time.monotonic() - started > options.budget_s:
            left_out.append(problem.shape)
            continue
        row = measure(problem, device, backend, carried, options)
        row["bandwidth_share"] = round(row["gb_per_s"] / copied[0], 4)
        rows.append(row)
        results.put(row)
        print(
            f"{problem.shape}: {row['ratio']:.4f} of torch.mm, {row['gb_per_s']:.0f} GB/s, "
            f"{row['bandwidth_share']:.3f} of a copy's, {row['kernel']}",
            flush=True,
        )
    copied.append(copy_bandwidth(backend))
    for row in rows:
        row["bandwidth_share"] = round(row["gb_per_s"] / max(copied), 4)
    large = [row for row in results.rows if row["weight_mb"] > 64]
    results.summary |= {
        "copy_gb_per_s": [round(one, 1) for one in copied],
        "geometric_mean": round(geometric_mean(row["ratio"] for row in results.rows), 4),
        "worst": min(row["ratio"] for row in results.rows),
        "least_bandwidth_share_over_64_mb": min((row["bandwidth_share"] for row in large), default=None),
        "left_out": left_out,
    }
    results.put(*rows)
    print(f"{results.summary}\nwritten: {results.path}")


def copy_bandwidth(backend: Any) -> float:
    """GB/s of copying 1 GiB in device memory, what is read and what is written counted both."""
    import torch

    source = torch.empty(1 << 30, dtype=torch.uint8, device=backend.torch_device)
    target = torch.empty_like(source)
    times = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    del source, target
    backend.release()
    return 2 * (1 << 30) / statistics.median(times[3:]) * 1e-6


def measure(
    problem: Problem, device: Device, backend: Any, carried: Carried, options: argparse.Namespace
) -> dict[str, Any]:
    """The row of one product, without its share of the bandwidth."""
    from benchmarks.interleave import Run, interleave

    family = families.get("skinny")
    runs: dict[str, Run] = {"torch": torch_mm}
    lacking = 0
    for candidate in candidates(problem, device, options):
        path = carried.find(problem, candidate)
        lacking += path is None
        if path is not None:
            runs[family.label(candidate)] = family.load(problem, candidate, device, path)
    if len(runs) == 1:
        raise CarriedError(f"{carried.folder} has no kernel for {problem}; fill it with --compile-only")
    found = interleave(
        problem, runs, backend, l2_bytes=device.l2_bytes, rounds=options.screen, min_replay_ms=0.3,
        settle_s=0.0, turn_ms=0,
    )  # fmt: skip
    screened = {
        label: timing.ratio_to(found.timings["torch"])
        for label, timing in found.timings.items()
        if label != "torch"
    }
    order = sorted(screened, key=lambda label: -screened[label])
    best = order[: options.finalists]
    final = interleave(
        problem, {label: runs[label] for label in ("torch", *best)}, backend, l2_bytes=device.l2_bytes,
        rounds=options.rounds, min_replay_ms=0.6, settle_s=0.0, turn_ms=0,
    )  # fmt: skip
    ratios = {label: final.timings[label].ratio_to(final.timings["torch"]) for label in best}
    first = max(ratios, key=lambda label: ratios[label])
    ours_us = final.timings[first].median_us
    backend.release()
    return problem_fields(problem) | {
        "ratio": round(ratios[first], 4),
        "bandwidth_share": 0.0,
        "kernel": first,
        "torch_us": round(final.timings["torch"].median_us, 3),
        "tunegemm_us": round(ours_us, 3),
        "gb_per_s": round(problem.bytes / ours_us * 1e-3, 1),
        "torch_gb_per_s": round(problem.bytes / final.timings["torch"].median_us * 1e-3, 1),
        "weight_mb": round(problem.n * problem.k * DTYPE_BYTES[problem.in_dtype] * 1e-6, 1),
        "noise": round(final.noise, 5),
        "operand_sets": final.operand_sets,
        "relative_error": final.timings[first].relative_error,
        "finalists": {label: round(ratio, 4) for label, ratio in ratios.items()},
        "screened": {label: round(screened[label], 4) for label in order},
        "skipped": dict(found.skipped),
        "without_object": lacking,
    }


def torch_mm(a: Any, b: Any, out: Any) -> None:
    """The baseline."""
    import torch

    torch.mm(a, b, out=out)


if __name__ == "__main__":
    sys.exit(main())
