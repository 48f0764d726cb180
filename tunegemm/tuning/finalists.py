"""Which candidates go on to the final race. Pure: no GPU, no database."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tunegemm.describe.space import Candidate
from tunegemm.generate import model
from tunegemm.generate.cublaslt import TORCH_MM, is_torch
from tunegemm.measure.outcome import Measurement
from tunegemm.search.budget import Effort

Measured = Mapping[Candidate, Measurement]


@dataclass(frozen=True)
class Places:
    """How many candidates a final race has, beside torch.mm."""

    own: int
    """Own ones, by what is expected of them."""
    quickest: int
    """Own ones by time, not by ratio."""
    library: int
    """Of the library's algorithms."""


#: In interleaved timing a candidate costs milliseconds; in steady state a turn in each round. There two to
#: four of those that were screened hold the fastest to within 0 to 1.4 %. Of 35 winners among our own
#: kernels 32 were one of the first three by what was expected, one the fourth, two the quickest (41
#: products of an H200, 2026-11-23).
_INTERLEAVED: Mapping[Effort, Places] = {
    "quick": Places(6, 2, 3), "full": Places(12, 4, 6), "exhaustive": Places(12, 4, 6),
}  # fmt: skip
_STEADY: Mapping[Effort, Places] = {
    "quick": Places(3, 1, 1), "full": Places(12, 4, 3), "exhaustive": Places(12, 4, 3),
}  # fmt: skip
_LAUNCHES_PER_FINALIST = 2


def finalists(screened: Measured, effort: Effort, *, is_throttled: bool) -> list[Candidate]:
    """Those of which most is expected, those that took the least time, the library's best, and torch.mm.

    is_throttled: the GPU is at its power cap, where the fastest by an interleaved screen need not be the
    fastest in use: all share the clocks that their mixture leaves, so that a candidate which draws less power
    gives what it gains to the others (docs/decisions/0012-steady-state-at-the-power-cap.md).

    By time, too, since for some shapes torch.mm has two speeds, some 10 % apart, and keeps one for most
    interleaves throughout: a candidate that met the slow one leads by ratio
    (H200, benchmarks/results/h200/torch-modes-2026-11-22.json).
    """
    places = (_STEADY if is_throttled else _INTERLEAVED)[effort]
    own, library = _by_ratio(screened)
    if is_throttled:
        expected = sorted(own, key=lambda m: -model.steady_ratio(m.candidate, m.ratio))
        quickest, each = own, 1
    else:
        expected, quickest, each = own, sorted(own, key=lambda m: m.median_us), _LAUNCHES_PER_FINALIST
    chosen = of_several_kernels(expected, places.own, each) + of_several_kernels(
        quickest, places.quickest, each
    )
    algorithms = [candidate for candidate in library if not is_torch(candidate)][: places.library]
    # torch.mm, too, where only families without it were asked for: it is the record when all of them lose.
    return [*dict.fromkeys([*chosen, *algorithms]), TORCH_MM] if screened else []


def of_several_kernels(measurements: Iterable[Measurement], count: int, each: int) -> list[Candidate]:
    """The first candidates, but few launches of one kernel.

    They are often all in front together and would leave no room for others, which the screen's few rounds
    in other moments of clock and power may have put too low.
    """
    chosen: list[Candidate] = []
    launches: Counter[Candidate] = Counter()
    for candidate in (measurement.candidate for measurement in measurements):
        launches[candidate.kernel] += 1
        if len(chosen) < count and launches[candidate.kernel] <= each:
            chosen.append(candidate)
    return chosen


def _by_ratio(measured: Measured) -> tuple[list[Measurement], list[Candidate]]:
    """Our own measurements and the library's candidates, the fastest first."""
    fastest_first = sorted(measured.values(), key=lambda m: -m.ratio)
    own = [m for m in fastest_first if m.candidate.family != TORCH_MM.family]
    return own, [m.candidate for m in fastest_first if m.candidate.family == TORCH_MM.family]
