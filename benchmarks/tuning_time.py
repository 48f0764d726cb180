"""How long tuning takes and what memory it needs: first shape cold, further ones with a warm object store.

    python -m benchmarks.tuning_time                             # 4096x4096x4096 cold, the others warm
    python -m benchmarks.tuning_time --cold 1024x1024x1024 --shapes llama-3-8b --effort full

Works in temporary folders: nothing is read from or written to the user's database and object store.
Writes results/GPU/tuning_time.json. Columns beside the shape's: `cold_s` (nothing compiled, workers not
started) or `warm_s` (only kernels that are in the store are tried, as with `tunegemm tune --compiled-only`;
`first_s` is the time before that, when only the shapes before it had been tuned); `measured` candidates,
`compiled` kernels (`first_compiled` in that first time), peak `host_rss_mb` of the tuner itself,
`children_rss_mb` of its workers together, `gpu_peak_mb`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import shapes
from benchmarks.footprint import Footprint
from benchmarks.results import Results, meta, problem_fields, results_path
from tunegemm.describe.device import Device, find_device
from tunegemm.describe.problem import Problem
from tunegemm.errors import TunegemmError
from tunegemm.measure.outcome import Measurement

if TYPE_CHECKING:
    from tunegemm.search.budget import Effort
    from tunegemm.tuning.tuner import Tuner

METHOD = (
    "wall time of Tuner.tune, final race included; cold adds the start of the workers; warm tries kernels "
    "of the store alone; each shape with an empty database; host memory as proportional set size"
)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; 2 for bad input or no GPU, with one line that says so."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tuning_time", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "--cold", default="4096x4096x4096", help="the first shape, tuned with nothing compiled"
    )
    parser.add_argument(
        "--shapes", action="append", default=[], help="further shapes: group, MxNxK or pattern"
    )
    parser.add_argument("--effort", default="quick")
    parser.add_argument("--workers", type=int, help="compile workers (default: by cores and memory)")
    parser.add_argument("--out", type=Path, help="folder of the result file (default: results/GPU)")
    parser.add_argument("--device", default="cuda:0")
    options = parser.parse_args(arguments)
    try:
        cold = Problem.parse(options.cold)
        further = [problem for problem in shapes.select(options.shapes) if problem != cold]
        device = find_device(options.device)
        results = Results(results_path(options.out, device, "tuning_time.json"), meta(device, METHOD))
        run(cold, further, device, options.effort, options.workers, results)
    except TunegemmError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def run(
    cold: Problem,
    further: list[Problem],
    device: Device,
    effort: Effort,
    workers: int | None,
    results: Results,
) -> None:
    """Tunes `cold` with nothing compiled, then each of `further` twice; writes their rows."""
    with tempfile.TemporaryDirectory(prefix="tunegemm-") as folder:
        root = Path(folder)
        row = _timed(cold, device, effort, workers, root, None)
        row["cold_s"] = row.pop("seconds")
        _put(results, row)
        from tunegemm.tuning.tuner import Tuner

        with Tuner(device, workers=workers, cache=root) as tuner:
            for problem in further:
                first = _timed(problem, device, effort, workers, root, tuner)
                tuner.compiled_only = True
                row = _timed(problem, device, effort, workers, root, tuner)
                tuner.compiled_only = False
                row["warm_s"] = row.pop("seconds")
                row |= {"first_s": first["seconds"], "first_compiled": first["compiled"]}
                _put(results, row)


def _timed(
    problem: Problem, device: Device, effort: Effort, workers: int | None, root: Path, tuner: Tuner | None
) -> dict[str, Any]:
    """One tuning with an empty database; without a `tuner` its start and end are part of the time."""
    from tunegemm.store import Database
    from tunegemm.tuning.tuner import Tuner

    with (
        tempfile.TemporaryDirectory(dir=root) as folder,
        Database.open(Path(folder) / "tuning.sqlite") as database,
        Footprint(device if device.is_real else None) as footprint,
    ):
        start = time.perf_counter()
        if tuner is None:
            with Tuner(device, database, workers=workers, cache=root) as own:
                result = own.tune(problem, effort=effort)
        else:
            tuner.database = database
            result = tuner.tune(problem, effort=effort)
        seconds = time.perf_counter() - start
    measured = {outcome.candidate for outcome in result.outcomes if isinstance(outcome, Measurement)}
    return problem_fields(problem) | {
        "effort": effort,
        "measured": len(measured),
        "failed": sum(not isinstance(outcome, Measurement) for outcome in result.outcomes),
        "compiled": result.compiled,
        "seconds": round(seconds, 2),
        "best_ratio": round(result.best.ratio, 4) if result.best else None,
        "best": result.labels.get(result.best.candidate.digest, "") if result.best else "",
        "host_rss_mb": round(footprint.host_mb),
        "children_rss_mb": round(footprint.children_mb),
        "gpu_peak_mb": round(footprint.gpu_mb),
    }


def _put(results: Results, row: dict[str, Any]) -> None:
    results.put(row)
    seconds = (
        f"cold {row['cold_s']} s" if "cold_s" in row else f"first {row['first_s']} s, warm {row['warm_s']} s"
    )
    print(
        f"{row['m']}x{row['n']}x{row['k']} {row['effort']}: {seconds}, {row['measured']} measured, "
        f"{row['compiled']} compiled, host {row['host_rss_mb']} MB, GPU {row['gpu_peak_mb']} MB",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
