"""Predicts the time of a tile candidate: waves, tensor cores, shared memory, L2, DRAM, epilogue.

The prediction only ranks: its microseconds order candidates of one problem. They are not a measurement, and
nothing stores or shows them as one. Every term is a closed formula of the problem, the candidate and the
device. The formulas leave out power, momentary clocks and bank conflicts; measuring covers these.

`terms` has the formulas.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate, Value
from tunegemm.model.energy import Steady, steady
from tunegemm.model.terms import Columns, Floats, Terms, fits_l2, terms

# Exponents that predict a steady-state ratio at the power cap: of the ratio in interleaved timing, where all
# kernels share one clock, and of the kernel's predicted clock. Fitted to our kernels that were timed both
# ways: 22 products on an H200 (benchmarks/results/h200/turns-2026-11-22.json), where a lead of 6 % shrinks to
# 2.3 %, twelve more on an H200 and nine on an H100 (benchmarks/sweeps).
STEADY_LEAD = 0.8
STEADY_CLOCK = 0.45
#: Up to this many rows or columns, the interleaved ratios rank as well as the formula: for 16 products of 128
#: and 256 rows on an H200, quick tuning with the formula found kernels 0.1 % slower (2026-11-26).
_STEADY_ABOVE = 256
#: Up to this many rows or columns, memory bounds a product, not the clock.
_MEMORY_BOUND = 64

_TILE_GRID = ("tile_m", "tile_n", "cluster_m", "cluster_n", "swap_ab")
#: The parameters of a kernel's order of tiles.
_RASTERIZATION = ("raster_order", "swizzle_size")
#: The launch at the power cap: clusters of a GPC take neighbouring tiles, with this swizzle size. The reads
#: that this saves raise the clock, by some per cent for a large product (2026-11-22).
_GPC_AWARE: Mapping[str, Value] = {"cluster_order": "gpc", "swizzle_size": 8}
#: The best launch depends on the grid of tiles, and with k splits also on the length of the main loop.
_GRID_PARAMETERS = (*_TILE_GRID, "tile_k", "schedule", "tile_scheduler")


@dataclass(frozen=True)
class Prediction:
    """The model's terms for one candidate. `str()` is one line."""

    candidate: Candidate
    tiles: int
    """Output tiles, after rounding each mode up to whole clusters."""
    ctas: int
    """CTAs of the grid that the launch asks for."""
    waves: int
    """Tiles of the CTA that has the most."""
    wave_efficiency: float
    """Tiles over waves times the CTAs that the device holds; 1 without a tail."""
    compute_us: float
    """Time of the tensor cores over all waves, or of shared memory or the ring if these are slower."""
    l2_us: float
    """Reads and writes of L2."""
    dram_us: float
    """Reads and writes of device memory."""
    epilogue_us: float
    """Epilogue time that no main loop hides."""
    total_us: float
    """Launch, fill, the overlapped terms and the exposed epilogue."""
    steady_us: float
    """The total at this kernel's clock under sustained work; at the power cap it ranks the kernels."""

    @property
    def bound(self) -> str:
        """The dominant term: ``compute``, ``l2`` or ``dram``."""
        terms = {"compute": self.compute_us, "l2": self.l2_us, "dram": self.dram_us}
        return max(terms, key=lambda name: terms[name])

    def __str__(self) -> str:
        return (
            f"{self.total_us:.1f} us by model ({self.bound}-bound): {self.tiles} tiles / {self.ctas} CTAs = "
            f"{self.waves} waves at {self.wave_efficiency:.0%}, compute {self.compute_us:.1f}, "
            f"L2 {self.l2_us:.1f}, DRAM {self.dram_us:.1f}, epilogue {self.epilogue_us:.1f}"
        )


def predict(problem: Problem, candidate: Candidate, device: Device) -> Prediction:
    """The terms of the prediction for a tile candidate.

    Raises SpaceError for a candidate without a tile shape, such as a library's algorithm.
    """
    return predictions(problem, [candidate], device)[0]


def predictions(problem: Problem, candidates: Sequence[Candidate], device: Device) -> list[Prediction]:
    """Return the predictions of many candidates, in their order."""
    return _predictions(candidates, *_terms(problem.as_modelled, Columns.of(candidates), device))


