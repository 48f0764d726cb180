"""Fused epilogues at Llama-3-8B's shapes beside eager torch and torch.compile, one interleave per row.

    python -m benchmarks.epilogues                       # tunes what is not recorded
    python -m benchmarks.epilogues --rows swiglu         # rows whose name matches

Writes results/GPU/epilogues.json: per row `torch` (eager: cuBLAS, then a kernel for each operation),
`compile` (torch.compile: cuBLAS, the operations fused into one kernel), `max_autotune` (Inductor's Triton
templates with the operations in their epilogue, or what it finds faster) and `tunegemm_cute` (one kernel).
"""

from __future__ import annotations

import argparse
import re
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.peers import measure, tuned_seconds
from benchmarks.results import Results, geometric_mean, meta, peers_table, ratio, results_path
from tunegemm.describe.device import find_device
from tunegemm.describe.problem import Problem
from tunegemm.errors import TunegemmError

if TYPE_CHECKING:
    import torch

    from benchmarks.providers import Contender, Options, Provider
    from tunegemm.describe.device import Device

#: MLP up with a bias, gate and up together, MLP down and attention's output with the residual stream.
ROWS = tuple(
    Problem.parse(f"{m}x{extents}", epilogue=epilogue)
    for extents, epilogue in (
        ("14336x4096", "bias_n+gelu_tanh"),
        ("28672x4096", "swiglu"),
        ("4096x14336", "residual"),
        ("4096x4096", "residual"),
    )
    for m in (512, 4096)
)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; 2 for bad input or no GPU, with one line that says so."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.epilogues", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--rows", default="", help="regular expression on a row's text")
    parser.add_argument("--effort", default="quick", help="effort of tuning (default: quick)")
    parser.add_argument("--trials", type=int, help="candidates per row (default: the effort's)")
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds per row")
    parser.add_argument("--tune-cap", type=float, default=60.0, help="seconds a peer may tune one row")
    parser.add_argument("--out", type=Path, help="folder of the result file (default: results/GPU)")
    parser.add_argument("--db", type=Path, help="tuning database (default: TUNEGEMM_DB or the user's)")
    parser.add_argument("--device", default="cuda:0")
    options = parser.parse_args(arguments)
    try:
        run(find_device(options.device), options)
    except TunegemmError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def run(device: Device, options: argparse.Namespace) -> None:
    """Tunes and times every row, writes the file and prints the table."""
    from benchmarks.interleave import METHOD
    from benchmarks.providers import Options, family_best
    from tunegemm.measure.backend import CudaBackend
    from tunegemm.store import Database
    from tunegemm.tuning.tuner import Tuner

    providers: dict[str, Provider] = {
        "torch": eager,
        "compile": compiled("default"),
        "max_autotune": compiled("max-autotune-no-cudagraphs"),
        "tunegemm_cute": family_best("cute_sm90"),
    }
    results = Results(results_path(options.out, device, "epilogues.json"), meta(device, METHOD))
    backend = CudaBackend(device)
    backend.open()
    with ExitStack() as stack:
        tuner = stack.enter_context(Tuner(device, stack.enter_context(Database.open(options.db))))
        for problem in ROWS:
            if re.search(options.rows, str(problem)) is None:
                continue
            seconds = tuned_seconds(problem, tuner, options.effort, options.trials)
            settings = Options(options.tune_cap, options.db)
            row = measure(problem, device, backend, [*providers], settings, options.rounds, providers)
            results.put(row | {"tune_seconds": seconds})
            speeds = {name: ratio(row, name) for name in providers}
            print(problem, *(f"{name} {speed:.3f}" for name, speed in speeds.items() if speed), flush=True)
    print()
    print(peers_table(results.rows))
    for peer in ("compile", "max_autotune"):
        pairs = [(ratio(row, "tunegemm_cute"), ratio(row, peer)) for row in results.rows]
        mean = geometric_mean(ours / theirs for ours, theirs in pairs if ours and theirs)
        print(f"geometric mean of tunegemm_cute to {peer}: {mean:.3f}")
    print(f"written: {results.path}")


def eager(problem: Problem, device: Device, options: Options) -> list[Contender]:
    """What a torch user would write, operation by operation."""
    from benchmarks.providers import Contender
    from tunegemm.generate.cublaslt.eager import torch_mm

    return [Contender(torch_mm(problem))]


def compiled(mode: str) -> Provider:
    """The same through torch.compile."""

    def provider(problem: Problem, device: Device, options: Options) -> list[Contender]:
        import torch

        from benchmarks.providers import Contender, tuned
        from tunegemm.generate.cublaslt.eager import composed

        torch._dynamo.reset()
        function = torch.compile(composed(problem), mode=mode, dynamic=False, fullgraph=True)

        def run(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *operands: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = function(a, b, *operands)
            return result

        return [Contender(run, tune_seconds=tuned(run, problem, device, options))]

    return provider


if __name__ == "__main__":
    sys.exit(main())
