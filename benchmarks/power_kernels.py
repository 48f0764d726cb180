"""Whether the model's joules are those of our own kernels: 60 launches on large products at the power cap.

    python -m benchmarks.power_kernels              # writes results/GPU/power_kernels.json, some two minutes
    python -m benchmarks.power_kernels --pairs      # the launches alone; needs no GPU
    python -m benchmarks.power_kernels --count FILE     # the bytes that each launch of that file really moves
    python -m benchmarks.power_kernels --summary FILE   # predictions and summary anew, of measured joules

Each launch runs alone in steady state while NVML's energy counter is read. The prediction is the sum of the
model's terms (tunegemm/generate/energy.py) at the clock and the time that were measured: what is tested are
the bytes and their joules, not the time. Nothing is fitted to these rows. A run that is cut short keeps its
rows, and goes on where it is run again.

--count tells bytes that the model's formulas miss from bytes that cost more than its table says: Nsight
Compute (`ncu`, on PATH) counts them, and the row has its joules once more by these (`counted_mj`), with the
bytes that the model says (`told`) and those that were counted (`counted`).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.large_kernels import Launches, Product, launches, roof_tflops, table_of, told_bytes
from benchmarks.power_roof import LAUNCH_MS, Chip, counted_bytes, counted_kernels, state
from benchmarks.results import Results, meta, opened, results_path
from tunegemm.describe.device import Device, find_device
from tunegemm.describe.problem import Problem
from tunegemm.errors import MeasureError, TunegemmError
from tunegemm.generate import energy, families
from tunegemm.generate.cublaslt import TORCH_MM
from tunegemm.generate.terms import Floats

if TYPE_CHECKING:
    from tunegemm.measure.race import Replay

METHOD = (
    "kernels of db/records and db/selector.toml as they ship compiled, and torch.mm, each in a CUDA graph "
    "over operand sets that together pass 3x the L2, normal(0, 1) in bf16, checked against fp32; each alone, "
    "replays of some {launch_ms:.0f} ms without a pause: first {warm_s} s, then from one step of NVML's "
    "energy counter to another at least {window_s} s later; clock: mean of NVML's over that window; "
    "predicted: the model's terms at that clock and the measured time; predicted_us: the model's time at the "
    "model's clock"
)
SHAPES = (
    "8192x8192x8192", "4096x28672x4096", "4096x14336x4096", "4096x4096x14336", "8448x9216x2048",
    "2048x7168x8192", "4096x6144x4096", "4096x4096x4096", "8192x3584x3584", "6144x6144x6144",
)  # fmt: skip
#: Launches of a product, and the most joules of the model's that one may have, relative to the fewest.
KERNELS, MOST_MJ = 6, 1.25
#: What tells kernels apart, beside the family.
_FEATURES = ("tile_m", "tile_n", "cluster_m", "cluster_n", "schedule", "tile_scheduler", "swap_ab")
#: The chip is warm then, which costs some per cent of its power.
_FIRST_WARM_S = 3.0
_WITHIN = 0.05


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; 2 for bad input, no GPU, or no compiled kernels, with one line that says so."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.power_kernels", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--shapes", default=",".join(SHAPES), help="MxNxK,...")
    parser.add_argument("--warm-s", type=float, default=0.15, help="seconds of a launch before it is metered")
    parser.add_argument("--window-s", type=float, default=0.8, help="seconds that it is metered, at least")
    parser.add_argument("--budget", type=float, default=110, help="seconds; begin no launch later than that")
    parser.add_argument("--out", type=Path, help="folder of the result file (default: results/GPU)")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--pairs", action="store_true", help="measure nothing; list the launches")
    parser.add_argument(
        "--count", type=Path, metavar="FILE", help="count bytes of this result file's launches"
    )
    parser.add_argument(
        "--summary", type=Path, metavar="FILE", help="measure nothing; the model's joules of this file anew"
    )
    parser.add_argument("--counted", action="store_true", help=argparse.SUPPRESS)  # the one that ncu profiles
    options = parser.parse_args(arguments)
    try:
        device = find_device(options.device)
        if options.summary is not None:
            print(json.dumps(summed_up(options.summary, device), indent=1))
            return 0
        problems = [Problem.parse(text) for text in options.shapes.split(",")]
        if options.count is not None:
            count(device, problems, options)
            return 0
        if options.counted:
            run_for_counters(device, problems)
            return 0
        if options.pairs:
            for problem in problems:
                found = pairs(problem, device)
                for number, candidate in enumerate(found.candidates):
                    print(
                        f"{problem.shape} {families.get(candidate.family).label(candidate)}: "
                        f"{found.mj[number]:.1f} mJ by model"
                    )
            return 0
        run(device, problems, options)
    except TunegemmError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def pairs(problem: Problem, device: Device) -> Launches:
    """A product's launches: the one of the fewest joules by the model, then each time the kernel that is most
    unlike those taken so far, of several the one of fewer joules. Raises ArtifactError without kernels.
    """
    found = launches(problem, device)
    places = found.best(found.mj)
    places = [place for place in places if found.mj[place] <= MOST_MJ * found.mj[places[0]]]
    taken = places[:1]
    while len(taken) < KERNELS and len(taken) < len(places):
        rest = [place for place in places if place not in taken]
        taken.append(max(rest, key=lambda place: min(_unlike(found, place, other) for other in taken)))
    return found.take(taken)


def _unlike(found: Launches, one: int, other: int) -> int:
    first, second = found.candidates[one], found.candidates[other]
    differing = sum(first.params.get(name) != second.params.get(name) for name in _FEATURES)
    return differing + (first.family != second.family)


def run(device: Device, problems: Sequence[Problem], options: argparse.Namespace) -> None:
    """Meters the launches that the file lacks until the budget is spent; writes each row as it comes."""
    from tunegemm.measure.backend import CudaBackend

    until = time.monotonic() + options.budget
    method = METHOD.format(launch_ms=LAUNCH_MS, warm_s=options.warm_s, window_s=options.window_s)
    path = results_path(options.out, device, "power_kernels.json")
    results = Results(path, meta(device, method))
    table, roof = table_of(device), roof_tflops(device)
    backend = CudaBackend(device)
    backend.open()
    chip = Chip(device, {})
    is_warm = False
    for problem in problems:
        chosen = pairs(problem, device)
        extents = {"m": problem.m, "n": problem.n, "k": problem.k}
        todo = [
            i for i in range(len(chosen.candidates)) if not results.find(extents | {"label": chosen.label(i)})
        ]
        if not todo or time.monotonic() > until:
            continue
        product = Product(problem, device, backend)
        replays = {}
        for i in todo:
            try:
                replays[i] = product.replay(chosen.candidates[i])
            except (TunegemmError, ValueError, RuntimeError) as error:
                print(f"{problem.shape} {chosen.label(i)}: {error}", file=sys.stderr)
                if not backend.alive():
                    raise MeasureError(f"{chosen.label(i)} lost the device; run again") from None
        torch_mm, seconds = product.replay(TORCH_MM)
        warm_s = options.warm_s if is_warm else _FIRST_WARM_S
        torch_row = metered(chip, product, torch_mm, seconds, warm_s, options.window_s)
        is_warm = True
        for i, (replay, seconds) in replays.items():
            if time.monotonic() > until:
                break
            row: dict[str, Any] = extents | {"label": chosen.label(i)}
            row |= metered(chip, product, replay, seconds, options.warm_s, options.window_s)
            row |= predicted(problem, chosen.take([i]), row["clock_mhz"], row["us"], table)
            row["error"] = round(row["predicted_mj"] / row["measured_mj"] - 1, 4)
            row |= {"torch_us": torch_row["us"], "torch_mj": torch_row["measured_mj"]}
            row["share_of_roof"] = roof and round(row["tflops"] / roof, 4)
            results.summary = summary([*results.rows, row])
            results.put(row)
            print(
                f"{problem.shape} {row['label']}: {row['measured_mj']:.1f} mJ, "
                f"predicted {row['predicted_mj']:.1f} ({row['error']:+.1%}), {row['us']:.1f} us, "
                f"torch.mm {row['torch_us']:.1f}",
                flush=True,
            )
        del replays, torch_mm, product
        backend.release()
    told = {name: value for name, value in results.summary.items() if name != "residuals"}
    print(f"{len(results.rows)} rows {told or results.earlier_summary}; written: {path}")


def count(device: Device, problems: Sequence[Problem], options: argparse.Namespace) -> None:
    """Writes what the hardware counted into the rows of a result file. Raises MeasureError without it."""
    results = opened(options.count)
    arguments = ["--counted", "--shapes", options.shapes, "--device", options.device]
    kernels, told = counted_kernels("benchmarks.power_kernels", arguments)
    if not told or len(kernels) != len(told):
        raise MeasureError(
            f"ncu counted {len(kernels)} kernels of {len(told)} launches; a launch is one here"
        )
    moved = {name: counted_bytes(kernel, 1) for name, kernel in zip(told, kernels, strict=True)}
    for row in results.rows:
        if (name := f"{row['m']}x{row['n']}x{row['k']} {row['label']}") in told:
            row |= by_counters(row, told[name], moved[name])
    results.summary = summary(results.rows)
    results.put()
    told_now = {name: value for name, value in results.summary.items() if name != "residuals"}
    print(f"{len(moved)} launches counted: {told_now}; written: {options.count}")


def by_counters(
    row: Mapping[str, Any], told: Mapping[str, float], moved: Mapping[str, float]
) -> dict[str, Any]:
    """A row's joules with the bytes that were counted in place of those of the model, and both."""
    counted = {
        "l2_read": moved["l2_read_bytes"], "crossing": moved["crossing_bytes"], "dram": moved["dram_bytes"],
    }  # fmt: skip
    terms = row["terms_mj"] | {
        name: row["terms_mj"][name] * amount / told[name] for name, amount in counted.items() if told[name]
    }
    mj = sum(terms.values())
    return {
        "told": {name: round(told[name]) for name in counted},
        "counted": {name: round(amount) for name, amount in counted.items()},
        "counted_mj": round(mj, 4),
        "counted_error": round(mj / row["measured_mj"] - 1, 4),
    }


