"""simplegemm's sweep on this GPU: 8448x9216xK for K = 64 to 2048 by 64, bf16.

    python -m benchmarks.seeds.seed_004            # writes results/GPU/seed-004.json
    python -m benchmarks.seeds.seed_004 --ks 256,512 --turns 7

The article's kernel (pingpong, tile 128x128x64, one CTA per cluster, 6 stages), the best of a list of our
own, torch.mm (cuBLAS) and the best of cuBLASLt's algorithms, in one interleave per K. "The best" is picked
per K in that very interleave, ours from 12 and cuBLASLt's from all that its heuristic names.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from benchmarks.contest import contest, hopper
from benchmarks.results import Results, meta, results_path
from tunegemm.describe.device import Device, find_device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.errors import TunegemmError

M, N, KS = 8448, 9216, range(64, 2049, 64)
ARTICLE = hopper("pingpong", (128, 128, 64), 6, (1, 1), 32)


def ours() -> list[Candidate]:
    """Tiles that tuning put ahead at K = 256 and 2048, in both kinds of timing, and the article's."""
    wide, tall, square, large = (128, 192, 64), (192, 128, 64), (128, 128, 64), (256, 192, 64)
    return [
        ARTICLE,
        *(hopper("pingpong", square, 6, cluster, 32, swizzle_size=4) for cluster in ((2, 1), (1, 2))),
        *(hopper("pingpong", wide, 5, cluster, 32, "along_n", 4) for cluster in ((1, 1), (2, 1))),
        *(hopper("pingpong", wide, 4, cluster, 64) for cluster in ((2, 1), (1, 2))),
        hopper("pingpong", wide, 4, (2, 1), 32, "along_m", 16, cluster_order="gpc"),
        hopper("pingpong", tall, 4, (1, 2), 64),
        hopper("pingpong", (128, 160, 64), 5, (2, 1), 32),
        hopper("cooperative", large, 3, (1, 2), 64, "along_m", 8, cluster_order="gpc"),
        hopper("cooperative", (256, 128, 64), 4, (1, 2), 64, "along_n", 8, cluster_order="gpc"),
    ]


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; 2 for bad input or no GPU, with one line that says so."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.seeds.seed_004", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--ks", help=f"K,... (default: {KS[0]} to {KS[-1]} by {KS.step})")
    parser.add_argument("--rounds", type=int, default=11, help="interleaved rounds per K")
    parser.add_argument("--turns", type=int, default=3, help="steady-state rounds, at the power cap")
    parser.add_argument("--out", type=Path, help="folder of the result file (default: results/GPU)")
    parser.add_argument("--device", default="cuda:0")
    options = parser.parse_args(arguments)
    try:
        options.ks = [int(k) for k in options.ks.split(",")] if options.ks else list(KS)
    except ValueError:
        parser.error(f"--ks {options.ks} is no list of numbers; use for example --ks 64,128")
    try:
        run(find_device(options.device), options)
    except TunegemmError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def run(device: Device, options: argparse.Namespace) -> None:
    """Times every K, writing after each."""
    from benchmarks.interleave import METHOD
    from tunegemm.compile.artifacts import ArtifactStore
    from tunegemm.compile.pool import CompilePool
    from tunegemm.measure.backend import CudaBackend

    results = Results(results_path(options.out, device, "seed-004.json"), meta(device, METHOD))
    backend = CudaBackend(device)
    backend.open()
    groups = {
        "pp128x128x64": {"the article's": ARTICLE},
        "tunegemm_cute": {f"ours {i}": candidate for i, candidate in enumerate(ours())},
    }
    ratios = []
    with CompilePool(ArtifactStore()) as pool:
        for k in options.ks:
            problem = Problem(M, N, k)
            # The chip has been busy with the K before: its clocks have settled.
            row = contest(
                problem, groups, device, backend, pool,
                rounds=options.rounds, turns=options.turns, settle_s=0.2,
            )  # fmt: skip
            results.put(row)
            providers = row["providers"]
            ratios.append(providers["tunegemm_cute"]["ratio"])
            said = ", ".join(
                f"{name} {one['tflops']} ({one['ratio']:.3f})" for name, one in providers.items()
            )
            print(f"K = {k}: {said}", flush=True)
    print(f"geometric mean of tunegemm_cute to torch.mm: {statistics.geometric_mean(ratios):.3f}")
    print(f"written: {results.path}")


if __name__ == "__main__":
    sys.exit(main())