#: The terms of a prediction, in its order.
_TERMS = (
    "tiles", "ctas", "waves", "wave_efficiency", "compute_us", "l2_us", "dram_us", "epilogue_us", "total_us",
)  # fmt: skip


def _terms(problem: Problem, columns: Columns, device: Device) -> tuple[Terms, Steady]:
    """The terms at one clock for all, and those of sustained work."""
    result = terms(problem, columns, device)
    return result, steady(problem, columns, result, device)


def _predictions(candidates: Sequence[Candidate], terms: Terms, lasting: Steady) -> list[Prediction]:
    columns = [getattr(terms, name).tolist() for name in _TERMS] + [lasting.us.tolist()]
    return [Prediction(c, *values) for c, *values in zip(candidates, *columns, strict=True)]


def rank(problem: Problem, candidates: Iterable[Candidate], device: Device) -> list[Prediction]:
    """Return predictions, fastest first; equal ones keep the order of the candidates."""
    candidates = list(candidates)
    result, lasting = _terms(problem.as_modelled, Columns.of(candidates), device)
    ranked = _predictions(candidates, result, lasting)
    return [ranked[number] for number in np.argsort(_by(result, lasting), kind="stable").tolist()]


def _by(terms: Terms, lasting: Steady) -> Floats:
    """The ranking key of a problem's kernels: at the power cap, the time at each kernel's own clock."""
    return lasting.us if lasting.at_cap else terms.total_us


def alternate_rankings(ranked: Sequence[Prediction]) -> list[Prediction]:
    """Return a ranking for the power cap and one by cycles, merged alternately, because only measuring shows
    which of the two is right for a product. Below the cap the two agree.
    """
    by_cycles = sorted(ranked, key=lambda p: p.total_us)
    both = itertools.chain.from_iterable(zip(ranked, by_cycles, strict=True))
    return list({id(prediction): prediction for prediction in both}.values())


def is_memory_bound(problem: Problem) -> bool:
    """Whether lower clocks hardly slow any of the problem's kernels, so that the fastest of an interleave is
    also the fastest in sustained work.

    Of nine products of 64 rows at an H200's power cap the kernel that led in the screen was 0.5 % behind the
    winner in steady state in the mean; of twelve of 256 rows 1.9 % (2026-11-26).
    """
    problem = problem.as_modelled
    return min(problem.m, problem.n) <= _MEMORY_BOUND


def steady_ratios(
    problem: Problem, ratios: Mapping[Candidate, float], device: Device
) -> dict[Candidate, float]:
    """Predict kernels' steady-state ratios to the baseline at the power cap from their interleaved ratios: a
    kernel that draws more power runs at lower clocks. Use this only for ranking.

    Raises SpaceError if a candidate has no tile shape.
    """
    problem = problem.as_modelled
    result = predictions(problem, list(ratios), device)
    if min(problem.m, problem.n) <= _STEADY_ABOVE:
        return dict(ratios)
    return {
        p.candidate: ratios[p.candidate] ** STEADY_LEAD * (p.total_us / p.steady_us) ** STEADY_CLOCK
        for p in result
    }


def l2_hint(problem: Problem, kernel: Candidate) -> str:
    """Return the operand to evict from L2 first: the one that only one cluster reads, if any.

    With one row of clusters all of B is read by one cluster only, and lines kept for no other push out
    those of A. On an H200 (one interleave per shape, 2026-11-21) the hint took 128x6144x4096
    from 0.97 to 1.03 of torch.mm, 128x7168x16384 from 1.13 to 1.17 and 256x4096x4096 from 0.98 to 1.01; on
    operands that are read again it changed nothing or cost up to 1 %.
    """
    rows = kernel["tile_m"] * kernel.params.get("cluster_m", 1)
    columns = kernel["tile_n"] * kernel.params.get("cluster_n", 1)
    if kernel.params.get("swap_ab", False):
        rows, columns = columns, rows
    if problem.m <= rows:
        return "b_first"
    return "a_first" if problem.n <= columns else "none"


