"""Policy `batch_invariant`: tests whether a row's bits depend on the number of rows, and measures the cost.

    python -m benchmarks.batch_invariance --kinds fp8,gelu  # a slice: its rows go into the same file

The first M rows are multiplied alone and compared, bit by bit, with the same rows of the largest batch, as
METHOD says; the Triton kernel is that of `benchmarks.fixed_tiles`. Writes results/GPU/batch_invariance.json,
a row for each timed M; its `differing` counts over all M and modes of its N x K, dtype and epilogue.
"""

from __future__ import annotations

import functools
import itertools
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

import tunegemm
from benchmarks.command import command, parser_of
from benchmarks.graphs import within
from benchmarks.interleave import interleave
from benchmarks.results import Results, geometric_mean, problem_fields, report
from benchmarks.shapes import LISTED
from tunegemm.choose.policies import Preference
from tunegemm.describe.device import Device, find_device
from tunegemm.describe.problem import Problem
from tunegemm.errors import ProblemError, TunegemmWarning
from tunegemm.generate.cublaslt.eager import torch_mm
from tunegemm.measure.backend import CudaBackend
from tunegemm.measure.operands import make_operands, torch_dtype

METHOD = (
    "records and kernels as shipped; operands as candidates are measured with; the rows of M in 1..300 and "
    "of {more} more up to {largest} are compared with those of {largest}, eagerly, and {sampled} M in CUDA "
    "graphs and compiled code; then one CUDA graph for each policy, for torch and for a Triton kernel of one "
    "tile for all M, over operand sets that together pass 3x the L2, in shuffled order in each of {rounds} "
    "rounds: ratios of times, above 1 where batch_invariant is faster"
)
KINDS = LISTED["kinds"]
LARGEST, MORE = 16384, 40
EVERY = range(1, 301)
#: M for CUDA graphs and compiled code, too, and M to time.
SAMPLED = (1, 2, 3, 7, 8, 15, 16, 17, 33, 64, 65, 100, 127, 128, 129, 200, 256, 300, 1111, LARGEST)
TIMED = (1, 16, 256, 4096)


def of_kind(shape: str, name: str, kinds: Mapping[str, Mapping[str, Any]] = KINDS) -> Problem:
    """A product by the name of its kind. Raises ProblemError for an unknown kind."""
    if name not in kinds:
        raise ProblemError(f"--kinds {name}: use {', '.join(kinds)}")
    return Problem.parse(shape, **kinds[name])


def larger(count: int = MORE, largest: int = LARGEST) -> list[int]:
    """So many M above the exhaustive ones, evenly spaced in their logarithm; the last is the largest."""
    step = (largest / EVERY[-1]) ** (1 / count)
    return [round(EVERY[-1] * step**number) for number in range(1, count + 1)]


@command
def main(arguments: Sequence[str] | None = None) -> int | None:
    """1 where bits differ."""
    parser = parser_of("benchmarks.batch_invariance", __doc__)
    parser.add_argument(
        "--shapes",
        default=",".join(LISTED["shapes"]["batch_invariance"]),
        help="NxK,...; default: %(default)s",
    )
    parser.add_argument("--kinds", default=",".join(KINDS), help="default: %(default)s")
    parser.add_argument("--timed", default=",".join(map(str, TIMED)), help="M,...; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds per timing")
    parser.add_argument("--budget-s", type=float, default=200, help="begin no N x K later than that")
    options = parser.parse_args(arguments)
    both = itertools.product(options.shapes.split(","), options.kinds.split(","))
    problems = [of_kind(f"{LARGEST}x{text}", name) for text, name in both]
    device = find_device(options.device)
    method = METHOD.format(more=MORE, largest=LARGEST, sampled=len(SAMPLED), rounds=options.rounds)
    results = Results.of(options.out, device, "batch_invariance.json", method)
    backend = CudaBackend(device)
    backend.open()
    different = 0
    earlier = results.summary.get("left_out", [])
    left_out = list(dict.fromkeys([*earlier, *map(str, problems)]))
    for problem in within(options.budget_s, problems):
        begun = time.monotonic()
        result, said, triton = compare(problem, [*EVERY, *larger()], SAMPLED)
        differing = sum(map(len, result.values()))
        different += differing
        seconds = time.monotonic() - begun
        shared = {"epilogue": problem.epilogue or "none", "differing": differing,
                  "differing_m": {mode: ms[:12] for mode, ms in result.items()},
                  "triton_differing": triton, "warnings": len(said)}  # fmt: skip
        timings = [replace(problem, m=int(m)) for m in options.timed.split(",")]
        rows = [
            problem_fields(each) | shared | timed(each, device, backend, options.rounds) for each in timings
        ]
        left_out.remove(str(problem))
        report(results, rows)
        backend.release()
        print(f"{problem}: {differing} differ, {seconds:.1f} s;", *said[:1], flush=True)
    results.summary = summed(results.rows) | {"left_out": left_out}
    results.put()
    print(results.summary, f"\nwritten: {results.path}")
    return int(different > 0)


