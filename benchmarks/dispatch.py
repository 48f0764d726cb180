"""Measures the host time of a call beside torch's own, and the cost of the first call and of the import.

    python -m benchmarks.dispatch

Tunes a product so small that the GPU never keeps the host waiting, and its relatives, into a temporary
database. Writes results/GPU/dispatch.json: a row `{call, torch_us, tunegemm_us, ratio}` for each call, last
those that find no kernel, and what processes of their own tell (`benchmarks.first_call`).
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.command import command, parser_of
from benchmarks.first_call import PROCESSES, fresh_processes
from benchmarks.results import Results, problem_fields, report
from tunegemm.describe.device import Device, find_device
from tunegemm.describe.problem import Problem
from tunegemm.errors import TunegemmError
from tunegemm.generate.cublaslt import is_torch
from tunegemm.measure.outcome import Measurement
from tunegemm.store import Database
from tunegemm.tuning.tuner import Tuner

#: Calls between two synchronisations: fewer than the launch queue holds, so that no call waits for the GPU.
CALLS = 100
PROBLEM = Problem(128, 128, 64)
ROUNDS = 101
METHOD = (
    f"{CALLS} calls after a synchronisation, per call; torch's and tunegemm's of all rows in shuffled order, "
    f"median of {ROUNDS} rounds, ratio the median over rounds; garbage collection off; first call and import "
    f"in {PROCESSES} fresh processes each, medians"
)

#: The stored gain of a kernel that is slower than torch.mm, so that dispatch serves it anyway.
_ENOUGH = 1.01
#: What the rows of calls begin with that find no kernel.
FALL_BACK = "no kernel: "

Call = Callable[[], Any]


@command
def main(arguments: Sequence[str] | None = None) -> None:
    options = parser_of("benchmarks.dispatch", __doc__).parse_args(arguments)
    device = find_device(options.device)
    results = Results.of(options.out, device, "dispatch.json", METHOD)
    with tempfile.TemporaryDirectory(prefix="tunegemm-") as folder:
        place(Path(folder))
        tune(PROBLEM, device)
        run(PROBLEM, device, results)
        results.summary |= fresh_processes(PROBLEM, device)
        results.put()
        print(json.dumps(results.summary, indent=1), flush=True)


def place(folder: Path) -> None:
    """Lets this process and its children read and write databases and kernels in the folder alone."""
    places = {"TUNEGEMM_DB": "tuning.sqlite", "TUNEGEMM_CACHE_DIR": "cache", "XDG_DATA_HOME": "data"}
    os.environ |= {name: str(folder / where) for name, where in places.items()}


def tune(problem: Problem, device: Device) -> None:
    """Tunes the problem, half its M, a batch of four; it with a bias, with gelu too, and of scaled fp8
    operands, by a generator only, so that the library wins no tie.
    """
    scaled = {"in_dtype": "fp8_e4m3", "epilogue": "scale_tensor", "accumulation": "two_level", "alignment": 0}
    changes: tuple[dict[str, Any], ...] = (
        {}, {"m": problem.m // 2}, {"batch": 4}, {"epilogue": "bias_n"}, {"epilogue": "bias_n+gelu"}, scaled
    )  # fmt: skip
    with Database.open() as database, Tuner(device, database, families=["cute_sm90"]) as tuner:
        for each in (replace(problem, **change) for change in changes):
            if not record_own(database, tuner, each, trials=6):
                raise TunegemmError(f"no kernel for {each}")
            print(f"tuned {each}", flush=True)


def record_own(
    database: Database, tuner: Tuner, problem: Problem, trials: int, following: Problem | None = None
) -> bool:
    """Tunes a problem and makes the tuner's fastest kernel its record, however fast: a winner that gains less
    than dispatch requires is stored with a sufficient gain. Returns whether there is one.

    database: a scratch one, because the stored ratio of a losing kernel is made up. following: as of
        `Tuner.tune`.
    """
    result = tuner.tune(problem, trials=trials, following=following)
    # Not the tuning's best: a race decided by noise leaves the record to torch.
    record = database.best(problem, tuner.device.fingerprint)
    if record is not None and not is_torch(record.candidate) and record.ratio >= _ENOUGH:
        return True
    measured = [o for o in result.outcomes if isinstance(o, Measurement) and not is_torch(o.candidate)]
    if not measured:
        return False
    best = min(measured, key=lambda item: item.median_us)
    served = replace(best, baseline_us=tuple(_ENOUGH * us for us in best.samples_us))
    database.confirm(problem, tuner.device, served, label=result.labels.get(best.candidate.digest, ""))
    return True


def run(problem: Problem, device: Device, results: Results) -> None:
    """Times the calls and writes their rows."""
    import torch

    pairs = calls(problem, device) | fall_backs(problem, device)
    for _ in range(3):
        for pair in pairs.values():
            for call in pair:
                with getattr(call, "within", nullcontext)():
                    call()
    timed = {f"{name}/{which}": call for name, pair in pairs.items() for which, call in enumerate(pair)}
    samples = host_times(timed, ROUNDS, torch.cuda.synchronize)
    rows: list[dict[str, Any]] = []
    for name in pairs:
        own, reference = samples[f"{name}/0"], samples[f"{name}/1"]
        ratio = statistics.median(mine / theirs for mine, theirs in zip(own, reference, strict=True))
        rows.append(problem_fields(problem) | {
            "call": name, "torch_us": round(statistics.median(reference), 3),
            "tunegemm_us": round(statistics.median(own), 3), "ratio": round(ratio, 4),
        })  # fmt: skip
    results.summary["ratio_to_torch_mm"] = rows[0]["ratio"]
    results.summary["worst_fall_back"] = max(
        row["ratio"] for row in rows if row["call"].startswith(FALL_BACK) and "enabled" not in row["call"]
    )
    report(results, rows)


def host_times(calls: Mapping[str, Call], rounds: int, synchronize: Call) -> dict[str, list[float]]:
    """Microseconds of the host per call, a sample of each call in every round.

    A call with an attribute `within`, a function that returns a context manager, is timed inside it.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    order, shuffle = list(calls), random.Random(0).shuffle
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            shuffle(order)
            for name in order:
                call = calls[name]
                with getattr(call, "within", nullcontext)():
                    call()
                    synchronize()
                    start = time.perf_counter()
                    for _ in range(CALLS):
                        call()
                    samples[name].append((time.perf_counter() - start) / CALLS * 1e6)
        synchronize()
    finally:
        gc.enable()
    return samples


