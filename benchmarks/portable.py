"""Times the families that run on every GPU since Ampere beside torch.mm, on 40 products, within a time limit.

    python -m benchmarks.portable --seconds 60 --shapes 4096x4096x4096,4096x4096x4097

Compiles the first kernels of `triton` and `cute_sm80` in the model's order, on all cores while the GPU
works. Checks them and the library's algorithms against fp32, races all of them beside torch.mm, then the
best of each family once more. Writes results/GPU/portable.json after each product: `wrong` names the kernels
that failed or gave a wrong result; the means are of products whose lines are whole vectors of 16 bytes, and
of the others.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from benchmarks.command import command, parser_of
from benchmarks.graphs import within
from benchmarks.interleave import METHOD as INTERLEAVE
from benchmarks.interleave import interleave
from benchmarks.peers import measure
from benchmarks.providers import PROVIDERS, Contender, Options, Provider, of_library
from benchmarks.results import Results, geometric_mean
from benchmarks.shapes import LISTED
from tunegemm.compile.artifacts import ArtifactStore
from tunegemm.compile.pool import CompilePool, CompileResult
from tunegemm.describe.device import Device, find_device
from tunegemm.describe.problem import MAX_ALIGNMENT, Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate import families
from tunegemm.generate.cublaslt import FAMILY, library
from tunegemm.measure.backend import CudaBackend
from tunegemm.model import rank as model
from tunegemm.tuning.kernels import Kernels

GENERATORS = ("triton", "cute_sm80")
SHAPES = tuple(LISTED["shapes"]["portable"])
#: Samples of a product's first race, by which the best of each family are chosen, and of the second.
_FIRST: dict[str, Any] = {"rounds": 5, "turn_ms": 0.0, "settle_s": 0.1}
_ROUNDS = 9
_SECOND: dict[str, Any] = {"turn_ms": 60.0, "turns": 5, "settle_s": 0.2, "settle_steady_s": 0.2}
#: What torch.mm allows itself on sm_90.
_WORKSPACE_BYTES = 32 << 20
METHOD = "the best of each family by an interleave of five rounds, in which all contenders are checked; then "


@command
def main(arguments: Sequence[str] | None = None) -> int | None:
    """1 where a kernel was wrong."""
    parser = parser_of("benchmarks.portable", __doc__)
    parser.add_argument("--seconds", type=float, default=140.0, help="no new product after (%(default)g)")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="MxNxK,... (default: the forty)")
    parser.add_argument("--dtype", default="bf16", help="(default: %(default)s)")
    parser.add_argument("--kernels", type=int, default=3, help="of a family and product (%(default)s)")
    options = parser.parse_args(arguments)
    problems = [Problem.parse(shape, dtype=options.dtype) for shape in options.shapes.split(",")]
    device = find_device(options.device)
    begun, wrong = time.monotonic(), 0
    with CompilePool(ArtifactStore()) as pool:
        kernels = Kernels(device, GENERATORS)
        compiled: dict[Problem, dict[Candidate, Future[CompileResult]]] = {}
        for problem in problems:
            first = first_kernels(problem, kernels, options.kernels)
            keys = {each: families.generator(each.family).kernel_key(problem, each, device) for each in first}
            compiled[problem] = {each: pool.submit(each.family, key) for each, key in keys.items()}
        backend = CudaBackend(device)
        backend.open()
        results = Results.of(options.out, device, "portable.json", METHOD + INTERLEAVE)
        for problem in within(options.seconds - (time.monotonic() - begun), problems):
            objects = {item: future.result() for item, future in compiled[problem].items()}
            row = raced(problem, device, backend, objects)
            wrong += len(row["wrong"])
            results.summary = means(results.rows)
            results.put(row)
            print(f"{problem}: {brief(row)}", flush=True)
    results.summary = means(results.rows)
    results.put()
    print(results.summary["means"], f"wrong kernels: {wrong}", f"written: {results.path}", sep="\n")
    return int(wrong > 0)


def first_kernels(problem: Problem, kernels: Kernels, count: int) -> list[Candidate]:
    """So many kernels of each generator with the launch that the model would give them, best by it first."""
    candidates: list[Candidate] = []
    for name in GENERATORS:
        ranked = model.alternate_rankings(kernels.ranked(problem, name, most=256).predictions)
        candidates += {trial.candidate.kernel: trial.candidate for trial in reversed(ranked[:count])}.values()
    return candidates


def raced(
    problem: Problem, device: Device, backend: CudaBackend, objects: Mapping[Candidate, CompileResult]
) -> dict[str, Any]:
    """The row of a product: the best of each family, timed beside torch.mm; and the faulty kernels."""
    options = Options(0.0, None)
    contenders: dict[str, list[Contender]] = {"torch": PROVIDERS["torch"](problem, device, options)}
    wrong: list[str] = []
    for candidate, result in objects.items():
        family = families.generator(candidate.family)
        label = family.label(candidate)
        if result.artifact is None:
            wrong.append(f"{candidate.family} {label}: {result.failure[:100]}")
            continue
        launch = family.load(problem, candidate, device, result.artifact.path)
        contenders.setdefault(candidate.family, []).append(Contender(launch, label))
    contenders["cublaslt"] = algorithms(problem, device)
    runs = {f"{name} {item.label}": item.run for name, each in contenders.items() for item in each}
    first = interleave(problem, runs, backend, l2_bytes=device.l2_bytes, **_FIRST)
    wrong += [f"{name}: {why}" for name, why in first.skipped.items()]
    best: dict[str, Provider] = {}
    for name, each in contenders.items():
        labels = {f"{name} {item.label}": item for item in each}
        times = {first.timings[label].median_us: labels[label] for label in labels.keys() & first.timings}
        if times:
            best[name] = functools.partial(lambda item, *_: [item], times[min(times)])
    row = measure(problem, device, backend, [*best], options, _ROUNDS, best, **_SECOND)
    return row | {"contenders": len(runs), "wrong": wrong}


def algorithms(problem: Problem, device: Device) -> list[Contender]:
    """The library's algorithms: those of its heuristic, and one of each id that it accepts."""
    named = FAMILY.discover(problem, device)
    if len(named) > 1:  # the library has algorithms for such operands
        named += library.one_of_each_id(problem, device.index, _WORKSPACE_BYTES)
    return of_library(problem, device, named)


