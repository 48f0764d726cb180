"""Whether the table of `benchmarks.power_roof` tells the joules of real products: those of torch.mm.

    python -m benchmarks.power_products          # writes results/GPU/power_products.json

Each product runs in steady state as a variant of the roof does, and Nsight Compute (`ncu`, which must be on
PATH) counts the bytes that its kernel moved. None of these rows was fitted. Flops are those of m64n256 with
operands in shared memory, whichever instruction the library's kernel has.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.power_fit import Voltage, predicted_w, spread
from benchmarks.power_roof import LAUNCH_MS, Chip, counted_bytes, counted_kernels, state
from benchmarks.power_variants import RoofError
from benchmarks.results import Results, meta, results_path
from tunegemm.describe.device import find_device
from tunegemm.errors import TunegemmError

METHOD = (
    "torch.mm(a, w.T, out=) in bf16, normal(0, 1), the same operands each time, in launches of some 10 ms "
    "without a pause: first warm_s, then from one step of NVML's energy counter to another at least window_s "
    "later; bytes of one product by Nsight Compute after three; predicted = the fit of power_roof.json at "
    "NVML's mean clock, with flops as smem_n256"
)
SHAPES = (
    "8192x8192x8192", "4096x28672x4096", "4096x14336x4096", "4096x4096x14336", "8448x9216x2048",
    "2048x7168x8192", "4096x6144x4096", "4096x4096x4096", "8192x3584x3584", "6144x6144x6144",
)  # fmt: skip

#: Products that are timed to know how many a launch has.
_TRIALS = 8


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; 2 for bad input, no GPU, no ncu or no fit, with one line that says so."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.power_products", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--shapes", default=",".join(SHAPES), help="MxNxK,...")
    parser.add_argument("--warm-s", type=float, default=1.5, help="seconds of a product before it is metered")
    parser.add_argument("--window-s", type=float, default=1.0, help="seconds that it is metered, at least")
    parser.add_argument("--out", type=Path, help="folder of both result files (default: results/GPU)")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--counted", action="store_true", help=argparse.SUPPRESS)  # the one that ncu profiles
    options = parser.parse_args(arguments)
    try:
        shapes = [parsed(text) for text in options.shapes.split(",")]
        chip = Chip(find_device(options.device), {})
        if options.counted:
            run_for_counters(shapes)
        else:
            run(chip, shapes, options)
    except TunegemmError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def parsed(text: str) -> tuple[int, int, int]:
    """m, n and k of MxNxK."""
    try:
        m, n, k = map(int, text.split("x"))
    except ValueError:
        raise RoofError(f"shape {text!r}: write MxNxK, such as 4096x4096x4096") from None
    return m, n, k


def product(shape: tuple[int, int, int], repeats: int = 1) -> Callable[[], None]:
    """Launches torch.mm of random operands so many times."""
    import torch

    m, n, k = shape
    a = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
    w = torch.randn(n, k, dtype=torch.bfloat16, device="cuda")
    out = a.new_empty(m, n)

    def launch() -> None:
        for _ in range(repeats):
            torch.mm(a, w.T, out=out)

    return launch


def run(chip: Chip, shapes: list[tuple[int, int, int]], options: argparse.Namespace) -> None:
    """Measures the products and compares each with what the table tells; writes each row as it comes."""
    coefficients, voltage = read_fit(results_path(options.out, chip.device, "power_roof.json"))
    path = results_path(options.out, chip.device, "power_products.json")
    results = Results(path, meta(chip.device, METHOD))
    kernels, _ = counted_kernels(
        "benchmarks.power_products", ["--counted", "--shapes", options.shapes, "--device", options.device]
    )
    if len(kernels) != len(shapes):
        raise RoofError(f"ncu counted {len(kernels)} kernels of {len(shapes)} products; leave out split ones")
    errors = []
    for (m, n, k), kernel in zip(shapes, kernels, strict=True):
        repeats = max(1, round(LAUNCH_MS / chip.launch_ms(product((m, n, k), _TRIALS)) * _TRIALS))
        window = chip.measure(product((m, n, k), repeats), options.warm_s, options.window_s)
        products_per_s = window.launches_per_s * repeats
        per_launch = {"flops": 2.0 * m * n * k, "stored_bytes": 2.0 * m * n} | counted_bytes(kernel, 1)
        per_launch["filled_bytes"] = per_launch["arrived_bytes"]
        clock_mhz = window.sm_clock_mhz or 0.0
        per_s = {name: amount * products_per_s for name, amount in per_launch.items()}
        per_s["sm_cycles"] = chip.device.sm_count * clock_mhz * 1e6
        row = {
            "m": m, "n": n, "k": k, "power_w": round(window.joules / window.seconds, 2), **state(window),
            "us": round(1e6 / products_per_s, 2), "tflops": round(per_s["flops"] / 1e12, 1),
            "per_s": {name: float(f"{amount:.6g}") for name, amount in per_s.items()},
            "operand": "smem", "width": 256,
        }  # fmt: skip
        told_w = float(predicted_w([row], coefficients, voltage)[0])
        row["mj"] = round(1e3 * row["power_w"] / products_per_s, 3)
        row["predicted_mj"] = round(1e3 * told_w / products_per_s, 3)
        errors.append(told_w / row["power_w"] - 1)
        results.summary["error_percent"] = spread(errors)
        results.put(row)
        print(f"{m}x{n}x{k}: {row['mj']} mJ, predicted {row['predicted_mj']} ({errors[-1]:+.1%})", flush=True)


def read_fit(path: Path) -> tuple[dict[str, float], Voltage]:
    """Coefficients and voltage that a result file of the roof has."""
    try:
        found = json.loads(path.read_text())["fit"]
        return found["coefficients"], Voltage(**found["voltage"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RoofError(f"{path}: no fit there ({error}); run python -m benchmarks.power_roof") from None


def run_for_counters(shapes: list[tuple[int, int, int]]) -> None:
    """Runs in the process that ncu profiles: of each product one launch after three."""
    import torch

    for shape in shapes:
        launch = product(shape)
        for _ in range(3):
            launch()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        launch()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
    print("{}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