def calls(problem: Problem, device: Device) -> dict[str, tuple[Call, Call]]:
    """By name: tunegemm's call and torch's for the same product."""
    import torch
    from torch.nn.functional import gelu, linear

    import tunegemm
    from tunegemm.dispatch import api
    from tunegemm.dispatch.forms import MATMUL, form_of
    from tunegemm.torch.lowering import site_of

    where, m, n, k = device.spec, problem.m, problem.n, problem.k
    a = torch.rand(m, k, dtype=torch.bfloat16, device=where)
    half = a[: max(m // 2, 1)]
    weight = torch.rand(n, k, dtype=torch.bfloat16, device=where)
    b, bias, out = weight.t(), weight.new_zeros(n), weight.new_empty(m, n)
    folded = a.view(2, -1, k) if m % 2 == 0 else a.view(1, m, k)
    batch, batch_b = a.expand(4, m, k).clone(), weight.expand(4, n, k).clone().mT
    parameter = torch.nn.Parameter(weight.clone())
    small, small_b = a.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn).t()
    scales = torch.rand((), device=where), torch.rand((), device=where)

    def inference(call: Call) -> Call:
        def run() -> None:
            with torch.inference_mode():
                call()

        return run

    plain, site = form_of(MATMUL, ""), site_of((a, b))
    inductors: Any = torch._C._dynamo.guards
    view = inductors._reinterpret_tensor

    def compiled() -> Any:
        """As Inductor writes it, see `tunegemm.torch.lowering`."""
        return api.dispatcher.compiled(site, plain, a, view(weight, (k, n), (1, k), 0), (), (), out)

    def fresh(product: Callable[..., Any]) -> Call:
        return lambda: product(a, weight.t())

    def alternating(product: Callable[..., Any]) -> Call:
        operands = itertools.cycle((a, half))
        return lambda: product(next(operands), b)

    return {
        "matmul": (lambda: tunegemm.matmul(a, b), lambda: torch.mm(a, b)),
        "matmul out=": (lambda: tunegemm.matmul(a, b, out=out), lambda: torch.mm(a, b, out=out)),
        "linear": (lambda: tunegemm.linear(a, weight), lambda: linear(a, weight)),
        "linear, bias": (lambda: tunegemm.linear(a, weight, bias), lambda: linear(a, weight, bias)),
        "linear, bias, gelu": (
            lambda: tunegemm.linear(a, weight, bias, "gelu"),
            lambda: gelu(linear(a, weight, bias)),
        ),
        "scaled_mm": (
            lambda: tunegemm.scaled_mm(small, small_b, *scales, out_dtype=torch.bfloat16),
            lambda: torch._scaled_mm(small, small_b, *scales, out_dtype=torch.bfloat16),
        ),
        "linear, 3-D input": (lambda: tunegemm.linear(folded, weight), lambda: linear(folded, weight)),
        "linear, Parameter, inference_mode": (
            inference(lambda: tunegemm.linear(a, parameter)),
            inference(lambda: linear(a, parameter)),
        ),
        "matmul, 3-D (bmm)": (lambda: tunegemm.matmul(batch, batch_b), lambda: torch.bmm(batch, batch_b)),
        "matmul, b a new view each time": (fresh(tunegemm.matmul), fresh(torch.mm)),
        "compiled code's call": (compiled, lambda: torch.mm(a, view(weight, (k, n), (1, k), 0), out=out)),
        "matmul, two m in turns": (alternating(tunegemm.matmul), alternating(torch.mm)),
    }


def fall_backs(problem: Problem, device: Device) -> dict[str, tuple[Call, Call]]:
    """As `calls`, for the problem with 8 more columns, which has no record."""
    import warnings

    import torch
    from torch.nn.functional import linear

    import tunegemm
    from tunegemm.dispatch import api

    m, n, k = problem.m, problem.n + 8, problem.k
    a = torch.rand(m, k, dtype=torch.bfloat16, device=device.spec)
    made = partial(torch.nn.Linear, k, n, device=device.spec, dtype=torch.bfloat16)
    layers, patched = ([made(bias=bias).requires_grad_(False) for bias in (True, False)] for _ in range(2))
    for layer in patched:
        tunegemm.patch(layer)
    weight, bias = layers[0].weight, layers[0].bias
    b, many = weight.t(), a.expand(4, m, k).clone()
    many_b = weight.expand(4, n, k).clone().mT

    def enabled(call: Call) -> Call:
        def run() -> Any:
            return call()

        run.within = tunegemm.enable  # type: ignore[attr-defined]  # see `host_times`
        return run

    pairs: dict[str, tuple[Call, Call]] = {
        "nn.Linear patched": (lambda: patched[0](a), lambda: layers[0](a)),
        "nn.Linear patched, no bias": (lambda: patched[1](a), lambda: layers[1](a)),
        "matmul": (lambda: tunegemm.matmul(a, b), lambda: torch.matmul(a, b)),
        "linear": (lambda: tunegemm.linear(a, weight), lambda: linear(a, weight)),
        "linear, bias": (lambda: tunegemm.linear(a, weight, bias), lambda: linear(a, weight, bias)),
        "addmm": (lambda: tunegemm.addmm(bias, a, b), lambda: torch.addmm(bias, a, b)),
        "bmm": (lambda: tunegemm.bmm(many, many_b), lambda: torch.bmm(many, many_b)),
        "mm, enabled": (enabled(lambda: torch.mm(a, b)), lambda: torch.mm(a, b)),
        "linear, bias, enabled": (enabled(lambda: linear(a, weight, bias)), lambda: linear(a, weight, bias)),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for ours, _ in pairs.values():
            ours()
    recent = api.dispatcher.planner.state.recent.get(b.data_ptr())
    if device.is_real and (recent is None or recent.plan is not None):
        raise TunegemmError(f"{m}x{n}x{k} does not fall back to torch")
    return {FALL_BACK + name: pair for name, pair in pairs.items()}


if __name__ == "__main__":
    sys.exit(main())
