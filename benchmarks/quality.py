"""What a quick tuning finds, beside what the search of 2026-11-22 found, which took 40 to 97 s a product.

    python -m benchmarks.quality                   # on a GPU; some four minutes

The winners of that day's default search are in winners-2026-11-22.json: records of an H200, of 20 products
(commit 1b9c274). Each product is tuned anew by `quick`, without records to begin with, and the two winners
then race each other and torch.mm, at the power cap in steady state. Writes results/GPU/quality.json: a row
`{m, n, k, at_cap, ratio, quick, before, ...}` each, where `ratio` is how many times as fast the quick
tuning's winner is, by the median over the race's rounds; 1 where both are the same kernel and launch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.results import Results, geometric_mean, meta, problem_fields, results_path
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.errors import TunegemmError
from tunegemm.generate import families
from tunegemm.measure.outcome import Measurement
from tunegemm.tuning import begin
from tunegemm.tuning.run import label
from tunegemm.tuning.tuner import Tuner, open_gpu

WINNERS = Path(__file__).with_name("winners-2026-11-22.json")
METHOD = (
    "each product tuned by quick with the kernels that ship and without records, then a race of both winners "
    "and torch.mm as a final race is, full; ratio: median over the rounds that both were in"
)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; 2 for bad input or no GPU, with one line that says so."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--winners", type=Path, default=WINNERS)
    parser.add_argument("--budget", type=float, default=280, help="seconds; begin no product later than that")
    parser.add_argument("--out", type=Path, help="folder of the result file (default: results/GPU)")
    parser.add_argument("--device", default="cuda:0")
    options = parser.parse_args(arguments)
    until = time.monotonic() + options.budget
    # No record tells the search where to begin.
    begin.read_texts = lambda: ([], [])  # type: ignore[attr-defined]
    try:
        device = open_gpu(options.device)
        results = Results(results_path(options.out, device, "quality.json"), meta(device, METHOD))
        with Tuner(device) as tuner:
            for one in json.loads(options.winners.read_text()):
                problem = Problem.parse(one["shape"])
                if results.find(problem_fields(problem)) or time.monotonic() > until:
                    continue
                before = families.completed(Candidate.from_json(json.dumps(one["candidate"])))
                row = problem_fields(problem) | raced(tuner, problem, before)
                results.summary = summary([*results.rows, row])
                results.put(row)
                print(json.dumps(row), flush=True)
    except (TunegemmError, OSError, ValueError, KeyError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{results.summary}; written: {results.path}")
    return 0


def raced(tuner: Tuner, problem: Problem, before: Candidate) -> dict[str, Any]:
    """A product's row."""
    found = tuner.tune(problem)
    if found.best is None:
        return {"ratio": None, "note": found.note}
    quick = found.best.candidate
    row = {
        "at_cap": found.best.is_steady, "quick": label(quick), "before": label(before),
        "measured": len({one.candidate for one in found.outcomes}), "seconds": round(found.seconds, 2),
    }  # fmt: skip
    if quick == before:
        return row | {"ratio": 1.0}
    outcomes = tuner.race(problem, [quick, before]).outcomes
    times = {one.candidate: one for one in outcomes if isinstance(one, Measurement)}
    if before not in times or quick not in times:
        return row | {
            "ratio": None,
            "note": "; ".join(str(one) for one in outcomes if one not in times.values()),
        }
    ratios = [old / new for old, new in zip(times[before].samples_us, times[quick].samples_us, strict=False)]
    return row | {
        "ratio": round(statistics.median(ratios), 4),
        "quick_to_torch": round(times[quick].ratio, 4),
        "before_to_torch": round(times[before].ratio, 4),
        "rounds": len(ratios),
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Over all products that both have a winner for."""
    ratios = [row["ratio"] for row in rows if row["ratio"] is not None]
    if not ratios:
        return {}
    return {
        "products": len(ratios), "geometric_mean": round(geometric_mean(ratios), 4), "worst": min(ratios),
        "under_0985": sum(ratio < 0.985 for ratio in ratios),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
