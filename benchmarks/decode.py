"""Times the projections of a Llama-3-8B layer at every M up to 256, of which few are tuned.

    python -m benchmarks.decode                          # M = 1, 2, ... 256, from the records there are
    python -m benchmarks.decode --tune 16,64,128,256     # first tunes these M where they are not confirmed
    python -m benchmarks.decode --step 16 --shapes 6144x4096

A server that batches what comes meets each of these M. What `tunegemm.matmul` makes of a problem (a hit, a
near hit, or torch's) stands in its row. Every M is one interleave of CUDA graphs; one where tunegemm seems
slower by more than 1 % is timed again for longer, and the second result is kept, whatever it is. Writes
results/GPU/decode.json after each projection.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.interleave import METHOD as INTERLEAVE
from benchmarks.interleave import interleave
from benchmarks.results import Results, geometric_mean, meta, problem_fields, results_path
from tunegemm.describe.device import Device, find_device
from tunegemm.describe.problem import Problem
from tunegemm.errors import ProblemError, TunegemmError, TunegemmWarning

if TYPE_CHECKING:
    from tunegemm.measure.backend import Backend

#: N x K of a Llama-3-8B layer: qkv, o, gate and up, down.
PROJECTIONS = ("6144x4096", "4096x4096", "28672x4096", "4096x14336")
LARGEST_M = 256
#: torch may be ahead by this much.
TOLERATED = 0.99
METHOD = (
    f"{INTERLEAVE}; of {{rounds}} rounds with replays of 0.4 ms, after a second of dense work for each "
    f"projection; where the ratio is under {TOLERATED}, timed anew with 31 rounds of 1 ms, and that is kept"
)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; 2 for bad input or no GPU, with one line that says so."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.decode", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--shapes", default=",".join(PROJECTIONS), help="NxK,...; default: %(default)s")
    parser.add_argument("--step", type=int, default=1, help="between values of M (default: 1)")
    parser.add_argument("--tune", default="", metavar="M,M", help="tune these M first, if not confirmed")
    parser.add_argument("--effort", default="quick", help="of --tune (default: quick)")
    parser.add_argument("--rounds", type=int, default=11, help="interleaved rounds per problem")
    parser.add_argument("--out", type=Path, help="folder of the result file (default: results/GPU)")
    parser.add_argument("--device", default="cuda:0")
    options = parser.parse_args(arguments)
    try:
        layers = {text: problems(text, options.step) for text in options.shapes.split(",")}
        anchors = [m for m in options.tune.split(",") if m]
        wanted = [Problem.parse(f"{m}x{text}") for text in layers for m in anchors]
        if options.rounds < 5:
            raise ProblemError(f"--rounds {options.rounds}: at least 5, and 11 for figures to keep")
        run(layers, wanted, find_device(options.device), options)
    except TunegemmError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def problems(projection: str, step: int) -> list[Problem]:
    """The products of a projection ``NxK`` for M = 1 or `step`, and every `step` further up to 256."""
    if not 1 <= step <= LARGEST_M:
        raise ProblemError(f"--step {step}: between 1 and {LARGEST_M}")
    return [Problem.parse(f"{m}x{projection}") for m in range(step, LARGEST_M + 1, step)]


def run(
    layers: dict[str, list[Problem]], anchors: Sequence[Problem], device: Device, options: argparse.Namespace
) -> None:
    """Tunes the anchors, times all problems, writes their rows and prints what came of each projection."""
    from tunegemm.measure.backend import CudaBackend

    path = results_path(options.out, device, "decode.json")
    results = Results(path, meta(device, METHOD.format(rounds=options.rounds)))
    if anchors:
        tune(anchors, device, options.effort)
    prepare(layers, device)
    backend = CudaBackend(device)
    backend.open()
    started = time.perf_counter()
    for text, wanted in layers.items():
        rows = measure(wanted, device, backend, options.rounds)
        results.put(*rows)
        print(f"{text}: {summary(rows)} ({time.perf_counter() - started:.0f} s so far)", flush=True)
    print(f"all: {summary(results.rows)}")
    print(f"written: {results.path}")


def tune(anchors: Sequence[Problem], device: Device, effort: Any) -> None:
    """Gives each problem a confirmed record."""
    from tunegemm.store import Database
    from tunegemm.store.layers import read_records
    from tunegemm.store.validity import judge_stored
    from tunegemm.tuning.tuner import Tuner

    known = {
        record.problem
        for record in read_records()[0]
        if record.confirmed and judge_stored(record, device.fingerprint).usable
    }
    with Database.open() as database, Tuner(device, database) as tuner:
        for problem in anchors:
            if problem not in known:
                result = tuner.tune(problem, effort=effort)
                said = f"{result.best.ratio:.3f} x torch.mm" if result.best else "nothing measured"
                print(f"tuned {problem} in {result.seconds:.1f} s: {said}", flush=True)


def prepare(layers: dict[str, list[Problem]], device: Device) -> None:
    """Compiles the kernels of shipped records of these projections, which come without any."""
    from tunegemm import serve as dispatch
    from tunegemm.store import packing
    from tunegemm.store.layers import read_records
    from tunegemm.store.validity import judge_stored

    extents = {(wanted[0].n, wanted[0].k) for wanted in layers.values()}
    records = [
        record
        for record in read_records()[0]
        if (record.problem.n, record.problem.k) in extents and judge_stored(record, device.fingerprint).usable
    ]
    print(f"{packing.provide(records).compiled} kernels compiled", flush=True)
    dispatch.refresh()


def measure(wanted: Sequence[Problem], device: Device, backend: Backend, rounds: int) -> list[dict[str, Any]]:
    """The rows of one projection."""
    from tunegemm import serve as dispatch
    from tunegemm.choose.selection import select
    from tunegemm.choose.snapshot import read_snapshot

    def ours(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        dispatch.matmul(a, b, out=out)

    def theirs(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        torch.mm(a, b, out=out)

    snapshot = read_snapshot()
    rows: list[dict[str, Any]] = []
    for problem in wanted:
        selection = select(snapshot, problem, device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TunegemmWarning)  # of every M that is torch's: the row says it
            settle_s = 0.0 if rows else 1.0
            for plan in ((rounds, 0.4, settle_s), (31, 1.0, 0.0)):
                found = interleave(
                    problem, {"torch": theirs, "tunegemm": ours}, backend, l2_bytes=device.l2_bytes,
                    rounds=plan[0], min_replay_ms=plan[1], settle_s=plan[2], turn_ms=0,
                )  # fmt: skip
                ratio = found.timings["tunegemm"].ratio_to(found.timings["torch"])
                if ratio >= TOLERATED:
                    break
        backend.release()
        record = selection.options[0] if selection.options else None
        rows.append(
            problem_fields(problem)
            | {
                "outcome": selection.outcome,
                "of": record.problem.shape if record else None,
                "kernel": str(record.candidate) if record else None,
                "torch_us": round(found.timings["torch"].median_us, 3),
                "tunegemm_us": round(found.timings["tunegemm"].median_us, 3),
                "ratio": round(ratio, 4),
                "noise": round(found.noise, 5),
                "rounds": found.rounds,
            }
        )
    return rows


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """One line: how the problems were served, and how their speeds compare with torch's."""
    counts = Counter(row["outcome"] for row in rows)
    served = ", ".join(
        f"{counts[name]} {name}" for name in ("hit", "predicted", "near", "miss") if counts[name]
    )
    ratios = [row["ratio"] for row in rows]
    slower = sum(ratio < TOLERATED for ratio in ratios)
    near = [row["ratio"] for row in rows if row["outcome"] in ("predicted", "near")]
    text = (
        f"{len(rows)} products ({served}), geometric mean {geometric_mean(ratios):.3f} of torch's speed, "
        f"{slower} slower by more than 1 %, worst {min(ratios):.3f}"
    )
    return text + (f"; near hits alone {geometric_mean(near):.3f}" if near else "")


if __name__ == "__main__":
    sys.exit(main())