def is_aligned(row: Mapping[str, Any]) -> bool:
    """Whether all lines of a row's product are whole vectors."""
    problem = Problem.parse(f"{row['m']}x{row['n']}x{row['k']}", dtype=row["dtype"], layout=row["layout"])
    return problem.alignment == MAX_ALIGNMENT and problem.n * 2 % MAX_ALIGNMENT == 0


def means(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The geometric mean of each family's ratios to torch.mm, of aligned products and of others."""
    ratios: dict[str, list[float]] = {}
    for row in rows:
        kind = "aligned" if is_aligned(row) else "other"
        for name, timed in row["providers"].items():
            if name != "torch" and "ratio" in timed:
                ratios.setdefault(f"{name}, {kind}", []).append(timed["ratio"])
    result = {name: [round(geometric_mean(each), 4), len(each)] for name, each in sorted(ratios.items())}
    return {"means": result}


def brief(row: Mapping[str, Any]) -> str:
    """A row in one line: each family's ratio, or why it has none."""
    words = [
        f"{name} {timed['ratio']:.3f}" if "ratio" in timed else f"{name}: {timed.get('skipped', 'failed')}"
        for name, timed in row["providers"].items()
        if name != "torch"
    ]
    return "  ".join([*words, *(f"WRONG {item}" for item in row["wrong"])])


if __name__ == "__main__":
    sys.exit(main())