def run_for_counters(device: Device, problems: Sequence[Problem]) -> None:
    """Runs in the process that ncu profiles: of each launch one on the last operand set, after one on each of
    the others, as in a replay. Prints the bytes that the model says.
    """
    from tunegemm.measure.backend import CudaBackend

    backend = CudaBackend(device)
    backend.open()
    told: dict[str, dict[str, float]] = {}
    for problem in problems:
        chosen = pairs(problem, device)
        product = Product(problem, device, backend)
        for number, candidate in enumerate(chosen.candidates):
            product.launch_for_counters(candidate)
            one = chosen.take([number])
            told[f"{problem.shape} {chosen.label(number)}"] = told_bytes(one)
        del product
        backend.release()
    print(json.dumps(told), flush=True)


def metered(
    chip: Chip, product: Product, replay: Replay, seconds: float, warm_s: float, window_s: float
) -> dict[str, Any]:
    """What one product of a replay takes and draws; `seconds` are those of a replay."""
    times = max(1, round(LAUNCH_MS * 1e-3 / seconds))
    window = chip.measure(lambda: replay.start(0, times), warm_s, window_s)
    products_per_s = window.launches_per_s * times * product.products
    power_w = window.joules / window.seconds
    told = state(window)
    return {
        "us": round(1e6 / products_per_s, 3), "power_w": round(power_w, 2),
        "measured_mj": round(1e3 * power_w / products_per_s, 4),
        "tflops": round(product.problem.flops * products_per_s / 1e12, 1),
        "clock_mhz": told.pop("nvml_clock_mhz"), **told,
    }  # fmt: skip


