"""Which kernels sum one element in the same order, and whether a row's bits depend on the rows beside it.

    python -m benchmarks.batch_bits --compile-only --objects build/bits   # no GPU needed; then, with one:
    python -m benchmarks.batch_bits --objects build/bits

Every kernel computes the same product. Kernels whose results agree in every bit are of one *reduction class*.
The summary says of each class what its kernels have in common, and of each parameter how often a change of it
alone changed the class. Then each computes the first M rows alone, for every M up to `--rows`: `differing` is
how often a row came out otherwise than in the whole product. Writes results/GPU/batch_bits_DTYPE.json, a row
of each kernel.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.carried import Carried, compile_into
from benchmarks.results import Results, meta, results_path
from tunegemm.describe.device import Device, find_device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate, Value
from tunegemm.errors import TunegemmError
from tunegemm.generate import families

METHOD = (
    "operands normal(0, 1) by seed, A row-major, B k-major; the product of {whole} rows by each kernel into "
    "a poisoned output, checked against fp32; classes by SHA-256 of its bits; then the first M rows for each "
    "M from 1 to {rows} and M in {more}, compared bit by bit with the same rows of that product"
)

Params = Mapping[str, Value]

#: Of each family a kernel and its launch, then changes to them: mostly of one thing, which then shows.
BASES: Mapping[str, Params] = {
    "cute_sm90": {
        "schedule": "cooperative", "tile_scheduler": "static", "tile_m": 128, "tile_n": 128, "tile_k": 64,
        "stages": 4, "cluster_m": 1, "cluster_n": 1, "epi_n": 32,
        "swap_ab": False, "raster_order": "along_m", "swizzle_size": 1, "cluster_order": "index",
        "ctas": "all", "split_k": 1, "reduction": "pairs", "l2_hint": "none",
    },
    "cute_sm80": {
        "tile_m": 128, "tile_n": 128, "tile_k": 32, "stages": 3, "warps_m": 2, "warps_n": 2, "atoms_n": 2,
        "smem_swizzle": 2, "vector_bytes": 16, "ctas_per_sm": 1, "acc_dtype": "fp32",
        "raster_order": "along_m", "swizzle_size": 1, "ctas": "tiles", "split_k": 1,
    },
    "triton_tma": {
        "schedule": "pipelined", "tile_m": 128, "tile_n": 128, "tile_k": 64, "stages": 3, "warps": 8,
        "epi_n": 64, "swap_ab": False, "raster_order": "along_m", "swizzle_size": 1, "ctas": "all",
        "split_k": 1,
    },
    "gluon_wgmma": {
        "schedule": "cooperative", "tile_m": 128, "tile_n": 128, "tile_k": 64, "stages": 4, "warps": 8,
        "instr_n": 256, "lhs_in_registers": False, "occupancy": 1, "swap_ab": False,
        "raster_order": "along_m", "swizzle_size": 1, "ctas": "all",
    },
    "skinny": {
        "tile_m": 16, "tile_n": 32, "tile_k": 256, "warps_n": 1, "warps_k": 8, "stages": 4,
        "vector_bytes": 16, "ctas_per_sm": 1, "ctas": "tiles", "split_k": 1,
    },
}  # fmt: skip
PINGPONG: Params = {"schedule": "pingpong"}
CHANGES: Mapping[str, tuple[Params, ...]] = {
    "cute_sm90": (
        {}, PINGPONG, {"tile_m": 64}, {"tile_m": 192}, {"tile_m": 256}, {"tile_n": 16, "epi_n": 16},
        {"tile_n": 32}, {"tile_n": 64}, {"tile_n": 96}, {"tile_n": 176, "epi_n": 16}, {"tile_n": 256},
        {"tile_k": 128, "stages": 3}, {"stages": 6}, {"cluster_m": 2}, {"cluster_n": 2},
        {"epi_n": 64}, {"swap_ab": True},
        {"swap_ab": True, "tile_n": 16, "epi_n": 16},
        {"raster_order": "along_n", "swizzle_size": 4}, {"ctas": "balanced"}, {"split_k": 2}, {"split_k": 4},
        {"split_k": 4, "reduction": "second_kernel"}, {"split_k": 3}, {"split_k": 3, "tile_n": 64},
        {"split_k": 3, "reduction": "second_kernel"}, {"tile_scheduler": "stream_k"},
        {"tile_scheduler": "stream_k", "tile_n": 64},
        {**PINGPONG, "tile_m": 64, "tile_n": 32}, {**PINGPONG, "split_k": 2},
        {"split_k": 2, "tile_k": 128, "stages": 3},
        {"split_k": 2, "swap_ab": True, "tile_m": 64, "tile_n": 32},
    ),
    "cute_sm80": (
        {}, {"tile_m": 64}, {"tile_n": 64}, {"tile_k": 64, "smem_swizzle": 3}, {"stages": 5},
        {"warps_n": 4}, {"atoms_n": 1}, {"split_k": 2}, {"split_k": 4}, {"ctas": "all"},
        {"tile_m": 32, "tile_n": 64, "tile_k": 64, "smem_swizzle": 3, "warps_m": 1},
    ),
    "triton_tma": (
        {}, {"schedule": "flattened"}, {"tile_m": 64, "warps": 4}, {"tile_n": 32, "epi_n": 32},
        {"tile_n": 256}, {"tile_k": 128, "stages": 2}, {"swap_ab": True}, {"split_k": 2},
    ),
    "gluon_wgmma": (
        {}, PINGPONG, {"schedule": "pipelined", "stages": 2}, {"schedule": "multistage"},
        {"schedule": "blocking", "stages": 1}, {"tile_n": 32}, {"tile_k": 128, "stages": 2},
        {"lhs_in_registers": True, "stages": 5}, {"tile_n": 256, "instr_n": 128}, {"swap_ab": True},
    ),
    "skinny": (
        {}, {"tile_m": 8}, {"tile_m": 32, "stages": 3}, {"tile_n": 16}, {"tile_n": 64, "stages": 3},
        {"stages": 2}, {"ctas": "all"}, {"tile_k": 512, "stages": 2}, {"warps_k": 4}, {"warps_k": 2},
        {"warps_k": 1}, {"tile_k": 512, "warps_k": 16, "stages": 2}, {"tile_k": 32, "warps_k": 1},
        {"split_k": 2}, {"split_k": 4}, {"warps_n": 2, "warps_k": 4, "tile_k": 128},
    ),
}  # fmt: skip
#: M beyond those of each row number.
MORE_ROWS = (384, 512, 1000, 1024)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; 2 for bad input or no GPU, with one line that says so."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.batch_bits", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--shape", default="1024x4096", help="NxK; default: %(default)s")
    parser.add_argument("--rows", type=int, default=300, help="largest M of which each smaller one is tried")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--out-dtype", default=None, help="default: the usual one of the dtype")
    parser.add_argument("--objects", type=Path, required=True, help="folder of compiled kernels")
    parser.add_argument("--compile-only", action="store_true", help="fill that folder and end; no GPU needed")
    parser.add_argument("--device", default="cuda:0", help="with --compile-only model:h200 will do")
    parser.add_argument("--out", type=Path, help="folder of the result file (default: results/GPU)")
    options = parser.parse_args(arguments)
    try:
        whole = max(options.rows, *MORE_ROWS)
        problem = Problem.parse(f"{whole}x{options.shape}", dtype=options.dtype, out_dtype=options.out_dtype)
        device = find_device(options.device)
        kernels = list(feasible(problem, device))
        if options.compile_only:
            for name, reason in compile_into(
                options.objects, ((problem, k) for k in kernels), device
            ).items():
                print(f"{name}: {reason}")
        else:
            run(problem, kernels, device, options)
    except TunegemmError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def feasible(problem: Problem, device: Device) -> Iterator[Candidate]:
    """The kernels that run; rules named `..._fits` look at speed. What another rule rejects is printed."""
    for name, changes in CHANGES.items():
        family = families.get(name)
        for change in changes:
            params = {**BASES[name], **change}
            if problem.in_dtype not in ("bf16", "fp16"):  # bytes of a step, not elements
                params["tile_k"] = 2 * int(params["tile_k"])
            compiled = {key: params[key] for key in family.parameters["compile"]}
            launched = {key: params[key] for key in family.parameters["launch"]}
            candidate = Candidate.make(name, compiled, launched)
            verdict = family.check(problem, candidate, device)
            if verdict or (verdict.rule or "").endswith("_fits"):
                yield candidate
            else:
                print(f"{family.label(candidate)} of {name} is left out: {verdict}")


def run(problem: Problem, kernels: list[Candidate], device: Device, options: argparse.Namespace) -> None:
    """Computes all products, and writes the classes and a row of each kernel."""
    import torch

    from tunegemm.measure.operands import check, expected, make_operands, restore, tolerance

    method = METHOD.format(whole=problem.m, rows=options.rows, more=", ".join(map(str, MORE_ROWS)))
    dtypes = problem.dtypes.replace(">", "-")
    results = Results(results_path(options.out, device, f"batch_bits_{dtypes}.json"), meta(device, method))
    carried, place = Carried(options.objects), torch.device("cuda", device.index)
    torch.cuda.set_device(place)
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    operands = make_operands(problem, place, 0)
    if problem.in_dtype != "int8":
        generator = torch.Generator(device=place).manual_seed(1)
        for operand in (operands.a, operands.b.t()):
            drawn = torch.empty(operand.shape, dtype=torch.float32, device=place)
            operand.copy_(drawn.normal_(generator=generator))
    wanted = expected(problem, operands)
    rows = [*range(1, options.rows + 1), *(m for m in MORE_ROWS if m > options.rows)]

    def launch_of(candidate: Candidate | None, m: int) -> Any:
        if candidate is None:
            return lambda a, b, out: torch.mm(a, b, out=out)
        found, path = families.get(candidate.family), carried.find(problem, candidate)
        return found.load(replace(problem, m=m), candidate, device, path)

    by_bits: dict[str, int] = {}
    ours: list[tuple[Candidate, int]] = []
    torchs = [None] if problem.out_dtype == problem.in_dtype else []
    for candidate in (*torchs, *kernels):
        if candidate is not None and carried.find(problem, candidate) is None:
            print(f"{candidate}: no object in {carried.folder}", flush=True)
            continue
        label = "torch.mm" if candidate is None else families.get(candidate.family).label(candidate)
        restore(operands)
        launch_of(candidate, problem.m)(operands.a, operands.b, operands.out)
        torch.cuda.synchronize()
        objection = check(operands, wanted).objection(tolerance(problem))
        bits = digest(operands.out)
        number = by_bits.setdefault(bits, len(by_bits))
        differing = [] if objection else differing_rows(operands, rows, candidate, launch_of)
        row = {
            "workload": label,
            "family": "torch" if candidate is None else candidate.family,
            "params": {} if candidate is None else dict(candidate.params),
            "dtype": problem.in_dtype, "out_dtype": problem.out_dtype, "n": problem.n, "k": problem.k,
            "class": number,
            "bits": bits,
            "objection": objection,
            "differing": len(differing),
            "differing_m": differing[:12],
        }  # fmt: skip
        results.put(row)
        if candidate is not None and objection is None:
            ours.append((candidate, number))
        said = objection or f"class {number}, {len(differing)} of {len(rows)} M differ"
        print(f"{row['family']} {label}: {said}", flush=True)
    results.summary |= {"classes": classes(ours), "parameters": deciding(ours)}
    results.put(*results.rows)
    print(f"{len(ours)} kernels, {len({number for _, number in ours})} classes\nwritten: {results.path}")


def digest(tensor: Any) -> str:
    """SHA-256 (16 hex digits) of a packed tensor's bytes."""
    import torch

    return hashlib.sha256(tensor.view(torch.uint8).cpu().numpy().tobytes()).hexdigest()[:16]


