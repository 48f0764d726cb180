"""Ways to cut k, side by side: a kernel as it is, split in parts that meet in pairs or in a second kernel,
and stream-K, which gives every cluster as many k tiles.

    python -m benchmarks.splits              # writes results/GPU/splits.json, some minutes on one GPU
    python -m benchmarks.splits --shapes 512x512x65536,1536x1536x8192

Tiles and launches are given, not tuned: what the ways differ in is all that differs. Beside them torch.mm and
the best of the algorithms that cuBLASLt's heuristic names, which has a split-K of its own.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.contest import contest, hopper
from benchmarks.results import Results, meta, results_path
from tunegemm.describe.device import Device, find_device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.errors import TunegemmError

#: A tile that fills one wave of an H200 with so many parts, or that it fills badly.
WIDE = hopper("cooperative", (128, 256, 64), 4, (2, 1), 32, "along_m", 8)
SQUARE = hopper("cooperative", (128, 128, 64), 5, (1, 2), 32, "along_m", 16)
TURNS = hopper("pingpong", (128, 128, 64), 6, (1, 1), 32, "along_m", 8)
NARROW = hopper("cooperative", (128, 64, 64), 8, (1, 2), 32)
#: For 16 rows: swapped, they are the columns of a tile.
FLAT = hopper("cooperative", (64, 16, 128), 9, (1, 1), 16, swap_ab=True)

#: Shape -> kernels and the counts of parts in which each is split.
SHAPES: dict[str, tuple[tuple[Candidate, tuple[int, ...]], ...]] = {
    "512x512x65536": ((SQUARE, (4, 8)), (TURNS, (8,))),
    "512x4096x14336": ((SQUARE, (2,)), (WIDE, (2,))),
    "256x4096x14336": ((SQUARE, (2, 4)), (NARROW, (2,))),
    "128x4096x14336": ((SQUARE, (3, 4, 8)), (NARROW, (2, 4))),
    "16x4096x14336": ((FLAT, (2, 4)),),
    "4096x4096x4096": ((WIDE, ()), (TURNS, ())),
    "3000x3000x4096": ((WIDE, ()), (TURNS, ())),
    "2304x2304x8192": ((WIDE, ()), (TURNS, ())),
    "1536x1536x8192": ((WIDE, (2,)), (TURNS, ())),
}


def ways(kernel: Candidate, splits: tuple[int, ...]) -> dict[str, Candidate]:
    """The kernel whole; with each split in both ways; as stream-K in both ways."""
    streaming = Candidate.make(
        kernel.family,
        dict(kernel.compile_params) | {"tile_scheduler": "stream_k"},
        dict(kernel.launch_params),
    )
    launches = {"whole": kernel.with_launch(reduction="pairs")}
    for reduction, words in (("pairs", "pairs"), ("second_kernel", "second kernel")):
        launches |= {
            f"{parts} parts, {words}": kernel.with_launch(split_k=parts, reduction=reduction)
            for parts in splits
        }
        launches[f"stream-K, {words}"] = streaming.with_launch(reduction=reduction)
    tile = f"{kernel['schedule']} {kernel['tile_m']}x{kernel['tile_n']}"
    return {f"{tile}, {name}": candidate for name, candidate in launches.items()}


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; 2 for bad input or no GPU, with one line that says so."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.splits", description=" ".join((__doc__ or "").split("\n\n")[0].split())
    )
    parser.add_argument("--shapes", help=f"separated by commas (default: {','.join(SHAPES)})")
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds")
    parser.add_argument("--out", type=Path, help="folder of the result file (default: results/GPU)")
    parser.add_argument("--device", default="cuda:0")
    options = parser.parse_args(arguments)
    shapes = options.shapes.split(",") if options.shapes else list(SHAPES)
    if unknown := [shape for shape in shapes if shape not in SHAPES]:
        print(f"no kernels for {', '.join(unknown)}; there are some for {', '.join(SHAPES)}", file=sys.stderr)
        return 2
    try:
        run(find_device(options.device), shapes, options)
    except TunegemmError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def run(device: Device, shapes: list[str], options: argparse.Namespace) -> None:
    """Times every shape, writing after each."""
    from benchmarks.interleave import METHOD
    from tunegemm.compile.artifacts import ArtifactStore
    from tunegemm.compile.pool import CompilePool
    from tunegemm.measure.backend import CudaBackend

    results = Results(results_path(options.out, device, "splits.json"), meta(device, METHOD))
    backend = CudaBackend(device)
    backend.open()
    with CompilePool(ArtifactStore()) as pool:
        for shape in shapes:
            groups = {
                name: {name: candidate}
                for kernel, splits in SHAPES[shape]
                for name, candidate in ways(kernel, splits).items()
            }
            row = contest(Problem.parse(shape), groups, device, backend, pool, rounds=options.rounds)
            results.put(row)
            print(shape)
            for name, found in sorted(row["providers"].items(), key=lambda item: -item[1]["ratio"]):
                print(f"  {found['ratio']:6.3f} {found['median_us']:9.2f} us  {name}: {found['label']}")
            for name, reason in row["skipped"].items():
                print(f"  {name}: {reason}")
            sys.stdout.flush()
    print(f"written: {results.path}")


if __name__ == "__main__":
    sys.exit(main())
