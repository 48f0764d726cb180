"""Compares tunegemm with torch, cuBLASLt, quack and Inductor, one interleave per shape.

    python -m benchmarks.peers --tune --shapes llama-3-8b        # a group; tunes shapes without a record
    python -m benchmarks.peers --shapes '512x.*' --peers cublaslt,tunegemm

Writes results/GPU/peers.json after each shape. A provider that is not installed, fails or is wrong is
skipped for that shape, with its reason. Ratios are valid within a row only: its providers were timed
together. quack tunes 20 to 60 s a shape; QUACK_CACHE_AUTOTUNING=1 makes it store its choice.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import providers, shapes
from benchmarks.command import chosen, command, parser_of
from benchmarks.interleave import METHOD, interleave
from benchmarks.providers import Contender, Options, Provider, Skip, is_settled
from benchmarks.results import Results, problem_fields
from benchmarks.tables import peers as tables
from benchmarks.tables.reading import shape_of
from tunegemm.describe.device import Device, find_device
from tunegemm.describe.problem import Problem
from tunegemm.errors import ProblemError
from tunegemm.generate.families import kernel_source_hash
from tunegemm.measure.backend import CudaBackend
from tunegemm.store import Database
from tunegemm.tuning.tuner import Tuner


@command
def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("benchmarks.peers", __doc__)
    parser.add_argument(
        "--shapes", action="append", default=[], help="a group, MxNxK or a regular expression"
    )
    parser.add_argument("--peers", help="comma-separated providers besides torch (default: all)")
    parser.add_argument("--tune", action="store_true", help="tune shapes that have no confirmed record")
    parser.add_argument("--tune-cap", type=float, default=180.0, help="seconds a peer may tune one shape")
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds per shape")
    parser.add_argument("--db", type=Path, help="tuning database (default: TUNEGEMM_DB or the user's)")
    options = parser.parse_args(arguments)
    problems = shapes.select(options.shapes)
    device = find_device(options.device)
    known = tuple(providers.PROVIDERS)
    names = list(dict.fromkeys(["torch", *chosen(options.peers or ",".join(known), known, "peers")]))
    if options.rounds < 3:
        raise ProblemError(f"--rounds {options.rounds}: at least 3, and 15 for figures to keep")
    if options.db is not None:
        os.environ["TUNEGEMM_DB"] = str(options.db)  # dispatch reads it, as it would for a user
    results = Results.of(options.out, device, "peers.json", METHOD)
    with ExitStack() as stack:
        tuner = None
        if options.tune:
            database = stack.enter_context(Database.open(options.db, create=True))
            tuner = stack.enter_context(Tuner(device, database))
        settings = Options(options.tune_cap, options.db)
        for row in compared(problems, device, names, settings, options.rounds, tuner):
            if row["tune_seconds"] is None and (old := results.find(row)) is not None:
                row["tune_seconds"] = old.get("tune_seconds")
            results.put(row)
    print("", *summary(results.rows), f"written: {results.path}", sep="\n")


def compared(
    problems: list[Problem], device: Device, names: list[str], settings: Options, rounds: int,
    tuner: Tuner | None, trials: int | None = None, known: Mapping[str, Provider] | None = None,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """The row of each problem. With a tuner, problems without a confirmed record of these kernels are tuned
    first.

    known: the providers by name, including torch.
    """
    backend = CudaBackend(device)
    backend.open()
    for index, problem in enumerate(problems):
        tune_seconds = None
        if tuner and not (tuner.database and is_settled(tuner.database, problem, device)):
            tune_seconds = round(tuner.tune(problem, trials=trials).seconds, 2)
        row = measure(problem, device, backend, names, settings, rounds, known)
        yield row | {"tune_seconds": tune_seconds}
        brief = "  ".join(
            f"{name} {got['median_us']:.1f}" for name, got in row["providers"].items() if "median_us" in got
        )
        print(f"[{index + 1}/{len(problems)}] {problem}: {brief} us", flush=True)


def summary(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The rows as a table with means and losses, as in the documents, then the skipped providers with
    reasons.
    """
    names = dict.fromkeys(name for row in rows for name in row["providers"] if name != "torch")
    yield from filter(None, tables.providers(rows, tuple(names)))
    skipped: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for name, got in row["providers"].items():
            if "skipped" in got:
                skipped.setdefault((name, got["skipped"]), []).append(shape_of(row))
    for (name, reason), where in skipped.items():
        more = ", ..." if len(where) > 4 else ""
        yield f"skipped {name}: {reason} ({len(where)} shapes: {', '.join(where[:4])}{more})"


def measure(
    problem: Problem, device: Device, backend: CudaBackend, names: list[str], settings: Options, rounds: int,
    known: Mapping[str, Provider] | None = None, **durations: Any,
) -> dict[str, Any]:  # fmt: skip
    """The row of one problem, without its tuning time. known: the providers by name. durations: those of the
    interleave that differ from its defaults.
    """
    timed_of: dict[str, dict[str, Any]] = {}
    contenders: dict[str, dict[str, Contender]] = {}
    for name in names:
        try:
            all_of = (known or providers.PROVIDERS)[name](problem, device, settings)
            contenders[name] = {f"{name} {number}": each for number, each in enumerate(all_of)}
        except Skip as skip:
            timed_of[name] = {"skipped": str(skip)}
    runs = {key: each.run for some in contenders.values() for key, each in some.items()}
    before = backend.telemetry()
    result = interleave(problem, runs, backend, l2_bytes=device.l2_bytes, rounds=rounds, **durations)
    for name, some in contenders.items():
        timed = [key for key in some if key in result.timings]
        if not timed:
            timed_of[name] = {"skipped": result.skipped[next(iter(some))]}
            continue
        best = min(timed, key=lambda key: result.timings[key].median_us)
        timing, contender = result.timings[best], some[best]
        timed_of[name] = {
            "median_us": round(timing.median_us, 3), "iqr_us": round(timing.iqr_us, 3),
            "tflops": round(problem.flops / timing.median_us / 1e6, 2),
            "ratio": round(timing.ratio_to(result.timings["torch 0"]), 4),
            "relative_error": timing.relative_error,
        }  # fmt: skip
        if result.shared:
            # Of the same contender: its steady-state time decides which of a provider's is meant.
            shared = result.shared[best].ratio_to(result.shared["torch 0"])
            timed_of[name]["ratio_shared"] = round(shared, 4)
        if contender.label:
            timed_of[name]["label"] = contender.label
        if contender.tune_seconds is not None:
            timed_of[name]["tune_seconds"] = round(contender.tune_seconds, 2)
        if len(some) > 1:
            timed_of[name]["contenders"] = len(timed)
    after = backend.telemetry()
    del contenders, contender, runs, some, all_of
    gc.collect()  # graphs and compiled functions hold device memory in cycles
    backend.release()
    return problem_fields(problem) | {
        "epilogue": problem.epilogue or "none",
        "providers": {name: timed_of[name] for name in names}, "tune_seconds": None,
        "kernel_source": kernel_source_hash("cute_sm90"), "noise": round(result.noise, 5),
        "rounds": result.rounds, "turn_ms": result.turn_ms, "operand_sets": result.operand_sets,
        "products_per_replay": result.products_per_replay, "clocks": {"before": before, "after": after},
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