def predicted(
    problem: Problem, one: Launches, clock_mhz: float, us: float, table: energy.Table
) -> dict[str, Any]:
    """The model's joules of one launch at a clock and a time, their terms, and the model's own time."""
    at = np.array([clock_mhz]), np.array([us])
    work = energy.terms_mj(problem, one.columns, one.terms, table, *at)
    return {
        "predicted_mj": round(float(sum(mj[0] for mj in work.values())), 4),
        "predicted_us": round(float(one.steady.us[0]), 1),
        "terms_mj": {name: round(float(mj[0]), 4) for name, mj in work.items()},
    }


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How far the predictions are off, and which term's joules that goes with."""
    errors: list[float] = [row["predicted_mj"] / row["measured_mj"] - 1 for row in rows]
    if not errors:
        return {}
    counted: list[float] = [row["counted_error"] for row in rows if "counted_error" in row]
    by_counters = {"counted": {"launches": len(counted)} | _spread(counted)} if counted else {}
    return {
        "pairs": len(errors),
        **_spread(errors),
        **by_counters,
        "residuals": residuals(rows),
    }


def _spread(errors: Sequence[float]) -> dict[str, float]:
    worst = max(errors, key=lambda error: abs(error))
    return {
        "within_5_percent": round(sum(abs(error) <= _WITHIN for error in errors) / len(errors), 4),
        "mean": round(sum(errors) / len(errors), 4),
        "rms": round(math.sqrt(sum(error**2 for error in errors) / len(errors)), 4),
        "worst": round(worst, 4),
    }


