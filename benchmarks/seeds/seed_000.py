"""The article's warp-specialized kernel on this GPU: 8192^3 bf16, fp32 output, tile 128x256x64, 4 stages.

    python -m benchmarks.seeds.seed_000            # writes results/GPU/seed-000.json

Without and with a 2x1 cluster, on 128 CTAs and on all, stored from registers and through shared memory by
TMA: eight launches of our Hopper generator, torch.mm and cuBLASLt's best in one interleave. The article
reports 643 TFLOP/s without and 658 with a cluster, on an H100, with 128 CTAs and stores from registers.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

from benchmarks.contest import contest, hopper
from benchmarks.results import Results, meta, results_path
from tunegemm.describe.device import Device, find_device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.errors import TunegemmError

PROBLEM = Problem.parse("8192x8192x8192", dtype="bf16", out_dtype="fp32")
#: TFLOP/s in the article, by cluster.
ARTICLE = {(1, 1): 643, (2, 1): 658}


def contenders() -> dict[str, dict[str, Candidate]]:
    """Each launch is a group of its own: nothing is picked."""
    named = {}
    for cluster, (epi_n, stores), (ctas, count) in itertools.product(
        ARTICLE, ((0, "registers"), (32, "TMA")), (("balanced", "128 CTAs"), ("all", "all CTAs"))
    ):
        name = f"cluster {cluster[0]}x{cluster[1]}, {count}, stores by {stores}"
        named[name] = {
            name: hopper("cooperative", (128, 256, 64), 4, cluster, epi_n, swizzle_size=4, ctas=ctas)
        }
    return named


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; 2 for bad input or no GPU, with one line that says so."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.seeds.seed_000", description=(__doc__ or "").split("\n")[0]
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
    """Times the launches, writes the row and prints it."""
    from benchmarks.interleave import METHOD
    from tunegemm.compile.artifacts import ArtifactStore
    from tunegemm.compile.pool import CompilePool
    from tunegemm.measure.backend import CudaBackend

    results = Results(results_path(options.out, device, "seed-000.json"), meta(device, METHOD))
    backend = CudaBackend(device)
    backend.open()
    with CompilePool(ArtifactStore()) as pool:
        row = contest(PROBLEM, contenders(), device, backend, pool, rounds=options.rounds)
    article = {f"cluster {m}x{n}": tflops for (m, n), tflops in ARTICLE.items()}
    results.put(row | {"article_tflops": article})
    for name, provider in row["providers"].items():
        print(f"{name}: {provider['tflops']} TFLOP/s, {provider['ratio']} of torch.mm")
    print(f"written: {results.path}")


if __name__ == "__main__":
    sys.exit(main())
