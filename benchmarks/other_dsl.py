"""What a program sees whose kernels are compiled in the background: no library in the wheel, or another DSL.

    python -m benchmarks.other_dsl --without-library        # as if the package had no compiled kernels
    python -m benchmarks.other_dsl                          # those of the package, under the DSL that is here

Calls `tunegemm.matmul` on products that have a shipped record, in turns, from the first call on until a
kernel of ours serves each of them, or for --seconds. The process is fresh, the kernel cache and the databases
are empty. Writes results/GPU/other_dsl_VERSION.json, of the DSL that is here, a row for each product:
`first_ms` of its first call, `worst_ms` of all calls until it was served, with that one (`swap_ms`), which
loads the kernel; `served_s` since the first call of all; whether every result before was torch.mm's to the
bit (`torch_meanwhile`); and the error of the last result relative to fp32.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.first_use import shipped, some
from benchmarks.results import Results, meta, problem_fields, results_path
from tunegemm.describe.device import Device, find_device, package_version
from tunegemm.describe.problem import Problem
from tunegemm.errors import TunegemmError
from tunegemm.generate import families
from tunegemm.generate.cublaslt import is_torch
from tunegemm.measure.operands import make_operands, tolerance
from tunegemm.serve.launchers import Prepared, prepare
from tunegemm.store.record import Record

METHOD = (
    "host time of tunegemm.matmul(a, b), one call of each product in turns, the GPU idle before each; after "
    "one of torch.mm; an empty database and an empty kernel cache; served: from the call on for which a "
    "kernel of ours was loaded"
)
Matmul = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--without-library", action="store_true", help="leave the package's kernels out")
    parser.add_argument("--products", type=int, default=12, help="drawn by seed (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60.0, help="the longest (default: %(default)g)")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--out", type=Path, help="folder of the result file (default: results/GPU)")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as empty:  # workers may still write there
        os.environ.pop("TUNEGEMM_DB", None)
        os.environ |= {
            "TUNEGEMM_CACHE_DIR": empty,
            "TUNEGEMM_COMPILE": "1",
            "TUNEGEMM_PACK": "",
            "XDG_DATA_HOME": empty,
        }
        try:
            return run(find_device(options.device), options)
        except TunegemmError as error:
            print(error, file=sys.stderr)
            return 2


def run(device: Device, options: argparse.Namespace) -> int:
    """Watches all products, writes their rows and prints a line; 1 where a result was wrong."""
    from tunegemm.serve import api
    from tunegemm.serve.dispatcher import Dispatcher
    from tunegemm.serve.planning import Planner
    from tunegemm.store import packs

    problems = some(of_ours(device), options.products, options.seed)
    if not problems:
        raise TunegemmError(f"no product has a shipped record of {device.name} with a kernel of ours")
    if options.without_library:
        packs.shipped = lambda: None  # type: ignore[assignment]
    mode = "without library" if options.without_library else "as installed"
    version = package_version("nvidia-cutlass-dsl") or "none"
    path = results_path(options.out, device, f"other_dsl_{version}.json")
    results = Results(path, meta(device, METHOD))
    loaded = Loaded()
    api.serve_by(Dispatcher(Planner(prepare=loaded.prepare)))
    place = torch.device(device.spec)
    pairs = {}
    for number, problem in enumerate(problems):
        operands = make_operands(problem, place, options.seed + number)
        pairs[problem] = operands.a, operands.b
    rows = watch(pairs, api.matmul, loaded, options.seconds)
    results.summary = results.earlier_summary | {mode: summary(rows)}
    results.put(*(problem_fields(problem) | {"mode": mode} | row for problem, row in rows.items()))
    print(f"{mode}: {len(rows)} products, " + ", ".join(f"{k} {v}" for k, v in results.summary[mode].items()))
    print(f"written: {results.path}")
    return 0 if all(row["right"] and row["torch_meanwhile"] for row in rows.values()) else 1


def of_ours(device: Device) -> list[Problem]:
    """The listed products of `first_use` whose record is a kernel that is compiled."""
    from tunegemm.choose.snapshot import read_snapshot

    snapshot, found = read_snapshot(), []
    for problem in shipped(device):
        record = snapshot.find(problem, device.fingerprint)
        if record is not None and families.get(record.candidate.family).compiled:
            found.append(problem)
    return found


@dataclass
class Loaded:
    """Which products have a kernel of ours."""

    prepare_record: Callable[[Record, Device], Prepared] = prepare
    problems: set[Problem] = field(default_factory=set)

    def prepare(self, record: Record, device: Device) -> Prepared:
        """What a planner calls for a record; raises where there is no kernel, as `prepare` does."""
        found = self.prepare_record(record, device)
        if not is_torch(record.candidate):
            self.problems.add(record.problem)
        return found


def watch(
    pairs: Mapping[Problem, tuple[torch.Tensor, torch.Tensor]],
    matmul: Matmul,
    loaded: Loaded,
    seconds: float,
) -> dict[Problem, dict[str, Any]]:
    """Calls all products in turns until a kernel of ours serves each, or for so long; a row for each."""
    for a, b in pairs.values():
        torch.mm(a, b)
    _wait(pairs)
    times: dict[Problem, list[float]] = {problem: [] for problem in pairs}
    served: dict[Problem, float] = {}
    torchs: dict[Problem, bool] = dict.fromkeys(pairs, True)
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for problem in itertools.cycle(pairs):
            if len(served) == len(pairs) or time.perf_counter() - start > seconds:
                break
            if problem in served:
                continue
            a, b = pairs[problem]
            before = time.perf_counter()
            result = matmul(a, b)
            times[problem].append(1e3 * (time.perf_counter() - before))
            if problem in loaded.problems:
                served[problem] = before - start
            else:
                torchs[problem] &= torch.equal(result, torch.mm(a, b))
            _wait(pairs)
    said = sorted({str(one.message) for one in caught})
    of_all = [line for line in said if not line.startswith(tuple(f"{problem} " for problem in pairs))]
    rows = {}
    for problem, (a, b) in pairs.items():
        error = relative_error(matmul(a, b), a, b)
        own = times[problem]
        rows[problem] = {
            "calls": len(own),
            "first_ms": round(own[0], 2),
            "worst_ms": round(max(own), 2),
            "swap_ms": round(own[-1], 2) if problem in served else None,
            "served_s": round(served[problem], 2) if problem in served else None,
            "torch_meanwhile": torchs[problem],
            "relative_error": error,
            "right": error <= tolerance(problem),
            "warnings": [*of_all, *(line for line in said if line.startswith(f"{problem} "))],
        }
    return rows


def relative_error(result: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> float:
    """||result - fp32|| / ||fp32||."""
    exact = a.float() @ b.float()
    return float((result.float() - exact).norm() / exact.norm())


def summary(rows: Mapping[Problem, Mapping[str, Any]]) -> dict[str, Any]:
    """Over all products."""
    served = [row["served_s"] for row in rows.values() if row["served_s"] is not None]
    return {
        "served": len(served),
        "all_served_s": max(served) if len(served) == len(rows) else None,
        "worst_ms": max(row["worst_ms"] for row in rows.values()),
        "torch_meanwhile": all(row["torch_meanwhile"] for row in rows.values()),
        "right": all(row["right"] for row in rows.values()),
    }


def _wait(pairs: Mapping[Problem, Iterable[torch.Tensor]]) -> None:
    if any(tensor.is_cuda for pair in pairs.values() for tensor in pair):
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main())