def residuals(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Least squares of what is missing on the terms' joules, each row relative to what was measured.

    A term's `part` is by how much its joules would have to grow, 0.1 a tenth; `error` one standard deviation
    of that; `alone` the part where no other term may change, `explains` how much of the squares it then takes
    away. What crosses between the halves of L2 is a fixed part of what device memory moves, and counts with
    it. What flows whatever runs is left out: at the cap its joules are the measured time in other units, and
    so what is to be explained.
    """
    measured = np.array([row["measured_mj"] for row in rows])
    missing = 1 - np.array([row["predicted_mj"] for row in rows]) / measured
    shares = {
        name: np.array([row["terms_mj"][name] for row in rows]) / measured
        for name in rows[0]["terms_mj"]
        if name != "static"
    }
    shares["dram"] = shares["dram"] + shares.pop("crossing")
    found: dict[str, Any] = {}
    for name, share in shares.items():
        part = float(share @ missing / (share @ share))
        left = missing - part * share
        taken = 1 - float(left @ left) / max(float(missing @ missing), 1e-12)
        found[name] = {"alone": round(part, 4), "explains": round(taken, 4)}
    if len(rows) < 2 * len(shares):
        return found
    matrix: Floats = np.stack(list(shares.values()), axis=1)
    parts, *_ = np.linalg.lstsq(matrix, missing, rcond=None)
    left = missing - matrix @ parts
    variance = float(left @ left) / (len(rows) - len(shares))
    spread = np.sqrt(np.diag(np.linalg.pinv(matrix.T @ matrix)) * variance)
    for name, part, error in zip(shares, parts.tolist(), spread.tolist(), strict=True):
        found[name] |= {"part": round(part, 4), "error": round(error, 4)}
    return found | {"rms_left": round(math.sqrt(float(left @ left) / len(rows)), 4)}


def summed_up(path: Path, device: Device) -> dict[str, Any]:
    """What the model says today of a result file's launches, as far as they ship, and the summary; written
    into it. Raises MeasureError for another file, ArtifactError without kernels.
    """
    results, table = opened(path), table_of(device)
    every: dict[Problem, tuple[Launches, dict[str, int]]] = {}
    try:
        for row in results.rows:
            problem = Problem(row["m"], row["n"], row["k"])
            if problem not in every:
                found = launches(problem, device)
                every[problem] = found, {found.label(i): i for i in range(len(found.candidates))}
            found, places = every[problem]
            if (place := places.get(row["label"])) is None:
                continue
            one = found.take([place])
            row |= predicted(problem, one, row["clock_mhz"], row["us"], table)
            row["error"] = round(row["predicted_mj"] / row["measured_mj"] - 1, 4)
            if counted := row.get("counted"):
                row |= by_counters(row, told_bytes(one), {f"{name}_bytes": n for name, n in counted.items()})
        results.summary = summary(results.rows)
    except (KeyError, TypeError) as error:
        raise MeasureError(f"{path}: not a result file ({error})") from None
    results.put()
    return results.summary


if __name__ == "__main__":
    sys.exit(main())