def summed(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Differences, and the policy's cost as geometric means, over all rows of the file."""
    return {"differing": sum(row["differing"] for row in rows)} | {
        f"geometric_mean_to_{other}": geometric_mean(filter(None, (row[f"ratio_to_{other}"] for row in rows)))
        for other in ("fastest", "torch", "triton")
    }


def product(problem: Problem) -> Callable[..., Any]:
    """The call of (a, b, *operands) that dispatch gets for such problems."""
    return _product(problem.epilogue, problem.out_dtype)[0]


@functools.cache
def _product(text: str, out_dtype: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The call, and the same compiled once for all extents."""
    dtype = torch_dtype(out_dtype)
    torch._dynamo.config.recompile_limit = 64  # all kinds, and an M of 1 of each, are of one line of code

    def call(a: Any, b: Any, *operands: Any) -> Any:
        if not text:
            return tunegemm.matmul(a, b)
        if text == "scale_rowwise":  # as torch has scales: of a column and of a row
            rows, columns = operands[0][:, None], operands[1][None, :]
            return tunegemm.scaled_mm(a, b, rows, columns, out_dtype=dtype, use_fast_accum=True)
        return tunegemm.matmul(a, b, epilogue=text, operands=operands, out_dtype=dtype)

    return call, torch.compile(call, dynamic=True, fullgraph=True)


def compare(
    problem: Problem, rows: Iterable[int], sampled: Iterable[int]
) -> tuple[dict[str, list[int]], list[str], int | None]:
    """By mode the M whose rows differ in a bit from the same rows of the whole problem; the warnings; and the
    number of sampled M for which the Triton kernel's rows differ, None if it does not run.

    rows: M to try eagerly; sampled: those in CUDA graphs and compiled code.
    """
    made = make_operands(problem, torch.device("cuda"), 0)
    call, compiled = _product(problem.epilogue, problem.out_dtype)
    kinds = [operand.kind for operand in problem.fused.operands]

    def operands_of(m: int) -> tuple[Any, ...]:
        pairs = zip(made.arguments[3:], kinds, strict=True)
        return made.a[:m], made.b, *(item[:m] if kind in ("m", "matrix") else item for item, kind in pairs)

    def captured(*operands: Any) -> Any:
        call(*operands)  # plans are made here, and not while a graph is captured
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = call(*operands)
        result.fill_(77)
        graph.replay()
        return result

    def unlike(how: Callable[..., Any], ms: Iterable[int], whole: Any) -> list[int]:
        here = (m for m in ms if m <= problem.m)
        return [m for m in here if not torch.equal(how(*operands_of(m)).view(torch.uint8), whole[:m])]

    with warnings.catch_warnings(record=True) as said, tunegemm.policy("batch_invariant"), torch.no_grad():
        warnings.simplefilter("always", TunegemmWarning)
        whole = call(*operands_of(problem.m)).view(torch.uint8)
        results = {
            "eager": unlike(call, rows, whole),
            "graph": unlike(captured, sampled, whole),
            "compiled": unlike(compiled, sampled, whole),
        }
        del whole
        try:
            from benchmarks import fixed_tiles

            theirs = fixed_tiles.of(problem)
            triton = len(unlike(theirs, sampled, theirs(*operands_of(problem.m)).view(torch.uint8)))
        except Exception:  # foreign code may raise anything; the line of its times reports it
            triton = None
    messages = [str(item.message) for item in said if issubclass(item.category, TunegemmWarning)]
    return results, messages, triton


def timed(problem: Problem, device: Device, backend: Any, rounds: int) -> dict[str, Any]:
    """The policy's speed beside `fastest`, torch's own operations and the Triton kernel."""
    call = product(problem)

    def under(prefer: Preference) -> Callable[..., Any]:
        def run(a: Any, b: Any, out: Any, *operands: Any) -> Any:
            with tunegemm.policy(prefer):
                return call(a, b, *operands)

        return run

    def triton(a: Any, b: Any, out: Any, *operands: Any) -> Any:
        from benchmarks import fixed_tiles

        return fixed_tiles.of(problem)(a, b, *operands)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TunegemmWarning)  # for products that `fastest` leaves to torch
        result = interleave(
            problem,
            {
                "torch": torch_mm(problem), "fastest": under("fastest"),
                "invariant": under("batch_invariant"), "triton": triton,
            },
            backend, l2_bytes=device.l2_bytes, rounds=rounds, min_replay_ms=0.3, settle_s=0.0, turn_ms=0,
        )  # fmt: skip
    ours, theirs = result.timings["invariant"], result.timings.get("triton")
    return {
        "ratio_to_fastest": round(ours.ratio_to(result.timings["fastest"]), 4),
        "ratio_to_torch": round(ours.ratio_to(result.timings["torch"]), 4),
        "ratio_to_triton": round(ours.ratio_to(theirs), 4) if theirs else None,
        "us": round(ours.median_us, 3), "triton_us": round(theirs.median_us, 3) if theirs else None,
        "triton_skipped": result.skipped.get("triton", ""), "noise": round(result.noise, 5),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
