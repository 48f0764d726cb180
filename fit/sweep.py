"""Records sweeps of this GPU, from which `replay:NAME` answers on machines without one.

    python -m fit.sweep --name h200 --shapes 4096x4096x4096 --shapes 512x6144x4096
    python -m fit.sweep --compile 640                  # without a GPU, into TUNEGEMM_CACHE_DIR
    python -m fit.sweep --name h100-drawn --compiled-only --trials 700 --shapes drawn

Every feasible kernel is measured at its model-best launch, and the whole launch grid on the leaders; with
--compiled-only of the kernels that ship or are in the store. `--shapes drawn` are those of `DRAWN`. If
lasting work lowers the chip's clocks, --compiled-only also times the first candidates of either order, the
measured one and the model's, in steady state, into NAME-steady. The files go to db/sweeps/NAME/; see
db/sweeps/README.md for their format. Products that have a file there are skipped.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from benchmarks import shapes
from benchmarks.command import command, parser_of
from tunegemm.compile.artifacts import ArtifactStore, digest
from tunegemm.compile.pool import CompilePool
from tunegemm.describe.device import Device, find_device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.errors import DeviceError
from tunegemm.generate import families
from tunegemm.measure.outcome import Measurement, Outcome
from tunegemm.measure.replay import sweep_path
from tunegemm.measure.settings import FINAL, Job
from tunegemm.model import rank as model
from tunegemm.store import packs
from tunegemm.tuning.kernels import Kernels
from tunegemm.tuning.progress import TuneResult
from tunegemm.tuning.tuner import Tuner

#: Recorded by default: squares, a projection, two wave tails, small K, and decode with a long K.
SHAPES = (
    "4096x4096x4096", "8192x8192x8192", "512x6144x4096", "4096x2112x7168", "8448x9216x256", "128x7168x16384",
)  # fmt: skip
#: For kernels drawn by chance: the model was not fitted to them, except for three of `SHAPES`.
DRAWN = (
    "16x4096x4096", "1024x1024x1024", "64x24576x1536", "128x7168x16384", "4096x4096x4096", "2048x8192x3584",
    "1x6144x4096", "32x28672x4096", "256x4096x14336", "512x6144x4096", "64x5120x25600", "1024x8192x1280",
    "3072x3072x3072", "4096x14336x4096", "4096x6144x4096", "8192x8192x8192",
)  # fmt: skip
#: How many feasible kernels to draw: for many rows and for few.
_DRAWN_FOR = "4096x4096x4096", "64x4096x4096"
#: Candidates of either order to time in steady state, and the settings.
_STEADY_OF_EITHER = 32
_STEADY = replace(FINAL, rounds=9, steady_groups=(8, 8), race_margin=10.0, interleave=2 * _STEADY_OF_EITHER)


@command
def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("fit.sweep", __doc__)
    parser.add_argument("--name", default="h200", help="of the recorded device")
    parser.add_argument(
        "--shapes", action="append", default=[], help="a group, MxNxK, a regular expression, or: drawn"
    )
    parser.add_argument("--trials", type=int, help="cut each sweep to so many candidates of a family")
    parser.add_argument("--compiled-only", action="store_true", help="only kernels that need no compiler")
    parser.add_argument(
        "--compile", type=int, metavar="N", help="measure nothing; compile N kernels by chance of either kind"
    )
    parser.add_argument("--budget", type=float, default=1e9, metavar="S", help="begin no product later")
    parser.add_argument("--out", type=Path, help="folder of the sweeps (default: db/sweeps)")
    options = parser.parse_args(arguments)
    if options.compile:
        compile_some(options.compile)
        return
    asked = [*options.shapes] or [*SHAPES]
    if "drawn" in asked:
        asked.remove("drawn")
        asked += DRAWN
    problems = shapes.select(asked)
    device = find_device(options.device)
    if not device.is_real:
        raise DeviceError(f"device {device.spec!r} measures nothing; record sweeps on cuda:N")
    record(problems, device, options)


def compile_some(count: int) -> None:
    """Compiles kernels of `cute_sm90` into the store, drawn from those of two products."""
    device = find_device("model:h200")
    kernels, family = Kernels(device, ["cute_sm90"]), families.generator("cute_sm90")
    keys = {}
    for shape in _DRAWN_FOR:
        problem = Problem.parse(shape)
        feasible = [prediction.candidate for prediction in kernels.ranked(problem, "cute_sm90").predictions]
        for candidate in random.Random(shape).sample(feasible, min(count, len(feasible))):
            key = family.kernel_key(problem, candidate, device)
            keys[digest(key)] = key
    with CompilePool(ArtifactStore(), shipped=packs.shipped()) as pool:
        waiting = [pool.submit("cute_sm90", key) for key in keys.values()]
        refused = sum(run.result().artifact is None for run in waiting)
    print(f"{len(keys)} kernels in {ArtifactStore().root}, {refused} do not compile")


def record(problems: list[Problem], device: Device, options: argparse.Namespace) -> None:
    """One file per problem, written as soon as its sweep is done. An interrupted sweep is not written."""
    from fit.sweep_files import write_sweep

    out = options.out or Path(__file__).parents[1] / "db" / "sweeps"
    started = time.monotonic()
    with Tuner(device, compiled_only=options.compiled_only) as tuner:
        for problem in problems:
            if sweep_path(out / options.name, problem).exists():
                continue
            if time.monotonic() - started > options.budget:
                print(f"{problem}: begins after {options.budget:g} s; run the same command again")
                return
            result = tuner.tune(problem, effort="exhaustive", trials=options.trials)
            if result.interrupted:
                print(f"{problem}: interrupted, not written", file=sys.stderr)
                return
            command = f"python -m fit.sweep --name {options.name} --shapes {problem.shape}"
            command += f" --trials {options.trials}" if options.trials is not None else ""
            command += " --compiled-only" if options.compiled_only else ""
            # A final race at the power cap was in steady state; such ratios compare with no other ratios.
            sweeps: dict[str, Sequence[Outcome]] = {
                options.name: [
                    outcome for outcome in result.outcomes if not getattr(outcome, "is_steady", False)
                ]
            }
            if options.compiled_only and result.best is not None and result.best.is_steady:
                sweeps[f"{options.name}-steady"] = in_steady_state(tuner, result)
            for name, outcomes in sweeps.items():
                path = write_sweep(
                    out, name, device, problem, outcomes, recorded_at=datetime.now(UTC), command=command
                )
                measured = sum(isinstance(outcome, Measurement) for outcome in outcomes)
                size = path.stat().st_size / 1000
                seconds = time.monotonic() - started
                print(f"{problem}: {measured} measured, {seconds:.0f} s, {path} ({size:.0f} kB)", flush=True)


def in_steady_state(tuner: Tuner, result: TuneResult) -> list[Outcome]:
    """Once more, alone: the first by measured ratio and the first by the model."""
    problem, device = result.problem, tuner.device
    screened = {
        outcome.candidate: outcome.ratio
        for outcome in result.outcomes
        if isinstance(outcome, Measurement)
        and not outcome.is_steady
        and families.get(outcome.candidate.family).compiled
    }
    by_ratio = sorted(screened, key=lambda candidate: -screened[candidate])
    ranked = [
        ranking.candidate for ranking in model.alternate_rankings(model.rank(problem, screened, device))
    ]
    chosen = dict.fromkeys([*by_ratio[:_STEADY_OF_EITHER], *ranked[:_STEADY_OF_EITHER]])
    measurer = tuner.measurer_for(problem)
    assert measurer is not None, "the tuning has measured"
    jobs = [Job(candidate, _object_of(tuner, problem, candidate)) for candidate in chosen]
    return [item for item in measurer.measure(problem, jobs, _STEADY) if getattr(item, "is_steady", True)]


def _object_of(tuner: Tuner, problem: Problem, candidate: Candidate) -> Path | None:
    key = families.generator(candidate.family).kernel_key(problem, candidate, tuner.device)
    artifact = tuner.pool.submit(candidate.family, key).result().artifact
    return None if artifact is None else artifact.path


if __name__ == "__main__":
    sys.exit(main())
