"""What a program whose products have random numbers of rows costs: memory that stays, warnings, host time.

    make kernels; python -m benchmarks.ragged               # 5,000 numbers of rows, some two minutes

Multiplies 20 weights that have shipped records with random numbers of rows, under each policy in turn, in one
process, and writes results/GPU/ragged.json: a row for torch alone, then one for each policy. `device_mib` and
`host_mib` are what the process holds more at the end than before, when torch and we had multiplied each
weight once and torch its numbers of rows, with the kernels that it has loaded meanwhile (`kernels`);
`grown_mib` is what it holds more after as many other numbers of rows. `plan_us` is the host's time of a first
product (median); `fall_backs` is how many of the last 60 products have no kernel, and `fall_back_us` and
`torch_us` the host's time of those when met again, and of torch's own call, in turns.
"""

from __future__ import annotations

import gc
import random
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any, get_args

from benchmarks.command import command, parser_of
from benchmarks.results import Results, meta, results_path
from tunegemm.choose.policies import Preference
from tunegemm.describe.device import Device, find_device
from tunegemm.errors import TunegemmError, TunegemmWarning

WEIGHTS, NUMBERS, MOST_ROWS = 20, 5000, 4096
TURNS = 20
#: Products that are looked at for what a fall-back costs.
LAST = 60
METHOD = (
    f"{WEIGHTS} weights of shipped bf16 records drawn by chance, rows from 1 to {MOST_ROWS} log-uniform, all "
    "policies in one process; memory of torch's allocator and resident memory after garbage collection"
)


@command
def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("benchmarks.ragged", __doc__)
    parser.add_argument("--numbers", type=int, default=NUMBERS, help="products under each policy")
    options = parser.parse_args(arguments)
    device = find_device(options.device)
    results = Results(results_path(options.out, device, "ragged.json"), meta(device, METHOD))
    results.rows = []
    run(device, options.numbers, results)


def run(device: Device, numbers: int, results: Results) -> None:
    """Writes a row for each policy, then what stays of all."""
    import torch

    import tunegemm
    from tunegemm.generate.cute_launch import kept

    weights = drawn(device)
    tensors = [torch.randn(n, k, device=device.spec, dtype=torch.bfloat16) for n, k in weights]
    once = [(index, 64) for index in range(len(tensors))]
    multiply(tensors, once)
    multiply(tensors, once, torch.nn.functional.linear)
    begin = memory()
    rng = random.Random(0)
    # torch's libraries load kernels, too, which a program without us would hold.
    drawn_rows = [(index % len(tensors), round(2 ** rng.uniform(0, 12))) for index in range(numbers)]
    multiply(tensors, drawn_rows, torch.nn.functional.linear)
    alone = memory()
    row: dict[str, Any] = {
        "label": "torch alone", "products": numbers, "weights": len(tensors),
        "device_mib": round((alone[0] - begin[0]) / 2**20, 1),
        "host_mib": round((alone[1] - begin[1]) / 2**20, 1),
    }  # fmt: skip
    print(row, flush=True)
    results.put(row)
    begin = alone
    for preference in get_args(Preference):
        with tunegemm.policy(preference), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", TunegemmWarning)
            rows = [round(2 ** rng.uniform(0, 12)) for _ in range(numbers)]
            calls = [(index % len(tensors), m) for index, m in enumerate(rows)]
            times = multiply(tensors, calls)
            first = memory()
            others = [(index, round(2 ** rng.uniform(0, 12))) for index, _ in calls]
            multiply(tensors, others)
            ours, torchs = fall_backs(tensors, calls[-LAST:])
            plans = tunegemm.dispatch.api.dispatcher.planner.state.plans
            served = sum(plan is not None for plan in plans.values())
        said = Counter(str(one.message).split(" x ")[0] for one in caught)
        held = memory()
        row = {
            "label": preference, "products": numbers, "weights": len(tensors),
            "plans": len(plans), "served": served, "warnings": sum(said.values()),
            "device_mib": round((held[0] - begin[0]) / 2**20, 1),
            "host_mib": round((held[1] - begin[1]) / 2**20, 1),
            "grown_mib": round((held[1] - first[1]) / 2**20, 1),
            "kernels": len(kept),
            "plan_us": round(statistics.median(times), 1),
            "fall_backs": len(ours),
        }  # fmt: skip
        if ours:
            row["fall_back_us"], row["torch_us"] = (
                round(statistics.median(ours), 2), round(statistics.median(torchs), 2)
            )  # fmt: skip
        print(row, flush=True)
        results.put(row)


def drawn(device: Device) -> list[tuple[int, int]]:
    """The N and K of weights that have shipped records of this kind of GPU."""
    from tunegemm.store.shipped import read_shipped

    found = {
        (record.problem.n, record.problem.k)
        for record in read_shipped()[0]
        if record.fingerprint.device_name == device.name
        and (record.problem.in_dtype, record.problem.epilogue, record.problem.batch) == ("bf16", "", 1)
        and record.problem.n * record.problem.k < 1 << 28
    }
    if len(found) < WEIGHTS:
        raise TunegemmError(
            f"{len(found)} weights have shipped records of {device.name}; {WEIGHTS} are drawn"
        )
    return random.Random(0).sample(sorted(found), WEIGHTS)


def multiply(tensors: list[Any], calls: list[tuple[int, int]], by: Any = None) -> list[float]:
    """Microseconds of the host for each call of a weight's number and rows."""
    import torch

    import tunegemm

    by = by or tunegemm.linear
    room = torch.zeros(
        MOST_ROWS * max(w.shape[1] for w in tensors), dtype=torch.bfloat16, device=tensors[0].device
    )
    times = []
    with torch.inference_mode():
        for number, (index, m) in enumerate(calls):
            weight = tensors[index]
            x = room[: m * weight.shape[1]].view(m, -1)
            start = time.perf_counter()
            by(x, weight)
            times.append((time.perf_counter() - start) * 1e6)
            if number % 16 == 0:
                torch.cuda.synchronize()
    return times


def fall_backs(tensors: list[Any], calls: list[tuple[int, int]]) -> tuple[list[float], list[float]]:
    """The host's microseconds of products without a kernel, and of torch's own call, for each its median."""
    import torch

    import tunegemm

    dispatcher = tunegemm.dispatch.api.dispatcher
    found: tuple[list[float], list[float]] = ([], [])
    for index, m in dict.fromkeys(calls):
        call, weight = [(index, m)] * TURNS, tensors[index]
        x = torch.zeros(m, weight.shape[1], dtype=weight.dtype, device=weight.device)
        with torch.inference_mode():
            if dispatcher.below_autograd(x, weight.t()) is not None:
                continue
        multiply(tensors, call)  # its plan is there
        for times, by in zip(found, (tunegemm.linear, torch.nn.functional.linear), strict=True):
            times.append(statistics.median(multiply(tensors, call, by)))
    return found


def memory() -> tuple[int, int]:
    """Bytes that torch's allocator has given out, and the process' resident ones."""
    import psutil
    import torch

    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(), psutil.Process().memory_info().rss


if __name__ == "__main__":
    sys.exit(main())
