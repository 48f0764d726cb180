"""Measures an installed package that tuned nothing: `tunegemm.matmul` beside torch.mm.

    python -m benchmarks.first_use --unseen 300 --seed 1
    python -m benchmarks.first_use --unseen 300 --seed 1 --listed 0 --skip 113     # continues an earlier run
    python -m benchmarks.first_use --kinds fp16,fp8,gelu,swiglu --unseen 40 --most-rows 256 --within 300

*Listed* products are bf16 ones with a shipped record of this GPU; *unseen* ones are drawn by seed: N and K
from dimensions of published models or random multiples of 8, M log-uniform. Nothing is tuned and compiled:
the user's databases and kernels are ignored. Writes results/GPU/first_use.json; `first_ms` of a row is the
time of the first call. With `--kinds`, compares so many unseen products of each kind, in turns, with the
operations that a user of torch would write for them, in first_use_kinds.json.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from typing import Any
from zlib import crc32

import torch

from benchmarks.batch_invariance import KINDS as OTHERS
from benchmarks.batch_invariance import of_kind, product
from benchmarks.command import command, parser_of
from benchmarks.graphs import within
from benchmarks.interleave import interleave
from benchmarks.results import Results, geometric_mean, problem_fields
from benchmarks.shapes import LISTED
from tunegemm.choose.selection import select
from tunegemm.choose.snapshot import read_snapshot
from tunegemm.describe.device import Device, find_device
from tunegemm.describe.problem import Problem
from tunegemm.dispatch.launchers import find_object
from tunegemm.errors import ArtifactError, TunegemmWarning
from tunegemm.generate.cublaslt.eager import torch_mm
from tunegemm.measure.backend import CudaBackend
from tunegemm.store.shipped import read_shipped
from tunegemm.torch.functions import matmul

METHOD = (
    "tunegemm.matmul(out=) and torch.mm(out=) in one CUDA graph each over operand sets that together pass 3x "
    "the L2, in shuffled order in each round, after dense work; where the chip has lowered its clocks then, "
    "each has turn_ms to itself, the second half of which is timed, but for products that fall back to "
    "torch: both graphs have the same kernels then; median of {rounds} rounds (or of {turns} in steady "
    "state), timed again where two captures of torch.mm differ by over 2 %; an empty database and an empty "
    "kernel cache"
)
KINDS = OTHERS | LISTED["unseen_kinds"]
TURN_MS = 160.0
MOST_ROWS = 16384
#: Repeats a timing, so often, if two captures of torch.mm differ by more: the clocks changed meanwhile. One
#: of 300 products was at 0.93 of itself, with a noise of 0.11.
NOISE, ATTEMPTS = 0.02, 3
DIMENSIONS: tuple[int, ...] = tuple(LISTED["shapes"]["dimensions"])


@command
def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("benchmarks.first_use", __doc__)
    parser.add_argument("--listed", type=int, default=1000, help="most shipped products, drawn by seed")
    parser.add_argument("--unseen", type=int, default=30, help="products drawn by seed (%(default)s)")
    parser.add_argument("--skip", type=int, default=0, metavar="N", help="the first N unseen: timed before")
    parser.add_argument("--kinds", default="", help=f"of {', '.join(KINDS)}; default: plain bf16")
    parser.add_argument("--most-rows", type=int, default=MOST_ROWS, help="of unseen products")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--turns", type=int, default=5, help="steady-state rounds")
    parser.add_argument("--within", type=float, default=math.inf, help="begin no product after so many s")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as empty:
        os.environ.pop("TUNEGEMM_DB", None)
        os.environ |= {"TUNEGEMM_CACHE_DIR": empty, "XDG_DATA_HOME": empty}
        run(find_device(options.device), options)


def run(device: Device, options: argparse.Namespace) -> None:
    """Times all products, writes each row immediately and prints a line for each kind."""
    method = METHOD.format(rounds=options.rounds, turns=options.turns)
    name = "first_use_kinds.json" if options.kinds else "first_use.json"
    results = Results.of(options.out, device, name, method)
    backend = CudaBackend(device)
    backend.open()
    unseen = drawn(options.unseen, options.seed, options.most_rows)[options.skip :]
    groups = {"listed": some(shipped(device), options.listed, options.seed), "unseen": unseen}
    if options.kinds:
        groups = {name: [_of_kind(problem, name) for problem in unseen] for name in options.kinds.split(",")}
    of_each = (zip(groups, each, strict=True) for each in itertools.zip_longest(*groups.values()))
    products = [(name, problem) for name, problem in itertools.chain.from_iterable(of_each) if problem]
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in groups}
    for name, problem in within(options.within, products):
        rows[name].append(measure(problem, name == "listed", device, backend, options))
        results.put(rows[name][-1])
    for name, timed in rows.items():
        if ratios := [row["ratio"] for row in timed]:
            served, below = sum(row["served"] for row in timed), sum(ratio < 0.99 for ratio in ratios)
            means = f"geometric mean {geometric_mean(ratios):.4f} of torch.mm, worst {min(ratios):.4f}"
            print(f"{name}: {len(ratios)} products, {served} served, {means}, {below} under 0.99")
    print(f"written: {results.path}")


def shipped(device: Device) -> list[Problem]:
    """The bf16 products of one matrix each that have a shipped record of this GPU."""
    records = [record for record in read_shipped()[0] if record.fingerprint.device_name == device.name]
    results = {record.problem for record in records if record.problem == Problem.parse(record.problem.shape)}
    return sorted(results)


def some(problems: list[Problem], count: int, seed: int) -> list[Problem]:
    """So many of them, by chance, in their order."""
    return sorted(random.Random(seed).sample(problems, min(count, len(problems))))


def _of_kind(problem: Problem, name: str) -> Problem:
    """In torch's form: rows of fp8 operands are multiples of 16 bytes."""
    n, k = (-(-extent // 16) * 16 for extent in (problem.n, problem.k))
    return of_kind(f"{problem.m}x{n}x{k}", name, KINDS)


def drawn(count: int, seed: int, most_rows: int = MOST_ROWS) -> list[Problem]:
    """Untuned products."""
    chance = random.Random(seed)

    def extent() -> int:
        return chance.choice(DIMENSIONS) if chance.random() < 0.7 else 8 * chance.randint(32, 2048)

    return [
        Problem.parse(f"{round(2 ** chance.uniform(0, math.log2(most_rows)))}x{extent()}x{extent()}")
        for _ in range(count)
    ]


def measure(
    problem: Problem, listed: bool, device: Device, backend: Any, options: argparse.Namespace
) -> dict[str, Any]:
    """The row of one product."""
    selection = select(read_snapshot(), problem, device)
    why, served = selection.why, False
    if selection.options:
        try:
            find_object(selection.options[0], device)
            served = True
        except ArtifactError as error:
            why = str(error)
    first: list[float] = []
    call = product(problem)

    def ours(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *operands: torch.Tensor) -> Any:
        start = time.perf_counter()
        result = call(a, b, *operands) if problem.epilogue else matmul(a, b, out=out)
        first.append(1e3 * (time.perf_counter() - start))
        return result if problem.epilogue else None

    with warnings.catch_warnings():  # for every product that falls back; the row records it
        warnings.simplefilter("ignore", TunegemmWarning)
        for attempt in range(ATTEMPTS):
            results = interleave(
                problem, {"torch": torch_mm(problem), "tunegemm": ours}, backend, l2_bytes=device.l2_bytes,
                rounds=options.rounds, turns=options.turns, turn_ms=TURN_MS if served else 0.0, settle_s=0.3,
                seed=attempt + (crc32(problem.shape.encode()) >> 8),  # a different order of rounds
            )  # fmt: skip
            if results.noise <= NOISE:
                break
    backend.release()
    torchs, own = results.timings["torch"], results.timings["tunegemm"]
    return {
        **problem_fields(problem), "epilogue": problem.epilogue, "listed": listed, "served": served,
        "predicted": selection.outcome in ("predicted", "near"),
        "expected": next((round(each.expected, 4) for each in selection.offers if each.expected), None),
        "why": why, "torch_us": round(torchs.median_us, 3), "tunegemm_us": round(own.median_us, 3),
        "ratio": round(own.ratio_to(torchs), 4), "noise": round(results.noise, 5),
        "turn_ms": results.turn_ms, "first_ms": round(first[0], 1),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
