"""The families that run on every GPU since Ampere beside torch.mm, over 40 products, within a time.

    python -m benchmarks.portable --seconds 220           # a scratch database; compiles what it needs
    python -m benchmarks.portable --seconds 60 --shapes 4096x4096x4096,4096x4096x4097

Tunes each product over `triton`, `cute_sm80` and `cublaslt` with an equal share of what is left of the time,
then times the best kernel of each family beside torch.mm in one interleave. Writes results/GPU/portable.json
after each product: `failed` counts the candidates that failed, by stage, of which `wrong` means that a result
was wrong. The means are of products whose lines are whole vectors of 16 bytes, and of the others.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.command import command, parser_of
from benchmarks.results import Results, geometric_mean, meta, results_path
from tunegemm.describe.device import Device, find_device
from tunegemm.describe.problem import MAX_ALIGNMENT, Problem

FAMILIES = ("triton", "cute_sm80", "cublaslt")
#: Squares, projections of Llama-3-8B and 70B at prefill and decode, DeepSeek-V3's, tails of waves; then lines
#: that are no whole vectors: odd K, odd N, strides that TMA refuses.
SHAPES = (
    "4096x4096x4096", "8192x8192x8192", "2048x2048x2048", "1024x1024x1024", "512x512x512", "256x256x16384",
    "4096x6144x4096", "4096x4096x14336", "4096x28672x4096", "2048x6144x4096", "512x6144x4096",
    "512x4096x14336", "128x6144x4096", "128x28672x4096", "64x4096x4096", "16x6144x4096", "16x28672x4096",
    "1x4096x4096", "4096x2112x7168", "128x7168x16384", "4096x7168x2048", "2000x1000x4096",
    "8448x9216x256", "1024x1024x65536", "512x10240x8192", "64x57344x8192",
    "4096x4096x4095", "4096x4096x4097", "1024x1024x1001", "2048x2047x2048", "4097x4095x1001",
    "512x6144x4095", "128x6144x4099", "64x4096x4093", "16x4096x4101", "4096x4098x4096", "1000x1002x1002",
    "333x777x555", "8192x1001x1001", "256x32001x4096",
)  # fmt: skip
METHOD = (
    "tuned for an equal share of the time left, with at most so many trials, into a scratch database; then "
)


@command
def main(arguments: Sequence[str] | None = None) -> int | None:
    """1 where a kernel was wrong."""
    parser = parser_of("portable", __doc__)
    parser.add_argument("--seconds", type=float, default=220.0, help="of all together (default: %(default)g)")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="MxNxK,... (default: the forty)")
    parser.add_argument("--dtype", default="bf16", help="(default: %(default)s)")
    parser.add_argument(
        "--trials", type=int, default=24, help="candidates of a product (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds (default: %(default)s)")
    parser.add_argument("--db", type=Path, help="a tuning database to keep (default: a scratch one)")
    options = parser.parse_args(arguments)
    problems = [Problem.parse(shape, dtype=options.dtype) for shape in options.shapes.split(",")]
    return run(problems, find_device(options.device), options)


def run(problems: Sequence[Problem], device: Device, options: argparse.Namespace) -> int:
    """Tunes and times every product and writes the file; whether a kernel was wrong."""
    from benchmarks.interleave import METHOD as INTERLEAVE
    from benchmarks.peers import measure
    from benchmarks.providers import PROVIDERS, Options, family_best
    from tunegemm.measure.backend import CudaBackend
    from tunegemm.measure.outcome import Failure
    from tunegemm.store import Database
    from tunegemm.tuning.tuner import Tuner

    known = {"torch": PROVIDERS["torch"], "cublaslt": PROVIDERS["cublaslt"]}
    known |= {name: family_best(name) for name in FAMILIES if name not in known}
    deadline, wrong = time.monotonic() + options.seconds, 0
    with ExitStack() as stack:
        place = options.db or Path(stack.enter_context(TemporaryDirectory()), "portable.sqlite")
        database = stack.enter_context(Database.open(place))
        tuner = stack.enter_context(Tuner(device, database, families=list(FAMILIES)))
        backend = CudaBackend(device)
        backend.open()
        results = Results(
            results_path(options.out, device, "portable.json"), meta(device, METHOD + INTERLEAVE)
        )
        for index, problem in enumerate(problems):
            # Half of a product's share for its search: the final race and the interleave take the rest.
            share_s = max(deadline - time.monotonic(), 0.0) / (len(problems) - index)
            following = problems[index + 1] if index + 1 < len(problems) else None
            budget_s = max(share_s / 2, 0.2)
            found = tuner.tune(problem, trials=options.trials, budget_seconds=budget_s, following=following)
            failed = Counter(one.stage for one in found.outcomes if isinstance(one, Failure))
            row = measure(problem, device, backend, [*known], Options(0.0, place), options.rounds, known)
            row |= {"tune_seconds": round(found.seconds, 2), "failed": dict(failed)}
            wrong += failed["wrong"]
            results.summary = means(results.rows)
            results.put(row)
            print(f"[{index + 1}/{len(problems)}] {problem}: {brief(row)}", flush=True)
    results.summary = means(results.rows)
    results.put()
    print(results.summary["means"], f"wrong kernels: {wrong}", f"written: {results.path}", sep="\n")
    return int(wrong > 0)


def is_aligned(row: Mapping[str, Any]) -> bool:
    """Whether all lines of a row's product are whole vectors."""
    problem = Problem.parse(f"{row['m']}x{row['n']}x{row['k']}", dtype=row["dtype"], layout=row["layout"])
    return problem.alignment == MAX_ALIGNMENT and problem.n * 2 % MAX_ALIGNMENT == 0


def means(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The geometric mean of each family's ratios to torch.mm, of aligned products and of others."""
    ratios: dict[str, list[float]] = {}
    for row in rows:
        for name, timed in row["providers"].items():
            if name != "torch" and "ratio" in timed:
                ratios.setdefault(f"{name}, {'aligned' if is_aligned(row) else 'other'}", []).append(
                    timed["ratio"]
                )
    found = {name: [round(geometric_mean(each), 4), len(each)] for name, each in sorted(ratios.items())}
    return {"means": found}


def brief(row: Mapping[str, Any]) -> str:
    """A row in one line: each family's ratio, or why it has none."""
    words = [
        f"{name} {timed['ratio']:.3f}" if "ratio" in timed else f"{name}: {timed.get('skipped', 'failed')}"
        for name, timed in row["providers"].items()
        if name != "torch"
    ]
    return "  ".join([*words, *(f"{count} failed at {stage}" for stage, count in row["failed"].items())])


if __name__ == "__main__":
    sys.exit(main())
