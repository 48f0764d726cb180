"""Records exhaustive sweeps of this GPU: what `replay:NAME` answers with on machines that have none.

    python -m benchmarks.sweep --name h200 --shapes 4096x4096x4096 --shapes 512x6144x4096

Every feasible kernel is measured at its model-best launch, and the whole launch grid on the leaders. The
files go to db/sweeps/NAME/; see db/sweeps/README.md for their format.
"""

from __future__ import annotations

import argparse
import sys
from datetime import UTC, datetime
from pathlib import Path

from benchmarks import shapes
from tunegemm.describe.device import Device, find_device
from tunegemm.describe.problem import Problem
from tunegemm.errors import DeviceError, TunegemmError
from tunegemm.measure.outcome import Measurement

#: Recorded by default: squares, a projection, two wave tails, small K, and decode with a long K.
SHAPES = (
    "4096x4096x4096", "8192x8192x8192", "512x6144x4096", "4096x2112x7168", "8448x9216x256", "128x7168x16384",
)  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; 2 for bad input or no GPU, with one line that says so."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sweep", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--name", default="h200", help="of the recorded device")
    parser.add_argument(
        "--shapes", action="append", default=[], help="a group, MxNxK or a regular expression"
    )
    parser.add_argument("--trials", type=int, help="cut each sweep to so many candidates")
    parser.add_argument("--out", type=Path, help="folder of the sweeps (default: db/sweeps)")
    parser.add_argument("--device", default="cuda:0")
    options = parser.parse_args(arguments)
    try:
        problems = shapes.select(options.shapes or list(SHAPES))
        device = find_device(options.device)
        if not device.is_real:
            raise DeviceError(f"device {device.spec!r} measures nothing; record sweeps on cuda:N")
        out = options.out or Path(__file__).parents[1] / "db" / "sweeps"
        record(problems, device, options.name, out, options.trials)
    except TunegemmError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def record(problems: list[Problem], device: Device, name: str, out: Path, trials: int | None) -> None:
    """One file per problem, written as soon as its sweep is done. An interrupted sweep is not written."""
    from benchmarks.sweep_files import write_sweep
    from tunegemm.tuning.tuner import Tuner

    with Tuner(device) as tuner:
        for problem in problems:
            result = tuner.tune(problem, effort="exhaustive", trials=trials)
            if result.interrupted:
                print(f"{problem}: interrupted, not written", file=sys.stderr)
                return
            command = f"python -m benchmarks.sweep --name {name} --shapes {problem.shape}"
            if trials is not None:
                command += f" --trials {trials}"
            path = write_sweep(
                out, name, device, problem, result.outcomes, recorded_at=datetime.now(UTC), command=command
            )
            measured = sum(isinstance(outcome, Measurement) for outcome in result.outcomes)
            size = path.stat().st_size / 1000
            print(
                f"{problem}: {measured} measured, {result.seconds:.0f} s, {path} ({size:.0f} kB)", flush=True
            )


if __name__ == "__main__":
    sys.exit(main())