def rank_kernels(
    problem: Problem,
    kernels: Sequence[Candidate],
    launch_values: Mapping[str, Sequence[Value]],
    device: Device,
    feasible: Callable[[Candidate], bool] = lambda launch: True,
    columns: Columns | None = None,
    most: int | None = None,
) -> list[Prediction]:
    """One prediction per kernel, each at its model-best feasible launch, fastest first; the first of equal
    launches in the lists' order.

    most: return only this many of the fastest by each ranking (`alternate_rankings`); all by default.
    columns: the kernels' columns, if known.

    Launch parameters that do not affect the prediction keep their first values. Values of the others are
    tried only if they are feasible with the first values of the rest. The launch affects only the DRAM term
    and the split of k, so kernels of one grid share their best launch.
    """
    if not kernels:
        return []
    problem = problem.as_modelled
    columns = Columns.of(kernels) if columns is None else columns
    launches = _best_launches(problem, kernels, columns, launch_values, device, feasible)
    columns = columns.launched(**_launch_columns(launches))
    result, lasting = _terms(problem, columns, device)
    order = np.argsort(_by(result, lasting), kind="stable").tolist()
    if most is not None:
        wanted = {*order[:most], *np.argsort(result.total_us, kind="stable")[:most].tolist()}
        order = [number for number in order if number in wanted]
    chosen = [launches[number] for number in order]
    columns, result, lasting = columns.take(order), result.take(order), lasting.take(order)
    hints = launch_values.get("l2_hint", ())
    if lasting.at_cap and all(v in launch_values.get(name, ()) for name, v in _GPC_AWARE.items()):
        columns, chosen = _gpc_aware_launches(
            problem, [kernels[number] for number in order], columns, chosen, device,
            may_stream="streamed" in hints,
        )  # fmt: skip
        result, lasting = _terms(problem, columns, device)
    ranked = []
    for place in np.argsort(_by(result, lasting), kind="stable").tolist():
        kernel, launch = kernels[order[place]], chosen[place]
        if (hint := l2_hint(problem, kernel)) != "none" and hint in hints:
            launch = launch | {"l2_hint": hint}
        ranked.append((place, kernel.with_launch(**launch)))
    places = [place for place, _ in ranked]
    return _predictions([launch for _, launch in ranked], result.take(places), lasting.take(places))


def _gpc_aware_launches(
    problem: Problem, kernels: Sequence[Candidate], columns: Columns, launches: Sequence[dict[str, Value]],
    device: Device, *, may_stream: bool,
) -> tuple[Columns, list[dict[str, Value]]]:  # fmt: skip
    """Launches for the power cap, where moving bytes lowers the clock: clusters of a GPC take neighbouring
    tiles. Each kernel gets its fastest raster order, and the hint to L2 if that is faster.

    If one row of clusters covers the product, neighbours share almost nothing. GPC-aware launches would then
    cost 1 to 4 % (eleven products, an H100 and an H200, 2026-11-25), so these launches do not change.
    """
    shares = np.array([l2_hint(problem, kernel) == "none" for kernel in kernels])
    aware = columns.launched(swizzle=np.array(_GPC_AWARE["swizzle_size"]), gpc_aware=np.array(True))
    times = []
    for along_n, streamed in itertools.product((False, True), (False, True)[: 1 + may_stream]):
        tried = aware.launched(along_n=np.array(along_n), streamed=np.array(streamed))
        times.append(_terms(problem, tried, device)[1].us)
    best = np.stack(times).argmin(axis=0)
    along_n, streamed = best > may_stream, (best % 2 == 1) & may_stream
    changed: list[dict[str, Value]] = [
        {**_GPC_AWARE, "raster_order": "along_n" if n else "along_m"} | ({"l2_hint": "streamed"} if s else {})
        for n, s in zip(along_n.tolist(), streamed.tolist(), strict=True)
    ]
    columns = columns.launched(
        along_n=np.where(shares, along_n, columns.along_n),
        swizzle=np.where(shares, aware.swizzle, columns.swizzle),
        gpc_aware=np.where(shares, aware.gpc_aware, columns.gpc_aware),
        streamed=np.where(shares, streamed, columns.streamed),
    )
    chosen = zip(launches, changed, shares.tolist(), strict=True)
    return columns, [launch | (new if does else {}) for launch, new, does in chosen]


