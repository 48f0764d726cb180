"""Times shipped kernels of fp8 and fused products beside torch, for the fit of their predicted gains.

    python -m fit.kind_choices --budget 120          # on a GPU, with the kernels of `make kernels`
    python -m fit.kind_choices --kinds residual,swiglu --least-rows 257 --most-rows 16384
    python -m fit.kind_choices --seed 1 --count 100 --out build/other

Draws products of the kinds of db/invariant.toml: N and K as in `fit.choices`, half of the gates twice as
wide, M mostly up to 256 rows. The kernels that predictions would consider (`choose.invariance.best_ranked`)
race torch's own operations in one interleave; above 256 rows, where the chip lowers its clocks, in steady
state. Torch also computes gates of two halves, as one merged product and two views of it, and its library
adds residuals by itself. Writes results/GPU/kind_choices.json: a row for each product with `launches`, the
best predicted first. Missing kernels are compiled at the start.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.command import command, parser_of
from benchmarks.interleave import METHOD, interleave
from benchmarks.results import Results, meta, problem_fields, results_path
from fit.choices import extent_of
from tunegemm.choose.invariance import FEW_ROWS, best_ranked
from tunegemm.describe.device import Device, find_device
from tunegemm.describe.epilogue import GATED
from tunegemm.describe.problem import Problem
from tunegemm.errors import TunegemmError
from tunegemm.generate import families
from tunegemm.generate.cublaslt import FAMILY as LIBRARY
from tunegemm.generate.cublaslt.choice import algorithm_to_add, first_choice
from tunegemm.generate.cublaslt.eager import torch_mm
from tunegemm.generate.cublaslt.library import algorithms
from tunegemm.generate.cublaslt.names import ADDED as SUMS
from tunegemm.model import shortlist

#: Rounds for few rows, and for many rows before the steady-state rounds.
ROUNDS, ROUNDS_OF_MANY_ROWS = 7, 5
#: The round of torch twice, and three launches: three turns at thirds of the controller's swing of 950 ms
#: (docs/decisions/0023).
TURNS, TURN_MS = 3, 65.0
#: Dense work before the test for lowered clocks, and before timed turns. The chip has just multiplied another
#: product.
SETTLE_S, SETTLE_STEADY_S = 0.15, 0.2
#: fp8 rows are whole multiples of 16 bytes; gates and all others follow.
UNIT = 16
MAX_FLOP, MAX_BYTES = 2e12, 2e9
#: cuBLASLt supports these scales itself: for 30 products its kernels were 3 % ahead of these; few were
#: behind.
LEFT_OUT = "scale_tensor"
#: Torch's gate of two halves; the library's sum of a product and its residual, and that of the algorithm that
#: its heuristic names first.
HALVES, ADDED, FIRST = "halves", "added", "first_added"


@command
def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("fit.kind_choices", __doc__)
    parser.add_argument("--budget", type=float, default=120, help="seconds; begin no product later than that")
    parser.add_argument("--count", type=int, default=100_000, help="most products")
    parser.add_argument("--seed", default="train", help="of the products")
    parser.add_argument("--least-rows", type=int, default=1, help="of the products that are timed")
    parser.add_argument("--most-rows", type=int, default=256, help="of the products that are timed")
    parser.add_argument(
        "--kinds", default="", help="epilogues to draw in turn, such as residual,bias_n,swiglu (default: all)"
    )
    options = parser.parse_args(arguments)
    run(find_device(options.device), options)


def kinds_of(words: str) -> list[Problem]:
    """Kinds by their epilogues, in this order and as often; by default all with shipped kernels.

    Raises TunegemmError for a kind without these that torch's library has not, either.
    """
    by_name = {
        kind.epilogue: kind
        for kind in shortlist.ordered_lists()
        if kind.in_dtype != "fp16" and kind.epilogue not in ("", LEFT_OUT)
    }
    if not words:
        return list(by_name.values())
    by_name |= {
        name: Problem.parse("64x64x64", dtype="bf16", epilogue=name) for name in SUMS if name not in by_name
    }
    if unknown := [word for word in words.split(",") if word not in by_name]:
        raise TunegemmError(f"--kinds {','.join(unknown)}: use {', '.join(by_name)}")
    return [by_name[word] for word in words.split(",")]


def drawn(
    seed: str, kinds: Sequence[Problem], least_rows: int = 1, most_rows: int = 1 << 13
) -> Iterator[Problem]:
    """Products without end, one kind after the other; the same for each seed and choice of kinds and rows."""
    chance = random.Random(f"kinds {seed}")
    low, high = math.log2(least_rows), math.log2(most_rows)
    ranges = [
        (max(low, start), min(high, end), weight)
        for start, end, weight in ((0, 6, 0.6), (6, 8, 0.2), (8, 14, 0.2))
        if start < high and end > low
    ]
    weights = [weight for _, _, weight in ranges]
    for kind in itertools.cycle(kinds):
        while True:
            start, end, _ = chance.choices(ranges, weights)[0]
            n, k = (max(UNIT, extent_of(chance) // UNIT * UNIT) for _ in range(2))
            if kind.fused.gated:
                n *= chance.choice((1, 2))  # two weights as one
            problem = replace(kind, m=round(2 ** chance.uniform(start, end)), n=n, k=k)
            if problem.flops <= MAX_FLOP and problem.bytes <= MAX_BYTES:
                break
        yield problem


def run(device: Device, options: argparse.Namespace) -> None:
    """Times products until the budget is spent, and writes a row of each."""
    from tunegemm.measure.backend import CudaBackend

    kinds = kinds_of(options.kinds)
    compile_missing(list(dict.fromkeys(kinds)), device)
    results = Results(results_path(options.out, device, "kind_choices.json"), meta(device, METHOD))
    backend = CudaBackend(device)
    backend.open()
    started, done = time.monotonic(), 0
    for problem in drawn(options.seed, kinds, options.least_rows, options.most_rows):
        if done == options.count or time.monotonic() - started > options.budget:
            break
        begun = time.monotonic()
        row = measure(problem, device, backend)
        results.put(row | {"seconds": round(time.monotonic() - begun, 2)})
        done += 1
        if done <= 12 or done % 25 == 0:
            print(f"{done}: {problem} {row['launches']} {time.monotonic() - begun:.2f} s", flush=True)
    print(f"{done} products in {time.monotonic() - started:.0f} s; written: {results.path}")


def compile_missing(kinds: Sequence[Problem], device: Device) -> None:
    """Compiles the missing kernels of the kinds; prints why one cannot be compiled."""
    from tunegemm.compile.artifacts import ArtifactStore
    from tunegemm.compile.pool import CompilePool
    from tunegemm.store import packs

    jobs = []
    for kind in kinds:
        launches = [shortlist.launched(kind, kernel) for kernel in shortlist.ordered_kernels(kind)]
        for launch in (*launches, *shortlist.large_kernels(kind)):
            family = families.generator(launch.family)
            if packs.find(key := family.kernel_key(kind, launch, device)) is None:
                jobs.append((f"{kind} {family.label(launch)}", launch.family, key))
    if not jobs:
        return
    started = time.monotonic()
    with CompilePool(ArtifactStore()) as pool:
        futures = {name: pool.submit(family, key) for name, family, key in jobs}
        failed = {
            name: result.failure for name, item in futures.items() if not (result := item.result()).artifact
        }
    print(f"{len(jobs)} kernels compiled in {time.monotonic() - started:.0f} s", flush=True)
    for name, why in failed.items():
        print(f"left out: {name}: {why}", flush=True)


def measure(problem: Problem, device: Device, backend: Any) -> dict[str, Any]:
    """The row of one product. Its `launches`: place in the kind's list of shipped kernels, whether tiles go
    along n, swizzle size, predicted lag behind the best, in log, ratio to torch, whether it goes by GPC (then
    a place in the list for many rows), whether L2 evicts streamed operands first."""
    from tunegemm.store import packs

    listed, large = shortlist.ordered_kernels(problem), shortlist.large_kernels(problem)
    by_gpc = [chosen.kernel for chosen in large]
    runs: dict[str, Any] = {"torch": torch_mm(problem)}
    launches: dict[str, list[Any]] = {}
    for number, pick in enumerate(best_ranked(problem, device)):
        family = families.generator(pick.candidate.family)
        artifact = packs.find(family.kernel_key(problem, pick.candidate, device))
        if artifact is None:
            continue  # it cannot be compiled, as reported above
        runs[str(number)] = family.load(problem, pick.candidate, device, artifact.path)
        goes_by_gpc = pick.candidate["cluster_order"] == "gpc"
        place = by_gpc.index(pick.kernel) if goes_by_gpc else listed.index(pick.kernel)
        launches[str(number)] = [
            place, int(pick.candidate["raster_order"] == "along_n"), pick.candidate["swizzle_size"],
            round(pick.expected, 4), None, int(goes_by_gpc), int(pick.candidate["l2_hint"] == "streamed"),
        ]  # fmt: skip
    if gate := next((GATED[step] for step in problem.fused.steps if step in GATED), None):
        runs[HALVES] = _of_halves(gate)
    if problem.epilogue in SUMS and (sums := algorithm_to_add(problem, device.index)):
        (first,) = algorithms(problem, device.index, 1, 32 << 20)
        runs |= {
            name: LIBRARY.load(problem, one, device, None) for name, one in ((ADDED, sums), (FIRST, first))
        }
    few = problem.m <= FEW_ROWS
    timed = interleave(
        problem, runs, backend, l2_bytes=device.l2_bytes, rounds=ROUNDS if few else ROUNDS_OF_MANY_ROWS,
        turns=TURNS, turn_ms=0.0 if few else TURN_MS, min_replay_ms=0.35,
        settle_s=0.0 if few else SETTLE_S, settle_steady_s=SETTLE_STEADY_S,
        tolerances={HALVES: math.inf},  # it has other columns
    )  # fmt: skip
    library = first_choice(replace(problem, epilogue=""), device.index)
    backend.release()
    baseline = timed.timings["torch"]
    for name in launches:
        ratio = timed.timings[name].ratio_to(baseline) if name in timed.timings else math.nan
        launches[name][4] = None if math.isnan(ratio) else round(ratio, 4)
    others = {
        name: round(timed.timings[name].ratio_to(baseline), 4) if name in timed.timings else None
        for name in (HALVES, ADDED, FIRST)
    }
    return problem_fields(problem) | {
        "epilogue": problem.epilogue,
        "launches": list(launches.values()),
        "library": None if library is None else [
            library.tile_m, library.tile_n, library.cluster_m, library.cluster_n, library.split_k
        ],
        "torch_us": round(baseline.median_us, 3),
        **others,
        "noise": round(timed.noise, 5),
        "turn_ms": timed.turn_ms,
        "wrong": dict(timed.skipped),
    }  # fmt: skip


def _of_halves(activation: str) -> Any:
    """Torch's gate of a merged product, whose first half of columns is activated."""
    import torch

    functions = {
        "silu": torch.nn.functional.silu, "relu": torch.relu, "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda value: torch.nn.functional.gelu(value, approximate="tanh"),
    }  # fmt: skip
    act = functions[activation]

    def launch(a: Any, b: Any, out: Any, *operands: Any) -> None:
        both = torch.addmm(operands[0], a, b) if operands else torch.mm(a, b)
        gate, up = both.chunk(2, dim=-1)
        torch.mul(act(gate), up, out=out)

    return launch


if __name__ == "__main__":
    sys.exit(main())