def differing_rows(
    operands: Any, rows: Iterable[int], candidate: Candidate | None, launch_of: Any
) -> list[int]:
    """The M whose product differs in a bit from the first M rows of the whole one, or is not written."""
    import torch

    found = []
    for m in rows:
        out = torch.full_like(operands.out[:m], 77)
        launch_of(candidate, m)(operands.a[:m], operands.b, out)
        if not torch.equal(out.view(torch.uint8), operands.out[:m].view(torch.uint8)):
            found.append(m)
    return found


def classes(kernels: list[tuple[Candidate, int]]) -> list[dict[str, Any]]:
    """Of each class its families and the values that each of their parameters takes in it."""
    found = []
    for number in sorted({number for _, number in kernels}):
        members = [candidate for candidate, own in kernels if own == number]
        of_family = {}
        for family in dict.fromkeys(candidate.family for candidate in members):
            params = [candidate.params for candidate in members if candidate.family == family]
            of_family[family] = {
                name: list(dict.fromkeys(each[name] for each in params))
                for name in params[0]
                if len({each[name] for each in params}) > 1 or params[0][name] != BASES[family][name]
            } | {"kernels": len(params)}
        found.append({"class": number, "kernels": len(members), "families": of_family})
    return found


def deciding(kernels: list[tuple[Candidate, int]]) -> dict[str, dict[str, dict[str, int]]]:
    """Of each family's parameters: pairs of kernels that differ in it alone, by whether their bits agree."""
    found: dict[str, dict[str, dict[str, int]]] = defaultdict(dict)
    for (one, number), (other, another) in itertools.combinations(kernels, 2):
        if one.family != other.family:
            continue
        unlike = [name for name, value in one.params.items() if other.params[name] != value]
        if len(unlike) == 1:
            counts = found[one.family].setdefault(unlike[0], {"same": 0, "other": 0})
            counts["same" if number == another else "other"] += 1
    return dict(found)


if __name__ == "__main__":
    sys.exit(main())
