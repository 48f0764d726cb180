"""Named candidates of one problem, timed beside torch.mm and cuBLASLt's algorithms in one interleave."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from benchmarks.results import problem_fields
from tunegemm.describe.space import Candidate, Value
from tunegemm.generate import families
from tunegemm.generate.cublaslt import FAMILY as LIBRARY
from tunegemm.generate.cublaslt import TORCH_MM

if TYPE_CHECKING:
    from benchmarks.interleave import Run
    from tunegemm.compile.pool import CompilePool
    from tunegemm.describe.device import Device
    from tunegemm.describe.problem import Problem
    from tunegemm.measure.backend import Backend


def hopper(
    schedule: str, tile: tuple[int, int, int], stages: int, cluster: tuple[int, int], epi_n: int,
    raster_order: str = "along_m", swizzle_size: int = 1, ctas: str = "all", swap_ab: bool = False,
    cluster_order: str = "index",
) -> Candidate:  # fmt: skip
    """A kernel of `cute_sm90` and its launch."""
    compile_params: dict[str, Value] = {
        "schedule": schedule, "tile_m": tile[0], "tile_n": tile[1], "tile_k": tile[2], "stages": stages,
        "cluster_m": cluster[0], "cluster_n": cluster[1], "epi_n": epi_n, "swap_ab": swap_ab,
    }  # fmt: skip
    launch_params: dict[str, Value] = {
        "raster_order": raster_order, "swizzle_size": swizzle_size, "cluster_order": cluster_order,
        "ctas": ctas, "split_k": 1, "l2_hint": "none",
    }  # fmt: skip
    return Candidate.make("cute_sm90", compile_params, launch_params)


def contest(
    problem: Problem,
    groups: Mapping[str, Mapping[str, Candidate]],
    device: Device,
    backend: Backend,
    pool: CompilePool,
    *,
    rounds: int,
    turns: int = 7,
    settle_s: float = 1.0,
) -> dict[str, Any]:
    """A row of a result file: per group its fastest candidate, and torch.mm and the best of cuBLASLt.

    All that compile and are right are timed; what is not is named under `skipped`. A group of several shows
    the best of its interleave, as cublaslt does.
    """
    from benchmarks.interleave import interleave

    runs: dict[str, Run] = {"torch": families.get("cublaslt").load(problem, TORCH_MM, device, None)}
    group_of, labels, skipped = {"torch": "torch"}, {"torch": ""}, {}
    futures = {
        (group, name): pool.submit(
            candidate.family, families.generator(candidate.family).kernel_key(problem, candidate, device)
        )
        for group, members in groups.items()
        for name, candidate in members.items()
    }
    for (group, name), future in futures.items():
        candidate, compiled = groups[group][name], future.result()
        if compiled.artifact is None:
            skipped[name] = compiled.failure
            continue
        family = families.get(candidate.family)
        runs[name] = family.load(problem, candidate, device, compiled.artifact.path)
        group_of[name], labels[name] = group, family.label(candidate)
    library = LIBRARY
    for candidate in library.discover(problem, device) if library.unavailable() is None else []:
        if candidate != TORCH_MM:
            with contextlib.suppress(ValueError):  # the library names algorithms that it then refuses
                name = library.label(candidate)
                runs[name] = library.load(problem, candidate, device, None)
                group_of[name], labels[name] = "cublaslt", name
    found = interleave(
        problem, runs, backend, l2_bytes=device.l2_bytes, rounds=rounds, turns=turns, settle_s=settle_s
    )  # fmt: skip
    baseline = found.timings["torch"]
    providers: dict[str, dict[str, Any]] = {}
    for name, timing in found.timings.items():
        ratio = round(timing.ratio_to(baseline), 4)
        group = group_of[name]
        if group not in providers or ratio > providers[group]["ratio"]:
            providers[group] = {
                "median_us": round(timing.median_us, 3),
                "tflops": round(problem.flops / timing.median_us / 1e6, 1),
                "ratio": ratio,
                "iqr_us": round(timing.iqr_us, 3),
                "relative_error": timing.relative_error,
                "label": labels[name],
            }
            if found.shared:
                shared = found.shared[name].ratio_to(found.shared["torch"])
                providers[group]["ratio_shared"] = round(shared, 4)
    return problem_fields(problem) | {
        "epilogue": "none",
        "providers": providers,
        "skipped": skipped | dict(found.skipped),
        "noise": round(found.noise, 5),
        "rounds": found.rounds,
        "turn_ms": found.turn_ms,
        "operand_sets": found.operand_sets,
        "products_per_replay": found.products_per_replay,
    }
