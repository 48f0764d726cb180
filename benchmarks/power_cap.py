"""Our own kernels beside torch.mm and cuBLASLt on large products at the power cap, all in steady state.

    python -m benchmarks.power_cap               # writes results/GPU/power_cap.json, some 15 s a product
    python -m benchmarks.power_cap --candidates  # the candidates alone; needs no GPU
    python -m benchmarks.power_cap --kinds swiglu,fp8    # beside torch's own operations: power_cap_kinds.json

Of our own kernels run those that ship compiled and that the model takes for the best, and the product's
record. The slower ones go in rounds; what is left, one of ours, one of cuBLASLt's algorithms and torch.mm, is
timed once more, and only that race's ratios are reported: no kernel is chosen by what it is reported with.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.batch_invariance import KINDS, of_kind
from benchmarks.large_kernels import Product, launches, object_of, roof_tflops
from benchmarks.results import Results, geometric_mean, meta, results_path
from tunegemm.choose.invariance import ranked
from tunegemm.describe.device import Device, find_device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.errors import ArtifactError, MeasureError, TunegemmError
from tunegemm.generate import families
from tunegemm.generate.cublaslt import FAMILY as LIBRARY
from tunegemm.generate.cublaslt import TORCH_MM
from tunegemm.measure.race import Replay, SteadyState, race
from tunegemm.measure.settings import RaceSettings
from tunegemm.model import shortlist
from tunegemm.store.shipped import read_shipped

if TYPE_CHECKING:
    from tunegemm.measure.backend import Backend

SHAPES = (
    "8192x8192x8192", "4096x28672x4096", "4096x14336x4096", "4096x4096x14336", "8448x9216x2048",
    "2048x7168x8192", "4096x6144x4096", "4096x4096x4096", "8192x3584x3584", "6144x6144x6144",
)  # fmt: skip


@dataclass(frozen=True)
class Stage:
    """A race in steady state."""

    own: int
    """Kernels of our own in it, the fastest of the stage before."""
    library: int
    rounds: int
    turn_ms: float
    """How long each has the chip to itself in a round; the second half is timed."""


#: Eleven seconds of a product, with all that go into it. Turns of 100 ms may flatter by a per cent what comes
#: after a kernel of less power (docs/decisions/0012); they only find those that go on.
STAGES = (Stage(20, 8, 1, 100.0), Stage(6, 2, 2, 160.0), Stage(3, 2, 2, 160.0))
FINAL = Stage(1, 1, 7, 160.0)
#: Kernels of our own that run beside the record, by the model, each at two launches at most; and how many of
#: them by joules alone, since of cycles the model knows less where two warpgroups share a tile.
KERNELS, BY_JOULES = 16, 4
#: Most algorithms of cuBLASLt, in the order in which the library names them.
ALGORITHMS = 8
#: The chip that meets its cap first lowers its clocks too far (benchmarks.interleave).
_SETTLE_S = 0.7
_NEVER = math.inf

METHOD = (
    "kernels of db/records and db/selector.toml as they ship compiled: the product's record, the first "
    "{joules} by the model's joules, and to {kernels} by the mean of the model's places by joules and by "
    "cycles, each in the model's order of tiles, and where clusters go by GPC in groups of 8 as well; "
    "cuBLASLt's first {algorithms} algorithms; torch.mm; each in a CUDA graph over operand sets that "
    "together pass 3x the L2, normal(0, 1) in bf16, checked against fp32; rounds in shuffled order, in which "
    "each has the chip to itself, the second half timed: {stages}; of those the best of each kind and "
    "torch.mm {rounds} rounds of {turn_ms:.0f} ms, whose ratios, medians over the rounds, are given"
)
METHOD_OF_KINDS = (
    "the product's record and the kind's kernels of db/invariant.toml, by the trees of db/order.json, beside "
    "the operations that a user of torch would write; else as power_cap.json: {stages}, {rounds} rounds of "
    "{turn_ms:.0f} ms"
)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; 2 for bad input, no GPU, or no compiled kernels, with one line that says so."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.power_cap", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--shapes", default=",".join(SHAPES), help="MxNxK,...")
    parser.add_argument("--kinds", default="bf16", help=f"of {', '.join(KINDS)}; default: %(default)s")
    parser.add_argument("--budget", type=float, default=200, help="seconds; begin no product later than that")
    parser.add_argument("--out", type=Path, help="folder of the result file (default: results/GPU)")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--candidates", action="store_true", help="measure nothing; list our own candidates")
    options = parser.parse_args(arguments)
    try:
        device = find_device(options.device)
        kinds = options.kinds.split(",")
        problems = [of_kind(shape, kind) for kind in kinds for shape in options.shapes.split(",")]
        if options.candidates:
            for problem in problems:
                names = [families.get(one.family).label(one) for one in candidates(problem, device)]
                print(f"{problem.shape}: {', '.join(names)}")
        else:
            run(device, problems, options)
    except TunegemmError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def candidates(problem: Problem, device: Device) -> list[Candidate]:
    """Our own: the product's record, then kernels by the model's rankings, each at the launch of the fewest
    joules; clusters by GPC in groups of 8 as well, which the model does not see. Of fp8 and fused products
    those that ship for the kind, by the trees.

    Raises ArtifactError where no compiled kernel is there.
    """
    if not shortlist.covers(problem):
        found = sorted(
            ranked(problem, shortlist.ordered_kernels(problem), device), key=lambda one: -one.expected
        )
        return list(dict.fromkeys([*_of_records(problem, device), *(one.candidate for one in found)]))
    return _by_joules(problem, device)


def _by_joules(problem: Problem, device: Device) -> list[Candidate]:
    found = launches(problem, device)
    by_joules, by_cycles = found.best(found.mj), found.best(found.terms.total_us)
    ranks = {found.candidates[place].kernel: rank for rank, place in enumerate(by_cycles)}
    by_both = sorted(
        range(len(by_joules)), key=lambda rank: rank + ranks[found.candidates[by_joules[rank]].kernel]
    )
    chosen = list(dict.fromkeys([*range(BY_JOULES), *by_both]))[:KERNELS]
    launched = [found.candidates[by_joules[rank]] for rank in chosen]
    grouped = [
        one.with_launch(**dict(one.launch_params) | {"swizzle_size": 8})
        for one in launched
        if one.params.get("cluster_order") == "gpc"
    ]
    return list(dict.fromkeys([*_of_records(problem, device), *launched, *grouped]))[: STAGES[0].own]


def _of_records(problem: Problem, device: Device) -> Iterator[Candidate]:
    for record in read_shipped()[0]:
        here = record.problem == problem and record.fingerprint.device_name == device.fingerprint.device_name
        if here and families.get(record.candidate.family).compiled:
            candidate = families.completed(record.candidate)
            try:
                object_of(problem, candidate, device)
            except ArtifactError:  # its kernel does not ship
                continue
            yield candidate


def run(device: Device, problems: Sequence[Problem], options: argparse.Namespace) -> None:
    """Races the products until the budget is spent, and writes each row as it comes."""
    from tunegemm.measure.backend import CudaBackend

    until = time.monotonic() + options.budget
    stages = ", ".join(
        f"{s.own} + {s.library} {s.rounds} rounds of {s.turn_ms:.0f} ms" for s in STAGES
    )  # fmt: skip
    is_plain = options.kinds == "bf16"
    method = (METHOD if is_plain else METHOD_OF_KINDS).format(
        joules=BY_JOULES, kernels=KERNELS, algorithms=ALGORITHMS, stages=stages, rounds=FINAL.rounds,
        turn_ms=FINAL.turn_ms,
    )  # fmt: skip
    name = "power_cap.json" if is_plain else "power_cap_kinds.json"
    results = Results(results_path(options.out, device, name), meta(device, method))
    backend = CudaBackend(device)
    backend.open()
    roof = roof_tflops(device)
    for problem in problems:
        if time.monotonic() > until:
            break
        begun = time.monotonic()
        row = measured(problem, device, backend)
        is_bf16 = problem.in_dtype == "bf16"
        row["share_of_roof"] = round(row["tflops"]["own"] / roof, 4) if roof and is_bf16 else None
        row["seconds"] = round(time.monotonic() - begun, 2)
        results.summary = summary([*(r for r in results.rows if r is not results.find(row)), row])
        results.put(row)
        print(
            f"{problem}: {row['own']} at {row['ratio_to_torch']:.3f} of torch.mm and "
            f"{row['ratio_to_best_cublaslt'] or 0:.3f} of {row['cublaslt']}, {row['tflops']}, "
            f"{row['seconds']} s",
            flush=True,
        )
    print(f"{results.summary or results.earlier_summary}; written: {results.path}")


def measured(problem: Problem, device: Device, backend: Backend) -> dict[str, Any]:
    """A product's row. Raises MeasureError where the device is lost, or none of our kernels runs."""
    product = Product(problem, device, backend)
    plain = shortlist.covers(problem)
    library = [one for one in _algorithms(problem, device) if plain and one != TORCH_MM][:ALGORITHMS]
    own = candidates(problem, device)
    runners: dict[Candidate, tuple[Replay, float]] = {TORCH_MM: product.replay(TORCH_MM)}
    failed: dict[str, str] = {}
    for candidate in (*own, *library):
        try:
            runners[candidate] = product.replay(candidate)
        except (TunegemmError, ValueError, RuntimeError) as error:
            failed[_label(candidate)] = str(error).partition("\n")[0][:160]
            if not backend.alive():
                raise MeasureError(f"{problem.shape}: {_label(candidate)} lost the device") from None
    own, library = ([one for one in kind if one in runners] for kind in (own, library))
    if not own:
        raise MeasureError(f"{problem.shape}: none of our kernels runs: {failed}")
    torch_mm = runners[TORCH_MM][0]
    until = time.monotonic() + _SETTLE_S
    while time.monotonic() < until:
        torch_mm.start()
        torch_mm.finish()
    counts = []
    for stage in STAGES:
        own, library = own[: stage.own], library[: stage.library]
        counts.append(len(own) + len(library))
        us = raced({one: runners[one] for one in (*own, *library)}, stage)
        own, library = (sorted(kind, key=lambda one: statistics.median(us[one])) for kind in (own, library))
    last = [TORCH_MM, own[0], *library[:1]]
    samples = raced({one: runners[one] for one in last}, FINAL)
    readings = {one: _under(runners[one][0], backend) for one in last}
    names = dict(zip(last, ("torch", "own", "cublaslt"), strict=False))
    ours = samples[own[0]]
    ratios = {names[one]: round(_ratio(samples[one], ours), 4) for one in last}
    row = {
        "m": problem.m, "n": problem.n, "k": problem.k,
        **({} if plain else {"dtype": problem.in_dtype, "epilogue": problem.epilogue}),
        "own": _label(own[0]), "cublaslt": _label(library[0]) if library else None,
        "ratio_to_torch": ratios["torch"], "ratio_to_best_cublaslt": ratios.get("cublaslt"),
        "us": {names[one]: round(statistics.median(samples[one]), 3) for one in last},
        "tflops": {
            names[one]: round(problem.flops / statistics.median(samples[one]) / 1e6, 1) for one in last
        },
        "rounds": FINAL.rounds, "turn_ms": FINAL.turn_ms, "raced": counts,
        "power_w": {names[one]: readings[one].get("power_w") for one in last},
        "throttle_reasons": readings[TORCH_MM].get("throttle_reasons"), "failed": failed,
    }  # fmt: skip
    del runners, torch_mm, product
    backend.release()
    return row