def _best_launches(
    problem: Problem,
    kernels: Sequence[Candidate],
    columns: Columns,
    launch_values: Mapping[str, Sequence[Value]],
    device: Device,
    feasible: Callable[[Candidate], bool],
) -> list[dict[str, Value]]:
    """Return the model's best launch of each kernel, from all launches of one kernel per grid at once."""
    # The launch parameters on which the predicted time depends.
    seen = [] if fits_l2(problem, device) else list(_RASTERIZATION)
    seen = [name for name in (*seen, "split_k", "reduction") if len(launch_values.get(name, ())) > 1]
    names = _GRID_PARAMETERS if {"split_k", "reduction"} & set(seen) else _TILE_GRID
    grids: dict[tuple[Value | None, ...], list[int]] = {}
    for number, kernel in enumerate(kernels):
        params = kernel.params
        grids.setdefault(tuple([params.get(name) for name in names]), []).append(number)
    first = {name: values[0] for name, values in launch_values.items()}
    # Most grids have the same launches, so these are listed once.
    listed: dict[tuple[tuple[Value, ...], ...], tuple[list[dict[str, Value]], dict[str, Any]]] = {}
    tried = []
    for members in grids.values():
        lists = _lists(problem, kernels[members[0]], launch_values, seen, feasible)
        place = tuple(tuple(values) for values in lists.values())
        if place not in listed:
            launches = [first | dict(zip(lists, values, strict=True)) for values in itertools.product(*place)]
            listed[place] = launches, _launch_columns(launches)
        tried.append(listed[place])
    rows = np.repeat([members[0] for members in grids.values()], [len(launches) for launches, _ in tried])
    launched = columns.take(rows).launched(
        **{
            name: np.concatenate([of_grid[name] for _, of_grid in tried]) if values.ndim else values
            for name, values in tried[0][1].items()
        }
    )
    times = _by(*_terms(problem, launched, device))
    best: list[dict[str, Value]] = [first] * len(kernels)
    start = 0
    for (launches, _), members in zip(tried, grids.values(), strict=True):
        end = start + len(launches)
        chosen = launches[int(times[start:end].argmin())]
        for number in members:
            best[number] = chosen
        start = end
    return best


def _lists(
    problem: Problem,
    kernel: Candidate,
    launch_values: Mapping[str, Sequence[Value]],
    seen: Sequence[str],
    feasible: Callable[[Candidate], bool],
) -> dict[str, list[Value]]:
    """The values to try of each parameter in `seen`: those feasible with the others' first values."""
    first = kernel.with_launch(**{name: values[0] for name, values in launch_values.items()})
    lists: dict[str, list[Value]] = {}
    for name in seen:
        values = launch_values[name]
        if name in _RASTERIZATION:
            lists[name] = list(values)
        elif name == "split_k":
            lists[name] = [values[0], *(v for v in values[1:] if feasible(first.with_launch(split_k=v)))]
        else:  # a second kernel, if there are splits to add
            most = {"split_k": lists["split_k"][-1]} if "split_k" in lists else {}
            lists[name] = [
                values[0], *(v for v in values[1:] if feasible(first.with_launch(**most, reduction=v)))
            ]  # fmt: skip
    return lists


def _launch_columns(launches: Sequence[Mapping[str, Value]]) -> dict[str, Any]:
    """The columns of launches that the terms read; all launches have the same parameters."""
    names = launches[0].keys()
    columns: dict[str, Any] = {}
    for name, column in (("split_k", "split_k"), ("swizzle_size", "swizzle")):
        if name in names:
            columns[column] = np.array([launch[name] for launch in launches])
    for name, column, value in (
        ("reduction", "second", "second_kernel"), ("ctas", "balanced", "balanced"),
        ("raster_order", "along_n", "along_n"),
    ):  # fmt: skip
        if name in names:
            columns[column] = np.array([launch[name] == value for launch in launches])
    if "reduction" in names:
        columns["reduces"] = np.array(True)
    return columns


def grid_shape(kernel: Candidate) -> tuple[Value | None, ...]:
    """The parameters that decide a kernel's best launch; kernels of one grid shape share it."""
    return tuple(kernel.params.get(name) for name in _GRID_PARAMETERS)


def is_redundant_launch(problem: Problem, candidate: Candidate, device: Device) -> bool:
    """Whether another launch of the kernel is identical: ``balanced`` if it launches all CTAs anyway."""
    if candidate.params.get("ctas") != "balanced":
        return False
    balanced, everything = predictions(problem, [candidate, candidate.with_launch(ctas="all")], device)
    return balanced.ctas == everything.ctas