def raced(runners: Mapping[Candidate, tuple[Replay, float]], stage: Stage) -> dict[Candidate, list[float]]:
    """Microseconds of a product in each round, by candidate; none drops out within a stage.

    runners: replays and their seconds.
    """
    lasting = [SteadyState.of(replay, seconds, stage.turn_ms) for replay, seconds in runners.values()]
    settings = RaceSettings(stage.rounds, min_replay_ms=1.0, race_after=stage.rounds + 1, race_margin=_NEVER)
    return dict(zip(runners, race(lasting, len(lasting), settings, lambda _: None), strict=True))


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Geometric means over the products."""
    found: dict[str, Any] = {"products": len(rows)}
    for name in ("ratio_to_torch", "ratio_to_best_cublaslt", "share_of_roof"):
        if values := [row[name] for row in rows if row[name] is not None]:
            found[name] = round(geometric_mean(values), 4)
    return found


def _algorithms(problem: Problem, device: Device) -> list[Candidate]:
    return LIBRARY.discover(problem, device) if LIBRARY.unavailable() is None else []


def _label(candidate: Candidate) -> str:
    return families.get(candidate.family).label(candidate)


def _ratio(baseline_us: Sequence[float], own_us: Sequence[float]) -> float:
    return statistics.median(b / own for b, own in zip(baseline_us, own_us, strict=True))


def _under(replay: Replay, backend: Backend) -> dict[str, Any]:
    """The chip's state while it works: an idle one shows other clocks."""
    replay.start(0, 8)
    found = backend.telemetry()
    replay.finish()
    return found


if __name__ == "__main__":
    sys.exit(main())
